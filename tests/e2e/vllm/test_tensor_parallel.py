"""Two tensor-parallel ranks in processes of their own on one pool that the scheduler's process owns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.vllm.checks import assert_same_answer, make_prompt
from tests.e2e.vllm.conftest import BLOCK_TOKENS, StartEngine
from tutti_mooncake.demo.engine_client import EngineFailed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

PROMPT = make_prompt(900, 5 * BLOCK_TOKENS + 20)
ANSWER_TOKENS = 12


def test_two_ranks_share_a_pool_that_outlives_them(start_engine: StartEngine, pool: Path) -> None:
    engine = start_engine(tensor_parallel_size=2)
    (cold,) = engine.call("generate", prompts=[PROMPT], max_tokens=ANSWER_TOKENS, logprobs=True)
    assert engine.call("reset_prefix_cache")
    (from_disk,) = engine.call("generate", prompts=[PROMPT], max_tokens=ANSWER_TOKENS, logprobs=True)
    assert_same_answer(from_disk, cold, "two ranks, from disk")
    report = engine.call("report")
    counters = report["counters"]
    assert report["geometry"]["tp_size"] == 2
    assert (counters["blocks_loaded"], counters["loads_failed"], counters["store_errors"]) == (5, 0, 0)
    assert counters["bytes_loaded"] == 5 * report["stats"]["block_bytes"]
    assert (report["pins_held"], report["stats"]["pins"]) == (0, 0)
    engine.kill()

    engine = start_engine({"FAULTY_RANK": "1"}, faulty=True, tensor_parallel_size=2)
    (again,) = engine.call("generate", prompts=[PROMPT], max_tokens=ANSWER_TOKENS, logprobs=True)
    assert_same_answer(again, cold, "two ranks, in a new process, the second reads damaged bytes")
    counters = engine.call("report")["counters"]
    assert (counters["loads"], counters["loads_failed"]) == (1, 1) and counters["blocks_loaded"] < 5
    assert engine.call("reset_prefix_cache")
    (repaired,) = engine.call("generate", prompts=[PROMPT], max_tokens=ANSWER_TOKENS, logprobs=True)
    assert_same_answer(repaired, cold, "two ranks, after the repair")
    assert engine.call("report")["counters"]["hit_tokens"] - counters["hit_tokens"] == 5 * BLOCK_TOKENS
    engine.stop()

    with pytest.raises(EngineFailed, match="tp_size: 2 != 1"):
        start_engine()
