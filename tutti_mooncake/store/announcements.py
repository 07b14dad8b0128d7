"""Who wants to know which blocks can be found: for the directory of a cluster.

Called under the store's lock, so that a listener hears of a block's removal after it has heard of the block. Removals it hears from the
history, with all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti_mooncake import _native
from tutti_mooncake.keys import KeyArray
from tutti_mooncake.store.history import History


@dataclass(frozen=True)
class StoredBlocks:
    """`keys`: salted, uint8 of shape (n, 32). `parents`: first 8 bytes of each block's parent, little-endian, uint64 of shape (n,), 0 at
    the beginning of a chain. `positions`: in the chain, uint32 of shape (n,). Parents come before their children.
    """

    keys: KeyArray
    parents: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.uint32]


class Announcements:
    """Of one store."""

    def __init__(self, table: _native.BlockTable, history: History) -> None:
        self._table = table
        self._history = history
        self._listeners: list[Callable[[StoredBlocks], None]] = []

    @property
    def heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def listen(self, stored: Callable[[StoredBlocks], None], removed: Callable[[KeyArray], None]) -> None:
        """Tells `stored` of all blocks there are, and from now on of new ones, and `removed` of the salted keys of those that go."""
        self._history.listen(removed)
        self._listeners.append(stored)
        self._tell([stored], self._table.resident_slots(0, self._table.slots))

    def unlisten(self, stored: Callable[[StoredBlocks], None], removed: Callable[[KeyArray], None]) -> None:
        """Tells these no more."""
        if stored in self._listeners:
            self._listeners.remove(stored)
            self._history.unlisten(removed)

    def published(self, slots: npt.NDArray[np.uint32]) -> None:
        """The blocks in these slots can be found."""
        if self._listeners:
            self._tell(self._listeners, slots)

    def _tell(self, listeners: list[Callable[[StoredBlocks], None]], slots: npt.NDArray[np.uint32]) -> None:
        if not len(slots):
            return
        parents, positions = self._table.lineage(slots)
        order = np.argsort(positions, kind="stable")
        blocks = StoredBlocks(self._table.keys(slots[order]), parents[order], positions[order])
        for listener in listeners:
            listener(blocks)
