"""What a real store has is what its book says, whatever happens to its blocks."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Stores
from tests.pattern import chain
from tests.waiting import wait_for
from tutti_mooncake import LocalStore, _native
from tutti_mooncake.directory.announcer import announce
from tutti_mooncake.directory.records import MOST_SPAN_BLOCKS, short_hashes
from tutti_mooncake.directory.span_book import SpanBook


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    opened = Stores(tmp_path, "posix")
    yield opened
    opened.close_all()


def announced(store: LocalStore, most_blocks: int = MOST_SPAN_BLOCKS) -> SpanBook:
    book = SpanBook(most_blocks)
    announce(store, book)
    return book


def shorts(keys: list[bytes]) -> list[int]:
    return [int.from_bytes(key[:8], "little") for key in keys]


def same(store: LocalStore, book: SpanBook) -> bool:
    """Every block is in the book once, behind its parent and at its position; and nothing else is."""
    there = {int.from_bytes(entry.key[:8], "little"): entry.parent for entry in store.entries()}
    found = {}
    for _, span in book.all():
        before = span.parent
        depth, above = 0, before
        while above:
            parent = there[above]
            depth, above = depth + 1, 0 if parent is None else int.from_bytes(parent[:8], "little")
        assert span.start == depth
        assert span.namespace == store.geometry.namespace_id
        for short in span.hashes.tolist():
            assert short not in found
            found[short], before = before, short
    return found == {short: 0 if parent is None else int.from_bytes(parent[:8], "little") for short, parent in there.items()}


def test_blocks_are_announced_as_they_come_and_go(stores: Stores) -> None:
    store, tensors = stores.open()
    book = announced(store)
    keys, branch = chain("a", 30), chain("b", 30, chain("a", 20))
    for prompt in (keys, branch):
        tensors.write(prompt)
        store.store(prompt, range(30)).wait(20).raise_for_status()
    assert [(span.start, span.hashes.tolist()) for _, span in book.all()] == [(0, shorts(keys)), (20, shorts(branch[20:]))]
    more = chain("a", 35)
    tensors.write(more)
    store.store(more[30:], range(30, 35), parent=more[29]).wait(20).raise_for_status()
    assert [len(span.hashes) for _, span in book.all()] == [35, 10] and same(store, book)
    store.evict(12)
    assert book.blocks == 33 and same(store, book)
    store.drop(keys[10:11])
    assert book.blocks == 10 and same(store, book)
    store.clear()
    assert book.blocks == 0 and same(store, book)


def test_what_was_in_the_pool_before_is_announced(stores: Stores) -> None:
    store, tensors = stores.open()
    keys, branch = chain("a", 30), chain("b", 30, chain("a", 20))
    for prompt in (keys, branch):
        tensors.write(prompt)
        store.store(prompt, range(30)).wait(20).raise_for_status()
    stores.close_all()
    store, _ = stores.open()
    book = announced(store, most_blocks=16)
    assert book.blocks == 40 and same(store, book)
    assert sorted(span.start for _, span in book.all())[0] == 0


def test_a_failed_write_is_not_in_the_book(stores: Stores) -> None:
    faults = _native.FaultInjector()
    store, tensors = stores.open(faults=faults)
    book = announced(store)
    keys = chain("a", 20)
    tensors.write(keys)
    faults.add(write=True, kind="error", every=7, limit=1)
    store.store(keys, range(20)).wait(20)
    store.close()
    assert book.blocks < 20
    stores.close_all()
    store, _ = stores.open()
    assert book.blocks == store.stats()["resident_blocks"]


def test_salted_keys_are_what_is_announced(stores: Stores) -> None:
    store, tensors = stores.open(tenant_salt="tenant")
    book = announced(store)
    keys = chain("a", 5)
    tensors.write(keys)
    store.store(keys, range(5)).wait(20).raise_for_status()
    ((_, span),) = book.all()
    assert span.hashes.tolist() == short_hashes(store.salted(keys)).tolist() != shorts(keys)


@pytest.mark.parametrize("seed", range(3))
def test_the_book_is_right_beside_any_traffic(stores: Stores, seed: int) -> None:
    store, tensors = stores.open(capacity="5MiB")
    book = announced(store, most_blocks=8)
    chance = random.Random(seed)
    done = threading.Event()

    def remove() -> None:
        mine = random.Random(seed + 100)
        while not done.wait(0.001):
            store.evict(mine.randrange(3))
            store.drop([mine.choice(chain(("p", mine.randrange(6)), 20))])

    remover = threading.Thread(target=remove)
    remover.start()
    for _ in range(60):
        shared = chain(("p", chance.randrange(6)), chance.randrange(20))
        keys = chain(("p", chance.randrange(6)), 20, shared)
        tensors.write(keys)
        store.store(keys, range(20)).wait(20)
    done.set()
    remover.join(20)
    assert same(store, book), f"seed {seed}"
    lengths = np.array([len(span.hashes) for _, span in book.all()])
    assert not len(lengths) or lengths.max() <= 8


def test_a_block_that_is_stored_again_before_its_first_write_has_ended_stays(stores: Stores) -> None:
    faults = _native.FaultInjector()
    store, tensors = stores.open(faults=faults)
    book = announced(store)
    keys = chain("a", 8)
    tensors.write(keys)
    faults.add(write=True, kind="hang", limit=1)
    first = store.store(keys, range(8), deadline_seconds=0.2)
    assert first.wait(20).ok_blocks < 8
    faults.clear()
    assert store.store(keys, range(8)).wait(20).ok_blocks > 0 and store.lookup(keys) == 8
    faults.release()
    wait_for(lambda: first.drained())
    wait_for(lambda: store.history.total > 0)
    assert store.lookup(keys) == 8 and same(store, book)


def test_what_expires_is_told_although_nothing_is_stored(stores: Stores) -> None:
    now = [1000.0]
    store, tensors = stores.open(clock=lambda: now[0], ttl_seconds=5)
    keys = chain("a", 20)
    tensors.write(keys)
    store.store(keys, range(20)).wait(20).raise_for_status()
    book = announced(store)
    assert book.blocks == 20
    now[0] += 100
    wait_for(lambda: book.blocks == 0)
    assert announced(store).blocks == 0


def test_an_announcement_can_be_ended(stores: Stores) -> None:
    store, tensors = stores.open()
    book = SpanBook()
    end = announce(store, book)
    end()
    end()
    keys = chain("a", 5)
    tensors.write(keys)
    store.store(keys, range(5)).wait(20).raise_for_status()
    assert book.blocks == 0
