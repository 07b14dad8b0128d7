"""The engine process that demo and benchmarks use, without a connector."""

from __future__ import annotations

import pytest

from tests.e2e.vllm.conftest import StartEngine

pytestmark = pytest.mark.e2e


def test_timed_steps_without_a_connector(start_engine: StartEngine) -> None:
    """Each step's time and tokens are told, and when a prompt got its first token, in this call or a later one."""
    engine = start_engine(kv_transfer_config=None)
    first = engine.call("timed_steps", steps=3, prompts=[[1, 2, 3], [4] * 900], max_tokens=9)  # 512 tokens a step
    assert first["tokens"] == [1, 2, 2] and len(first["seconds"]) == 3 and min(first["seconds"]) > 0
    assert first["first_tokens"] == pytest.approx([first["seconds"][0], sum(first["seconds"][:2])])
    second = engine.call("timed_steps", steps=2, prompts=[[5] * 8], max_tokens=1)
    assert second["tokens"] == [3, 2] and second["first_tokens"] == [second["seconds"][0]]
    assert second["thread_seconds"] > 0
    engine.call("drain")
