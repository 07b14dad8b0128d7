"""More requests than vLLM has room for: blocks are preempted, freed and filled again while they move to and from
disk.
"""

from __future__ import annotations

import pytest

from tests.e2e.vllm.checks import assert_same_answer, make_prompt
from tests.e2e.vllm.conftest import BLOCK_TOKENS, StartEngine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PROMPTS = [make_prompt(200 + i, 4 * BLOCK_TOKENS + 90) for i in range(8)]
ANSWER_TOKENS = 60
ROOM_BLOCKS = 12
"""One is vLLM's null block: two requests of 5 blocks fit, and the sixth block of each forces the other out."""


def test_all_requests_finish_and_answer_right_when_memory_is_short(start_engine: StartEngine) -> None:
    engine = start_engine(num_gpu_blocks_override=ROOM_BLOCKS, max_model_len=ROOM_BLOCKS * BLOCK_TOKENS // 2)
    expected = [engine.call("generate", prompts=[prompt], max_tokens=ANSWER_TOKENS, logprobs=True)[0] for prompt in PROMPTS]
    assert engine.call("report")["counters"]["loads"] == 0
    for attempt in ("first", "second"):
        answers = engine.call("generate", prompts=PROMPTS, max_tokens=ANSWER_TOKENS, logprobs=True)
        for i, (answer, reference) in enumerate(zip(answers, expected, strict=True)):
            assert_same_answer(answer, reference, f"prompt {i}, {attempt} time, with room for two requests")
    engine.call("drain")
    report = engine.call("report")
    assert report["counters"]["preemptions"] > 0, "nothing was preempted: the test doesn't reach what it is for"
    assert report["counters"]["blocks_loaded"] > 0
    assert report["counters"]["loads_failed"] == 0
    assert report["counters"]["store_errors"] == 0
    assert report["steps_under_way"] == 0
    assert (report["pins_held"], report["stats"]["pins"]) == (0, 0)
    engine.stop()
