"""kill -9 at random points of a store/evict/reuse loop: no wrong byte, no lost promise, exact accounting."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.kill_loop import run_once
from tutti_mooncake.io import choose_executor

KILLS = 100  # per executor


@pytest.mark.timeout(300)
def test_kills_leave_a_pool_that_keeps_its_promises(tmp_path: Path, executor: str) -> None:
    wrong = [problem for seed in range(KILLS) for problem in run_once(tmp_path, seed, executor)]
    assert not wrong, "\n".join(wrong)


def test_kill_under_flush_durability(tmp_path: Path) -> None:
    wrong = [problem for seed in range(10) for problem in run_once(tmp_path, 1000 + seed, choose_executor("auto")[0], "flush")]
    assert not wrong, "\n".join(wrong)
