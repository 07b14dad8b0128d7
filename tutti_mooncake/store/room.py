"""Slots for new blocks, and what goes for them.

Eviction takes the least recently used ends of chains, never what the new blocks hang on. Called under the store's lock.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_mooncake import _native
from tutti_mooncake.store.counters import Counters
from tutti_mooncake.store.history import Removal
from tutti_mooncake.store.listing import NO_SLOT
from tutti_mooncake.store.retire import Retirement, Slots

SWEEP_SLOTS = 4096
EVICT_BATCH = 64


class Room:
    """`ttl_seconds`: how long new blocks live; 0 = until they are evicted."""

    def __init__(self, table: _native.BlockTable, retirement: Retirement, counters: Counters, ttl_seconds: float) -> None:
        self._table = table
        self._retirement = retirement
        self._counters = counters
        self._ttl_seconds = ttl_seconds

    def reserve(
        self, chain: npt.NDArray[np.uint8], parent: npt.NDArray[np.uint8] | None, now: int
    ) -> tuple[npt.NDArray[np.uint8], Slots, Slots, npt.NDArray[np.uint8]]:
        """Status, slot, generation and rotation for each (salted) key of a chain below `parent`, None being the root."""
        self.sweep(SWEEP_SLOTS, now)
        above = chain if parent is None else np.concatenate([parent, chain])
        slot, generation, _ = self._table.pin_prefix(above, now)
        try:
            missing = len(chain) - self._table.counts()["free"]
            if missing > 0:
                self.evict(min(max(missing, EVICT_BATCH), max(missing, self._table.slots // 16)))
            expiry = now + math.ceil(self._ttl_seconds) if self._ttl_seconds else 0
            reservations: tuple[Any, ...]
            reservations, removed = self._table.reserve(chain, parent, expiry, now)
            self._retirement.retire(removed, Removal.EXPIRED)
        finally:
            if slot != NO_SLOT:
                self._table.unpin(slot, generation)
        statuses, slots, generations, rots = reservations
        return statuses, slots, generations, rots

    def sweep(self, slots: int, now: int) -> None:
        """Removes what has expired among the next `slots` of a round over all."""
        if self._ttl_seconds:
            self._retirement.retire(self._table.sweep_expired(slots, now), Removal.EXPIRED)

    def evict(self, blocks: int) -> int:
        """How many of `blocks` could be evicted."""
        removed = self._table.evict(blocks)
        self._counters.add(evicted_blocks=len(removed))
        self._retirement.retire(removed, Removal.EVICTED)
        return len(removed)
