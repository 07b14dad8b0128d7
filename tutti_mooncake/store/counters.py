"""What a store has done, counted by name."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tutti_mooncake.errors import Status

logger = logging.getLogger(__name__)
_PUBLISH_SECONDS = 3.0


class Counters:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, int] = {}

    def add(self, **amounts: int) -> None:
        """Adds to the counters of these names."""
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] = self._values.get(name, 0) + amount

    def add_statuses(self, kind: str, statuses: npt.NDArray[np.uint8]) -> None:
        """Adds to `<kind>_<status>_blocks` for the blocks of an operation."""
        names, counts = np.unique(statuses, return_counts=True)
        self.add(**{f"{kind}_{Status(name).name.lower()}_blocks": int(count) for name, count in zip(names, counts, strict=True)})

    def values(self) -> dict[str, int]:
        """A copy."""
        with self._lock:
            return dict(self._values)


class Publisher:
    """Leaves counters on the pool, for `tutti stat`, when they have changed and every few seconds at most; used by one thread at a time."""

    def __init__(self, read: Callable[[], dict[str, int]], write: Callable[[dict[str, int]], None]) -> None:
        self._read = read
        self._write = write
        self._next = 0.0
        self._written: dict[str, int] | None = None
        self._failed = False

    def tick(self, *, now: bool = False) -> None:
        """Publishes when it is time to, or `now`. A failure, of whatever kind, is logged once and costs nothing else."""
        if not now and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _PUBLISH_SECONDS
        values = self._read()
        if values == self._written:
            return
        self._written = values
        try:
            self._write(values)
        except Exception as error:
            if not self._failed:
                logger.warning("the counters can't be left on the pool: %s", error)
            self._failed = True
