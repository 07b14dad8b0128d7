"""Nodes in processes of their own, a real etcd and Mooncake's Transfer Engine: found, fetched from, killed and restarted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.etcd_server import EtcdServer, etcd_binary
from tests.integration.agent.fetching import fetch
from tests.pattern import PatternTensors, chain, geometry
from tests.waiting import wait_for
from tutti_mooncake import LocalStore, Status, StoreConfig
from tutti_mooncake.config import ClusterConfig
from tutti_mooncake.keys import as_key_array

pytest.importorskip("etcd3", reason="the module etcd3 is not installed (scripts/setup)")
pytest.importorskip("mooncake.engine", reason="Mooncake's Transfer Engine can't be loaded", exc_type=ImportError)
if not etcd_binary():
    pytest.skip("there is no etcd (scripts/setup)", allow_module_level=True)

from tutti_mooncake.agent.node import Node
from tutti_mooncake.remote.fetcher import Fetcher

PROMPT = chain("shared", 60)
RESTARTS = int(os.environ.get("TUTTI_TEST_RESTARTS", "4"))


class NodeProcess:
    """Of node_process.py."""

    def __init__(self, root: Path, name: str, etcd: str, blocks: int) -> None:
        command = [sys.executable, "-m", "tests.integration.agent.node_process", str(root), name, etcd, "shared", str(blocks)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        for line in self._process.stdout:  # the Transfer Engine may say something first
            if line.startswith("ready "):
                self.recovered = int(line.split()[1])
                return
        raise AssertionError(f"node {name} didn't start")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def stop(self) -> None:
        self._process.communicate("", timeout=30)


@dataclass
class Here:
    """The node, and what fetches into its tensors."""

    node: Node
    fetcher: Fetcher
    tensors: PatternTensors

    def ahead(self) -> int:
        plan = self.node.sources.plan(as_key_array(PROMPT))
        return 0 if plan is None else plan.blocks

    def fetch(self, first: int = 0) -> tuple[int, Status]:
        fetched = fetch(self.node.sources, self.fetcher, PROMPT, first)
        return fetched.blocks, fetched.status


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd").start()
    yield server
    server.kill()


@pytest.fixture
def here(tmp_path: Path, etcd: EtcdServer) -> Iterator[Here]:
    """A node of this process, whose pool is empty."""
    with LocalStore.open(StoreConfig(devices=(str(tmp_path / "here"),), capacity="16MiB", executor="posix"), geometry()) as store:
        tensors = PatternTensors(geometry(), 200)
        tensors.wipe()
        store.register(tensors.tensors)
        config = ClusterConfig(etcd=etcd.endpoint, etcd_timeout_seconds=1, node_name="here", node_ttl_seconds=2, publish_seconds=0.1)
        node = Node(store, config)
        fetcher = Fetcher("here", store.geometry, node.transport, tensors.tensors)
        yield Here(node, fetcher, tensors)
        fetcher.close()
        node.close()
        node.close()


def nodes(etcd: EtcdServer, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "tutti_mooncake.cli", "nodes", "--etcd", etcd.endpoint, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_prompt_of_another_node_survives_its_restart(tmp_path: Path, etcd: EtcdServer, here: Here) -> None:
    node, tensors = here.node, here.tensors
    other = NodeProcess(tmp_path / "there", "there", etcd.endpoint, 60)
    wait_for(lambda: here.ahead() == 60)
    assert here.fetch() == (60, Status.OK) and all(tensors.holds(key, i) for i, key in enumerate(PROMPT))
    status, said, _ = nodes(etcd, "--json")
    found = json.loads(said)
    assert status == 0 and [(one["node"], one["blocks"]) for one in found["nodes"]] == [("here", 0), ("there", 60)] and not found["ended"]
    first_epoch = found["nodes"][1]["epoch"]

    other.kill()
    tensors.wipe()
    blocks, status_ = here.fetch()
    assert blocks == 0 and status_ in (Status.RETRY, Status.NOT_FOUND)
    wait_for(lambda: here.ahead() == 0)
    assert "ended: node there" in nodes(etcd)[1]

    again = NodeProcess(tmp_path / "there", "there", etcd.endpoint, 0)
    assert again.recovered == 60
    wait_for(lambda: here.ahead() == 60)
    assert here.fetch(100) == (60, Status.OK) and all(tensors.holds(key, 100 + i) for i, key in enumerate(PROMPT))
    found = json.loads(nodes(etcd, "--json")[1])
    assert found["nodes"][1]["epoch"] > first_epoch and not found["ended"] and found["distinct_blocks"] == 60

    again.stop()
    wait_for(lambda: node.view.node("there") is None)
    assert json.loads(nodes(etcd, "--json")[1])["distinct_blocks"] == 0


def test_the_longer_of_two_is_asked(tmp_path: Path, etcd: EtcdServer, here: Here) -> None:
    node, tensors = here.node, here.tensors
    short = NodeProcess(tmp_path / "short", "short", etcd.endpoint, 20)
    long = NodeProcess(tmp_path / "long", "long", etcd.endpoint, 50)
    wait_for(lambda: len(node.view.nodes()) == 3 and here.ahead() == 50)
    assert here.fetch() == (50, Status.NOT_FOUND) and sum(tensors.holds(key, i) for i, key in enumerate(PROMPT)) == 50
    short.kill()
    long.kill()


def test_a_peer_that_restarts_again_and_again_under_load(tmp_path: Path, etcd: EtcdServer, here: Here) -> None:
    """Killed in the midst of fetches: what arrives is right, and each of its lives is found and fetched from."""
    stop, wrong, results = threading.Event(), [], []

    def load() -> None:
        while not stop.is_set():
            here.tensors.wipe()
            blocks, _ = here.fetch()
            there = [here.tensors.holds(key, i) for i, key in enumerate(PROMPT)]
            if not all(there[:blocks]) or any(there[blocks:]):
                wrong.append((blocks, there))
            results.append(blocks)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(RESTARTS):
            other = NodeProcess(tmp_path / "there", "there", etcd.endpoint, 60)
            seen = len(results)
            wait_for(lambda seen=seen: 60 in results[seen:])  # type: ignore[misc]
            other.kill()
    finally:
        stop.set()
        thread.join(60)
    assert not wrong and not thread.is_alive()


def test_doctor_looks_at_the_way_to_other_nodes(etcd: EtcdServer) -> None:
    def doctor(*settings: str) -> dict[str, tuple[str, str]]:
        command = [sys.executable, "-m", "tutti_mooncake.cli", "doctor", "--json"]
        command += [part for setting in settings for part in ("--set", setting)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
        return {one["check"]: (one["state"], one["found"]) for one in json.loads(said)["findings"] if one["subject"] == "cluster"}

    assert doctor() == {}
    found = doctor(f"etcd={etcd.endpoint},127.0.0.1:1", "etcd_timeout_seconds=1")
    assert found[f"etcd at {etcd.endpoint}"][0] == "ok" and found["etcd at 127.0.0.1:1"] == ("FAIL", "doesn't answer")
    assert found["address"] == ("warn", "127.0.0.1") and found["Transfer Engine"][1].startswith("tcp at 127.0.0.1:")
    assert doctor(f"etcd={etcd.endpoint}", "transfer_protocol=rdma")["Transfer Engine"] == ("FAIL", "rdma")


def test_a_cluster_whose_etcd_is_away_fetches_on(tmp_path: Path, etcd: EtcdServer, here: Here) -> None:
    other = NodeProcess(tmp_path / "there", "there", etcd.endpoint, 60)
    wait_for(lambda: here.ahead() == 60)
    etcd.kill()
    wait_for(lambda: here.node.follower.last_error != "")
    assert here.fetch() == (60, Status.OK)
    assert nodes(etcd, "--timeout", "0.5")[0] == 1 and f"etcd at {etcd.endpoint}" in nodes(etcd, "--timeout", "0.5", "--json")[1]
    other.kill()
