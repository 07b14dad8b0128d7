"""From the store to the book: the blocks that a store has, as they come and go."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tutti_mooncake.directory.records import short_hashes
from tutti_mooncake.directory.span_book import SpanBook
from tutti_mooncake.keys import KeyArray
from tutti_mooncake.store import LocalStore
from tutti_mooncake.store.announcements import StoredBlocks


def announce(store: LocalStore, book: SpanBook) -> Callable[[], None]:
    """Puts all blocks of `store` into `book`, and keeps that so for as long as the store is open, or until the result is called."""
    namespace = store.geometry.namespace_id

    def stored(blocks: StoredBlocks) -> None:
        hashes = short_hashes(blocks.keys)
        ends = np.flatnonzero(blocks.parents[1:] != hashes[:-1]) + 1  # where the next block continues another one
        for begin, end in zip([0, *ends.tolist()], [*ends.tolist(), len(hashes)], strict=True):
            book.add(namespace, int(blocks.positions[begin]), int(blocks.parents[begin]), hashes[begin:end])

    def removed(keys: KeyArray) -> None:
        book.remove(namespace, short_hashes(keys))

    return store.listen(stored, removed)
