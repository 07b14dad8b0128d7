"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_SECONDS = 30.0


def wait_for(condition: Callable[[], bool]) -> float:
    """Seconds until it holds; fails after `DEADLINE_SECONDS`."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + DEADLINE_SECONDS
        time.sleep(0.01)
    return time.monotonic() - begin
