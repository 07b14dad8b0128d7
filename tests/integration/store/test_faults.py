"""Failing I/O: each kind ends in its own status, nothing wrong is served, what failed is forgotten, the rest goes on."""

from __future__ import annotations

import errno
import time

import pytest

from tests.conftest import Stores
from tests.pattern import chain
from tests.soak.mixing import mix
from tutti_mooncake import OperationFailed, Status, _native


@pytest.fixture
def faults() -> _native.FaultInjector:
    """The fault version of the device seam."""
    return _native.FaultInjector()


def test_failed_store_is_never_found(stores: Stores, faults: _native.FaultInjector) -> None:
    store, tensors = stores.open(faults=faults)
    faults.add(True, "error", every=10, error=errno.EIO)
    good, bad = [], []
    for prompt in range(60):
        keys = chain(prompt, 1)
        tensors.write(keys)
        status = Status(store.store(keys, [0]).wait(20).statuses[0])
        (good if status == Status.OK else bad).append(keys[0])
    injected = faults.injected
    faults.clear()
    assert len(bad) == injected > 0 and store.stats()["store_device_error_blocks"] == injected
    assert all(store.lookup([key]) == 1 for key in good) and all(store.lookup([key]) == 0 for key in bad)
    tensors.wipe(10, 1)
    assert Status(store.retrieve([bad[0]], [10]).wait(20).statuses[0]) == Status.NOT_FOUND
    assert store.stats()["resident_blocks"] == len(good) and store.stats()["writing_blocks"] == 0
    assert store.stats()["free_blocks"] == store.stats()["slots"] - len(good)


@pytest.mark.parametrize(
    ("kind", "error", "status"),
    [
        ("short", 0, Status.SHORT_IO),
        ("error", errno.EIO, Status.DEVICE_ERROR),
        ("error", errno.ENOSPC, Status.NO_SPACE),
        ("error", errno.EAGAIN, Status.RETRY),
        ("error", errno.ECANCELED, Status.CANCELLED),
    ],
)
@pytest.mark.parametrize("position", [0, 4, 9])
def test_failed_block_of_a_store_takes_its_tail(
    stores: Stores, faults: _native.FaultInjector, kind: str, error: int, status: Status, position: int
) -> None:
    store, tensors = stores.open(faults=faults, lanes=1, executor="posix")  # one lane: operations go in order
    keys = chain(kind, 10)
    tensors.write(keys)
    faults.add(True, kind, every=position * 4 + 2, error=error, limit=1)
    result = store.store(keys, range(10)).wait(20)
    faults.clear()
    assert Status(result.statuses[position]) == status and store.lookup(keys) == position
    with pytest.raises(OperationFailed, match=status.name):
        result.raise_for_status()
    assert store.store(keys, range(10)).wait(20).failed == [] and store.lookup(keys) == 10
    tensors.wipe(20)
    store.retrieve(keys, range(20, 30)).wait(20).raise_for_status()
    assert all(tensors.holds(key, 20 + i) for i, key in enumerate(keys))


@pytest.mark.parametrize(
    ("kind", "status"), [("error", Status.DEVICE_ERROR), ("short", Status.SHORT_IO), ("corrupt", Status.CHECKSUM_ERROR)]
)
def test_failed_load_is_reported_and_dropped_with_its_tail(
    stores: Stores, faults: _native.FaultInjector, kind: str, status: Status
) -> None:
    store, tensors = stores.open(faults=faults)
    keys = chain("load", 12)
    tensors.write(keys)
    store.store(keys, range(12)).wait(20).raise_for_status()
    faults.add(False, kind, every=17, limit=1)
    tensors.wipe(20)
    result = store.retrieve(keys, range(20, 32)).wait(20)
    assert len(result.failed) == 1 and Status(result.statuses[result.failed[0]]) == status
    for position, key in enumerate(keys):  # the others are whole
        assert position == result.failed[0] or tensors.holds(key, 20 + position)
    assert store.lookup(keys) == result.failed[0]
    assert store.stats()["dropped_blocks"] == 12 - result.failed[0]
    assert store.stats()["pinned_blocks"] == 0
    assert store.store(keys, range(12)).wait(20).failed == [] and store.lookup(keys) == 12  # it can be stored again


def test_damaged_write_is_noticed_at_load(stores: Stores, faults: _native.FaultInjector) -> None:
    store, tensors = stores.open(faults=faults)
    keys = chain("damaged", 6)
    tensors.write(keys)
    faults.add(True, "corrupt", every=9, limit=1)
    store.store(keys, range(6)).wait(20).raise_for_status()
    result = store.retrieve(keys, range(20, 26)).wait(20)
    assert [Status(result.statuses[i]) for i in result.failed] == [Status.CHECKSUM_ERROR]
    assert store.stats()["checksum_errors"] == 1


def test_io_that_never_returns_ends_by_its_deadline(stores: Stores, faults: _native.FaultInjector) -> None:
    store, tensors = stores.open(faults=faults, lanes=2)
    keys, other = chain("stuck", 4), chain("served", 4)
    tensors.write([*keys, *other])
    store.store(keys, range(4)).wait(20).raise_for_status()
    store.store(other, range(4, 8)).wait(20).raise_for_status()
    faults.add(False, "hang", limit=1)
    begin = time.monotonic()
    stuck = store.retrieve(keys, range(20, 24), deadline_seconds=0.2)
    result = stuck.wait()
    assert time.monotonic() - begin < 5 and Status.TIMEOUT in result.statuses and not stuck.drained()
    faults.clear()
    assert store.retrieve(other, range(30, 34)).wait(20).ok_blocks == 4  # others are served meanwhile
    assert store.stats()["pinned_blocks"] == 1 and store.evict(100) == 4  # what may still be read stays
    faults.release()
    while not stuck.drained():
        store.retrieve(keys, range(40, 44)).wait(20)
    assert store.lookup(keys) == 4  # a deadline proves nothing about the bytes


def test_write_that_never_returns_keeps_its_slot(stores: Stores, faults: _native.FaultInjector) -> None:
    store, tensors = stores.open(faults=faults, lanes=2)
    keys = chain("stuck write", 3)
    tensors.write(keys)
    faults.add(True, "hang", limit=1)
    stuck = store.store(keys, range(3), deadline_seconds=0.2)
    result = stuck.wait(20)
    assert set(result.statuses) == {Status.TIMEOUT} and store.lookup(keys) == 0
    free = store.stats()["free_blocks"]
    assert free <= store.stats()["slots"] - 1  # a late write must not land in a slot that was given out again
    faults.clear()
    faults.release()
    tail = chain("after", 2)
    tensors.write(tail, 10)
    deadline = time.monotonic() + 20
    while store.stats()["free_blocks"] != store.stats()["slots"] - store.stats()["resident_blocks"] and time.monotonic() < deadline:
        store.store(tail, [10, 11]).wait(20)
    assert store.stats()["writing_blocks"] == 0
    assert store.store(keys, range(3)).wait(20).ok_blocks == 3


def test_cancelled_operations_say_so(stores: Stores, faults: _native.FaultInjector) -> None:
    store, tensors = stores.open(faults=faults)
    keys = chain("cancelled", 8)
    tensors.write(keys)
    store.store(keys, range(8)).wait(20).raise_for_status()
    faults.add(False, "hang", limit=1)
    operation = store.retrieve(keys, range(20, 28))
    with pytest.raises(TimeoutError, match="still runs"):
        operation.wait(0.05)
    operation.cancel()
    assert set(operation.wait(20).statuses) == {Status.CANCELLED}
    faults.release()


def test_one_failing_device_costs_misses_only(stores: Stores, faults: _native.FaultInjector) -> None:
    store, tensors = stores.open(faults=faults)
    keys = chain("striped", 8)
    tensors.write(keys)
    store.store(keys, range(8)).wait(20).raise_for_status()
    faults.add(False, "error", device=1)
    result = store.retrieve(keys, range(20, 28)).wait(20)
    assert set(result.statuses) == {Status.DEVICE_ERROR} and store.lookup(keys) == 0
    faults.clear()
    assert store.store(keys, range(8)).wait(20).ok_blocks == 8


def test_store_that_always_fails_never_blocks(stores: Stores, faults: _native.FaultInjector) -> None:
    store, tensors = stores.open(faults=faults)
    faults.add(True, "error")
    faults.add(False, "error")
    for prompt in range(50):
        keys = chain(prompt, 4)
        tensors.write(keys)
        assert store.store(keys, range(4)).wait(20).ok_blocks == 0
    assert store.stats()["free_blocks"] == store.stats()["slots"]
    faults.clear()
    assert store.store(keys, range(4)).wait(20).ok_blocks == 4


def test_staging_does_not_run_out(stores: Stores) -> None:
    """Loads through staging memory go on however many run at once: each operation in flight has its own."""
    store, tensors = stores.open(blocks=200, align_offset=64, queue_depth=2, lanes=1)
    keys = chain("staged", 40)
    tensors.write(keys)
    store.store(keys, range(40)).wait(20).raise_for_status()
    operations = [store.retrieve(keys, range(40 * turn, 40 * turn + 40)) for turn in range(1, 5)]
    for turn, operation in enumerate(operations, 1):
        assert operation.wait(20).ok_blocks == 40
        assert all(tensors.holds(key, 40 * turn + i) for i, key in enumerate(keys))


def test_readers_and_writers_never_see_foreign_bytes(stores: Stores) -> None:
    """16 threads over 64 sessions in a pool that holds a tenth of them; `scripts/soak sessions` is the long form."""
    assert mix(stores.root, stores.executor, 2000, 1) == []


def test_failed_flush_is_not_called_durable(stores: Stores) -> None:
    store, tensors = stores.open(durability="flush")
    keys = chain("flushed", 4)
    tensors.write(keys)
    store._pool.flush_data = lambda: Status.DEVICE_ERROR  # type: ignore[method-assign]
    result = store.store(keys, range(4)).wait(20)
    assert set(result.statuses) == {Status.DEVICE_ERROR} and store.lookup(keys) == 0
    del store._pool.flush_data  # type: ignore[attr-defined]
    assert store.store(keys, range(4)).wait(20).ok_blocks == 4
