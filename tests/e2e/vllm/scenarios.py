"""Random mixtures of what vLLM users do, from a seed: shared prefixes, aborts, priorities, salts, resets, short memory, failing I/O.

Every answer of a request that wasn't aborted is compared with that of the same request alone and without any cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.vllm import faulty_engine
from tests.e2e.vllm.tiny_model import LAYERS, make_tiny_model
from tutti_mooncake.demo.engine_client import EngineProcess

BLOCK_TOKENS = 32
"""The least that vLLM takes on a CPU."""
TIE = 5e-3
"""Two tokens whose log probabilities lie nearer than this may change places: a batch of another size adds in another order."""


@dataclass(frozen=True)
class Variant:
    """An engine that scenarios run on: its name, settings of `vllm.LLM`, of the store, and changes to the tiny model."""

    name: str
    settings: dict[str, Any]
    store: dict[str, Any]
    model: dict[str, Any]


VARIANTS = (
    Variant("short of memory", {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 96}, {"load_threshold": "none"}, {}),
    Variant(
        "priorities, layer by layer",
        {"scheduling_policy": "priority", "num_gpu_blocks_override": 30, "max_num_batched_tokens": 256},
        {"load": "layerwise", "load_threshold": "none"},
        {},
    ),
    Variant(
        "windows",
        {"num_gpu_blocks_override": 80, "max_num_batched_tokens": 128},
        {"load_threshold": "none"},
        {"layer_types": ["full_attention", "sliding_attention"] * (LAYERS // 2), "sliding_window": 72},
    ),
    Variant("tiny pool", {"num_gpu_blocks_override": 100, "max_num_batched_tokens": 512}, {"capacity": "8MiB"}, {}),
)


def start(variant: Variant, directory: Path) -> EngineProcess:
    """An engine of a variant, with its model and pool below `directory`."""
    settings = {"model": str(make_tiny_model(directory / "model", **variant.model)), "block_size": BLOCK_TOKENS, "max_model_len": 640}
    store = {"breaker_wait_seconds": 0.05, "read_deadline_seconds": 1.0, "write_deadline_seconds": 1.0, **variant.store}
    return EngineProcess(
        {**settings, **variant.settings},
        [str(directory / "pool")],
        directory / "engine.log",
        str(store.pop("capacity", "96MiB")),
        {"OMP_NUM_THREADS": "1"},
        store=store,
        connector=faulty_engine.CONNECTOR,
        server=faulty_engine.MODULE,
    )


def make_scenario(seed: int) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """Requests and actions for `run_scenario`."""
    source = random.Random(seed)
    stems = [[source.randrange(256) for _ in range(source.randrange(8, 300))] for _ in range(3)]
    requests, at = [], 0
    for _ in range(source.randrange(6, 14)):
        stem = source.choice(stems)
        cut = source.randrange(1, len(stem) + 1) if source.random() < 0.3 else len(stem)
        tail = [source.randrange(256) for _ in range(source.choice([0, 1, 5, 16, 40, 100]))]
        request: dict[str, Any] = {
            "prompt": stem[:cut] + tail,
            "max_tokens": source.choice([1, 2, 8, 24, 60]),
            "add_at": at,
            "priority": source.randrange(3),
            "skip_reading": True if source.random() < 0.1 else None,
            "cache_salt": source.choice(["", "", "", "mine"]),
        }
        if source.random() < 0.2:
            request["abort_at"] = at + source.choice([0, 1, 2, 3, 8])
        requests.append(request)
        at += source.choice([0, 0, 0, 1, 3, 10, 30])
    actions: dict[str, list[dict[str, Any]]] = {}
    for _ in range(source.randrange(5)):
        fault = {"do": "add_fault", "write": source.random() < 0.3, "seed": seed}
        fault |= {"kind": source.choice(["error", "short", "corrupt"]), "every": source.choice([1, 3, 20])}
        fault["limit"] = source.choice([1, 5, 1000])
        begin = source.choice(requests)["add_at"]  # when blocks are looked up
        actions.setdefault(str(begin), []).append(fault)
        actions.setdefault(str(begin + source.randrange(1, 30)), []).append({"do": "clear_faults"})
    for _ in range(source.randrange(3)):
        actions.setdefault(str(source.randrange(at + 20)), []).append({"do": "reset_while_busy"})
    return requests, actions


def run_seed(engine: EngineProcess, seed: int, references: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Runs the scenario of a seed, checks every answer and that nothing was leaked. Returns the growth of the connector's counters."""
    requests, actions = make_scenario(seed)
    engine.call("clear_faults")
    for request in requests:
        key = repr((request["prompt"], request["max_tokens"]))
        if key not in references:
            alone = {
                "prompt": request["prompt"],
                "max_tokens": request["max_tokens"],
                "add_at": 0,
                "skip_reading": True,
                "cache_salt": "",
            }
            (references[key],) = engine.call("run_scenario", requests=[alone], actions={})
    engine.call("drain")
    engine.call("reset_while_busy")
    before = engine.call("report")["counters"]
    answers = engine.call("run_scenario", requests=requests, actions=actions)
    engine.call("clear_faults")
    engine.call("drain")
    report = engine.call("report")
    for position, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        if "abort_at" not in request:
            reference = references[repr((request["prompt"], request["max_tokens"]))]
            assert_same_or_tie(answer, reference, f"seed {seed}, request {position}")
    assert (report["pins_held"], report["stats"]["pins"], report["stats"]["writing_blocks"]) == (0, 0, 0), f"seed {seed}: leaked"
    assert report["stats"]["free_blocks"] + report["stats"]["resident_blocks"] == report["stats"]["slots"], (
        f"seed {seed}: slots are missing"
    )
    after = report["counters"]
    assert after["local_hit_tokens"] + after["hit_tokens"] + after["miss_tokens"] == after["requested_tokens"], f"seed {seed}: sums differ"
    assert after["store_errors"] == 0, f"seed {seed}: calls to the store raised"
    return {name: after[name] - before[name] for name in after}


def assert_same_or_tie(answer: dict[str, Any], reference: dict[str, Any], what: str) -> None:
    """Equal tokens up to the end, or up to a place where the reference's two best tokens are as good as equal."""
    assert answer["finish_reason"] is not None, f"{what}: not finished"
    ours, theirs = answer["token_ids"], reference["token_ids"]
    for place, (token, expected) in enumerate(zip(ours, theirs, strict=False)):
        if token != expected:
            (best, _), (second, other) = reference["best"][place]
            assert best - second < TIE and token == other, f"{what}: token {place} is {token}, without a cache it is {expected}"
            return
    assert (ours, answer["finish_reason"]) == (theirs, reference["finish_reason"]), f"{what}: it ends at another place"
