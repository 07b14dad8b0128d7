"""The way of removed slots back to the free list.

A slot whose block was removed while somebody may still read it waits until every retrieve that began before the removal has ended.
Called under the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tutti_mooncake import _native
from tutti_mooncake.errors import Status
from tutti_mooncake.store.history import History, Removal

Slots = npt.NDArray[np.uint32]


class Retirement:
    """`free_records(slots)` makes the slots' records free on the device and says whether that worked; else they stay out of use."""

    def __init__(self, table: _native.BlockTable, free_records: Callable[[Slots], bool], history: History) -> None:
        self._table = table
        self._free_records = free_records
        self._history = history
        self._next_ticket = 0
        self._readers: set[int] = set()
        self._waiting: list[tuple[int, Slots]] = []

    def reader_begins(self) -> int:
        """A ticket for reader_ends()."""
        self._next_ticket += 1
        self._readers.add(self._next_ticket)
        return self._next_ticket

    def reader_ends(self, ticket: int) -> None:
        """Gives back what waited for this reader."""
        self._readers.discard(ticket)
        oldest = min(self._readers, default=self._next_ticket + 1)
        for _, slots in [entry for entry in self._waiting if entry[0] < oldest]:
            self._table.release(slots)
        self._waiting = [entry for entry in self._waiting if entry[0] >= oldest]

    def retire(self, slots: Slots, reason: Removal) -> None:
        """Takes slots that can't be found any more. Those that were evicted have no readers: a retrieve pins what it reads."""
        if not len(slots):
            return
        keys = self._table.keys(slots)
        gone = None
        if reason is Removal.NOT_WRITTEN:  # known late, when the last I/O has ended: the block may have been stored again meanwhile
            statuses, _, _, _ = self._table.resolve(keys, 0)
            gone = np.ascontiguousarray(keys[statuses != Status.OK])
        self._history.removed(keys, reason, gone)
        if not self._free_records(slots):
            return
        if self._readers and reason is not Removal.EVICTED:
            self._waiting.append((self._next_ticket, slots))
        else:
            self._table.release(slots)
