"""Scrub: every resident block is read into scratch memory and checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_mooncake import _native
from tutti_mooncake.errors import Status
from tutti_mooncake.io.device import all_in_memory
from tutti_mooncake.io.executor import FOREVER, choose_executor
from tutti_mooncake.store.pool import Pool, Progress
from tutti_mooncake.store.reports import VerifyReport

_SCRATCH_BYTES = 64 << 20
_ALIGNMENT = 4096
Drop = Callable[[npt.NDArray[np.uint8], npt.NDArray[np.uint32]], None]


def _resident(table: _native.BlockTable, fields: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
    """Which of these blocks are resident now, in these generations."""
    statuses, _, generations, _ = table.resolve(fields["keys"], 0)
    same: npt.NDArray[np.bool_] = (statuses == Status.OK) & (generations == fields["generations"])
    return same


def verify_blocks(
    pool: Pool, table: _native.BlockTable, progress: Progress | None, drop: Drop, check_open: Callable[[], None]
) -> VerifyReport:
    """Reads all blocks of this rank with its own lane; `drop(keys, generations)` removes those that fail.

    Slots may be given to other blocks while they are read. A generation is never used twice, so a block that was resident with its
    generation before and after the read was read as itself: only then is a failure damage. `check_open()` raises to end it early.
    """
    start = time.perf_counter()
    geometry = pool.geometry
    objects, size = geometry.objects_per_block, pool.object_bytes
    batch = max(1, min(1024, _SCRATCH_BYTES // (objects * size)))
    scratch = np.zeros(batch * objects * size + _ALIGNMENT, dtype=np.uint8)
    base = -(-scratch.ctypes.data // _ALIGNMENT) * _ALIGNMENT
    executor = _native.LaneExecutor(
        pool.layout,
        [(device.direct_fd, device.memory_align, device.offset_align) for device in pool.devices],
        choose_executor("auto", in_memory=all_in_memory(pool.devices))[0],
        1,
        32,
        False,
        pool.slot_table,
        None,
    )
    executor.start(
        np.array([base + i * size for i in range(objects)], dtype=np.uint64),
        np.full(objects, objects * size, dtype=np.uint64),
        np.full(objects, batch, dtype=np.uint64),
        np.zeros(objects, dtype=np.uint32),
    )
    total, checked, bad_blocks, first = int(table.counts()["resident"]), 0, 0, 0
    reasons: dict[str, int] = {}
    try:
        while len(slots := table.resident_slots(first, batch)):
            fields = table.records(pool.slot_table, slots)
            before = _resident(table, fields)
            plan = executor.submit(False, slots, fields["generations"], fields["rots"], np.arange(len(slots), dtype=np.uint32), FOREVER)
            plan.wait(FOREVER)
            statuses = plan.statuses()
            bad = np.flatnonzero((statuses != Status.OK) & before & _resident(table, fields))
            for status in statuses[bad]:
                reasons[Status(status).name] = reasons.get(Status(status).name, 0) + 1
            if len(bad):
                drop(np.ascontiguousarray(fields["keys"][bad]), np.ascontiguousarray(fields["generations"][bad]))
            checked, bad_blocks, first = checked + len(slots), bad_blocks + len(bad), int(slots[-1]) + 1
            if progress is not None:
                progress(checked, max(total, checked))
            check_open()
    finally:
        executor.stop(0.0)
    return VerifyReport(checked, bad_blocks, checked * objects * geometry.object_bytes, time.perf_counter() - start, reasons)
