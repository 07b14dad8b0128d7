"""The process in which LMCache's local disk backend runs, as its own engine adapter would drive it: chunks of 256 tokens, batched reads
by its thread pool, copies between its chunk buffers and the engine's paged tensors (here as plain contiguous copies, the cheapest
there can be). Protocol on stdin: `store` or `retrieve`; on stdout: lines `ANSWER {json}`.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
import threading
import time

CHUNK_BLOCKS = 16


def answer(**values: object) -> None:
    """One answer line."""
    print("ANSWER " + json.dumps(values), flush=True)


def main() -> None:
    """Serves until stdin ends."""
    import torch
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
    from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

    directory, blocks, block_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    layers = 32
    chunks = blocks // CHUNK_BLOCKS
    total = blocks * block_bytes
    os.makedirs(directory, exist_ok=True)
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=256,
        local_cpu=False,
        max_local_cpu_size=2 * total / 1024**3 + 0.5,
        local_disk=directory,
        max_local_disk_size=1e5,  # it does not take removed chunks off its count
    )
    shape = torch.Size([2, layers, 256, block_bytes * CHUNK_BLOCKS // (2 * layers * 256 * 2)])
    kv_shape = (layers, 2, 256, 8, shape[3] // 8)
    metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, kv_shape)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    cpu = LocalCPUBackend(config, metadata=metadata, dst_device="cpu")
    disk = LocalDiskBackend(config, loop, cpu, dst_device="cpu", metadata=metadata)
    memory = torch.empty(2 * total, dtype=torch.uint8)
    pages = memory.data_ptr() + -memory.data_ptr() % 4096
    ctypes.CDLL(None).madvise(ctypes.c_void_p(pages), ctypes.c_size_t(2 * total - 4096), 14)  # MADV_HUGEPAGE, as ours asks for its tensors
    memory[:total].random_(0, 256)
    paged = memory[:total].view(chunks, -1)
    target = memory[total:].view(chunks, -1)
    keys = [CacheEngineKey("bench", 1, 0, index + 1, torch.bfloat16) for index in range(chunks)]

    def store() -> None:
        done = threading.Semaphore(0)
        for key, part in zip(keys, paged, strict=True):
            chunk = cpu.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD)
            chunk.tensor.view(torch.uint8).view(-1).copy_(part)
            disk.submit_put_task(key, chunk, on_complete_callback=lambda _key: done.release())
            chunk.ref_count_down()
        for _ in keys:
            done.acquire()

    def retrieve() -> None:
        for chunk, part in zip(disk.batched_get_blocking(keys), target, strict=True):
            part.copy_(chunk.tensor.view(torch.uint8).view(-1))
            chunk.ref_count_down()

    answer(
        note=f"LMCache local disk: {chunks} chunks of 256 tokens ({block_bytes * CHUNK_BLOCKS >> 20} MiB), its 4 I/O threads, "
        "buffered I/O, no checksums"
    )
    for line in sys.stdin:
        if line.strip() == "store":
            for key in keys:
                disk.remove(key)
        else:
            for name in os.listdir(directory):
                descriptor = os.open(os.path.join(directory, name), os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
            target.zero_()
        before, begin = time.process_time(), time.perf_counter()
        store() if line.strip() == "store" else retrieve()
        wall, used = time.perf_counter() - begin, time.process_time() - before
        if line.strip() == "retrieve" and not torch.equal(paged, target):
            raise SystemExit("LMCache returned other bytes than it was given")
        answer(wall=wall, cpu=used)


if __name__ == "__main__":
    main()
