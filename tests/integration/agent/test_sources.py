"""Whom a node fetches from when several hold what it wants, and what it does when they fail. Owners, stores and fetcher are real."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.clock import Clock
from tests.integration.agent.fetching import fetch
from tests.pattern import PatternTensors, chain, geometry
from tutti_mooncake import LocalStore, Status, StoreConfig
from tutti_mooncake.agent.sources import Sources
from tutti_mooncake.directory.announcer import announce
from tutti_mooncake.directory.broker import Change
from tutti_mooncake.directory.records import Keys, NodeRecord
from tutti_mooncake.directory.span_book import SpanBook
from tutti_mooncake.directory.view import DirectoryView
from tutti_mooncake.keys import as_key_array
from tutti_mooncake.remote.fetcher import Fetched, Fetcher
from tutti_mooncake.remote.owner import Owner
from tutti_mooncake.remote.transport import MemoryTransport, Piece, TransportError
from tutti_mooncake.remote.wire import Peer

KEYS = Keys("test")
PROMPT = chain("prompt", 40)


class Faulty(MemoryTransport):
    """Calls `fault` before each write."""

    fault: Callable[[], None] = staticmethod(lambda: None)

    def write(self, segment: str, pieces: Sequence[Piece]) -> None:
        self.fault()
        super().write(segment, pieces)


class Cluster:
    """Owners with stores, a view of them that the test keeps, and a node that fetches."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ends: dict[str, MemoryTransport] = {}
        self.view = DirectoryView(KEYS, "engine")
        self.clock = Clock()
        self.usable = True
        self.owners: dict[str, tuple[Owner, LocalStore, Faulty]] = {}
        self.target = PatternTensors(geometry(), 200)
        self.target.wipe()
        self.fetcher = Fetcher("engine", geometry(), MemoryTransport("engine", self.ends), self.target.tensors, windows=24, window_blocks=8)
        self.sources = Sources(
            self.view,
            lambda: self.usable,
            geometry().namespace_id,
            zone="here",
            clock=self.clock,
            chance=random.Random(1),
        )

    def add(self, name: str, keys: list[bytes], zone: str = "here") -> Faulty:
        transport = Faulty(name, self.ends)
        store = LocalStore.open(StoreConfig(devices=(str(self.root / name),), capacity="4MiB", executor="posix"), geometry())
        tensors = PatternTensors(geometry(), 100)
        store.register(tensors.tensors)
        tensors.write(keys)
        store.store(keys, range(len(keys))).wait(20).raise_for_status()
        owner = Owner(store, lambda: Peer(name, 1), transport, host="127.0.0.1", window_blocks=8)
        book = SpanBook()
        announce(store, book)
        self.owners[name] = owner, store, transport
        self.view.apply([Change(KEYS.node(name), NodeRecord(name, 1, owner.address, zone).encode())])
        self.view.apply([Change(KEYS.span(name, 1, number), span.encode()) for number, span in book.all()])
        return transport

    def fetch(self, keys: list[bytes] = PROMPT, first: int = 0, seconds: float = 10.0) -> Fetched:
        return fetch(self.sources, self.fetcher, keys, first, seconds)

    def ahead(self, keys: list[bytes] = PROMPT) -> int:
        plan = self.sources.plan(as_key_array(keys))
        return 0 if plan is None else plan.blocks

    def arrived(self, keys: list[bytes] = PROMPT, first: int = 0) -> int:
        there = [self.target.holds(key, first + position) for position, key in enumerate(keys)]
        count = there.index(False) if False in there else len(there)
        assert not any(there[count:])
        return count

    def close(self) -> None:
        for owner, store, _ in self.owners.values():
            owner.close()
            store.close()
        self.fetcher.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def names(fetched: Fetched) -> list[str]:
    return [peer.node for peer, _ in fetched.tries]


def fail() -> None:
    raise TransportError("the test cut the cable")


def test_the_longest_prefix_is_asked_for_and_the_rest_elsewhere(cluster: Cluster) -> None:
    cluster.add("a", PROMPT[:10])
    cluster.add("b", PROMPT[:30])
    assert cluster.ahead() == 30 and cluster.ahead(PROMPT[30:]) == 0
    fetched = cluster.fetch()
    assert (fetched.blocks, fetched.status, names(fetched)) == (30, Status.NOT_FOUND, ["b", "a"])
    assert cluster.arrived() == 30


def test_what_fails_half_way_goes_on_at_another(cluster: Cluster) -> None:
    cluster.add("a", PROMPT)
    cluster.add("b", PROMPT)
    count = [0]

    def fail_third() -> None:
        count[0] += 1
        if count[0] == 3:
            fail()

    for _, _, transport in cluster.owners.values():
        transport.fault = fail_third
    fetched = cluster.fetch()
    assert (fetched.blocks, fetched.status) == (40, Status.OK) and cluster.arrived() == 40
    assert sorted(names(fetched)) == ["a", "b"] and [result.blocks for _, result in fetched.tries] == [16, 24]
    assert cluster.sources.counters.failed_tries == 1 and cluster.sources.counters.blocks == 40


def test_a_node_that_fails_is_left_alone_and_comes_back(cluster: Cluster) -> None:
    transport = cluster.add("a", PROMPT)
    transport.fault = fail
    for _ in range(3):
        assert cluster.fetch().blocks == 0
    assert cluster.sources.breakers() == {"a": 2} and cluster.ahead() == 0
    assert cluster.fetch().tries == []
    cluster.clock.now += 11
    assert names(cluster.fetch()) == ["a"] and cluster.fetch().tries == []
    cluster.clock.now += 21
    transport.fault = lambda: None
    assert cluster.fetch().blocks == 40 and cluster.sources.breakers() == {"a": 0}


def test_a_node_that_is_gone_costs_one_try(cluster: Cluster) -> None:
    cluster.add("a", PROMPT)
    cluster.add("b", PROMPT[:39])
    cluster.owners["a"][0].close()
    for _ in range(6):
        assert cluster.fetch().blocks >= 39
    assert cluster.sources.counters.failed_tries <= 3


def test_a_stale_directory_is_nobodys_fault(cluster: Cluster) -> None:
    cluster.add("a", PROMPT)
    cluster.owners["a"][1].clear()
    for _ in range(5):
        fetched = cluster.fetch()
        assert (fetched.blocks, fetched.status, names(fetched)) == (0, Status.NOT_FOUND, ["a"])
    assert cluster.sources.breakers() == {"a": 0} and cluster.sources.counters.stale == 5


def test_the_faster_is_asked_once_both_are_known(cluster: Cluster) -> None:
    cluster.add("slow", PROMPT).fault = lambda: threading.Event().wait(0.03) and None
    cluster.add("fast", PROMPT)
    seen = [names(cluster.fetch())[0] for _ in range(12)]
    assert {"slow", "fast"} == set(seen[:4]) and set(seen[4:]) == {"fast"}


def test_unknown_nodes_of_our_zone_come_first(cluster: Cluster) -> None:
    cluster.add("far", PROMPT, "there")
    cluster.add("near", PROMPT, "here")
    assert names(cluster.fetch()) == ["near"]


def test_only_so_many_fetches_run_at_one_node(cluster: Cluster) -> None:
    goes_on, entered = threading.Event(), threading.Semaphore(0)

    def hold() -> None:
        entered.release()
        goes_on.wait(10)

    cluster.add("a", PROMPT).fault = hold
    results: list[Fetched] = []
    threads = [threading.Thread(target=lambda i=i: results.append(cluster.fetch(first=40 * i))) for i in range(2)]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert entered.acquire(timeout=10)
    assert cluster.fetch(first=120).tries == []
    goes_on.set()
    for thread in threads:
        thread.join(20)
    assert [one.blocks for one in results] == [40, 40] and cluster.fetch(first=120).blocks == 40
    assert all(owner.in_flight == 0 for owner in cluster.sources._owners.values())


def test_a_shortage_of_our_own_memory_is_not_the_owners_fault(cluster: Cluster) -> None:
    cluster.add("a", PROMPT)
    taken = [cluster.fetcher._windows.acquire(0) for _ in range(24)]
    for _ in range(4):
        fetched = cluster.fetch(seconds=0.1)
        assert (fetched.blocks, fetched.status) == (0, Status.REJECTED)
    assert cluster.sources.breakers() == {"a": 0}
    for window in taken:
        cluster.fetcher._windows.release(window)
    assert cluster.fetch().blocks == 40


def test_a_view_that_is_too_old_sends_nobody_anywhere(cluster: Cluster) -> None:
    cluster.add("a", PROMPT)
    cluster.usable = False
    assert cluster.ahead() == 0 and cluster.fetch().tries == []


def test_time_is_shared_by_all_tries(cluster: Cluster) -> None:
    for name in ("a", "b", "c"):
        cluster.add(name, PROMPT).fault = lambda: threading.Event().wait(1.0) and None
    fetched = cluster.fetch(seconds=0.5)
    assert fetched.status is Status.TIMEOUT and len(fetched.tries) == 1 and fetched.tries[0][1].seconds < 2
