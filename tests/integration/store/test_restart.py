"""What is on disk survives a restart; what can't be trusted is dropped, counted, and never served."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.conftest import Stores
from tests.pattern import chain, geometry
from tutti_mooncake import LocalStore, Status


def fill(stores: Stores, blocks: int = 40) -> list[bytes]:
    """A closed pool with one chain."""
    store, tensors = stores.open()
    keys = chain("kept", blocks)
    tensors.write(keys)
    store.store(keys, range(blocks)).wait(20).raise_for_status()
    stores.close_all()
    return keys


def test_restart_finds_everything_and_writes_nothing(stores: Stores) -> None:
    store, tensors = stores.open(blocks=500)
    prompts = [chain(index, 50) for index in range(10)]
    for keys in prompts:
        tensors.write(keys)
        store.store(keys, range(50)).wait(20).raise_for_status()
    stores.close_all()
    store, tensors = stores.open(blocks=500)
    assert store.recovery.recovered_blocks == 500 and store.recovery.dropped_blocks == 0 and store.recovery.clean_shutdown
    for keys in prompts:
        assert store.lookup(keys) == 50
        tensors.write(keys)
        assert store.store(keys, range(50)).wait(20).ok_blocks == 0
        assert store.retrieve(keys, range(100, 150)).wait(20).ok_blocks == 50
        assert all(tensors.holds(key, 100 + position) for position, key in enumerate(keys))
    assert store.stats()["bytes_written"] == 0


def test_recency_survives_a_restart(stores: Stores) -> None:
    now = [1000.0]
    store, tensors = stores.open(clock=lambda: now[0])
    old, new = chain("old", 10), chain("new", 10)
    for keys in (old, new):
        tensors.write(keys)
        store.store(keys, range(10)).wait(20).raise_for_status()
    first_slot = {entry.key: entry.last_use for entry in store.entries()}
    assert set(first_slot) == {*old, *new}
    import time

    deadline = int(time.time()) + 1
    while int(time.time()) <= deadline:  # recency is kept in whole seconds
        store.lookup(old)
    stores.close_all()
    store, _ = stores.open()
    assert store.evict(5) == 5 and store.lookup(old) == 10 and store.lookup(new) == 5


def test_generations_go_on_after_a_restart(stores: Stores) -> None:
    keys = fill(stores)
    store, tensors = stores.open()
    before = {entry.slot: entry.generation for entry in store.entries()}
    store.clear()
    stores.close_all()
    store, tensors = stores.open()
    tensors.write(keys)
    store.store(keys, range(40)).wait(20).raise_for_status()
    after = {entry.slot: entry.generation for entry in store.entries()}
    assert all(after[slot] > before[slot] for slot in before if slot in after)


def flip_random_bit(path: Path, first: int, last: int, chance: random.Random) -> int:
    """Flips one bit in [first, last); returns its byte offset."""
    offset = chance.randrange(first, last)
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << chance.randrange(8))]))
    return offset


@pytest.mark.parametrize("region", ["records", "sums", "data"])
def test_flipped_bit_is_a_miss_and_never_wrong_bytes(stores: Stores, region: str) -> None:
    keys = fill(stores)
    shape = geometry()
    superblock = _superblock(stores)
    bounds = {
        "records": (superblock["records_offset"], superblock["records_offset"] + 40 * 128),
        "sums": (superblock["sums_offset"], superblock["sums_offset"] + 40 * 8 * shape.objects_per_block),
        "data": (superblock["data_offsets"][0], superblock["data_offsets"][0] + 40 * 2 * 4096),
    }[region]
    chance = random.Random(7)
    for attempt in range(25):
        offset = flip_random_bit(stores.root / "nvme0" / "default.pool", *bounds, chance)
        store, tensors = stores.open()
        hit = store.lookup(keys)
        result = store.retrieve(keys[:hit], range(hit)).wait(20)
        lost = (hit < 40) + len(result.failed)
        assert lost == 1, f"seed 7, attempt {attempt}, byte {offset}: the flip went unnoticed"
        assert all(tensors.holds(keys[i], i) for i in range(hit) if Status(result.statuses[i]) == Status.OK)
        tensors.write(keys)
        store.store(keys, range(40)).wait(20).raise_for_status()  # stored again: all 40 are there
        assert store.lookup(keys) == 40
        stores.close_all()


def test_verify_finds_and_drops_damage(stores: Stores) -> None:
    keys = fill(stores)
    superblock = _superblock(stores)
    path = stores.root / "nvme1" / "default.pool"
    flip_random_bit(path, superblock["data_offsets"][1], superblock["data_offsets"][1] + 40 * 2 * 4096, random.Random(3))
    store, _ = stores.open()
    seen: list[tuple[int, int]] = []
    report = store.verify(lambda done, total: seen.append((done, total)))
    assert report.dropped_blocks == 1 and report.reasons == {"CHECKSUM_ERROR": 1} and seen[-1][0] == report.checked_blocks
    assert store.lookup(keys) < 40
    again = store.verify()
    assert again.dropped_blocks == 0 and again.checked_blocks == store.stats()["resident_blocks"]


def test_swapped_slots_are_not_believed(stores: Stores) -> None:
    keys = fill(stores)
    superblock = _superblock(stores)
    path = stores.root / "nvme0" / "default.pool"
    data, size = superblock["data_offsets"][0], 2 * 4096
    with open(path, "r+b") as file:  # the first two blocks' objects on this device change places
        file.seek(data)
        one, two = file.read(size), file.read(size)
        file.seek(data)
        file.write(two + one)
    store, tensors = stores.open()
    result = store.retrieve(keys, range(40)).wait(20)
    assert all(tensors.holds(keys[i], i) for i in range(40) if Status(result.statuses[i]) == Status.OK)
    assert [Status(result.statuses[i]) for i in result.failed] == [Status.CHECKSUM_ERROR] * 2


def test_record_whose_parent_is_damaged_goes_too(stores: Stores) -> None:
    keys = fill(stores)
    store, _ = stores.open()
    slot = next(entry.slot for entry in store.entries() if entry.key == keys[10])
    stores.close_all()
    superblock = _superblock(stores)
    with open(stores.root / "nvme0" / "default.pool", "r+b") as file:
        file.seek(superblock["records_offset"] + slot * 128 + 20)
        file.write(b"\xff")
    store, _ = stores.open()
    assert store.lookup(keys) == 10 and store.recovery.dropped_reasons == {
        "damaged records": 1,
        "without their parent": 29,
    }
    assert "30 dropped" in str(store.recovery)
    stores.close_all()
    store, _ = stores.open()  # they were freed: nothing is dropped twice
    assert store.recovery.dropped_reasons.get("without their parent") is None


def _superblock(stores: Stores) -> dict:  # type: ignore[type-arg]
    import os

    from tutti_mooncake.store import format as on_disk

    path = str(stores.root / "nvme0" / "default.pool")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        values = on_disk.read_superblock(descriptor, path)
    finally:
        os.close(descriptor)
    assert values is not None
    return values


def test_unclean_stop_is_reported(stores: Stores) -> None:
    import os

    pid = os.fork()
    if pid == 0:  # a process that dies with the pool open
        LocalStore.open(stores.config(), geometry())
        os._exit(0)
    os.waitpid(pid, 0)
    store, _ = stores.open()
    assert not store.recovery.clean_shutdown and "unclean" in str(store.recovery)
