"""A store that fails in every way under a running engine: the answers are those of an engine without one, and it comes back by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.vllm import faulty_engine
from tests.e2e.vllm.checks import assert_same_answer, make_prompt, needs_windows
from tests.e2e.vllm.conftest import BLOCK_TOKENS, CAPACITY
from tests.e2e.vllm.test_restart import ask, counters, growth
from tests.e2e.vllm.tiny_model import LAYERS, make_tiny_model
from tutti_mooncake.demo.engine_client import EngineProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

BLOCKS = 5
PROMPTS = [make_prompt(600 + i, BLOCKS * BLOCK_TOKENS + 30) for i in range(4)]
ANSWER_TOKENS = 10


class Faulty:
    """An engine on a pool of its own, and its answers from before anything failed."""

    def __init__(self, model: Path, directory: Path, load: str) -> None:
        self.pool = directory / "pool"
        self.load = load
        self.engine = EngineProcess(
            {"model": str(model), "block_size": BLOCK_TOKENS, "max_model_len": 4096, "max_num_batched_tokens": 512},
            [str(self.pool)],
            directory / "engine.log",
            CAPACITY,
            {"OMP_NUM_THREADS": "1"},
            store={"load": load, "load_threshold": "none", "breaker_wait_seconds": 0.3, "read_deadline_seconds": 0.5},
            connector=faulty_engine.CONNECTOR,
            server=faulty_engine.MODULE,
        )
        self.cold = [ask(self.engine, prompt, ANSWER_TOKENS) for prompt in PROMPTS]

    def again(self, prompt: int, what: str) -> dict[str, int]:
        """Asks with vLLM's own cache empty, compares the answer, and tells what grew."""
        assert self.engine.call("reset_prefix_cache")
        before = counters(self.engine)
        assert_same_answer(ask(self.engine, PROMPTS[prompt], ANSWER_TOKENS), self.cold[prompt], what)
        self.engine.call("drain")
        return growth(before, counters(self.engine))

    def until_loaded(self, prompt: int) -> None:
        """The tier comes back: the prompt is stored again if need be, and loaded."""
        deadline = time.monotonic() + 30
        seen = []
        while (grown := self.again(prompt, "while the store comes back"))["blocks_loaded"] < BLOCKS:
            seen.append({name: value for name, value in grown.items() if value})
            assert time.monotonic() < deadline, f"the store didn't come back: {seen[:3]} ... {seen[-5:]}; {self.engine.call('report')}"


@pytest.fixture(scope="module", params=["layerwise", "asynchronous", pytest.param("windows", marks=needs_windows)])
def faulty(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    directory = tmp_path_factory.mktemp(request.param)
    model, load = tiny_model, request.param
    if load == "windows":
        kinds = ["full_attention", "sliding_attention"] * (LAYERS // 2)
        model, load = make_tiny_model(directory / "model", layer_types=kinds, sliding_window=200), "auto"  # no layer can wait
    engine = Faulty(model, directory, load)
    yield engine
    engine.engine.kill()


@pytest.mark.parametrize("fault", [{"kind": "error", "error": 5}, {"kind": "short"}, {"kind": "corrupt"}], ids=lambda fault: fault["kind"])
@pytest.mark.parametrize("every", [1, 7])
def test_every_kind_of_failing_load_is_computed_again(faulty: Faulty, fault: dict[str, Any], every: int) -> None:
    faulty.until_loaded(0)
    faulty.engine.call("add_fault", write=False, every=every, limit=3, **fault)
    grown = faulty.again(0, f"{fault['kind']} on every {every}th read")
    assert faulty.engine.call("clear_faults") > 0
    assert (grown["loads"], grown["loads_failed"]) == (1, 1), "one failed load per request, and not one more"
    faulty.until_loaded(0)
    assert faulty.again(0, "after the repair")["loads_failed"] == 0


def test_read_that_does_not_return_within_its_deadline_is_computed(faulty: Faulty) -> None:
    faulty.until_loaded(1)
    faulty.engine.call("add_fault", write=False, kind="hang", limit=1)
    faulty.engine.call("release_later", seconds=1.5)
    before = time.monotonic()
    grown = faulty.again(1, "one read hangs")
    assert time.monotonic() - before < 10
    assert grown["loads_failed"] == 1 and grown["hit_tokens"] < BLOCKS * BLOCK_TOKENS
    faulty.engine.call("clear_faults")
    faulty.until_loaded(1)


def test_tier_that_fails_always_is_bypassed_and_comes_back(faulty: Faulty) -> None:
    for prompt in range(4):
        faulty.until_loaded(prompt)
    faulty.engine.call("add_fault", write=False, kind="error")
    faulty.engine.call("add_fault", write=True, kind="error")
    bypassed = failed = 0
    for i in range(12):
        grown = faulty.again(i % 4, "every read and write fails")
        bypassed, failed = bypassed + grown["blocks_store_bypassed"] + grown["blocks_bypassed"], failed + grown["blocks_store_failed"]
    assert bypassed > 0, "no breaker opened"
    faulty.engine.call("clear_faults")
    for prompt in range(4):
        faulty.until_loaded(prompt)


def test_failed_writes_are_never_found(faulty: Faulty) -> None:
    prompt = make_prompt(690, 3 * BLOCK_TOKENS + 5)
    faulty.engine.call("add_fault", write=True, kind="error", error=28, limit=1)  # ENOSPC
    cold = ask(faulty.engine, prompt, ANSWER_TOKENS)
    faulty.engine.call("drain")
    assert faulty.engine.call("clear_faults") > 0
    assert faulty.engine.call("reset_prefix_cache")
    before = counters(faulty.engine)
    assert_same_answer(ask(faulty.engine, prompt, ANSWER_TOKENS), cold, "after a full disk")
    grown = growth(before, counters(faulty.engine))
    assert grown["loads_failed"] == 0 and grown["hit_tokens"] < 3 * BLOCK_TOKENS


def test_pins_and_blocks_are_given_back_after_all_that(faulty: Faulty) -> None:
    faulty.engine.call("drain")
    report = faulty.engine.call("report")
    assert report["steps_under_way"] == 0
    assert (report["pins_held"], report["stats"]["pins"], report["stats"]["writing_blocks"]) == (0, 0, 0)
    assert report["stats"]["free_blocks"] + report["stats"]["resident_blocks"] == report["stats"]["slots"]
    assert report["counters"]["store_errors"] == 0
    loads = report["counters"]["loads"]
    assert report["counters"]["loads_layerwise"] == (loads if faulty.load == "layerwise" else 0)


def test_pool_that_is_lost_under_a_running_engine_is_a_miss(faulty: Faulty) -> None:
    faulty.until_loaded(2)
    faulty.engine.call("truncate_pool", device=str(faulty.pool))
    for _ in range(3):
        faulty.again(2, "the pool is gone")
    faulty.engine.stop()
