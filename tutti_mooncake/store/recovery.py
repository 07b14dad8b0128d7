"""Opening a pool: the slot table is read once, and what is whole becomes the index.

A crash can have left records that were being written (their check fails), children whose parents never became durable (orphans), and
slots whose removal was not finished. All of them are dropped, counted by reason and freed on the device. Nothing is guessed: a record
that can't be trusted is a miss.
"""

from __future__ import annotations

import time

import numpy as np

from tutti_mooncake import _native
from tutti_mooncake.store.pool import Pool
from tutti_mooncake.store.reports import RecoveryReport

_DROP_REASONS = {
    "bad_check": "damaged records",
    "wrong_slot": "records of another slot",
    "foreign_pool": "records of another pool",
    "unreadable": "unreadable records",
    "duplicate_key": "duplicate keys",
}


def recover(pool: Pool, now: int, *, read_only: bool) -> tuple[_native.BlockTable, RecoveryReport]:
    """The index of what is on the pool, and the report."""
    start = time.perf_counter()
    table = _native.BlockTable(pool.slots, len(pool.devices))
    counts = pool.slot_table.scan(table)
    dropped, orphans, expired = table.finish_load(now)
    if len(dropped):
        if not read_only:
            pool.slot_table.write(table, dropped, False)
        table.release(dropped)
    duplicates = counts["duplicate_slots"]
    if len(duplicates) and not read_only:
        pool.slot_table.write(table, duplicates, False)
    reasons = {text: int(counts[name]) for name, text in _DROP_REASONS.items() if counts[name]}
    if orphans:
        reasons["without their parent"] = int(orphans)
    if expired:
        reasons["expired"] = int(expired)
    return table, RecoveryReport(
        recovered_blocks=int(table.counts()["resident"]),
        dropped_blocks=int(np.sum(list(reasons.values()), dtype=np.int64)) if reasons else 0,
        dropped_reasons=reasons,
        seconds=time.perf_counter() - start,
        clean_shutdown=bool(pool.read_state().get("clean", True)),
        repaired_superblocks=pool.repaired_superblocks,
    )
