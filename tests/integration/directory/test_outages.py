"""Two nodes over a real etcd that is paused, killed and wiped: what they know of each other meanwhile and after."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.etcd_server import EtcdServer
from tests.waiting import wait_for
from tutti_mooncake.directory.etcd_broker import EtcdBroker, EtcdOptions
from tutti_mooncake.directory.follower import Follower
from tutti_mooncake.directory.member import Member
from tutti_mooncake.directory.records import Keys, NodeRecord, ShortHashes
from tutti_mooncake.directory.span_book import SpanBook
from tutti_mooncake.directory.view import DirectoryView

KEYS = Keys("test")
NAMESPACE = bytes(16)
TTL_SECONDS = 2.0


def hashes(*of: int) -> ShortHashes:
    return np.array(of, dtype="<u8")


class Node:
    """A node with its threads."""

    def __init__(self, endpoint: str, name: str) -> None:
        options = EtcdOptions([endpoint], timeout_seconds=1.0)
        self.brokers = [EtcdBroker(options), EtcdBroker(options)]
        self.book, self.view = SpanBook(), DirectoryView(KEYS)
        self.follower = Follower(self.brokers[0], KEYS, self.view, check_seconds=0.4)
        record = NodeRecord(name, time.time_ns())
        self.member = Member(self.brokers[1], KEYS, record, self.book, self.view, ttl_seconds=TTL_SECONDS, publish_seconds=0.1)
        self.follower.start()
        self.member.start()

    def sees(self, *of: int) -> dict[str, int]:
        return {record.node: blocks for record, blocks in self.view.holders(NAMESPACE, hashes(*of))}

    def crash(self) -> None:
        self.member.stop()
        self.follower.stop()
        for broker in self.brokers:
            broker.close()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd").start()
    yield server
    server.kill()


@pytest.fixture
def nodes(etcd: EtcdServer) -> Iterator[tuple[Node, Node]]:
    both = Node(etcd.endpoint, "a"), Node(etcd.endpoint, "b")
    both[0].book.add(NAMESPACE, 0, 0, hashes(1, 2))
    wait_for(lambda: both[1].sees(1, 2, 3) == {"a": 2} and [record.node for record in both[0].view.nodes()] == ["a", "b"])
    yield both
    for node in both:
        node.crash()


def down_for(node: Node, seconds: float) -> None:
    """The control plane is away for so long; answers from memory go on, and are quick."""
    wait_for(lambda: node.follower.last_error != "")
    slowest, until = 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        begin = time.monotonic()
        assert node.sees(1, 2, 3) == {"a": 2} and node.follower.usable
        slowest = max(slowest, time.monotonic() - begin)
        time.sleep(0.02)
    assert slowest < 0.5


def catches_up(a: Node, b: Node) -> None:
    wait_for(lambda: b.sees(1, 2, 3) == {"a": 3})
    wait_for(lambda: [record.node for record in a.view.nodes()] == ["a", "b"])
    assert not b.follower.last_error


def test_a_paused_control_plane(etcd: EtcdServer, nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    etcd.pause()
    a.book.add(NAMESPACE, 2, 2, hashes(3))
    down_for(b, 2 * TTL_SECONDS)
    etcd.resume()
    catches_up(a, b)


def test_a_killed_control_plane_that_comes_back(etcd: EtcdServer, nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    etcd.kill()
    a.book.add(NAMESPACE, 2, 2, hashes(3))
    down_for(b, 1.0)
    etcd.start()
    catches_up(a, b)


def test_a_control_plane_that_comes_back_empty(etcd: EtcdServer, nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    etcd.wipe()
    a.book.add(NAMESPACE, 2, 2, hashes(3))
    down_for(b, 1.0)
    etcd.start()
    catches_up(a, b)
    assert a.member.registrations == 2


def test_a_node_that_dies_is_known_to_be_dead(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    a.crash()
    seconds = wait_for(lambda: b.sees(1, 2) == {})
    assert seconds > 0.1 and b.view.stats().spans == 1


def test_a_node_that_leaves_is_gone_at_once(nodes: tuple[Node, Node]) -> None:
    a, b = nodes
    a.member.leave()
    wait_for(lambda: b.sees(1, 2) == {} and b.view.stats().spans == 0)
