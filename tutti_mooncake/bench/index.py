"""The index at 10 million blocks: lookups, memory, and how long a pool of that size takes to open, after a clean stop and after a crash.

There are no objects: records are written by the store's own code, and nothing else.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import time

import numpy as np
import numpy.typing as npt

from tutti_mooncake import _native
from tutti_mooncake.bench.report import Report, positive

PROMPT_BLOCKS = 8192


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--directory", default="/tmp")
    parser.add_argument("--blocks", type=positive, default=10_000_000)
    parser.add_argument("--lookups", type=positive, default=20_000)
    parser.add_argument("--opens", type=positive, default=3)


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run(arguments: argparse.Namespace) -> Report:
    """Builds the index, measures, and opens it again."""
    root = tempfile.mkdtemp(prefix="tutti-bench-", dir=arguments.directory)
    try:
        return _run(arguments, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _run(arguments: argparse.Namespace, root: str) -> Report:
    report = Report("index")
    blocks = arguments.blocks
    descriptor = os.open(os.path.join(root, "records"), os.O_RDWR | os.O_CREAT)
    sums_offset = blocks * 128
    os.ftruncate(descriptor, sums_offset + blocks * 8)
    slot_table = _native.SlotTable(descriptor, 0, sums_offset, blocks, 1, 7)
    gc.collect()
    before = resident_bytes()
    table = _native.BlockTable(blocks, 4)
    random = np.random.default_rng(1)
    prompts: list[npt.NDArray[np.uint8]] = []
    while len(prompts) * PROMPT_BLOCKS < blocks:
        keys = random.integers(0, 256, (min(PROMPT_BLOCKS, blocks - len(prompts) * PROMPT_BLOCKS), 32), dtype=np.uint8)
        (statuses, slots, _, _), _removed = table.reserve(keys, None, 0, 1)
        assert not statuses.any()
        table.publish(slots)
        slot_table.write(table, slots, True)
        prompts.append(keys)
    whole = [keys for keys in prompts if len(keys) == PROMPT_BLOCKS]
    held = sum(keys.nbytes for keys in prompts)
    report.add("bytes_per_block", [(resident_bytes() - before - held) / blocks], "B", "<= 120")
    report.add("bytes_per_block_computed", [table.memory_bytes / blocks], "B")
    _lookups(arguments, report, table, whole, random)
    del table
    for state in ("clean", "crash"):
        seconds = []
        for _ in range(arguments.opens):
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # as after a restart of the machine
            begin = time.perf_counter()
            table = _native.BlockTable(blocks, 4)
            counts = slot_table.scan(table)
            _dropped, orphans, _expired = table.finish_load(1)
            seconds.append(time.perf_counter() - begin)
            found = table.counts()["resident"]
            if state == "clean" and (found != blocks or orphans or counts["bad_check"]):
                raise SystemExit(f"bench index: {found} of {blocks} blocks came back")
            del table
        report.add(f"open_{state}_s", seconds, "s", "<= 5" if state == "clean" else "<= 30")
        _damage(descriptor, blocks, random)
    os.close(descriptor)
    report.notes.append("opening reads every record and builds the tree in both cases; for `crash` 1,000 records were torn before")
    return report


def _lookups(
    arguments: argparse.Namespace,
    report: Report,
    table: _native.BlockTable,
    prompts: list[npt.NDArray[np.uint8]],
    random: np.random.Generator,
) -> None:
    """Prompts of 8,192 blocks of which a random part is resident."""
    foreign = random.integers(0, 256, (PROMPT_BLOCKS, 32), dtype=np.uint8)
    micros = []
    for _ in range(arguments.lookups):
        keys = foreign.copy()
        known = int(random.integers(0, PROMPT_BLOCKS + 1))
        keys[:known] = prompts[int(random.integers(0, len(prompts)))][:known]
        begin = time.perf_counter()
        found = table.find_prefix(keys, 1, True)
        micros.append(1e6 * (time.perf_counter() - begin))
        if found != known:
            raise SystemExit(f"bench index: found {found} of {known} blocks")
    report.add("lookup_p99_us", [float(np.percentile(micros, 99))], "us", "<= 20")
    report.add("lookup_p50_us", [float(np.percentile(micros, 50))], "us")
    report.notes.append(
        f"lookups: n={len(micros)}, as seen from Python, prompts of {PROMPT_BLOCKS} blocks, "
        f"least {min(micros):.1f}, greatest {max(micros):.0f} us"
    )


def _damage(descriptor: int, blocks: int, random: np.random.Generator) -> None:
    for slot in random.integers(0, blocks, 1000):
        os.pwrite(descriptor, b"\xff" * 64, int(slot) * 128 + 64)
