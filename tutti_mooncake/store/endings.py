"""Ends of stores and retrieves: what the device says becomes what the store knows.

Order of a store's end: its parent is committed -> checksums and bytes are on the device -> [fdatasync] -> record -> [fdatasync] -> the
block can be found. What failed takes its descendants along; its slots are used again only when no I/O can touch them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from tutti_mooncake import _native
from tutti_mooncake.errors import Status
from tutti_mooncake.keys import KeyArray
from tutti_mooncake.store.announcements import Announcements
from tutti_mooncake.store.committer import Committer
from tutti_mooncake.store.counters import Counters
from tutti_mooncake.store.history import Removal
from tutti_mooncake.store.moves import MoverLike
from tutti_mooncake.store.operations import Operation, StoreOperation
from tutti_mooncake.store.pool import Pool
from tutti_mooncake.store.retire import Retirement, Slots

# A retrieve that ended so proves the stored copy unusable; it is dropped with its descendants.
_DROP = (Status.CHECKSUM_ERROR, Status.DEVICE_ERROR, Status.SHORT_IO, Status.STALE)


class Endings:
    """Of one store. `lock`: the store's; `now`: seconds since the epoch; `flush`: durability "flush". Called without the lock."""

    def __init__(
        self,
        table: _native.BlockTable,
        pool: Pool,
        mover: MoverLike,
        committer: Committer,
        retirement: Retirement,
        announcements: Announcements,
        counters: Counters,
        lock: threading.RLock,
        now: Callable[[], int],
        *,
        flush: bool,
    ) -> None:
        self._table = table
        self._pool = pool
        self._mover = mover
        self._committer = committer
        self._retirement = retirement
        self._announcements = announcements
        self._counters = counters
        self.lock = lock
        self._now = now
        self._flush = flush

    def drop_failed(self, keys: KeyArray, generations: Slots) -> None:
        """Removes blocks whose stored copy proved unusable; a read-only store forgets them. `keys` are salted."""
        with self.lock:
            removed = self._table.remove(keys, generations)
            self._retirement.retire(removed, Removal.FAILED_CHECK)
        self._counters.add(dropped_blocks=len(removed))

    def store_ended(self, operation: Operation) -> None:
        """Its plan is done."""
        plan = operation.plan
        assert plan is not None
        statuses = self._mover.seal(plan)
        if isinstance(operation, StoreOperation) and operation.parent is not None and not operation.parent.done():
            statuses[statuses == Status.OK] = Status.TIMEOUT
        written = np.flatnonzero(statuses == Status.OK).astype(np.uint32)
        if len(written) and self._flush and (flushed := self._pool.flush_data()) != Status.OK:
            statuses[written] = flushed
        # First the failures: they take their descendants along, which then are refused by commit or publish.
        unusable = [self._table.abort(operation.slots[statuses != Status.OK])]
        written = np.flatnonzero(statuses == Status.OK).astype(np.uint32)
        if len(written):
            statuses[written] = self._pool.slot_table.commit(self._table, operation.slots[written], self._now())
            if self._flush and (flushed := self._pool.flush_records()) != Status.OK:
                statuses[written] = flushed
            unusable.append(self._table.abort(operation.slots[written[statuses[written] != Status.OK]]))
            durable = written[statuses[written] == Status.OK]
            with self.lock:
                statuses[durable] = self._table.publish(operation.slots[durable])
                self._announcements.published(operation.slots[durable[statuses[durable] == Status.OK]])
            unusable.append(operation.slots[durable[statuses[durable] != Status.OK]])
        removed = np.concatenate(unusable)

        def retire() -> None:
            with self.lock:
                self._retirement.retire(removed, Removal.NOT_WRITTEN)

        if len(removed):
            self._committer.when_drained(plan, retire)
        operation.statuses[operation.positions] = statuses
        self._counters.add_statuses("store", operation.statuses)

    def retrieve_ended(self, operation: Operation) -> None:
        """Its plan is done."""
        plan = operation.plan
        assert plan is not None
        statuses = plan.statuses()
        bad = np.isin(statuses, [int(status) for status in _DROP])

        def release() -> None:
            with self.lock:
                self._table.unpin(int(operation.slots[-1]), int(operation.generations[-1]))
                self._retirement.reader_ends(operation.ticket)

        self._committer.when_drained(plan, release)
        if bad.any():
            self.drop_failed(operation.keys[bad], operation.generations[bad])
        operation.statuses[operation.positions] = statuses
        self._counters.add_statuses("retrieve", operation.statuses)
