"""What was stored comes back, to the right blocks, on every executor, layout and alignment."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.conftest import Stores
from tests.pattern import PatternTensors, chain, device_of, geometry
from tutti_mooncake import KeyFormatError, LocalStore, Status, StoreClosed, TensorError


def stored(store: LocalStore, tensors: PatternTensors, keys: list[bytes]) -> None:
    """Stores `keys` from engine blocks 0.. and checks that all went."""
    tensors.write(keys)
    store.store(keys, range(len(keys))).wait(20).raise_for_status()


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("kv_factor", [1, 2])
@pytest.mark.parametrize("align_offset", [0, 64], ids=["aligned", "staged"])
def test_bytes_come_back(stores: Stores, devices: int, kv_factor: int, align_offset: int) -> None:
    shape = geometry(kv_factor=kv_factor)
    names = [str(stores.root / f"disk{index}") for index in range(devices)]
    store, tensors = stores.open(shape, align_offset=align_offset, devices=names)
    keys = chain("a", 20)
    stored(store, tensors, keys)
    assert store.lookup([*keys, *chain("b", 3)]) == 20
    tensors.wipe(32)
    operation = store.retrieve(keys, range(32, 52))
    for layer in range(shape.layers):
        operation.wait_layer(layer, 20)
    result = operation.wait(20)
    assert result.ok_blocks == 20 and result.failed == [] and result.bytes == 20 * shape.payload_bytes_per_block
    assert operation.done() and operation.drained()
    assert all(tensors.holds(key, 32 + position) for position, key in enumerate(keys))


def test_object_size_that_no_device_takes_is_padded(stores: Stores) -> None:
    shape = geometry(object_bytes=1000)
    store, tensors = stores.open(shape)
    keys = chain("odd", 7)
    stored(store, tensors, keys)
    tensors.wipe()
    store.retrieve(keys, range(10, 17)).wait(20).raise_for_status()
    assert all(tensors.holds(key, 10 + position) for position, key in enumerate(keys))
    if stores.executor in ("uring", "posix"):
        assert store.stats()["staged_objects"] > 0


def test_layer_is_whole_when_its_wait_returns(stores: Stores) -> None:
    store, tensors = stores.open(blocks=128)
    keys = chain("layers", 60)
    stored(store, tensors, keys)
    reference = [tensors.object(index, block).clone() for index in range(4) for block in range(60)]
    tensors.wipe(60)
    operation = store.retrieve(keys, range(60, 120))
    for layer in range(4):
        operation.wait_layer(layer, 20)
        for block in range(60):
            assert bool((tensors.object(layer, 60 + block) == reference[layer * 60 + block]).all())
    operation.wait(20).raise_for_status()


def test_chain_goes_on_below_its_parent(stores: Stores) -> None:
    store, tensors = stores.open()
    keys = chain("turns", 12)
    tensors.write(keys)
    first = store.store(keys[:5], range(5))
    second = store.store(keys[5:], range(5, 12), parent=keys[4])  # while the first still runs
    assert second.wait(20).ok_blocks == 7 and first.wait(20).ok_blocks == 5
    assert store.lookup(keys) == 12
    orphan = store.store(chain("lost", 2), [0, 1], parent=chain("nobody", 1)[0]).wait(20)
    assert list(orphan.statuses) == [Status.REJECTED, Status.REJECTED] and orphan.failed == []


def test_duplicates_are_stored_once(stores: Stores) -> None:
    store, tensors = stores.open()
    keys = chain("ten", 10)
    stored(store, tensors, keys[:3])
    result = store.store(keys, range(10)).wait(20)
    assert list(result.statuses[:3]) == [Status.EXISTS] * 3 and result.ok_blocks == 7 and result.failed == []
    twice = store.store([keys[0], keys[0]], [0, 1]).wait(20)
    assert list(twice.statuses) == [Status.EXISTS, Status.EXISTS]
    assert store.stats()["resident_blocks"] == 10


def test_nothing_and_one_block(stores: Stores) -> None:
    store, tensors = stores.open()
    assert store.lookup([]) == 0
    assert store.store([], []).wait(5).ok_blocks == 0 and store.retrieve([], []).wait(5).ok_blocks == 0
    keys = chain("one", 1)
    stored(store, tensors, keys)
    assert store.retrieve(keys, [9]).wait(20).ok_blocks == 1 and tensors.holds(keys[0], 9)


def test_unknown_keys_are_not_found(stores: Stores) -> None:
    store, tensors = stores.open()
    keys = chain("known", 3)
    stored(store, tensors, keys)
    result = store.retrieve([*keys, *chain("unknown", 1)], [10, 11, 12, 13]).wait(20)
    assert list(result.statuses) == [Status.OK] * 3 + [Status.NOT_FOUND] and result.failed == [3]


@pytest.mark.parametrize("bad", [b"", b"short", b"x" * 31, b"x" * 33, "y" * 32, None])
def test_key_of_odd_length_or_type_is_refused(stores: Stores, bad: object) -> None:
    store, _ = stores.open()
    with pytest.raises(KeyFormatError, match=r"keys\[1\]"):
        store.lookup([b"k" * 32, bad])  # type: ignore[list-item]
    with pytest.raises(KeyFormatError, match="shape"):
        store.lookup(np.zeros((2, 31), dtype=np.uint8))


def test_block_ids_that_cannot_be_are_refused(stores: Stores) -> None:
    store, _ = stores.open(blocks=8)
    keys = chain("ids", 2)
    for ids, match in (
        ([0], "1 block ids for 2 keys"),
        ([0, 8], "outside"),
        ([-1, 0], "outside"),
        ([0.5, 1.5], "integers"),
    ):
        with pytest.raises(TensorError, match=match):
            store.store(keys, ids)  # type: ignore[arg-type]
    with pytest.raises(TensorError, match="twice"):
        store.retrieve(keys, [3, 3])


def test_tensors_that_do_not_fit_are_refused(stores: Stores) -> None:
    import torch

    store = LocalStore.open(stores.config(), geometry())
    try:
        with pytest.raises(TensorError, match="no KV tensors"):
            store.store(chain("x", 1), [0])
        device = device_of(stores.executor)
        good = [torch.zeros((8, 4096), dtype=torch.uint8, device=device) for _ in range(4)]
        wrong = {
            "3 tensors for 4": good[:3],
            r"tensors\[2\].*object_bytes 4096": [*good[:2], torch.zeros((8, 2048), dtype=torch.uint8, device=device), good[3]],
            "not contiguous": [*good[:3], torch.zeros((8, 4096, 2), dtype=torch.uint8, device=device)[:, :, 0]],
            "different numbers": [*good[:3], torch.zeros((9, 4096), dtype=torch.uint8, device=device)],
            "overlap": [*good[:3], torch.zeros(8192, dtype=torch.uint8, device=device).as_strided((2, 4096), (1, 1))],
            "the same memory": [*good[:3], good[0]],
            "dtype float16, the geometry says float32": [*good[:3], torch.zeros((8, 2048), dtype=torch.float16, device=device)],
            "shape": [*good[:3], torch.zeros(4096, dtype=torch.uint8, device=device)],
        }
        if device != "cpu":
            wrong["on different devices"] = [*good[:3], good[3].cpu()]
        for match, tensors in wrong.items():
            with pytest.raises(TensorError, match=match):
                store.register(tensors)
        store.register(good)
        with pytest.raises(TensorError, match="already"):
            store.register(good)
    finally:
        store.close()
    with pytest.raises(StoreClosed):
        store.lookup(chain("x", 1))


def test_waiting_lets_other_threads_run(stores: Stores) -> None:
    from tutti_mooncake import _native

    faults = _native.FaultInjector()
    store, tensors = stores.open(faults=faults)
    keys = chain("gil", 2)
    stored(store, tensors, keys)
    faults.add(False, "hang", limit=1)
    operation = store.retrieve(keys, [10, 11])
    releaser = threading.Thread(target=faults.release)  # runs only if the wait below lets go of the interpreter
    waiter = threading.Thread(target=lambda: operation.wait(20))
    waiter.start()
    while not faults.injected:
        pass
    releaser.start()
    waiter.join(20)
    assert not waiter.is_alive() and operation.done()
