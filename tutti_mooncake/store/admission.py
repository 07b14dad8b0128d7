"""What is worth writing: admission policies and the write budget.

Drives wear out by writing (the paper's machine would rewrite its drives some 15 times a day if it persisted everything), so a block may
have to be asked for twice before it is stored, and the bytes written per day may have a limit.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from tutti_mooncake.keys import KeyArray

SECONDS_PER_DAY = 86400.0
_BURST_SECONDS = 3600.0


class Admission(Protocol):
    """Decides which new blocks are stored."""

    def admit(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """One flag per key of shape (n, 32). Called once per offer, under the store's lock."""


class AdmitAll:
    """Everything that is offered."""

    def admit(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """All True."""
        return np.ones(len(keys), dtype=np.bool_)


class AdmitSecondTouch:
    """Only blocks that were offered before, as far as a bounded memory of offers remembers.

    The memory is a direct-mapped table of 8-byte key prefixes, so a block is forgotten when another falls on its entry.
    """

    def __init__(self, entries: int = 1 << 20) -> None:
        self._seen = np.zeros(1 << (entries - 1).bit_length(), dtype=np.uint64)

    def admit(self, keys: KeyArray) -> npt.NDArray[np.bool_]:
        """True where the key was offered before; remembers all."""
        prefixes = np.ascontiguousarray(keys[:, :8]).view(np.uint64).ravel()
        prefixes = np.maximum(prefixes, np.uint64(1))
        mixed = prefixes * np.uint64(0x9E3779B97F4A7C15)
        at = (mixed >> np.uint64(16)) & np.uint64(len(self._seen) - 1)
        admitted: npt.NDArray[np.bool_] = self._seen[at] == prefixes
        self._seen[at] = prefixes
        return admitted


def make_admission(name: str) -> Admission:
    """The policy of a configuration's name."""
    return AdmitSecondTouch() if name == "second_touch" else AdmitAll()


class WriteBudget:
    """Bytes per day as a token bucket that holds at most one hour's worth; 0 = no limit. Not thread-safe.

    A restart does not refill it: the level is kept in the pool's state block.
    """

    def __init__(self, bytes_per_day: int, now: float, level: float | None = None, level_time: float | None = None) -> None:
        self.bytes_per_day = bytes_per_day
        self._burst = bytes_per_day * _BURST_SECONDS / SECONDS_PER_DAY
        self.level = self._burst if level is None else min(level, self._burst)
        self._time = now if level_time is None else min(level_time, now)

    def take(self, unit_bytes: int, units: int, now: float) -> int:
        """How many of `units` writes of `unit_bytes` may go now; takes them from the budget."""
        if self.bytes_per_day == 0:
            return units
        elapsed = max(0.0, now - self._time)
        self.level = min(self._burst, self.level + elapsed * self.bytes_per_day / SECONDS_PER_DAY)
        self._time = now
        granted = min(units, max(0, int(self.level // unit_bytes)))
        self.level -= granted * unit_bytes
        return granted

    def give_back(self, size: int) -> None:
        """Returns bytes that were taken and not written."""
        if self.bytes_per_day:
            self.level = min(self._burst, self.level + size)
