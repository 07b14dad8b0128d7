"""What one retrieve call costs the engine's thread: 80 layers, 64 and 8,192 blocks; bytes move in other threads."""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time

import numpy as np
import torch

from tutti_mooncake import Geometry, LocalStore, StoreConfig
from tutti_mooncake.bench.report import Report, positive

SMALL, LARGE = 64, 8192


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--directory", default="/dev/shm")
    parser.add_argument("--rounds", type=positive, default=30)


def run(arguments: argparse.Namespace) -> Report:
    """Objects of 512 bytes: the number of objects is what counts here, not their size."""
    root = tempfile.mkdtemp(prefix="tutti-bench-", dir=arguments.directory)
    geometry = Geometry("bench", 80, 1, 16, 8, 128, "bfloat16", "packed", "sha256", "none", object_bytes=512)
    config = StoreConfig(devices=(root,), capacity=LARGE * (80 * 520 + 200) + (8 << 20))
    report = Report("enqueue")
    try:
        with LocalStore.open(config, geometry) as store:
            memory = torch.zeros((80, LARGE, 512), dtype=torch.uint8)
            store.register(list(memory))
            keys = np.random.default_rng(1).integers(0, 256, (LARGE, 32), dtype=np.uint8)
            store.store(keys, np.arange(LARGE, dtype=np.uint32)).wait().raise_for_status()
            seconds: dict[int, list[float]] = {SMALL: [], LARGE: []}
            for _ in range(arguments.rounds):
                for blocks, values in seconds.items():
                    ids = np.arange(blocks, dtype=np.uint32)
                    chain = keys[:blocks]
                    begin = time.perf_counter()
                    operation = store.retrieve(chain, ids)
                    values.append(time.perf_counter() - begin)
                    operation.wait().raise_for_status()
            report.add("enqueue_ms_80_layers", [1e3 * value for value in seconds[LARGE]], "ms", "<= 2")
            report.add("enqueue_ms_80_layers_64_blocks", [1e3 * value for value in seconds[SMALL]], "ms")
            extra = [1e3 * (large - small) for large, small in zip(seconds[LARGE], seconds[SMALL], strict=True)]
            report.add("enqueue_extra_ms", extra, "ms", "<= 0.5")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    report.notes.append("the call resolves keys to slots, pins, and hands the plan over; all blocks are compared by checksum afterwards")
    return report
