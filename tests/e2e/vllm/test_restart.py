"""One pool through four lives of an engine: written, killed, read by a second, damaged, read by a third.

The tests run in the order of the file and hand on what the first engine said.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from tests.e2e.vllm.checks import assert_same_answer, make_prompt
from tests.e2e.vllm.conftest import BLOCK_TOKENS, CAPACITY, StartEngine
from tutti_mooncake import Geometry, LocalStore, StoreConfig
from tutti_mooncake.demo.engine_client import EngineProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

LONG = make_prompt(1, 1300)
OTHER = make_prompt(2, 1300)
ANSWER_TOKENS = 24
DOCUMENT_BLOCKS = 1300 // BLOCK_TOKENS


@pytest.fixture(scope="module")
def first_life() -> dict[str, Any]:
    """Answers of the first engine, by name of the prompt, and its geometry."""
    return {}


def ask(engine: EngineProcess, prompt: list[int], max_tokens: int = ANSWER_TOKENS) -> dict[str, Any]:
    (answer,) = engine.call("generate", prompts=[prompt], max_tokens=max_tokens, logprobs=True)
    return dict(answer)


def counters(engine: EngineProcess) -> dict[str, int]:
    return dict(engine.call("report")["counters"])


def growth(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in before}


def test_answers_from_disk_equal_those_computed(start_engine: StartEngine, first_life: dict[str, Any]) -> None:
    engine = start_engine()
    cold = ask(engine, LONG)
    other = ask(engine, OTHER)
    assert cold["token_ids"] != other["token_ids"], (
        "the model doesn't look at its prompt; comparing answers proves nothing"
    )
    first_life |= {"long": cold, "other": other}
    assert counters(engine)["blocks_loaded"] == 0

    assert_same_answer(ask(engine, LONG), cold, "from vLLM's own prefix cache")
    assert counters(engine)["blocks_loaded"] == 0

    assert engine.call("reset_prefix_cache")
    assert_same_answer(ask(engine, LONG), cold, "from disk")
    assert counters(engine)["blocks_loaded"] == DOCUMENT_BLOCKS

    check_hit_rate(engine)
    check_second_turn(engine)
    check_aborts(engine, cold)
    report = engine.call("report")
    assert report["counters"]["loads_failed"] == 0
    assert report["counters"]["store_errors"] == 0
    first_life["geometry"] = report["geometry"]
    first_life["blocks"] = report["counters"]["blocks_stored"]
    engine.call("drain")
    engine.kill()


def check_hit_rate(engine: EngineProcess) -> None:
    """Ten prompts cold and then warm: the rate is one half within a block, because all prompt tokens are counted."""
    prompts = [make_prompt(100 + i, 4 * BLOCK_TOKENS + 8) for i in range(10)]
    before = counters(engine)
    cold = engine.call("generate", prompts=prompts, max_tokens=4, logprobs=True)
    assert engine.call("reset_prefix_cache")
    warm = engine.call("generate", prompts=prompts, max_tokens=4, logprobs=True)
    for i, (a, b) in enumerate(zip(warm, cold, strict=True)):
        assert_same_answer(a, b, f"prompt {i} of ten")
    grown = growth(before, counters(engine))
    assert grown["requested_tokens"] == 2 * sum(map(len, prompts))
    assert grown["local_hit_tokens"] == 0
    rate = grown["hit_tokens"] / grown["requested_tokens"]
    assert abs(rate - 0.5) <= BLOCK_TOKENS / (2 * len(prompts[0])), grown


def check_second_turn(engine: EngineProcess) -> None:
    """Blocks that filled during chunked prefill and during decode are found by the next turn of the conversation."""
    first_turn = make_prompt(3, 700)
    answer = ask(engine, first_turn, max_tokens=200)
    assert engine.call("reset_prefix_cache")
    conversation = first_turn + answer["token_ids"]
    second_turn = conversation + make_prompt(4, 40)
    before = counters(engine)
    from_disk = ask(engine, second_turn)
    grown = growth(before, counters(engine))
    assert grown["hit_tokens"] == (len(conversation) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert grown["hit_tokens"] > len(first_turn), "no block made during decode was found"
    assert_same_answer(ask(engine, second_turn), from_disk, "second turn, from vLLM's cache")
    assert engine.call("reset_prefix_cache")


def check_aborts(engine: EngineProcess, expected: dict[str, Any]) -> None:
    """Requests that end before, while and after their blocks are loaded leave no pin behind."""
    assert engine.call("reset_prefix_cache")
    prompts = [make_prompt(100 + i, 4 * BLOCK_TOKENS + 8) for i in range(10)] + [LONG, LONG]
    abort_at_step = {str(i): i % 3 for i in range(9)}
    answers = engine.call("generate_and_abort", prompts=prompts, max_tokens=ANSWER_TOKENS, abort_at_step=abort_at_step)
    assert [answers[i]["token_ids"] for i in (10, 11)] == [expected["token_ids"]] * 2
    engine.call("drain")
    report = engine.call("report")
    assert report["pins_held"] == 0
    assert report["stats"]["pins"] == 0


def test_killed_engine_leaves_all_its_blocks_to_the_next(start_engine: StartEngine, first_life: dict[str, Any]) -> None:
    engine = start_engine()
    assert engine.call("report")["recovered_blocks"] == first_life["blocks"]
    for name, prompt in (("long", LONG), ("other", OTHER)):
        assert_same_answer(ask(engine, prompt), first_life[name], f"{name} prompt, in a new process")
    engine.call("drain")
    count = counters(engine)
    assert count["hit_tokens"] == 2 * DOCUMENT_BLOCKS * BLOCK_TOKENS
    assert count["blocks_loaded"] == 2 * DOCUMENT_BLOCKS
    assert count["blocks_stored"] == 0, "blocks that were on disk were written again"
    engine.stop()


def test_flipped_bit_on_disk_is_recomputed_and_dropped(
    start_engine: StartEngine, first_life: dict[str, Any], pool: Path
) -> None:
    damaged = flip_bit_of_third_block(pool, Geometry(**first_life["geometry"]))
    engine = start_engine()
    assert_same_answer(ask(engine, LONG), first_life["long"], "with a damaged block")
    engine.call("drain")
    count = counters(engine)
    assert (count["loads"], count["loads_failed"]) == (1, 1)
    assert count["hit_tokens"] == damaged * BLOCK_TOKENS
    assert count["blocks_stored"] == DOCUMENT_BLOCKS - damaged, "the dropped blocks were not stored anew"

    assert engine.call("reset_prefix_cache")
    assert_same_answer(ask(engine, LONG), first_life["long"], "after the repair")
    again = growth(count, counters(engine))
    assert (again["loads"], again["loads_failed"], again["blocks_loaded"]) == (1, 0, DOCUMENT_BLOCKS)
    engine.stop()


def flip_bit_of_third_block(pool: Path, geometry: Geometry) -> int:
    """Flips one bit of the payload of the long prompt's third block in the files of the pool; returns its position, 2.

    Finds the payload by reading the block through the store and searching the files for the same bytes, so it holds for
    every format on disk.
    """
    with LocalStore.open(StoreConfig(devices=[str(pool)], capacity=CAPACITY), geometry, create=False) as store:
        tensors = [
            torch.zeros(1, geometry.object_bytes, dtype=torch.uint8)
            for _ in range(geometry.kv_factor * geometry.layers)
        ]
        store.register(tensors)
        keys = block_hashes(LONG)
        assert store.lookup(keys) == DOCUMENT_BLOCKS
        store.retrieve(keys[2:3], [0]).wait().raise_for_status()
    needle = bytes(tensors[1][0, :64].tolist())
    hits = 0
    for file in sorted(path for path in pool.rglob("*") if path.is_file() and path.stat().st_size):
        with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as view:
            at = view.find(needle)
            while at >= 0:
                hits += 1
                view[at + 10] ^= 0x04
                view.flush()
                at = view.find(needle, at + 1)
    assert hits == 1, f"the payload was found {hits} times"
    return 2


def block_hashes(tokens: list[int]) -> list[bytes]:
    """The hashes of the full blocks of a prompt, made by vLLM itself."""
    init_none_hash(sha256)
    request = Request(
        request_id="hashes",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )
    return [bytes(key) for key in request.block_hashes]
