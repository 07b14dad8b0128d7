"""An owner in another process, over Mooncake's Transfer Engine by TCP: what arrives is right, whatever becomes of the owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.pattern import PatternTensors, chain, geometry
from tutti_mooncake import Status
from tutti_mooncake.keys import as_key_array
from tutti_mooncake.remote.fetcher import Fetcher, FetchResult
from tutti_mooncake.remote.transport import RDMA_DEVICES, MooncakeTransport, TransportError
from tutti_mooncake.remote.wire import Peer

pytest.importorskip("mooncake.engine", reason="Mooncake's Transfer Engine can't be loaded", exc_type=ImportError)

BLOCKS = 400
SHAPE = geometry(head_dim=1024)
KEYS = chain("remote", BLOCKS)


class OwnerProcess:
    """Of owner_process.py."""

    def __init__(self, root: Path, epoch: int, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.remote.owner_process", str(root), str(epoch), str(port), str(BLOCKS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.epoch = epoch
        assert self._process.stdout is not None
        while True:  # the Transfer Engine may say something first
            line = self._process.stdout.readline()
            assert line, "the owner didn't start"
            if line.startswith("127.0.0.1:"):
                self.address = line.strip()
                return

    @property
    def peer(self) -> Peer:
        return Peer("owner", self.epoch, self.address)

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


class Engine:
    """That fetches."""

    def __init__(self) -> None:
        self.tensors = PatternTensors(SHAPE, BLOCKS)
        self.tensors.wipe()
        self.fetcher = Fetcher("engine", SHAPE, MooncakeTransport("127.0.0.1"), self.tensors.tensors, window_blocks=8)

    def fetch(self, peer: Peer, seconds: float = 30.0) -> FetchResult:
        return self.fetcher.fetch(peer, as_key_array(KEYS), np.arange(BLOCKS, dtype=np.uint32), seconds=seconds)

    def arrived(self) -> int:
        there = [self.tensors.holds(key, position) for position, key in enumerate(KEYS)]
        count = there.index(False) if False in there else BLOCKS
        assert not any(there[count:]) and bool((self.tensors._view[:, count:] == 0xEE).all())
        return count


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.fetcher.close()


@pytest.fixture
def owner(tmp_path: Path, engine: Engine) -> Iterator[OwnerProcess]:
    engine.tensors.wipe()
    made = OwnerProcess(tmp_path / "nvme0", 1)
    yield made
    made.kill()


def after(seconds: float, owner: OwnerProcess, number: int) -> threading.Timer:
    timer = threading.Timer(seconds, lambda: owner.signal(number))
    timer.start()
    return timer


def test_blocks_of_another_process(engine: Engine, owner: OwnerProcess) -> None:
    result = engine.fetch(owner.peer)
    assert (result.blocks, result.status) == (BLOCKS, Status.OK) and engine.arrived() == BLOCKS
    assert engine.fetcher.quarantined_windows == 0


def test_an_owner_that_is_killed(engine: Engine, owner: OwnerProcess) -> None:
    whole = engine.fetch(owner.peer).seconds
    engine.tensors.wipe()
    timer = after(whole / 3, owner, signal.SIGKILL)
    result = engine.fetch(owner.peer)
    timer.join()
    assert engine.arrived() == result.blocks
    assert result.status is Status.RETRY or result.blocks == BLOCKS
    again = engine.fetch(owner.peer, 5.0)
    assert again.blocks == 0 and again.status is Status.RETRY and again.seconds < 5


def test_an_owner_that_stops_answering(engine: Engine, owner: OwnerProcess) -> None:
    owner.signal(signal.SIGSTOP)
    begin = time.monotonic()
    result = engine.fetch(owner.peer, 1.0)
    assert (result.blocks, result.status) == (0, Status.TIMEOUT) and time.monotonic() - begin < 3
    owner.signal(signal.SIGCONT)
    assert engine.arrived() == 0 and engine.fetch(owner.peer).blocks == BLOCKS


def test_a_port_that_another_life_of_the_owner_has(engine: Engine, owner: OwnerProcess, tmp_path: Path) -> None:
    port = int(owner.address.rpartition(":")[2])
    owner.kill()
    again = OwnerProcess(tmp_path / "nvme0", 2, port)
    try:
        result = engine.fetch(owner.peer)
        assert result.blocks == 0 and "'owner' of epoch 2 answers, not epoch 1" in result.why and engine.arrived() == 0
        assert engine.fetch(again.peer).blocks == BLOCKS and engine.arrived() == BLOCKS
    finally:
        again.kill()


def test_protocols_that_the_engine_would_silently_replace_are_refused() -> None:
    with pytest.raises(TransportError, match="protocol 'nonsense'.*tcp or rdma"):
        MooncakeTransport("127.0.0.1", "nonsense")
    if not RDMA_DEVICES.is_dir():
        with pytest.raises(TransportError, match="can't use RDMA"):
            MooncakeTransport("127.0.0.1", "rdma")
