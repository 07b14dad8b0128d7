"""A node in the directory over a control plane that stops, forgets and is replaced, by a clock that the test steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tests.clock import Clock
from tutti_mooncake.directory.broker import BrokerError, Change, Snapshot
from tutti_mooncake.directory.follower import Follower
from tutti_mooncake.directory.member import Member
from tutti_mooncake.directory.memory_broker import MemoryBroker
from tutti_mooncake.directory.records import Keys, NodeRecord, ShortHashes
from tutti_mooncake.directory.span_book import SpanBook
from tutti_mooncake.directory.view import DirectoryView

KEYS = Keys("test")
NAMESPACE = bytes(16)
TTL = 9.0


def hashes(*of: int) -> ShortHashes:
    return np.array(of, dtype="<u8")


class Node:
    """One process: its book, its view of the others, and what keeps both."""

    def __init__(self, broker: MemoryBroker, clock: Clock, name: str, epoch: int = 1) -> None:
        self.book = SpanBook()
        self.view = DirectoryView(KEYS)
        self.follower = Follower(broker, KEYS, self.view, clock=clock)
        record = NodeRecord(name, epoch, f"{name}:1")
        self.member = Member(broker, KEYS, record, self.book, self.view, ttl_seconds=TTL, clock=clock)

    def step(self) -> None:
        self.member.step()
        while self.follower.step(0.0):
            pass

    def sees(self, *of: int) -> dict[str, int]:
        return {record.node: blocks for record, blocks in self.view.holders(NAMESPACE, hashes(*of))}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker(clock: Clock) -> MemoryBroker:
    return MemoryBroker(clock)


@pytest.fixture
def node(broker: MemoryBroker, clock: Clock) -> Callable[..., Node]:
    return lambda name, epoch=1: Node(broker, clock, name, epoch)


def steps(clock: Clock, seconds: float, *nodes: Node) -> None:
    for _ in range(round(seconds)):
        clock.now += 1.0
        for one in nodes:
            one.step()


def test_nodes_find_what_others_hold(clock: Clock, node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    a.book.add(NAMESPACE, 0, 0, hashes(1, 2, 3))
    steps(clock, 2, a, b)
    assert b.sees(1, 2, 3, 4) == {"a": 3} and [record.address for record in b.view.nodes()] == ["a:1", "b:1"]
    a.book.remove(NAMESPACE, hashes(3))
    steps(clock, 2, a, b)
    assert b.sees(1, 2, 3, 4) == {"a": 2}


def test_changes_of_a_second_are_one_batch(clock: Clock, node: Callable[..., Node]) -> None:
    a = node("a")
    steps(clock, 2, a)
    before = a.member.writes
    for block in range(1, 100):
        a.book.add(NAMESPACE, block - 1, block - 1, hashes(block))
    steps(clock, 1, a)
    assert a.member.writes == before + 1 and a.sees(*range(1, 100)) == {"a": 99}


def test_a_node_that_ends_is_gone_with_its_lease_and_later_its_spans_too(
    broker: MemoryBroker, clock: Clock, node: Callable[..., Node]
) -> None:
    a, b = node("a"), node("b")
    a.book.add(NAMESPACE, 0, 0, hashes(1))
    steps(clock, 2, a, b)
    steps(clock, TTL - 4, b)
    assert b.sees(1) == {"a": 1}
    steps(clock, 5, b)
    assert b.sees(1) == {} and b.view.stats().spans == 1
    steps(clock, 61, b)
    assert b.view.stats().spans == 0 and not broker.snapshot(KEYS.spans).items


def test_a_lease_that_ran_out_needs_no_spans_written_again(broker: MemoryBroker, clock: Clock, node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    a.book.add(NAMESPACE, 0, 0, hashes(1))
    steps(clock, 2, a, b)
    writes = a.member.writes
    clock.now += TTL + 1
    b.step()
    assert b.sees(1) == {}
    steps(clock, 1, a, b)
    assert b.sees(1) == {"a": 1} and a.member.registrations == 2 and a.member.writes == writes


def test_an_outage_is_caught_up_with(broker: MemoryBroker, clock: Clock, node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    a.book.add(NAMESPACE, 0, 0, hashes(1))
    steps(clock, 2, a, b)
    broker.fail("out of order")
    a.book.add(NAMESPACE, 1, 1, hashes(2))
    for _ in range(20):
        clock.now += 1.0
        with contextlib.suppress(BrokerError):
            a.member.step()
        with pytest.raises(BrokerError, match="out of order"):
            b.follower.step(0.0)
    assert b.sees(1, 2) == {"a": 1} and b.follower.usable and "out of order" in b.follower.last_error and a.member.last_error
    clock.now += 15
    assert not b.follower.usable
    broker.fail("")
    steps(clock, 2, a, b)
    assert b.sees(1, 2) == {"a": 2} and b.follower.usable and not b.follower.last_error and not a.member.last_error


def test_a_control_plane_that_lost_everything_is_filled_again(broker: MemoryBroker, clock: Clock, node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    a.book.add(NAMESPACE, 0, 0, hashes(1, 2))
    steps(clock, 2, a, b)
    broker.wipe()
    for _ in range(8):
        clock.now += 1.0
        for one in (a, b):
            with contextlib.suppress(BrokerError):
                one.step()
    assert b.sees(1, 2) == {"a": 2} and [record.node for record in b.view.nodes()] == ["a", "b"]


def test_a_watch_that_fell_behind_reads_everything_anew(broker: MemoryBroker, clock: Clock, node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    steps(clock, 2, a, b)
    a.book.add(NAMESPACE, 0, 0, hashes(1))
    steps(clock, 2, a)
    broker.compact()
    with pytest.raises(BrokerError, match="not known any more"):
        b.follower.step(0.0)
    b.step()
    assert b.sees(1) == {"a": 1} and b.follower.resyncs == 2


def test_a_restarted_node_announces_what_it_has_now(broker: MemoryBroker, clock: Clock, node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    a.book.add(NAMESPACE, 0, 0, hashes(1, 2))
    steps(clock, 2, a, b)
    again = node("a", 2)
    again.book.add(NAMESPACE, 0, 0, hashes(1))
    steps(clock, 2, again, b)
    assert b.sees(1, 2) == {"a": 1}
    assert [epoch for _, epoch, _ in b.view.spans()] == [2]
    steps(clock, TTL + 2, again, b)  # the old lease ends without taking the new record along
    assert b.sees(1, 2) == {"a": 1}


def test_of_two_processes_of_one_name_the_later_stays(clock: Clock, node: Callable[..., Node]) -> None:
    first, second, other = node("a", 1), node("a", 2), node("b")
    first.book.add(NAMESPACE, 0, 0, hashes(1, 2))
    steps(clock, 2, first, other)
    second.book.add(NAMESPACE, 0, 0, hashes(1))
    steps(clock, 3, second, first, other)
    assert first.member.superseded and not second.member.superseded
    steps(clock, 20, first, second, other)
    assert other.sees(1, 2) == {"a": 1} and other.view.stats().spans == 1


def test_the_earlier_of_two_does_not_come_back_after_an_outage(broker: MemoryBroker, clock: Clock, node: Callable[..., Node]) -> None:
    first, second, other = node("a", 1), node("a", 2), node("b")
    steps(clock, 2, first)
    clock.now += TTL + 1  # its lease runs out unseen
    second.book.add(NAMESPACE, 0, 0, hashes(1))
    steps(clock, 2, second, other)
    first.member.step()  # without having heard of the second
    assert first.member.superseded and first.member.registrations == 1
    steps(clock, 2, second, other)
    assert other.sees(1) == {"a": 1}


def test_a_record_that_someone_else_put_in_its_place_is_mended(broker: MemoryBroker, clock: Clock, node: Callable[..., Node]) -> None:
    a, b = node("a", 5), node("b")
    a.book.add(NAMESPACE, 0, 0, hashes(1))
    steps(clock, 2, a, b)
    for value in (NodeRecord("a", 4).encode(), b"nonsense"):
        broker.apply([Change(KEYS.node("a"), value)])
        b.step()
        assert b.sees(1) == {}
        steps(clock, 301, a, b)
        assert b.sees(1) == {"a": 1} and not a.member.superseded
    broker.apply([Change(KEYS.node("a"), None)])
    steps(clock, 301, a, b)
    assert b.sees(1) == {"a": 1}


def test_a_view_that_is_behind_deletes_nothing_of_the_living(broker: MemoryBroker, clock: Clock, node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    b.book.add(NAMESPACE, 0, 0, hashes(1))
    steps(clock, 2, a, b)
    clock.now += TTL + 1
    a.step()
    assert a.view.dead() == {("b", 1)}
    b.step()
    for _ in range(100):
        clock.now += 1.0
        a.member.step()  # and not its follower
        b.member.step()
    assert len(broker.snapshot(KEYS.spans_of("b")).items) == 1


def test_a_lease_is_kept_while_much_is_written(clock: Clock, broker: MemoryBroker, node: Callable[..., Node]) -> None:
    a = node("a")
    a.step()
    for chain in range(3000):
        a.book.add(NAMESPACE, 0, 0, hashes(1000 + chain))
    applied = broker.apply

    def slow(changes: Sequence[Change], lease: int = 0) -> int:
        clock.now += 0.9
        return applied(changes, lease)

    broker.apply = slow  # type: ignore[method-assign]
    clock.now += 1.0
    a.member.step()
    assert a.member.registrations == 1 and len(broker.snapshot(KEYS.spans).items) == 3000


def test_a_watch_that_ended_without_a_word(clock: Clock, node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    steps(clock, 2, a, b)
    watch = b.follower._watch
    assert watch is not None
    watch.next = lambda timeout_seconds: None  # type: ignore[method-assign]
    a.book.add(NAMESPACE, 0, 0, hashes(1))
    steps(clock, 121, a, b)
    assert b.sees(1) == {"a": 1}


def test_a_node_that_leaves_takes_everything_along(broker: MemoryBroker, clock: Clock, node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    a.book.add(NAMESPACE, 0, 0, hashes(1))
    steps(clock, 2, a, b)
    a.member.leave()
    b.step()
    assert b.sees(1) == {} and b.view.stats().spans == 0 and [record.node for record in b.view.nodes()] == ["b"]


def test_records_that_someone_damaged_are_mended(broker: MemoryBroker, clock: Clock, node: Callable[..., Node]) -> None:
    a, b = node("a"), node("b")
    a.book.add(NAMESPACE, 0, 0, hashes(1))
    steps(clock, 2, a, b)
    broker.apply([Change(KEYS.span("a", 1, 1), b"nonsense"), Change(KEYS.span("a", 1, 99), b"of nobody")])
    b.step()
    assert b.sees(1) == {} and b.view.stats().refused == 2
    steps(clock, 301, a, b)
    assert b.sees(1) == {"a": 1} and b.view.stats().spans == 1


def test_more_than_a_batch_is_written_whole(clock: Clock, node: Callable[..., Node]) -> None:
    a = node("a")
    for chain in range(300):
        a.book.add(NAMESPACE, 0, 0, hashes(1000 + chain))
    steps(clock, 2, a)
    assert a.view.stats().spans == 300 and a.book.waiting == 0


def test_a_clock_that_went_back_between_two_starts(clock: Clock, node: Callable[..., Node]) -> None:
    a, b = node("a", 100), node("b")
    a.book.add(NAMESPACE, 0, 0, hashes(1, 2))
    steps(clock, 2, a, b)
    again = node("a", 50)
    again.book.add(NAMESPACE, 0, 0, hashes(1))
    again.follower.step(0.0)  # it sees its own earlier start, and takes it for what it is
    steps(clock, 2, again, b)
    epoch = again.member.record.epoch
    assert epoch > 100 and not again.member.superseded
    assert b.sees(1, 2) == {"a": 1} and [one for _, one, _ in b.view.spans()] == [epoch]


class DefectiveBroker(MemoryBroker):
    """Its first snapshot fails in a way that nobody expects."""

    def __init__(self) -> None:
        super().__init__()
        self.defects = 1

    def snapshot(self, prefix: str) -> Snapshot:
        if self.defects:
            self.defects -= 1
            raise ZeroDivisionError("of the test")
        return super().snapshot(prefix)


def test_threads_outlive_a_defect() -> None:
    broker = DefectiveBroker()
    view, book = DirectoryView(KEYS), SpanBook()
    follower = Follower(broker, KEYS, view)
    member = Member(broker, KEYS, NodeRecord("a", 1), book, view, publish_seconds=0.01)
    book.add(NAMESPACE, 0, 0, hashes(1))
    follower.start()
    member.start()
    deadline = time.monotonic() + 20
    while not view.holders(NAMESPACE, hashes(1)):
        assert time.monotonic() < deadline
    member.leave()
    follower.stop()
    assert broker.defects == 0 and not broker.snapshot(KEYS.prefix).items
