"""The seam to the control plane: a key-value store with revisions, leases and watches. `EtcdBroker` is the real one, `MemoryBroker` one in
this process.

Every change has a revision, larger than those before; a batch has one. A watch from a revision misses nothing after it, or raises
`WatchLost`: then a new snapshot is needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tutti_mooncake.errors import TuttiError

MOST_BATCH = 128
"""Changes of one batch: etcd's default limit on the operations of a transaction."""


class BrokerError(TuttiError):
    """The control plane can't be reached, or answered with an error; the text says which and where."""


class LeaseLost(BrokerError):
    """The lease has run out, or was never there: what was put under it is gone."""


class WatchLost(BrokerError):
    """Changes were missed, since the history that the watch needs is compacted or of another cluster."""


@dataclass(frozen=True)
class Change:
    """`value` is None where the key was deleted."""

    key: str
    value: bytes | None


@dataclass(frozen=True)
class Snapshot:
    """All of a prefix at one revision. `cluster`: which history the revision belongs to."""

    items: Mapping[str, bytes]
    revision: int
    cluster: int


class Watch(Protocol):
    """Not thread-safe."""

    def next(self, timeout_seconds: float) -> tuple[Sequence[Change], int] | None:
        """The changes of one or more revisions in order, and the last of these; None when there were none. Raises BrokerError."""
        ...

    def close(self) -> None:
        """Ends the watch."""
        ...


class Broker(Protocol):
    """Thread-safe. Every call returns or raises BrokerError within the broker's own timeout."""

    def apply(self, changes: Sequence[Change], lease: int = 0) -> int:
        """At most MOST_BATCH changes of different keys at once, all or none; puts go under `lease`. Returns the revision."""
        ...

    def delete_prefix(self, prefix: str) -> int:
        """How many keys it deleted."""
        ...

    def snapshot(self, prefix: str) -> Snapshot:
        """What is there now."""
        ...

    def watch(self, prefix: str, after_revision: int) -> Watch:
        """Changes after this revision."""
        ...

    def head(self) -> tuple[int, int]:
        """Cluster and revision now: a cheap question that shows that the control plane answers."""
        ...

    def grant(self, ttl_seconds: float) -> int:
        """A new lease."""
        ...

    def keep_alive(self, lease: int) -> None:
        """Starts the lease's time anew. Raises LeaseLost."""
        ...

    def revoke(self, lease: int) -> None:
        """Ends the lease, and deletes what is under it. Nothing happens when it isn't there."""
        ...

    def close(self) -> None:
        """Frees connections."""
        ...
