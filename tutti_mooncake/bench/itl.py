"""What the connector costs a real vLLM on the CPU, against vLLM without one: an engine process per variant, all alive at once.

In a turn every variant takes the same few steps, in random order, on the same new prompts, so that nothing is ever loaded; ratios are
taken within a turn. In idle turns requests are shorter than a block, so that there is nothing to store either; in each storing turn a
longer prompt is computed, and stored, beside running decodes. The variant `control` is a second engine without a connector: its ratios
are what the machine's noise alone makes. Processes of the same code differ too, by where their memory lies, so they are started anew
after some rounds.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tutti_mooncake.bench.report import Report, positive
from tutti_mooncake.bench.vllm_engines import Engines, engines
from tutti_mooncake.demo.engine_client import EngineFailed, EngineProcess
from tutti_mooncake.demo.model import MODEL_NAME, prepare_model

BLOCK_TOKENS = 128
DECODES, DECODE_PROMPT = 4, 16
IDLE_TURNS, IDLE_STEPS = 24, 2
STORING_TURNS, STORING_STEPS = 10, 5
"""Of a round. Turns are short, because a machine's speed drifts, and no decode gets so long that it fills a block."""
WARM_UP_TURNS = 3
COLD_BLOCKS = 4
COLD_TOKENS = COLD_BLOCKS * BLOCK_TOKENS + 1
"""One more than whole blocks, as ExampleConnector stores no block that ends with the prompt."""
VOCABULARY = range(1000, 40000)
BASELINE, CONTROL, OURS, PEER = "none", "control", "tutti", "example"
LABELS = {OURS: "connector", PEER: "example", CONTROL: "control"}
RATIOS = {
    "idle_tpot_ms": ("throughput_idle_{}", "<= 1.01"),
    "idle_quiet_ms": ("idle_quiet_step_{}", ""),
    "idle_cpu_ms": ("idle_cpu_{}", ""),
    "itl_ms": ("itl_with_stores_{}", "<= 1.02"),
    "itl_behind_ms": ("decode_behind_prompt_{}", ""),
    "cold_ttft_ms": ("cold_ttft_with_stores_{}", "<= 1.02"),
    "storing_cpu_ms": ("storing_cpu_{}", ""),
}
"""Per figure the name of its ratio to the baseline, and the goal."""

Measure = Callable[[str, dict[str, Any]], None]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--directory", default="/dev/shm", help="where the pool is made (default: RAM-backed files)")
    parser.add_argument("--rounds", type=positive, default=12, help="of many turns each")
    parser.add_argument("--fresh-every", type=positive, metavar="N", default=3, help="rounds after which the engines are started anew")
    parser.add_argument("--cache", type=Path, metavar="DIR", default=Path(".cache/demo"), help="where the model is, or is made")
    parser.add_argument("--seed", type=int, default=1)


def run(arguments: argparse.Namespace) -> Report:
    """Starts the engines and runs the rounds."""
    with engines("itl", arguments.directory) as side_by_side:
        return _Itl(arguments, side_by_side).run()


class _Itl:
    def __init__(self, arguments: argparse.Namespace, side_by_side: Engines) -> None:
        self.arguments = arguments
        self.root = side_by_side.root
        self.say = side_by_side.say
        self.engines = side_by_side.running
        self.chance = random.Random(arguments.seed)
        self.variants = [BASELINE, CONTROL, OURS, PEER]
        self.figures: list[dict[str, dict[str, list[float]]]] = []
        """Per set of processes: by figure and variant one value per turn or round."""
        self.idle_seconds: dict[str, list[float]] = {}
        self.report = Report("itl")

    def run(self) -> Report:
        """All rounds, then the report."""
        model = prepare_model(self.arguments.cache.resolve(), self.say)
        for round_ in range(self.arguments.rounds):
            if round_ % self.arguments.fresh_every == 0:
                self.stop()
                self.start_all(model)
            self.decode(IDLE_TURNS, IDLE_STEPS, self.idle)
            self.decode(STORING_TURNS, STORING_STEPS, self.storing, cold=True)
            for variant, seconds in self.idle_seconds.items():
                self.add("idle_quiet_ms", variant, 1e3 * statistics.quantiles(seconds, n=4)[0])
            self.idle_seconds.clear()
            self.say(f"round {round_ + 1} of {self.arguments.rounds}")
        self.stop()
        return self.finish()

    def start_all(self, model: Path) -> None:
        """A new set of processes, started in random order, and warmed up."""
        for variant in self.chance.sample(self.variants, len(self.variants)):
            self.start(variant, model)
        self.decode(WARM_UP_TURNS, IDLE_STEPS, None)
        self.decode(WARM_UP_TURNS, STORING_STEPS, None, cold=True)
        self.figures.append({})

    def stop(self) -> None:
        """Ends all engines and removes what they stored."""
        for variant, engine in self.engines.items():
            engine.stop()
            shutil.rmtree(self.root / variant)
        self.engines.clear()

    def start(self, variant: str, model: Path) -> None:
        """One engine; a peer that doesn't start is left out and noted."""
        self.say(f"starting vLLM: {variant}")
        settings = {"model": str(model), "block_size": BLOCK_TOKENS, "max_model_len": 2048, "max_num_batched_tokens": 1024}
        others: dict[str, dict[str, Any]] = {BASELINE: {"kv_transfer_config": None}, CONTROL: {"kv_transfer_config": None}}
        folder = self.root / variant
        folder.mkdir()
        peer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}
        others[PEER] = {"kv_transfer_config": peer}
        try:
            self.engines[variant] = EngineProcess(
                {**settings, **others.get(variant, {})},
                [str(folder)],
                self.root / f"{variant}.log",
                environment={"OMP_NUM_THREADS": "1"},
            )
        except EngineFailed as error:
            self.without_peer(variant, error)

    def without_peer(self, variant: str, error: EngineFailed) -> None:
        """Goes on without a peer that failed, and raises the failure of any other variant."""
        if variant != PEER:
            raise error
        self.report.notes.append(f"ExampleConnector failed: {str(error).strip().splitlines()[-1]}")
        if variant in self.engines:
            self.engines.pop(variant).kill()
        self.variants.remove(variant)

    def decode(self, turns: int, steps: int, measure: Measure | None, *, cold: bool = False) -> None:
        """Decodes in turns, with a cold prompt at the beginning of each if `cold`; every full block of those is stored, and no other."""
        before = {variant: self.blocks(variant) for variant in self.engines}
        self.turn(1, [self.prompt(DECODE_PROMPT) for _ in range(DECODES)], 1 + turns * steps, None)
        for _ in range(turns):
            self.turn(steps, [self.prompt(COLD_TOKENS)] if cold else [], 2, measure)
        for variant, engine in self.engines.items():
            engine.call("drain")
            stored, expected = self.blocks(variant) - before[variant], turns * COLD_BLOCKS * cold
            if variant in (OURS, PEER) and stored != expected:
                raise SystemExit(f"bench itl: {variant} stored {stored} blocks, expected {expected}")
        if PEER in self.engines:
            for folder in self.peer_folders():
                shutil.rmtree(folder)

    def turn(self, steps: int, prompts: list[list[int]], max_tokens: int, measure: Measure | None) -> None:
        """The same steps in each engine, in random order."""
        for variant in self.chance.sample(list(self.engines), len(self.engines)):
            try:
                measured = self.engines[variant].call("timed_steps", steps=steps, prompts=prompts, max_tokens=max_tokens)
            except EngineFailed as error:
                self.without_peer(variant, error)
                continue
            if prompts:
                os.sync()  # what the peer has left in the page cache
            if measure is None:
                continue
            extra = max_tokens * len(prompts)
            if sum(measured["tokens"]) != DECODES * steps + extra:
                raise SystemExit(f"bench itl: {variant} gave {measured['tokens']} tokens in {steps} steps")
            measure(variant, measured)

    def blocks(self, variant: str) -> int:
        """Blocks that the variant has stored so far."""
        if variant == OURS:
            counters = self.engines[variant].call("report")["counters"]
            if counters["blocks_loaded"] or counters["blocks_store_failed"] or counters["store_errors"]:
                raise SystemExit(f"bench itl: something was loaded or failed: {counters}")
            return int(counters["blocks_stored"])
        return COLD_BLOCKS * len(self.peer_folders()) if variant == PEER else 0

    def peer_folders(self) -> list[Path]:
        """Where the peer's prompts lie, one folder each; that of prompts shorter than a block holds headers alone."""
        return [folder for folder in (self.root / PEER).iterdir() if max(file.stat().st_size for file in folder.iterdir()) > 4096]

    def prompt(self, tokens: int) -> list[int]:
        """Never seen before."""
        return self.chance.choices(VOCABULARY, k=tokens)

    def add(self, name: str, variant: str, value: float) -> None:
        """One figure of one variant."""
        self.figures[-1].setdefault(name, {}).setdefault(variant, []).append(value)

    def idle(self, variant: str, measured: dict[str, Any]) -> None:
        """Figures of a turn without anything to store. Each step gives each decode a token."""
        self.idle_seconds.setdefault(variant, []).extend(measured["seconds"])
        self.add("idle_tpot_ms", variant, 1e3 * statistics.mean(measured["seconds"]))
        self.add("idle_cpu_ms", variant, 1e3 * measured["thread_seconds"] / IDLE_STEPS)

    def storing(self, variant: str, measured: dict[str, Any]) -> None:
        """Figures of a turn with a cold prompt."""
        self.add("itl_ms", variant, 1e3 * statistics.mean(measured["seconds"]))
        self.add("itl_behind_ms", variant, 1e3 * statistics.mean(measured["seconds"][1:]))
        self.add("cold_ttft_ms", variant, 1e3 * measured["first_tokens"][0])
        self.add("storing_cpu_ms", variant, 1e3 * measured["thread_seconds"] / STORING_STEPS)

    def finish(self) -> Report:
        """Medians; ratios within turns, those of the quiet steps within rounds."""
        report, intervals, sets = self.report, [], []
        for name, (metric, goal) in RATIOS.items():
            for variant in (variant for variant in LABELS if variant in self.variants):
                ratios = [
                    [theirs / none for theirs, none in zip(figures[name][variant], figures[name][BASELINE], strict=True)]
                    for figures in self.figures
                ]
                values = [value for of_set in ratios for value in of_set]
                metric_name = metric.format(LABELS[variant])
                report.add(metric_name, values, "ratio", goal if variant == OURS else "")
                if goal:
                    intervals.append(f"{metric_name} {_interval(values)}")
                    sets.append(f"{metric_name} {', '.join(f'{statistics.median(of_set):.3f}' for of_set in ratios)}")
        for name in ("idle_tpot_ms", "itl_ms", "itl_behind_ms", "cold_ttft_ms"):
            for variant in self.variants:
                values = [value for figures in self.figures for value in figures[name][variant]]
                report.add(f"{name}_{variant}", values, "ms")
                if name == "idle_tpot_ms":
                    report.add(f"idle_tokens_per_s_{variant}", [1e3 * DECODES / value for value in values], "tokens/s")
        kind = "RAM-backed files" if str(self.root).startswith("/dev/shm") else "files on disk"
        report.notes += [
            "95 % intervals of the medians: " + "; ".join(intervals),
            f"medians of each of {len(self.figures)} sets of processes: " + "; ".join(sets),
            f"{MODEL_NAME}, float32, an engine process of one thread per variant; pool and peer on {kind}; {DECODES} decodes",
            f"idle: {IDLE_TURNS} turns of {IDLE_STEPS} steps a round; kv_both, prompt and answer shorter than a block of {BLOCK_TOKENS}. "
            "quiet_step: the lower quartile of a round's steps; cpu: processor time of the engine's own thread",
            f"stores: {STORING_TURNS} turns of {STORING_STEPS} steps a round, a cold prompt of {COLD_TOKENS} tokens computed in the first "
            "step of each (decode_behind_prompt: the other steps); "
            f"{STORING_TURNS * COLD_BLOCKS} blocks stored a round, counted, none loaded",
        ]
        return report


def _interval(values: list[float]) -> str:
    """Where the median lies with a confidence of 95 %, by the order of the values alone."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low, high = math.floor(len(values) / 2 - half), math.ceil(len(values) / 2 + half)
    return f"{ordered[max(0, low)]:.3f} to {ordered[min(len(values) - 1, high)]:.3f}"
