"""Which node to fetch from, and from whom next when that fails.

Policy. Among the nodes that hold the next block, are not closed off by their breaker and serve fewer than `most_in_flight` of our fetches:
those that hold at least nine tenths of what the best one holds; of these the one from which the bytes are expected soonest, by the speed
that its fetches had (a moving average), divided among the fetches that are running there. A node that was never asked counts as fast as the
fastest, those of our own zone first. Ties are broken at random. What has arrived stays: the next owner is asked for the rest, with the
time that is left. Owners that failed are not asked again for the same fetch.

Breakers: a node that failed `breaker_failures` times in a row, or was too slow, is left alone for `breaker_wait_seconds`, then tried by one
fetch. A node that doesn't hold what the directory said isn't sick.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tutti_mooncake import Status
from tutti_mooncake.directory.records import NodeRecord, short_hashes
from tutti_mooncake.directory.view import DirectoryView
from tutti_mooncake.keys import KeyArray
from tutti_mooncake.remote.fetcher import Fetcher, FetchResult
from tutti_mooncake.remote.wire import Peer
from tutti_mooncake.schedule import Breaker

SMOOTHING = 0.3
"""Weight of the newest fetch in a peer's speed."""
ENOUGH = 0.9
"""Of the longest prefix that anybody holds."""


@dataclass(frozen=True)
class Fetched:
    """`blocks`: leading ones that are in the tensors. `status`: OK when these are all. `tries`: whom we asked, and how that ended."""

    blocks: int
    status: Status
    bytes: int
    tries: list[tuple[str, FetchResult]]


@dataclass
class _Owner:
    breaker: Breaker
    bytes_per_second: float = 0.0
    """0 = not known."""
    in_flight: int = 0


@dataclass
class SourceCounters:
    """Since the start. `stale`: an owner didn't hold what the directory said. `nobody`: nobody could be asked."""

    fetches: int = 0
    tries: int = 0
    blocks: int = 0
    bytes: int = 0
    failed_tries: int = 0
    stale: int = 0
    nobody: int = 0
    by_status: dict[str, int] = field(default_factory=dict)


class Sources:
    """Thread-safe. `usable`: whether `view` is fresh enough. `zone`: our own."""

    def __init__(
        self,
        view: DirectoryView,
        usable: Callable[[], bool],
        fetcher: Fetcher,
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
        self._fetcher = fetcher
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

    def ahead(self, keys: KeyArray, begin: int) -> int:
        """Blocks from `begin` on that some node holds that may be asked now. `keys`: salted. From memory; asks nobody."""
        with self._lock:
            return max((blocks for _, blocks in self._candidates(keys, begin, set())), default=0)

    def fetch(self, keys: KeyArray, block_ids: npt.NDArray[np.uint32], *, seconds: float) -> Fetched:
        """Fetches the blocks of `keys` (salted), consecutive ones of one chain, into `block_ids`; the chain may begin before them.

        Returns within `seconds`, and a little more. The blocks' memory is the fetcher's until then.
        """
        deadline = time.monotonic() + seconds
        failed: set[tuple[str, int]] = set()
        tries: list[tuple[str, FetchResult]] = []
        blocks = 0
        status = Status.NOT_FOUND
        with self._lock:
            self.counters.fetches += 1
        while blocks < len(keys) and (left := deadline - time.monotonic()) > 0:
            with self._lock:
                choice = self._choose(keys, blocks, failed)
                if choice is None:
                    self.counters.nobody += not tries
                    break
                record, held = choice
                owner = self._begin(record)
            end = min(blocks + held, len(keys))
            result = None
            try:
                peer = Peer(record.node, record.epoch, record.address)
                result = self._fetcher.fetch(peer, keys[blocks:end], block_ids[blocks:end], seconds=left)
            finally:
                with self._lock:
                    self._end(owner, result)
            tries.append((record.node, result))
            blocks += result.blocks
            status = result.status
            if status is Status.REJECTED:
                break
            if status is not Status.OK:
                failed.add((record.node, record.epoch))
        if blocks == len(keys):
            status = Status.OK
        elif status is Status.OK:  # nobody has the rest
            status = Status.NOT_FOUND
        return Fetched(blocks, status, sum(result.bytes for _, result in tries), tries)

    def breakers(self) -> dict[str, int]:
        """State of each node's breaker, as metrics show it."""
        with self._lock:
            return {node: int(owner.breaker.state) for (node, _), owner in self._owners.items()}

    # --- under the lock ---

    def _candidates(self, keys: KeyArray, begin: int, without: set[tuple[str, int]]) -> list[tuple[NodeRecord, int]]:
        if not self._usable():
            return []
        found = []
        for record, blocks in self._view.holders(self._namespace, short_hashes(keys), begin):
            owner = self._owners.get((record.node, record.epoch))
            asked = owner is not None and (owner.in_flight >= self._most_in_flight or not owner.breaker.allows())
            if record.address and not asked and (record.node, record.epoch) not in without:
                found.append((record, blocks))
        return found

    def _choose(self, keys: KeyArray, begin: int, without: set[tuple[str, int]]) -> tuple[NodeRecord, int] | None:
        candidates = self._candidates(keys, begin, without)
        if not candidates:
            return None
        longest = max(blocks for _, blocks in candidates)
        good = [one for one in candidates if one[1] >= ENOUGH * longest]
        fastest = max((owner.bytes_per_second for owner in self._owners.values()), default=0.0) or 1.0

        def expected(one: tuple[NodeRecord, int]) -> tuple[float, bool, float]:
            record = one[0]
            owner = self._owners.get((record.node, record.epoch))
            speed, running = (fastest, 0) if owner is None else (owner.bytes_per_second or fastest, owner.in_flight)
            return (running + 1) / speed, record.zone != self._zone, self._chance.random()

        return min(good, key=expected)

    def _begin(self, record: NodeRecord) -> _Owner:
        key = (record.node, record.epoch)
        owner = self._owners.get(key)
        if owner is None:
            living = {(one.node, one.epoch) for one in self._view.nodes()}
            self._owners = {one: known for one, known in self._owners.items() if one in living or known.in_flight}
            owner = self._owners[key] = _Owner(Breaker(self._breaker_failures, self._breaker_wait_seconds, self._clock))
        owner.breaker.attempt()
        owner.in_flight += 1
        self.counters.tries += 1
        return owner

    def _end(self, owner: _Owner, result: FetchResult | None) -> None:
        owner.in_flight -= 1
        if result is None:  # an exception: nobody's fault but ours
            return
        counters = self.counters
        counters.blocks += result.blocks
        counters.bytes += result.bytes
        counters.by_status[result.status.name] = counters.by_status.get(result.status.name, 0) + 1
        if result.status in (Status.OK, Status.NOT_FOUND):
            owner.breaker.success()
            counters.stale += result.status is Status.NOT_FOUND
        elif result.status is not Status.REJECTED:  # which says nothing about the owner
            owner.breaker.failure()
            counters.failed_tries += 1
        if result.bytes and result.seconds > 0:
            speed = result.bytes / result.seconds
            known = owner.bytes_per_second
            owner.bytes_per_second = speed if not known else (1 - SMOOTHING) * known + SMOOTHING * speed
