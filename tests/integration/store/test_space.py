"""The pool's space: a cap that holds, eviction, pins, admission, budgets, TTL, salts."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Stores
from tests.pattern import chain, geometry
from tutti_mooncake import ConfigError, Status, StoreConfig
from tutti_mooncake.store.admission import SECONDS_PER_DAY, AdmitSecondTouch, WriteBudget


def disk_usage(root: Path) -> int:
    """Physical bytes below a directory."""
    return sum(os.stat(os.path.join(folder, name)).st_blocks * 512 for folder, _, names in os.walk(root) for name in names)


def put(store, tensors, keys, parent=None):  # type: ignore[no-untyped-def]
    tensors.write(keys)
    return store.store(keys, range(len(keys)), parent=parent).wait(20)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_disk_usage_stays_under_the_cap_summed_over_devices_and_ranks(stores: Stores, tp_size: int) -> None:
    cap = 8 << 20
    shape = geometry(tp_size=tp_size, object_bytes=4096)
    for turn in range(2):  # a restart in the middle
        store, tensors = stores.open(shape, capacity=cap)
        for prompt in range(25):
            keys = chain((turn, prompt), 30)
            assert put(store, tensors, keys).failed == []
            assert disk_usage(stores.root) <= cap
            assert store.retrieve(keys, range(30, 60)).wait(20).ok_blocks == 30
            assert all(tensors.holds(key, 30 + position) for position, key in enumerate(keys))
        stats = store.stats()
        assert stats["evicted_blocks"] > 0 and stats["pool_bytes"] <= cap
        assert stats["resident_blocks"] + stats["free_blocks"] == stats["slots"]
        stores.close_all()


def test_prompt_longer_than_the_pool_keeps_its_head(stores: Stores) -> None:
    store, tensors = stores.open(blocks=2000, capacity="5MiB")
    slots = store.stats()["slots"]
    keys = chain("long", slots + 50)
    result = put(store, tensors, keys)
    assert result.ok_blocks == slots and set(result.statuses[slots:]) == {Status.NO_SPACE}
    assert store.lookup(keys) == slots


def test_eviction_takes_tails_of_the_least_recently_used(stores: Stores) -> None:
    store, tensors = stores.open()
    old, new = chain("old", 40), chain("new", 40)
    put(store, tensors, old)
    put(store, tensors, new)
    store.lookup(old)  # now the other one is the oldest
    assert store.evict(10) == 10
    assert store.lookup(new) == 30 and store.lookup(old) == 40


def test_pins_hold_and_all_of_them_end(stores: Stores) -> None:
    now = [1000.0]
    store, tensors = stores.open(clock=lambda: now[0])
    keys = chain("pinned", 20)
    put(store, tensors, keys)
    pin = store.pin(keys, 60)
    assert pin.blocks == 20 and store.evict(1000) == 0 and store.lookup(keys) == 20
    store.unpin(pin)
    store.unpin(pin)  # twice is once
    for attempt in range(1000):  # a third aborted before the load, a third loaded, a third never needed
        pin = store.pin(keys, 60)
        if attempt % 3 == 0:
            store.retrieve(keys[:2], [40, 41]).wait(20).raise_for_status()
        store.unpin(pin)
    assert store.stats()["pinned_blocks"] == 0 and store.stats()["pins"] == 0
    for lease in (0, -5, "x", float("nan")):
        with pytest.raises(ConfigError, match="lease_seconds"):
            store.pin(keys, lease)  # type: ignore[arg-type]
    assert store.stats()["pinned_blocks"] == 0
    store.pin(keys, 60)  # forgotten by its owner: the lease ends it
    now[0] += 61
    assert store.stats()["pins"] == 0 and store.stats()["pinned_blocks"] == 0
    assert store.evict(1000) == 20


def test_second_touch_admission(stores: Stores) -> None:
    store, tensors = stores.open(admission="second_touch")
    keys = chain("touched", 10)
    first = put(store, tensors, keys)
    assert set(first.statuses) == {Status.REJECTED} and first.failed == []
    assert put(store, tensors, keys).ok_blocks == 10


def test_second_touch_memory_is_bounded_and_finds_what_it_saw() -> None:
    policy = AdmitSecondTouch(1 << 12)
    keys = np.random.default_rng(1).integers(0, 256, (1000, 32), dtype=np.uint8)
    assert not policy.admit(keys).any()
    assert policy.admit(keys).mean() > 0.75  # some were pushed out by others


def test_write_budget_holds(stores: Stores) -> None:
    now = [5000.0]
    block = geometry().payload_bytes_per_block
    store, tensors = stores.open(clock=lambda: now[0], write_budget_bytes_per_day=24 * 10 * block)
    result = put(store, tensors, chain("spender", 30))
    assert result.ok_blocks == 10 and store.stats()["store_over_budget_blocks"] == 20
    now[0] += 1800
    assert put(store, tensors, chain("later", 30)).ok_blocks == 5
    stores.close_all()
    store, tensors = stores.open(clock=lambda: now[0], write_budget_bytes_per_day=24 * 10 * block)
    assert put(store, tensors, chain("restarted", 30)).ok_blocks == 0  # a restart doesn't refill it


def test_write_budget_never_grants_more_than_its_rate() -> None:
    random = np.random.default_rng(2)
    budget, now, granted = WriteBudget(1_000_000, 0.0), 0.0, 0
    for _ in range(2000):
        now += float(random.uniform(0, 60))
        granted += 100 * budget.take(100, int(random.integers(0, 500)), now)
    assert granted <= 1_000_000 * (now + 3600) / SECONDS_PER_DAY


def test_blocks_expire(stores: Stores) -> None:
    now = [1000.0]
    store, tensors = stores.open(clock=lambda: now[0], ttl_seconds=100)
    keys = chain("mortal", 10)
    put(store, tensors, keys[:5])
    now[0] += 60
    put(store, tensors, keys)
    assert store.lookup(keys) == 10
    now[0] += 41
    assert store.lookup(keys) == 0  # the first five expired, and the rest hangs on them
    assert put(store, tensors, keys).ok_blocks == 10 and store.lookup(keys) == 10


def test_salt_isolates_tenants(stores: Stores) -> None:
    keys = chain("shared prompt", 5)
    store, tensors = stores.open(tenant_salt="alice")
    put(store, tensors, keys)
    assert store.lookup(keys) == 5
    stores.close_all()
    store, tensors = stores.open(tenant_salt="bob")
    assert store.lookup(keys) == 0 and store.recovery.recovered_blocks == 5


@pytest.mark.parametrize("durability", ["none", "data", "flush"])
def test_every_durability_level_serves_and_restarts(stores: Stores, durability: str) -> None:
    store, tensors = stores.open(durability=durability)
    keys = chain(durability, 30)
    put(store, tensors, keys)
    stores.close_all()
    store, tensors = stores.open(durability=durability)
    assert store.lookup(keys) == 30
    assert store.retrieve(keys, range(30)).wait(20).ok_blocks == 30
    assert all(tensors.holds(key, position) for position, key in enumerate(keys))


def test_drop_and_clear(stores: Stores) -> None:
    store, tensors = stores.open()
    trunk = chain("trunk", 4)
    put(store, tensors, trunk)
    left, right = chain("left", 8, trunk), chain("right", 8, trunk)
    put(store, tensors, left)
    put(store, tensors, right)
    assert store.stats()["resident_blocks"] == 12
    assert store.drop([left[4]]) == 4 and store.lookup(left) == 4 and store.lookup(right) == 8
    assert store.clear() == 8 and store.stats()["resident_blocks"] == 0
    assert store.stats()["free_blocks"] == store.stats()["slots"]


def test_hit_rate_has_its_denominator(stores: Stores) -> None:
    store, tensors = stores.open()
    prompts = [chain(index, 4) for index in range(10)]
    for keys in prompts:  # cold
        store.lookup(keys)
        put(store, tensors, keys)
    for keys in prompts:  # warm
        store.lookup(keys)
    stats = store.stats()
    assert stats["lookup_hit_blocks"] / stats["lookup_blocks"] == 0.5


def test_entries_show_what_is_there(stores: Stores) -> None:
    store, tensors = stores.open()
    keys = chain("listed", 6)
    put(store, tensors, keys)
    entries = {entry.key: entry for entry in store.entries()}
    assert set(entries) == set(keys) and len(list(store.entries(limit=2))) == 2
    assert entries[keys[0]].parent is None and all(entries[keys[i]].parent == keys[i - 1] for i in range(1, 6))
    assert entries[keys[3]].tokens == 4 and entries[keys[3]].bytes == geometry().payload_bytes_per_block


def test_config_round_trip(stores: Stores) -> None:
    config = stores.config(ttl_seconds=5)
    assert StoreConfig.from_mapping(config.as_dict(), {}) == config


def test_expiry_below_a_second_is_a_second(stores: Stores) -> None:
    now = [1000.0]
    store, tensors = stores.open(ttl_seconds=0.5, clock=lambda: now[0])
    keys = chain(1, 2)
    tensors.write(keys)
    store.store(keys, [0, 1]).wait(20).raise_for_status()
    assert store.lookup(keys) == 2
    now[0] += 1.0
    assert store.lookup(keys) == 0
