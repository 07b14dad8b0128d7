"""Sliding windows: alone, and beside full attention in the hybrid KV cache manager."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.vllm.checks import assert_same_answer, make_prompt, needs_windows
from tests.e2e.vllm.conftest import StartEngine
from tests.e2e.vllm.test_restart import ask, counters, growth
from tests.e2e.vllm.tiny_model import LAYERS, make_tiny_model
from tutti_mooncake.demo.engine_client import EngineProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), needs_windows]

BLOCK_TOKENS = 32
WINDOW = 96
PROMPT = make_prompt(800, 20 * BLOCK_TOKENS + 9)
KINDS = {
    "beside full attention": ["full_attention", "sliding_attention"] * (LAYERS // 2),
    "alone": ["sliding_attention"] * LAYERS,
}


@pytest.fixture(scope="module", params=list(KINDS))
def window_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose layers of these kinds look back 96 tokens."""
    directory = tmp_path_factory.mktemp("window")
    return make_tiny_model(directory / "tiny-window", layer_types=KINDS[request.param], sliding_window=WINDOW)


@pytest.fixture(scope="module")
def pool(window_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool per model."""
    return tmp_path_factory.mktemp("pool")


def test_blocks_of_every_kind_of_layer_come_back(start_engine: StartEngine, window_model: Path) -> None:
    engine = start(start_engine, window_model)
    cold = ask(engine, PROMPT)
    assert engine.call("reset_prefix_cache")
    assert_same_answer(ask(engine, PROMPT), cold, "from disk")
    assert counters(engine)["blocks_loaded"] == 20
    assert engine.call("report")["kv_cache_groups"] == len(set(json.loads((window_model / "config.json").read_text())["layer_types"]))
    check_parts(engine)
    check_second_turn(engine)
    check_pressure(engine)
    report = engine.call("report")
    assert (report["counters"]["loads_failed"], report["counters"]["store_errors"]) == (0, 0)
    assert report["steps_under_way"] == 0
    assert (report["pins_held"], report["stats"]["pins"]) == (0, 0)
    engine.kill()
    engine = start(start_engine, window_model)
    assert_same_answer(ask(engine, PROMPT), cold, "in a new process")
    assert counters(engine)["blocks_loaded"] == 20
    engine.stop()


def start(start_engine: StartEngine, model: Path) -> EngineProcess:
    return start_engine(
        model=str(model), block_size=BLOCK_TOKENS, max_num_batched_tokens=128, num_gpu_blocks_override=120, max_model_len=1024
    )


def check_parts(engine: EngineProcess) -> None:
    """A prefix that ends anywhere is enough, though it is behind the window of what was stored last."""
    for blocks in (1, 3, 11):
        prompt = PROMPT[: blocks * BLOCK_TOKENS] + make_prompt(810 + blocks, 70)
        assert engine.call("reset_prefix_cache")
        before = counters(engine)
        warm = ask(engine, prompt, max_tokens=8)
        assert growth(before, counters(engine))["hit_tokens"] == blocks * BLOCK_TOKENS
        assert_same_answer(ask(engine, prompt, max_tokens=8), warm, f"{blocks} blocks from disk, and from vLLM's own cache")


def check_second_turn(engine: EngineProcess) -> None:
    """Blocks that filled during decode have been stored before their window moved on."""
    first = make_prompt(820, 150)
    answer = ask(engine, first, max_tokens=200)
    engine.call("drain")
    assert engine.call("reset_prefix_cache")
    conversation = first + answer["token_ids"]
    before = counters(engine)
    warm = ask(engine, conversation + make_prompt(821, 20), max_tokens=8)
    assert growth(before, counters(engine))["hit_tokens"] == (len(conversation) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert_same_answer(ask(engine, conversation + make_prompt(821, 20), max_tokens=8), warm, "second turn")


def check_pressure(engine: EngineProcess) -> None:
    """More requests than fit: blocks are preempted, freed behind windows and filled again while they move."""
    prompts = [make_prompt(830 + i, 11 * BLOCK_TOKENS + 5) for i in range(12)]
    alone = [ask(engine, prompt, max_tokens=40) for prompt in prompts]
    assert engine.call("reset_prefix_cache")
    answers: list[dict[str, Any]] = engine.call("generate", prompts=prompts * 2, max_tokens=40, logprobs=True)
    for i, answer in enumerate(answers):
        assert_same_answer(answer, alone[i % 12], f"prompt {i % 12} among many")
    engine.call("drain")
