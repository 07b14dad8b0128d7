"""Reads blocks of a store into memory that isn't its engine's: for those who pass them on."""

from __future__ import annotations

from collections.abc import Callable

from tutti_mooncake.keys import BlockIds, Keys
from tutti_mooncake.store.operations import RetrieveOperation


class StoreReader:
    """Thread-safe. Made by `LocalStore.reader`, whose tensors its block ids name."""

    def __init__(self, retrieve: Callable[[Keys, BlockIds, float | None], RetrieveOperation], close: Callable[[], None]) -> None:
        self._retrieve = retrieve
        self._close = close

    def retrieve(self, keys: Keys, block_ids: BlockIds, *, deadline_seconds: float | None = None) -> RetrieveOperation:
        """As `LocalStore.retrieve`."""
        return self._retrieve(keys, block_ids, deadline_seconds)

    def close(self) -> None:
        """Ends what runs, and lets the tensors go. Nothing may be retrieved any more."""
        self._close()
