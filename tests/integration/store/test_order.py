"""Stores that run at the same time: who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.conftest import Stores
from tests.pattern import PatternTensors, chain
from tutti_mooncake import LocalStore, Status, _native

Hung = tuple[LocalStore, PatternTensors, list[bytes], _native.FaultInjector]


@pytest.fixture
def hung(stores: Stores) -> Iterator[Hung]:
    """A store whose first write never ends by itself, and the keys of that write."""
    faults = _native.FaultInjector()
    store, tensors = stores.open(faults=faults, lanes=4)
    keys = chain("hung", 8)
    tensors.write(keys)
    faults.add(True, "hang", limit=1)
    yield store, tensors, keys, faults
    faults.release()


def until_hung(faults: _native.FaultInjector) -> None:
    """Waits until the write has begun that hangs: else a younger store's may be the one."""
    while faults.injected == 0:
        time.sleep(0.001)


def test_a_store_does_not_wait_for_an_older_one_that_it_does_not_hang_on(hung: Hung) -> None:
    store, tensors, keys, faults = hung
    older = store.store(keys, range(8), deadline_seconds=60)
    until_hung(faults)
    others = chain("other", 8)
    tensors.write(others, first=8)
    assert store.store(others, range(8, 16)).wait(20).statuses.tolist() == [Status.OK] * 8
    assert store.lookup(others) == 8 and not older.done()
    faults.release()
    older.wait(20)


def test_a_store_below_one_that_hangs_ends_at_its_own_deadline(hung: Hung) -> None:
    store, tensors, keys, faults = hung
    older = store.store(keys[:4], range(4), deadline_seconds=60)
    until_hung(faults)
    begin = time.monotonic()
    younger = store.store(keys[4:], range(4, 8), parent=keys[3], deadline_seconds=0.5)
    assert younger.wait(20).statuses.tolist() == [Status.TIMEOUT] * 4
    assert time.monotonic() - begin >= 0.5 and not older.done()
    faults.release()
    assert older.wait(20).ok_blocks != 4, "the write that hung ends as cancelled"
    faults.clear()
    assert store.store(keys, range(8)).wait(20).ok_blocks == 8
    assert store.lookup(keys) == 8
    tensors.wipe()
    assert store.retrieve(keys, range(8)).wait(20).ok_blocks == 8
    assert all(tensors.holds(key, block) for block, key in enumerate(keys))


def test_children_are_stored_when_their_parents_are(stores: Stores) -> None:
    store, tensors = stores.open(blocks=64)
    keys = chain("long", 64)
    tensors.write(keys)
    running = [store.store(keys[:1], [0])]
    running += [store.store(keys[at : at + 3], range(at, at + 3), parent=keys[at - 1]) for at in range(1, 64, 3)]
    for operation in reversed(running):
        assert operation.wait(20).failed == []
    assert store.lookup(keys) == 64
