"""Why blocks are not there any more: the last removals, in memory and on the pool, for `tutti explain` and for KV events.

A removal is 16 bytes on device 0 (docs/format.md): the first 8 bytes of the (salted) key, the time, the reason and a check. The ring holds
the last 31,488 of them; what is older, or damaged, is as if it had never been stored.
"""

from __future__ import annotations

import enum
import os
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tutti_mooncake.keys import KeyArray
from tutti_mooncake.store.format import FRAME_BYTES

HISTORY_OFFSET = 5 * FRAME_BYTES
HISTORY_ENTRIES = ((512 << 10) - HISTORY_OFFSET) // 16
_ENTRY = np.dtype([("key", "<u8"), ("time", "<u4"), ("check", "<u4")])  # check: 24 bits, and the reason in the lowest byte


class Removal(enum.IntEnum):
    """Why a block was removed."""

    EVICTED = 1
    EXPIRED = 2
    FAILED_CHECK = 3
    DROPPED = 4
    CLEARED = 5
    NOT_WRITTEN = 6

    @property
    def text(self) -> str:
        """For people."""
        return {
            Removal.EVICTED: "evicted to make room",
            Removal.EXPIRED: "expired (ttl_seconds)",
            Removal.FAILED_CHECK: "failed its check when it was read",
            Removal.DROPPED: "dropped on request",
            Removal.CLEARED: "cleared on request",
            Removal.NOT_WRITTEN: "never became durable: its store, or that of a block before it, failed",
        }[self]


class History:
    """Thread-safe. `clock` gives seconds since 1970."""

    def __init__(self, clock: Callable[[], float], entries: npt.NDArray[np.void] | None = None) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries = np.zeros(HISTORY_ENTRIES, dtype=_ENTRY) if entries is None else entries
        self._next = _after_newest(self._entries["time"])
        self._unwritten: list[tuple[int, int]] = []
        self.total = 0
        """Removals noted since the store was opened."""
        self._listeners: list[Callable[[KeyArray], None]] = []

    def listen(self, listener: Callable[[KeyArray], None]) -> None:
        """From now on `listener` is called too with the salted keys of every removal, from any thread."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[KeyArray], None]) -> None:
        """Calls it no more."""
        self._listeners.remove(listener)

    def removed(self, keys: KeyArray, reason: Removal, gone: KeyArray | None = None) -> None:
        """Notes that these (salted) keys were removed just now. `gone`: those of them that listeners are told of; all unless given."""
        if not len(keys):
            return
        for listener in list(self._listeners):
            listener(keys if gone is None else gone)
        latest = keys[-HISTORY_ENTRIES:]
        new = np.zeros(len(latest), dtype=_ENTRY)
        new["key"] = _short(latest)
        new["time"] = int(self._clock())
        new["check"] = _check(new["key"], new["time"], int(reason))
        with self._lock:
            begin = self._next
            first = min(len(new), HISTORY_ENTRIES - begin)
            self._entries[begin : begin + first] = new[:first]
            self._entries[: len(new) - first] = new[first:]
            self._unwritten += [(begin, first), (0, len(new) - first)]
            self.total += len(keys)
            self._next = (begin + len(new)) % HISTORY_ENTRIES

    def reasons(self, keys: KeyArray) -> list[tuple[Removal, int] | None]:
        """For each (salted) key the reason and time (seconds since 1970) of its latest removal; None where none is known."""
        with self._lock:
            entries = self._entries[_valid(self._entries)]
        order = np.argsort(entries["time"], kind="stable")
        latest = {int(entries["key"][i]): i for i in order}
        found = [latest.get(int(short)) for short in _short(keys)]
        return [None if i is None else (Removal(int(entries["check"][i]) & 0xFF), int(entries["time"][i])) for i in found]

    def write(self, descriptor: int) -> None:
        """Leaves what is new on device 0. Raises OSError."""
        with self._lock:
            ranges, self._unwritten = self._unwritten, []
            parts = [(begin, self._entries[begin : begin + count].tobytes()) for begin, count in ranges if count]
        for begin, data in parts:
            os.pwrite(descriptor, data, HISTORY_OFFSET + begin * _ENTRY.itemsize)

    @classmethod
    def read(cls, descriptor: int, clock: Callable[[], float]) -> History:
        """What an earlier owner left on device 0."""
        data = os.pread(descriptor, HISTORY_ENTRIES * _ENTRY.itemsize, HISTORY_OFFSET)
        entries = np.zeros(HISTORY_ENTRIES, dtype=_ENTRY)
        whole = len(data) // _ENTRY.itemsize
        entries[:whole] = np.frombuffer(data[: whole * _ENTRY.itemsize], dtype=_ENTRY)
        entries[~_valid(entries)] = np.zeros(1, dtype=_ENTRY)
        return cls(clock, entries)


def _after_newest(times: npt.NDArray[np.uint32]) -> int:
    """Where the ring goes on: behind the last entry of the latest second."""
    newest = times == times.max()
    ends = np.flatnonzero(newest & ~np.roll(newest, -1))
    return int(ends[-1] + 1) % len(times) if len(ends) and times.any() else 0


def _short(keys: KeyArray) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys[:, :8]).view("<u8").reshape(-1)


def _check(keys: npt.NDArray[np.uint64], times: npt.NDArray[np.uint32], reasons: npt.NDArray[np.uint32] | int) -> npt.NDArray[np.uint32]:
    """24 bits over key, time and reason, above the reason."""
    with np.errstate(over="ignore"):
        mixed = (keys ^ (times.astype(np.uint64) << np.uint64(8)) ^ np.asarray(reasons, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return (((mixed >> np.uint64(40)) << np.uint64(8)) | np.asarray(reasons, dtype=np.uint64)).astype(np.uint32)


def _valid(entries: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    reasons = (entries["check"] & 0xFF).astype(np.uint32)
    known = np.isin(reasons, [int(reason) for reason in Removal]) & (entries["time"] != 0)
    valid: npt.NDArray[np.bool_] = known & (_check(entries["key"], entries["time"], reasons) == entries["check"])
    return valid
