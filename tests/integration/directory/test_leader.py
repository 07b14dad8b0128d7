"""An etcd of three members whose leader stops or dies: the directory goes on by the other two."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.etcd_server import EtcdServer, etcd_binary
from tests.waiting import wait_for
from tutti_mooncake.directory.etcd_broker import EtcdBroker, EtcdOptions
from tutti_mooncake.directory.follower import Follower
from tutti_mooncake.directory.member import Member
from tutti_mooncake.directory.records import Keys, NodeRecord
from tutti_mooncake.directory.span_book import SpanBook
from tutti_mooncake.directory.view import DirectoryView

KEYS = Keys("leader/v1")
TTL_SECONDS = 4.0


@pytest.fixture
def members(tmp_path: Path) -> Iterator[list[EtcdServer]]:
    servers = [EtcdServer(tmp_path / f"member-{number}") for number in range(3)]
    for server in servers:
        server.members = [one.member for one in servers]
        server.start()
    wait_for(lambda: leader_of(servers) is not None)
    yield servers
    for server in servers:
        server.kill()


def leader_of(servers: list[EtcdServer]) -> EtcdServer | None:
    control = str(Path(etcd_binary()).parent / "etcdctl")
    for server in servers:
        command = [control, "--endpoints", server.url, "--command-timeout=1s", "endpoint", "status", "-w", "json"]
        done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "ETCDCTL_API": "3"})
        if done.returncode == 0:
            status = json.loads(done.stdout)[0]["Status"]
            if status["header"]["member_id"] == status.get("leader"):
                return server
    return None


class Node:
    """Publishes, and sees what others have published."""

    def __init__(self, name: str, endpoints: list[str]) -> None:
        self.name = name
        self.brokers = [EtcdBroker(EtcdOptions(endpoints, 1.0)) for _ in range(2)]
        self.book, self.view = SpanBook(), DirectoryView(KEYS, name)
        self.follower = Follower(self.brokers[0], KEYS, self.view)
        self.member = Member(
            self.brokers[1],
            KEYS,
            NodeRecord(name, time.time_ns(), "-:1"),
            self.book,
            self.view,
            ttl_seconds=TTL_SECONDS,
            publish_seconds=0.1,
        )
        self.follower.start()
        self.member.start()

    def close(self) -> None:
        self.member.leave()
        self.follower.stop()
        for broker in self.brokers:
            broker.close()


@pytest.mark.parametrize("fate", ["stopped", "killed"])
def test_two_of_three_members_are_enough(members: list[EtcdServer], fate: str) -> None:
    leader = leader_of(members)
    assert leader is not None
    endpoints = [leader.endpoint, *(server.endpoint for server in members if server is not leader)]  # both nodes begin at the leader
    a, b = Node("a", endpoints), Node("b", endpoints)
    wait_for(lambda: [one.node for one in b.view.nodes()] == ["a", "b"] and a.follower.usable)
    leader.pause() if fate == "stopped" else leader.kill()
    begin = time.monotonic()
    a.book.add(bytes(16), 0, 0, np.array([1], dtype=np.uint64))
    wait_for(lambda: b.view.stats().blocks == 1)
    seconds = time.monotonic() - begin
    assert seconds < 3 * TTL_SECONDS, f"{seconds:.1f} s"  # an election, and a lease that etcd lengthens by it
    assert [one.node for one in b.view.nodes()] == ["a", "b"] and b.follower.usable
    if fate == "stopped":
        leader.resume()
    else:
        leader.start()
    a.close()
    wait_for(lambda: [one.node for one in b.view.nodes()] == ["b"])
    b.close()
