"""A control plane in this process: for one node, for tests, and for simulated clusters. What etcd does to its clients can be asked of it:
stop answering, forget its history, lose everything.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from tutti_mooncake.directory.broker import MOST_BATCH, BrokerError, Change, LeaseLost, Snapshot, WatchLost


class MemoryBroker:
    """`history`: revisions that a watch can go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, history: int = 1 << 16) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._items: dict[str, tuple[bytes, int]] = {}
        self._leases: dict[int, tuple[float, float]] = {}
        self._history: deque[tuple[int, Change]] = deque(maxlen=history)
        self._forgotten = 0
        self._revision = 1
        self._cluster = 1
        self._next_lease = 1
        self._down = ""
        self.operations = 0
        """Batches, deletions and snapshots so far."""

    # --- what tests ask of it ---

    def fail(self, why: str = "") -> None:
        """From now on every call raises BrokerError with this text; empty: it works again."""
        with self._changed:
            self._down = why
            self._changed.notify_all()

    def compact(self) -> None:
        """Forgets the history: watches that are behind are lost."""
        with self._changed:
            self._forgotten = self._revision
            self._history.clear()
            self._changed.notify_all()

    def wipe(self) -> None:
        """Another, empty cluster answers from now on."""
        with self._changed:
            self._items, self._leases, self._revision, self._forgotten = {}, {}, 1, 1
            self._history.clear()
            self._cluster += 1
            self._changed.notify_all()

    # --- Broker ---

    def apply(self, changes: Sequence[Change], lease: int = 0) -> int:
        """See Broker."""
        with self._changed:
            self._enter()
            if len(changes) > MOST_BATCH or len({change.key for change in changes}) < len(changes):
                raise BrokerError(f"a batch has at most {MOST_BATCH} changes, of different keys")
            if lease and lease not in self._leases:
                raise LeaseLost(f"lease {lease} is not there")
            self._write(changes, lease)
            return self._revision

    def delete_prefix(self, prefix: str) -> int:
        """See Broker."""
        with self._changed:
            self._enter()
            keys = [key for key in self._items if key.startswith(prefix)]
            if keys:
                self._write([Change(key, None) for key in keys], 0)
            return len(keys)

    def snapshot(self, prefix: str) -> Snapshot:
        """See Broker."""
        with self._changed:
            self._enter()
            items = {key: value for key, (value, _) in self._items.items() if key.startswith(prefix)}
            return Snapshot(items, self._revision, self._cluster)

    def watch(self, prefix: str, after_revision: int) -> MemoryWatch:
        """See Broker."""
        with self._changed:
            self._enter()
            return MemoryWatch(self, prefix, after_revision, self._cluster)

    def head(self) -> tuple[int, int]:
        """See Broker."""
        with self._changed:
            self._enter()
            return self._cluster, self._revision

    def grant(self, ttl_seconds: float) -> int:
        """See Broker."""
        with self._changed:
            self._enter()
            lease = self._next_lease
            self._next_lease += 1
            self._leases[lease] = (self._clock() + ttl_seconds, ttl_seconds)
            return lease

    def keep_alive(self, lease: int) -> None:
        """See Broker."""
        with self._changed:
            self._enter()
            if lease not in self._leases:
                raise LeaseLost(f"lease {lease} is not there")
            ttl = self._leases[lease][1]
            self._leases[lease] = (self._clock() + ttl, ttl)

    def revoke(self, lease: int) -> None:
        """See Broker."""
        with self._changed:
            self._enter()
            self._end(lease)

    def close(self) -> None:
        """See Broker."""

    def take(self, watch: MemoryWatch, timeout_seconds: float) -> tuple[Sequence[Change], int] | None:
        """The watch's next changes."""
        with self._changed:
            self._enter()
            if not self._changed.wait_for(lambda: self._down or self._ready(watch), timeout_seconds):
                return None
            self._enter()
            if watch.cluster != self._cluster or watch.revision < self._forgotten or watch.revision > self._revision:
                raise WatchLost(f"changes after revision {watch.revision} are not known any more")
            found = [change for revision, change in self._history if revision > watch.revision and change.key.startswith(watch.prefix)]
            watch.revision = self._revision
            return (found, self._revision) if found else None

    def _ready(self, watch: MemoryWatch) -> bool:
        return self._revision != watch.revision or self._cluster != watch.cluster

    def _enter(self) -> None:
        if self._down:
            raise BrokerError(f"control plane in memory: {self._down}")
        self.operations += 1
        now = self._clock()
        for lease in [lease for lease, (until, _) in self._leases.items() if until <= now]:
            self._end(lease)

    def _end(self, lease: int) -> None:
        if self._leases.pop(lease, None) is not None and (keys := [key for key, (_, under) in self._items.items() if under == lease]):
            self._write([Change(key, None) for key in keys], 0)

    def _write(self, changes: Sequence[Change], lease: int) -> None:
        self._revision += 1
        for change in changes:
            if change.value is None:
                self._items.pop(change.key, None)
            else:
                self._items[change.key] = (change.value, lease)
            if len(self._history) == self._history.maxlen:
                self._forgotten = self._history[0][0]
            self._history.append((self._revision, change))
        self._changed.notify_all()


class MemoryWatch:
    """Of a MemoryBroker."""

    def __init__(self, broker: MemoryBroker, prefix: str, revision: int, cluster: int) -> None:
        self._broker = broker
        self.prefix = prefix
        self.revision = revision
        self.cluster = cluster

    def next(self, timeout_seconds: float) -> tuple[Sequence[Change], int] | None:
        """See Watch."""
        return self._broker.take(self, timeout_seconds)

    def close(self) -> None:
        """See Watch."""
