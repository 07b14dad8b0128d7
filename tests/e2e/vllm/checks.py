"""How the end-to-end tests make prompts and compare answers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

needs_windows = pytest.mark.skipif(
    not hasattr(SchedulerOutput, "kv_connector_block_state"), reason="this vLLM doesn't tell which blocks a sliding window has left"
)

LOGPROB_TOLERANCE = 2e-3
"""Chunks of other sizes add in another order; this is ten times the difference seen, and far below that of a wrong
block.
"""


def make_prompt(seed: int, tokens: int) -> list[int]:
    """Byte tokens drawn from `seed`; prompts of different seeds share no block."""
    source = random.Random(seed)
    return [source.randrange(256) for _ in range(tokens)]


def assert_same_answer(actual: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """Equal tokens, equal reason to stop, and log probabilities that only rounding tells apart."""
    assert expected["token_ids"], f"{what}: the reference answer is empty"
    assert actual["token_ids"] == expected["token_ids"], what
    assert actual["finish_reason"] == expected["finish_reason"], what
    differences = [abs(a - b) for a, b in zip(actual["logprobs"], expected["logprobs"], strict=True)]
    assert max(differences) < LOGPROB_TOLERANCE, f"{what}: log probabilities differ by up to {max(differences)}"
