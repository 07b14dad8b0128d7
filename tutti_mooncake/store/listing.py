"""Resident blocks, one by one, for people and tools."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from tutti_mooncake import _native
from tutti_mooncake.store.pool import Pool
from tutti_mooncake.store.reports import BlockInfo

NO_SLOT = 2**32 - 1
_PAGE_SLOTS = 4096


def list_blocks(
    pool: Pool, table: _native.BlockTable, limit: int | None, using: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[BlockInfo]:
    """Resident blocks in slot order, at most `limit`. Keys are salted ones. `using()` keeps the devices open while a page is read."""
    first, left = 0, table.slots if limit is None else limit
    while left > 0:
        with using():
            slots = table.resident_slots(first, min(left, _PAGE_SLOTS))
            if not len(slots):
                return
            fields = table.records(pool.slot_table, slots)
            roots = fields["parent_slots"] == NO_SLOT
            parents = table.records(pool.slot_table, np.where(roots, slots, fields["parent_slots"]))
        for i, slot in enumerate(slots):
            yield BlockInfo(
                bytes(fields["keys"][i]),
                None if roots[i] else bytes(parents["keys"][i]),
                int(slot),
                int(fields["generations"][i]),
                pool.geometry.block_tokens,
                pool.geometry.payload_bytes_per_block,
                int(fields["created"][i]),
                int(fields["last_use"][i]),
                int(fields["expiry"][i]),
            )
        first, left = int(slots[-1]) + 1, left - len(slots)
