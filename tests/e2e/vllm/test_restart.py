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
SHORT = [make_prompt(100 + i, 4 * BLOCK_TOKENS + 8) for i in range(10)]
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
    assert cold["token_ids"] != other["token_ids"], "the model doesn't look at its prompt; comparing answers proves nothing"
    first_life |= {"long": cold, "other": other}
    assert counters(engine)["blocks_loaded"] == 0

    own_hit = ask(engine, LONG)
    assert_same_answer(own_hit, cold, "from vLLM's own prefix cache")
    assert counters(engine)["blocks_loaded"] == 0

    assert engine.call("reset_prefix_cache")
    from_disk = ask(engine, LONG)
    assert_same_answer(from_disk, cold, "from disk")
    assert from_disk["logprobs"] == own_hit["logprobs"], "a hit of the same shape from vLLM's own cache differs in some bit"
    assert counters(engine)["blocks_loaded"] == DOCUMENT_BLOCKS

    first_life["short"] = check_hit_rate(engine)
    check_second_turn(engine)
    check_aborts(engine, cold)
    report = engine.call("report")
    assert report["counters"]["loads_failed"] == 0
    assert report["counters"]["store_errors"] == 0
    first_life["geometry"] = report["geometry"]
    first_life["blocks"] = report["counters"]["blocks_stored"]
    engine.call("drain")
    engine.kill()


def check_hit_rate(engine: EngineProcess) -> dict[str, Any]:
    """Ten prompts cold and then warm: the rate is one half within a block, because all prompt tokens are counted.

    Returns the answer to the first of the ten.
    """
    before = counters(engine)
    cold = engine.call("generate", prompts=SHORT, max_tokens=4, logprobs=True)
    assert engine.call("reset_prefix_cache")
    warm = engine.call("generate", prompts=SHORT, max_tokens=4, logprobs=True)
    for i, (a, b) in enumerate(zip(warm, cold, strict=True)):
        assert_same_answer(a, b, f"prompt {i} of ten")
    grown = growth(before, counters(engine))
    assert grown["requested_tokens"] == 2 * sum(map(len, SHORT))
    assert grown["local_hit_tokens"] == 0
    rate = grown["hit_tokens"] / grown["requested_tokens"]
    assert abs(rate - 0.5) <= BLOCK_TOKENS / (2 * len(SHORT[0])), grown
    return dict(cold[0])


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
    prompts = [*SHORT, LONG, LONG]
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


def test_flipped_bits_on_disk_are_recomputed_and_dropped(start_engine: StartEngine, first_life: dict[str, Any], pool: Path) -> None:
    damage = [("other", OTHER, ANSWER_TOKENS, 0), ("long", LONG, ANSWER_TOKENS, 4), ("short", SHORT[0], 4, 3)]
    flip_bits(pool, Geometry(**first_life["geometry"]), [(prompt, position) for _, prompt, _, position in damage])
    engine = start_engine()
    for name, prompt, max_tokens, position in damage:
        blocks = len(prompt) // BLOCK_TOKENS
        before = counters(engine)
        answer = ask(engine, prompt, max_tokens)
        assert_same_answer(answer, first_life[name], f"{name} prompt with block {position} damaged")
        engine.call("drain")
        grown = growth(before, counters(engine))
        assert (grown["loads"], grown["loads_failed"]) == (1, 1)
        assert grown["hit_tokens"] == position * BLOCK_TOKENS
        assert grown["blocks_stored"] == blocks - position, "the dropped blocks were not stored anew"

        assert engine.call("reset_prefix_cache")
        before = counters(engine)
        assert_same_answer(ask(engine, prompt, max_tokens), first_life[name], f"{name} prompt, after the repair")
        grown = growth(before, counters(engine))
        assert (grown["loads"], grown["loads_failed"], grown["blocks_loaded"]) == (1, 0, blocks)
    engine.stop()


def flip_bits(pool: Path, geometry: Geometry, damage: list[tuple[list[int], int]]) -> None:
    """Flips one bit of the payload of block `position` of each prompt in the files of the pool.

    Finds the payload by reading the block through the store and searching the files for the same bytes, so it holds for
    every format on disk.
    """
    with LocalStore.open(StoreConfig(devices=[str(pool)], capacity=CAPACITY), geometry, create=False) as store:
        tensors = [torch.zeros(len(damage), geometry.object_bytes, dtype=torch.uint8) for _ in range(geometry.kv_factor * geometry.layers)]
        store.register(tensors)
        for i, (prompt, position) in enumerate(damage):
            keys = block_hashes(prompt)
            assert store.lookup(keys) == len(prompt) // BLOCK_TOKENS, "the pool doesn't hold the whole prompt"
            store.retrieve(keys[position : position + 1], [i]).wait().raise_for_status()
    needles = [bytes(tensors[1][i, :64].tolist()) for i in range(len(damage))]
    found = [0] * len(damage)
    for file in sorted(path for path in pool.rglob("*") if path.is_file() and path.stat().st_size):
        with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as view:
            for i, needle in enumerate(needles):
                at = view.find(needle)
                while at >= 0:
                    found[i] += 1
                    view[at + 10] ^= 0x04
                    at = view.find(needle, at + 1)
            view.flush()
    assert found == [1] * len(damage), f"the payloads were found {found} times"


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
