"""Blocks go from one store to another engine's tensors, or don't; wrong ones never do. Both ends are in this process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgpack
import numpy as np
import pytest

from tests.conftest import Stores
from tests.pattern import PatternTensors, chain, geometry
from tutti_mooncake import LocalStore, Status, StoreConfig, _native
from tutti_mooncake.keys import as_key_array
from tutti_mooncake.remote.fetcher import Cancel, Fetcher, FetchResult
from tutti_mooncake.remote.owner import Owner
from tutti_mooncake.remote.transport import MemoryTransport, Piece, TransportError
from tutti_mooncake.remote.wire import Peer

WINDOW_BLOCKS = 8


class FaultyTransport(MemoryTransport):
    """Calls `fault(pieces)` after each write."""

    def __init__(self, segment: str, ends: dict[str, MemoryTransport]) -> None:
        super().__init__(segment, ends)
        self.fault: Callable[[Sequence[Piece]], None] = lambda pieces: None

    def write(self, segment: str, pieces: Sequence[Piece]) -> None:
        super().write(segment, pieces)
        self.fault(pieces)


class Cluster:
    """An owner with a store, and an engine elsewhere."""

    def __init__(self, root: Path, *, owner_windows: int = 4, windows: int = 4, salt: str = "") -> None:
        ends: dict[str, MemoryTransport] = {}
        self.transport = FaultyTransport("owner", ends)
        self.store = LocalStore.open(
            StoreConfig(devices=[str(root / "nvme0")], capacity="16MiB", executor="posix", tenant_salt=salt), geometry()
        )
        self.source = PatternTensors(geometry(), 200)
        self.store.register(self.source.tensors)
        self.peer = Peer("owner", 7)
        self.owner = Owner(
            self.store, lambda: self.peer, self.transport, host="127.0.0.1", windows=owner_windows, window_blocks=WINDOW_BLOCKS
        )
        self.peer = Peer("owner", 7, self.owner.address)
        self.target = PatternTensors(geometry(), 400)
        self.fetcher = Fetcher(
            "engine", geometry(), MemoryTransport("engine", ends), self.target.tensors, windows=windows, window_blocks=WINDOW_BLOCKS
        )

    def fill(self, keys: list[bytes]) -> None:
        self.source.write(keys)
        self.store.store(keys, range(len(keys))).wait(20).raise_for_status()

    def fetch(self, keys: list[bytes], first: int = 0, *, seconds: float = 20.0, peer: Peer | None = None) -> FetchResult:
        blocks = np.arange(first, first + len(keys), dtype=np.uint32)
        return self.fetcher.fetch(peer or self.peer, as_key_array(keys), blocks, seconds=seconds)

    def arrived(self, keys: list[bytes], first: int = 0) -> int:
        """Leading blocks that are there; all others must be as they were."""
        there = [self.target.holds(key, first + position) for position, key in enumerate(keys)]
        count = there.index(False) if False in there else len(there)
        assert not any(there[count:])
        assert bool((self.target._view[:, first + count : first + len(keys)] == 0xEE).all())
        return count

    def close(self) -> None:
        self.owner.close()
        self.fetcher.close()
        self.store.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    made.target.wipe()
    yield made
    made.close()


@pytest.mark.parametrize("blocks", [1, 7, 8, 9, 100])
def test_blocks_arrive_where_they_belong(cluster: Cluster, blocks: int) -> None:
    keys = chain("a", blocks)
    cluster.fill(keys)
    result = cluster.fetch(keys, 50)
    assert (result.blocks, result.status, result.why) == (blocks, Status.OK, "")
    assert cluster.arrived(keys, 50) == blocks
    assert result.bytes == blocks * geometry().payload_bytes_per_block and 0 < result.first_window_seconds <= result.seconds


def test_blocks_go_to_any_places(cluster: Cluster) -> None:
    keys = chain("a", 30)
    cluster.fill(keys)
    places = np.random.default_rng(1).permutation(400)[:30].astype(np.uint32)
    assert cluster.fetcher.fetch(cluster.peer, as_key_array(keys), places, seconds=20).blocks == 30
    assert all(cluster.target.holds(key, int(place)) for key, place in zip(keys, places, strict=True))


def test_what_the_owner_has_of_a_prefix_is_used(cluster: Cluster) -> None:
    cluster.fill(chain("a", 21))
    keys = chain("b", 60, chain("a", 21))
    result = cluster.fetch(keys)
    assert (result.blocks, result.status) == (21, Status.NOT_FOUND) and "21 of 60" in result.why
    assert cluster.arrived(keys) == 21
    assert cluster.fetch(chain("c", 5)).status is Status.NOT_FOUND


def test_no_pin_and_no_window_is_left(cluster: Cluster) -> None:
    cluster.fill(chain("a", 40))
    for blocks in (40, 60):
        cluster.fetch(chain("b", blocks, chain("a", 40)), seconds=5)
    assert cluster.store.evict(40) == 40 and cluster.fetcher.quarantined_windows == 0
    for windows in (cluster.owner._windows, cluster.fetcher._windows):
        assert sorted(windows._free) == list(range(4))


def test_many_fetches_share_few_windows(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, owner_windows=2, windows=3)
    cluster.target.wipe()
    prompts = [chain(name, 50) for name in range(3)]
    for keys in prompts:
        cluster.fill(keys)
    results: dict[int, FetchResult] = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: cluster.fetch(prompts[i % 3], 50 * i)}))  # type: ignore[misc]
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [results[i].blocks for i in range(6)] == [50] * 6
    assert [cluster.arrived(prompts[i % 3], 50 * i) for i in range(6)] == [50] * 6
    cluster.close()


@pytest.mark.parametrize("window", [0, 2])
def test_bits_that_flip_on_the_way_are_noticed(cluster: Cluster, window: int) -> None:
    keys = chain("a", 40)
    cluster.fill(keys)
    seen = []

    def flip(pieces: Sequence[Piece]) -> None:
        seen.append(pieces)
        if len(seen) == window + 1:
            piece = pieces[2]
            place = piece.target - cluster.fetcher._windows.base + 3 * geometry().object_bytes + 17  # of the window's fourth block
            cluster.fetcher._windows._view.reshape(-1)[place] ^= 4

    cluster.transport.fault = flip
    result = cluster.fetch(keys)
    assert (result.blocks, result.status) == (8 * window + 3, Status.CHECKSUM_ERROR) and "failed its check" in result.why
    assert cluster.arrived(keys) == 8 * window + 3
    assert cluster.fetcher.quarantined_windows == 3


def test_a_block_that_the_owner_can_not_read_ends_the_prefix(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.target.wipe()
    keys = chain("a", 40)
    cluster.fill(keys)
    slot = {entry.key: entry.slot for entry in cluster.store.entries()}[keys[20]]
    pool = cluster.store._pool
    device, offset = pool.layout.address(slot, 0, 0)
    descriptor = pool.devices[device].buffered_fd
    os.pwrite(descriptor, bytes([os.pread(descriptor, 1, offset)[0] ^ 1]), offset)
    result = cluster.fetch(keys)
    assert (result.blocks, result.status) == (20, Status.CHECKSUM_ERROR) and cluster.arrived(keys) == 20
    assert cluster.store.lookup(keys) == 20
    cluster.close()


def test_a_transport_that_fails(cluster: Cluster) -> None:
    keys = chain("a", 40)
    cluster.fill(keys)
    writes = []

    def fail(pieces: Sequence[Piece]) -> None:
        writes.append(pieces)
        if len(writes) == 3:
            raise TransportError("the test cut the cable")

    cluster.transport.fault = fail
    result = cluster.fetch(keys)
    assert (result.blocks, result.status) == (16, Status.RETRY) and "cable" in result.why
    assert cluster.arrived(keys) == 16 and cluster.fetch(keys).blocks == 40


def test_an_owner_that_is_too_slow(cluster: Cluster) -> None:
    keys = chain("a", 40)
    cluster.fill(keys)
    goes_on = threading.Event()
    writes = []

    def hang(pieces: Sequence[Piece]) -> None:
        writes.append(pieces)
        if len(writes) == 2:
            goes_on.wait(20)

    cluster.transport.fault = hang
    begin = time.monotonic()
    result = cluster.fetch(keys, seconds=1.0)
    assert time.monotonic() - begin < 3 and (result.blocks, result.status) == (8, Status.TIMEOUT)
    assert cluster.arrived(keys) == 8 and cluster.fetcher.quarantined_windows == 3
    busy = cluster.fetch(keys, 100, seconds=0.5)  # one window is left, and goes through it
    assert busy.blocks in (0, 40)
    goes_on.set()


def test_a_fetch_that_is_cancelled_leaves_nothing_behind(cluster: Cluster) -> None:
    """However often: its windows are free at once at both ends, and nothing is written into its blocks any more."""
    keys = chain("a", 100)
    cluster.fill(keys)
    for after in range(12):
        cluster.target.wipe()
        cancel, writes = Cancel(), []

        def fault(pieces: Sequence[Piece], cancel: Cancel = cancel, writes: list[int] = writes, after: int = after) -> None:
            writes.append(len(pieces))
            if len(writes) == after % 6 + 1:
                cancel.ask()

        cluster.transport.fault = fault
        blocks = np.arange(100, dtype=np.uint32)
        result = cluster.fetcher.fetch(cluster.peer, as_key_array(keys), blocks, seconds=20, cancel=cancel)
        assert result.status is Status.CANCELLED and result.seconds < 5 and cluster.arrived(keys) == result.blocks < 100
        assert cluster.fetcher.quarantined_windows == 0 and len(writes) < 13
    cluster.transport.fault = lambda pieces: None
    assert cluster.fetch(keys, 200).status is Status.OK and cluster.owner.counters["failed"] == 0


def test_an_owner_that_goes_away(cluster: Cluster) -> None:
    keys = chain("a", 100)
    cluster.fill(keys)
    writes = []

    def close(pieces: Sequence[Piece]) -> None:
        writes.append(pieces)
        if len(writes) == 3:
            threading.Thread(target=cluster.owner.close).start()
            time.sleep(0.1)

    cluster.transport.fault = close
    result = cluster.fetch(keys)
    assert result.status is Status.RETRY and 16 <= result.blocks < 100 and cluster.arrived(keys) == result.blocks
    gone = cluster.fetch(keys, 200)
    assert (gone.blocks, gone.status) == (0, Status.RETRY) and cluster.peer.address in gone.why


def test_another_life_of_the_owner_is_not_the_one_that_was_meant(cluster: Cluster) -> None:
    keys = chain("a", 10)
    cluster.fill(keys)
    for wrong in (Peer("owner", 8, cluster.peer.address), Peer("other", 7, cluster.peer.address)):
        result = cluster.fetch(keys, peer=wrong)
        assert (result.blocks, result.status) == (0, Status.RETRY) and "'owner' of epoch 7 answers" in result.why
    assert cluster.arrived(keys) == 0 and cluster.owner.counters["requests"] == 0


def test_blocks_of_another_model_are_refused(cluster: Cluster) -> None:
    other = geometry(model="another")
    fetcher = Fetcher("engine", other, MemoryTransport("other", {}), PatternTensors(other, 10).tensors, window_blocks=WINDOW_BLOCKS)
    result = fetcher.fetch(cluster.peer, as_key_array(chain("a", 2)), np.arange(2, dtype=np.uint32), seconds=5)
    assert result.blocks == 0 and "another model" in result.why


def test_a_tenant_without_the_salt_finds_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, salt="secret")
    cluster.target.wipe()
    keys = chain("a", 10)
    cluster.fill(keys)
    assert cluster.fetch(keys).status is Status.NOT_FOUND and cluster.arrived(keys) == 0
    salted = cluster.store.salted(keys)
    assert cluster.fetcher.fetch(cluster.peer, salted, np.arange(10, dtype=np.uint32), seconds=5).blocks == 10
    cluster.close()


HELLO = msgpack.packb({"v": 1, "node": "owner", "epoch": 7, "namespace": geometry().namespace_id})


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\xff\xff\xff\xff",
        framed(b"\xc1"),
        framed(msgpack.packb([1])),
        framed(msgpack.packb({"v": 2})),
        framed(msgpack.packb({"v": 1, "node": "owner"})),
        framed(HELLO),
        framed(HELLO) + framed(msgpack.packb({"window": 1, "blocks": 1, "sums": bytes(32)})),
        framed(HELLO) + framed(msgpack.packb({"window": 0, "blocks": 9, "sums": bytes(9 * 32)})),
        framed(HELLO) + framed(msgpack.packb({"window": 0, "blocks": 8, "sums": bytes(31)})),
        framed(HELLO) + framed(msgpack.packb({"window": 0, "blocks": 8, "sums": bytes(8 * 32)})),
        framed(HELLO) + framed(msgpack.packb({"end": True, "blocks": 10, "status": 0, "why": ""})),
        framed(HELLO) + framed(msgpack.packb({"end": True, "blocks": 10, "status": "0", "why": ""})),
    ],
)
def test_whatever_answers_on_a_port_nothing_of_it_is_used(cluster: Cluster, says: bytes) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        sock, _ = listener.accept()
        sock.sendall(says)
        sock.settimeout(5)
        try:
            while sock.recv(65536):
                pass
        except OSError:
            pass
        sock.close()

    thread = threading.Thread(target=answer)
    thread.start()
    keys = chain("a", 10)
    result = cluster.fetch(keys, seconds=1.0, peer=Peer("owner", 7, f"127.0.0.1:{listener.getsockname()[1]}"))
    thread.join(10)
    listener.close()
    assert result.blocks == 0 and result.status is not Status.OK and cluster.arrived(keys) == 0


@pytest.mark.parametrize(
    "asks",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        framed(b"\xc1"),
        framed(msgpack.packb({"v": 2})),
        framed(msgpack.packb({"v": 1})) + framed(msgpack.packb({})),
        framed(msgpack.packb({"v": 1})) + framed(msgpack.packb({"keys": b"1" * 31, "windows": [0]})),
        framed(msgpack.packb({"v": 1})) + framed(msgpack.packb({"keys": b"1" * 32, "windows": []})),
        framed(msgpack.packb({"v": 1}))
        + framed(msgpack.packb({"keys": b"1" * 32, "windows": [0], "window_blocks": 8, "seconds": 1.0, "segment": "engine", "base": -1})),
    ],
)
def test_whatever_an_owner_is_asked_it_goes_on(cluster: Cluster, asks: bytes) -> None:
    host, port = cluster.peer.address.split(":")
    with socket.create_connection((host, int(port)), 5) as sock:
        sock.sendall(asks)
        sock.settimeout(10)
        while sock.recv(65536):
            pass
    keys = chain("a", 10)
    cluster.fill(keys)
    assert cluster.fetch(keys).blocks == 10


def test_a_reader_is_closed_with_its_store(tmp_path: Path) -> None:
    stores = Stores(tmp_path, "posix")
    store, tensors = stores.open()
    keys = chain("a", 10)
    tensors.write(keys)
    store.store(keys, range(10)).wait(20).raise_for_status()
    others = PatternTensors(geometry(), 10)
    reader = store.reader(others.tensors)
    operation = reader.retrieve(keys, range(10))
    assert operation.wait(20).ok_blocks == 10 and all(others.holds(key, i) for i, key in enumerate(keys))
    plan = operation.plan
    assert plan is not None and plan.sums().shape == (40,)  # type: ignore[attr-defined]
    rows = others._view[2].numpy()
    assert _native.multilinear64_rows(rows).tolist() == plan.sums()[2::4].tolist()  # type: ignore[attr-defined]
    stores.close_all()
    with pytest.raises(Exception, match="closed"):
        reader.retrieve(keys, range(10))


@pytest.mark.parametrize("seed", range(3))
def test_whoever_writes_into_windows_late_changes_no_block(cluster: Cluster, seed: int) -> None:
    keys = chain("a", 100)
    cluster.fill(keys)
    done = threading.Event()
    chance = np.random.default_rng(seed)
    windows = cluster.fetcher._windows._view.reshape(-1)

    def write() -> None:
        while not done.is_set():
            windows[int(chance.integers(len(windows)))] ^= 1

    late = threading.Thread(target=write)
    late.start()
    results = [cluster.fetch(keys, first) for first in (0, 100, 200)]
    done.set()
    late.join(10)
    assert [cluster.arrived(keys, first) for first in (0, 100, 200)] == [result.blocks for result in results]


def test_a_failed_transfer_leaves_windows_in_quarantine_at_both_ends(cluster: Cluster) -> None:
    keys = chain("a", 10)
    cluster.fill(keys)

    def fail(pieces: Sequence[Piece]) -> None:
        raise TransportError("the test cut the cable")

    cluster.transport.fault = fail
    assert cluster.fetch(keys).blocks == 0
    assert cluster.fetcher.quarantined_windows == 3 and cluster.owner._windows.quarantined == 1
