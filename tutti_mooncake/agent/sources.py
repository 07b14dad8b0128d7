"""Which nodes to fetch from, and in which order.

Policy. Among the nodes that hold the next block, are not closed off by their breaker and serve fewer than `most_in_flight` of our fetches:
first those that hold at least nine tenths of what the best one holds, the one from which the bytes are expected soonest ahead, by the speed
that its fetches had (a moving average), divided among the fetches that are running there. A node that was never asked counts as fast as the
fastest, those of our own zone first. Ties are broken at random. Then the others, who holds more ahead. Who comes later is asked for what
those before him didn't deliver.

Breakers: a node that failed `breaker_failures` times in a row, or was too slow, is left alone for `breaker_wait_seconds`, then tried by one
fetch. A node that doesn't hold what the directory said isn't sick.

Plans are made where requests are scheduled, and carried out where the tensors are, which may be another process; how each try ended comes
back by `ended`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tutti_mooncake import Status
from tutti_mooncake.directory.records import NodeRecord, short_hashes
from tutti_mooncake.directory.view import DirectoryView
from tutti_mooncake.keys import KeyArray
from tutti_mooncake.remote.fetcher import FetchResult
from tutti_mooncake.remote.wire import Peer
from tutti_mooncake.schedule import Breaker

SMOOTHING = 0.3
"""Weight of the newest fetch in a peer's speed."""
ENOUGH = 0.9
"""Of the longest prefix that anybody holds."""
MOST_OWNERS = 4
"""That one fetch may turn to."""


@dataclass(frozen=True)
class FetchPlan:
    """`keys`: salted, of the blocks that the best of `owners` holds, who are to be asked in this order."""

    keys: KeyArray
    owners: tuple[Peer, ...]

    @property
    def blocks(self) -> int:
        """How many that are."""
        return len(self.keys)


@dataclass
class _Owner:
    breaker: Breaker
    bytes_per_second: float = 0.0
    """0 = not known."""
    in_flight: int = 0


@dataclass
class SourceCounters:
    """Since the start. `stale`: an owner didn't hold what the directory said."""

    fetches: int = 0
    tries: int = 0
    blocks: int = 0
    bytes: int = 0
    failed_tries: int = 0
    stale: int = 0
    by_status: dict[str, int] = field(default_factory=dict)


class Sources:
    """Thread-safe. `usable`: whether `view` is fresh enough. `zone`: our own."""

    def __init__(
        self,
        view: DirectoryView,
        usable: Callable[[], bool],
        namespace: bytes,
        *,
        zone: str = "",
        most_in_flight: int = 2,
        breaker_failures: int = 3,
        breaker_wait_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        self._view = view
        self._usable = usable
        self._namespace = namespace
        self._zone = zone
        self._most_in_flight = most_in_flight
        self._breaker_failures = breaker_failures
        self._breaker_wait_seconds = breaker_wait_seconds
        self._clock = clock
        self._chance = chance or random.Random()
        self._lock = threading.Lock()
        self._owners: dict[tuple[str, int], _Owner] = {}
        self.counters = SourceCounters()

    def plan(self, keys: KeyArray) -> FetchPlan | None:
        """Whom to ask for the blocks of `keys` (salted), consecutive ones of one chain, which may begin before them; `None` when nobody
        that may be asked now holds the first one. From memory; asks nobody, and counts nothing.
        """
        with self._lock:
            found = self._in_order(self._candidates(keys))[:MOST_OWNERS]
        if not found:
            return None
        owners = tuple(Peer(record.node, record.epoch, record.address) for record, _ in found)
        return FetchPlan(keys[: max(blocks for _, blocks in found)], owners)

    def begin(self, plan: FetchPlan) -> None:
        """The plan is being carried out; `ended` is to be called once."""
        with self._lock:
            self.counters.fetches += 1
            owner = self._owner(plan.owners[0])
            owner.breaker.attempt()
            owner.in_flight += 1

    def ended(self, plan: FetchPlan, tries: Sequence[tuple[Peer, FetchResult]]) -> None:
        """It was carried out: whom we asked, and how that ended. Tries that we broke off ourselves are left out."""
        with self._lock:
            self._owner(plan.owners[0]).in_flight -= 1
            for peer, result in tries:
                self._take(self._owner(peer), result)

    def breakers(self) -> dict[str, int]:
        """State of each node's breaker, as metrics show it."""
        with self._lock:
            return {node: int(owner.breaker.state) for (node, _), owner in self._owners.items()}

    # --- under the lock ---

    def _candidates(self, keys: KeyArray) -> list[tuple[NodeRecord, int]]:
        if not self._usable():
            return []
        found = []
        for record, blocks in self._view.holders(self._namespace, short_hashes(keys)):
            owner = self._owners.get((record.node, record.epoch))
            closed = owner is not None and (owner.in_flight >= self._most_in_flight or not owner.breaker.allows())
            if record.address and not closed:
                found.append((record, blocks))
        return found

    def _in_order(self, candidates: list[tuple[NodeRecord, int]]) -> list[tuple[NodeRecord, int]]:
        longest = max((blocks for _, blocks in candidates), default=0)
        fastest = max((owner.bytes_per_second for owner in self._owners.values()), default=0.0) or 1.0

        def order(one: tuple[NodeRecord, int]) -> tuple[int, float, bool, float]:
            record, blocks = one
            owner = self._owners.get((record.node, record.epoch))
            speed, running = (fastest, 0) if owner is None else (owner.bytes_per_second or fastest, owner.in_flight)
            lacks = 0 if blocks >= ENOUGH * longest else longest - blocks
            return lacks, (running + 1) / speed, record.zone != self._zone, self._chance.random()

        return sorted(candidates, key=order)

    def _owner(self, peer: Peer) -> _Owner:
        key = (peer.node, peer.epoch)
        owner = self._owners.get(key)
        if owner is None:
            living = {(one.node, one.epoch) for one in self._view.nodes()}
            self._owners = {one: known for one, known in self._owners.items() if one in living or known.in_flight}
            owner = self._owners[key] = _Owner(Breaker(self._breaker_failures, self._breaker_wait_seconds, self._clock))
        return owner

    def _take(self, owner: _Owner, result: FetchResult) -> None:
        counters = self.counters
        counters.tries += 1
        counters.blocks += result.blocks
        counters.bytes += result.bytes
        counters.by_status[result.status.name] = counters.by_status.get(result.status.name, 0) + 1
        if result.status in (Status.OK, Status.NOT_FOUND):
            owner.breaker.success()
            counters.stale += result.status is Status.NOT_FOUND
        elif result.status in (Status.REJECTED, Status.CANCELLED):  # which say nothing about the owner
            owner.breaker.undecided()
        else:
            owner.breaker.failure()
            counters.failed_tries += 1
        if result.bytes and result.seconds > 0:
            speed = result.bytes / result.seconds
            known = owner.bytes_per_second
            owner.bytes_per_second = speed if not known else (1 - SMOOTHING) * known + SMOOTHING * speed
