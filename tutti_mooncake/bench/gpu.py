"""Store and retrieve between files and paged GPU memory by the I/O kernel, against what bounds them: reading or writing the same ranges of
the same files without a GPU, and the copy over PCIe.

Each round runs every contestant once, in random order, on the same bytes; a retrieve is checked by comparing GPU memory with what
was stored. `vs_limit` is taken within a round: ours over the slower of raw file I/O (the faster of io_uring and plain calls, into
slots that are reused as ours are) and one PCIe copy. The peer copies each object by a cudaMemcpyAsync of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable

import numpy as np
import torch

from tutti_mooncake import Geometry, LocalStore, StoreConfig, _native
from tutti_mooncake.bench.report import Report, positive
from tutti_mooncake.io import executor as executor_module
from tutti_mooncake.io.device import all_in_memory
from tutti_mooncake.io.partition import SmPartition

_SLOT_SETS = 8  # objects per thread that the raw contestants cycle through


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--directory", default="/dev/shm", help="where the pool is made; a tmpfs mounted with huge=always is faster")
    parser.add_argument("--devices", type=positive, default=1, help="files to stripe over")
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="bytes of one retrieve")
    parser.add_argument("--layers", type=positive, default=32)
    parser.add_argument("--object-kib", default="64", help="sizes of an object, with commas between")
    parser.add_argument("--lanes", type=int, default=0, help="threads that serve files (0 = as the store chooses)")
    parser.add_argument("--queue-depth", type=positive, default=32)
    parser.add_argument("--io-blocks", default="8", help="thread blocks of the I/O kernel, with commas between")
    parser.add_argument("--issuers", type=positive, default=executor_module._GPU_ISSUERS)
    parser.add_argument("--movers", type=positive, default=executor_module._GPU_MOVERS)
    parser.add_argument("--parts", default="files,model,interference", help="what to measure")
    parser.add_argument("--pinned", default="256MiB")
    parser.add_argument("--seed", type=int, default=1)


def run(arguments: argparse.Namespace) -> Report:
    """The parts that were asked for."""
    refusal = _native.probe_cuda()
    if refusal:
        raise SystemExit(f"bench gpu: {refusal}")
    executor_module._GPU_ISSUERS = arguments.issuers
    executor_module._GPU_MOVERS = arguments.movers
    report = Report("gpu")
    parts = {"files": files, "model": model, "interference": interference}
    for part in arguments.parts.split(","):
        if part not in parts:
            raise SystemExit(f"bench gpu: --parts {part}: there are {', '.join(parts)}")
        parts[part](arguments, report)
    report.notes.append(f"{torch.cuda.get_device_name()}, driver CUDA {torch.version.cuda}; every read compared")
    return report


def files(arguments: argparse.Namespace, report: Report) -> None:
    """The executor uring-gpu on files: all sizes and numbers of thread blocks; the first carries the goals' names."""
    sizes = [int(size) for size in arguments.object_kib.split(",")]
    blocks = [int(number) for number in arguments.io_blocks.split(",")]
    for index, (size, number) in enumerate(itertools.product(sizes, blocks)):
        root = tempfile.mkdtemp(prefix="tutti-bench-", dir=arguments.directory)
        try:
            _Gpu(arguments, root, size << 10, number).run(report, "" if index == 0 else f"_{size}k_{number}b")
        finally:
            shutil.rmtree(root, ignore_errors=True)


def model(arguments: argparse.Namespace, report: Report) -> None:
    """The nvme path over the controller model, whose images are pinned memory: SGL against PRP, and one object at a time."""
    executor_module._GPU_LANES = 32
    for pointers in ("sgl", "prp"):
        root = tempfile.mkdtemp(prefix="tutti-bench-", dir=arguments.directory)
        try:
            gpu = _Gpu(arguments, root, 64 << 10, 8, "nvme-model", pointers)
            gpu.store.store(gpu.keys, gpu.from_blocks).wait().raise_for_status()
            for _ in range(arguments.rounds + 1):
                gpu.view[:, torch.from_numpy(gpu.to_blocks.astype(np.int64)).cuda()] = 0
                gpu.timed("retrieve", gpu.retrieve)
                if not gpu.same():
                    raise SystemExit("bench gpu: bytes differ from what was stored")
            gpu.store.close()
            name, goal = ("model_retrieve_gb_per_s", ">= 49") if pointers == "sgl" else ("model_retrieve_prp_gb_per_s", "")
            report.add(name, [gpu.bytes / 1e9 / seconds for seconds in gpu.seconds["retrieve"][1:]], "GB/s", goal)
        finally:
            shutil.rmtree(root, ignore_errors=True)
    saved = executor_module._GPU_ISSUERS, executor_module._GPU_MOVERS
    executor_module._GPU_LANES, executor_module._GPU_ISSUERS, executor_module._GPU_MOVERS = 1, 1, 31
    root = tempfile.mkdtemp(prefix="tutti-bench-", dir=arguments.directory)
    try:
        gpu = _Gpu(arguments, root, 64 << 10, 1, "nvme-model", "sgl", gigabytes=0.2)
        gpu.store.store(gpu.keys, gpu.from_blocks).wait().raise_for_status()
        for _ in range(arguments.rounds + 1):
            gpu.timed("one by one", gpu.retrieve)
        gpu.store.close()
        objects = gpu.blocks * gpu.layers
        report.add("submit_complete_us", [seconds / objects * 1e6 for seconds in gpu.seconds["one by one"][1:]], "us", "<= 10")
        report.notes.append(f"submit_complete_us: one command in flight at a time, {objects} in a row, checksum included")
    finally:
        shutil.rmtree(root, ignore_errors=True)
        executor_module._GPU_LANES, (executor_module._GPU_ISSUERS, executor_module._GPU_MOVERS) = 32, saved


class _Layer:
    """A transformer layer of Llama-3-8B's shape: 2,048 new tokens after a prefix of 16 K, bf16."""

    def __init__(self) -> None:
        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02

        self.hidden = torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16)
        self.qkv, self.out, self.up, self.down = weight(4096, 6144), weight(4096, 4096), weight(4096, 28672), weight(14336, 4096)
        self.keys = torch.randn(1, 8, 16384 + 2048, 128, device="cuda", dtype=torch.bfloat16)
        self.values = torch.randn_like(self.keys)

    def run(self) -> torch.Tensor:
        """One pass."""
        query = (self.hidden @ self.qkv)[:, :4096].view(1, 2048, 32, 128).transpose(1, 2)
        keys, values = self.keys.repeat_interleave(4, 1), self.values.repeat_interleave(4, 1)
        attention = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
        hidden = self.hidden + attention.transpose(1, 2).reshape(2048, 4096) @ self.out
        gate, up = (hidden @ self.up).chunk(2, 1)
        return hidden + (torch.nn.functional.silu(gate) * up) @ self.down

    def milliseconds(self, stream: torch.cuda.Stream, passes: int) -> float:
        """Of one pass, on this stream."""
        with torch.cuda.stream(stream):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.run()
            begin.record()
            for _ in range(passes):
                self.run()
            end.record()
            end.synchronize()
        return float(begin.elapsed_time(end)) / passes


def interference(arguments: argparse.Namespace, report: Report) -> None:
    """A compute-bound layer on its own SMs, without and with a retrieve that goes on beside it on the other SMs."""
    whole = _Layer()
    on_all = [whole.milliseconds(torch.cuda.current_stream(), 20) for _ in range(arguments.rounds)]
    partition = SmPartition(0, 8)
    if partition.kind != "green":
        raise SystemExit(f"bench gpu: no SM partition: {partition.reason}")
    root = tempfile.mkdtemp(prefix="tutti-bench-", dir=arguments.directory)
    executor_module._IO_STREAM = partition.io_stream() or 0
    try:
        stream = torch.cuda.ExternalStream(partition.compute_stream() or 0)
        gpu = _Gpu(arguments, root, 64 << 10, partition.io_sms)
        gpu.store.store(gpu.keys, gpu.from_blocks).wait().raise_for_status()
        alone, beside, flow = [], [], []
        for _ in range(arguments.rounds):
            alone.append(whole.milliseconds(stream, 20))
            moved, stop = [0], threading.Event()

            def retrieves(moved: list[int] = moved, stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    gpu.retrieve()
                    moved[0] += 1

            reader = threading.Thread(target=retrieves)
            begin = time.perf_counter()
            reader.start()
            time.sleep(0.05)
            beside.append(whole.milliseconds(stream, 60))
            stop.set()
            reader.join()
            flow.append(moved[0] * gpu.bytes / 1e9 / (time.perf_counter() - begin))
        gpu.store.close()
        report.add("layer_slowdown", [100 * (b / a - 1) for a, b in zip(alone, beside, strict=True)], "%", "<= 2")
        report.add("layer_slowdown_flow_gb_per_s", flow, "GB/s", ">= 25")
        report.add("layer_124_of_132_sms", [a / b for a, b in zip(alone, on_all, strict=True)], "ratio")
        report.add("layer_ms_alone", alone, "ms")
        report.notes.append(
            f"layer_slowdown: 2,048 tokens after 16 K on {partition.compute_sms} SMs, I/O kernel on the other {partition.io_sms}"
        )
    finally:
        executor_module._IO_STREAM = 0
        del whole
        torch.cuda.empty_cache()
        partition.close()
        shutil.rmtree(root, ignore_errors=True)


class _Gpu:
    def __init__(
        self,
        arguments: argparse.Namespace,
        root: str,
        object_bytes: int,
        io_blocks: int,
        executor: str = "uring-gpu",
        pointers: str = "sgl",
        gigabytes: float = 0,
    ) -> None:
        self.arguments = arguments
        self.object_bytes = object_bytes
        self.io_blocks = io_blocks
        self.layers = arguments.layers
        self.blocks = max(1, int((gigabytes or arguments.gigabytes) * 1e9) // (self.layers * object_bytes))
        self.bytes = self.blocks * self.layers * object_bytes
        geometry = Geometry("bench", self.layers, 1, 16, 8, 128, "bfloat16", "packed", "sha256", "none", object_bytes=object_bytes)
        config = StoreConfig(
            devices=tuple(os.path.join(root, f"device{index}") for index in range(arguments.devices)),
            capacity=int(self.bytes * 1.02) + (32 << 20),
            lanes=arguments.lanes,
            queue_depth=arguments.queue_depth,
            pinned_bytes=arguments.pinned,
            executor=executor,
            nvme_pointers=pointers,
            io_blocks=io_blocks,
            prewrite=True,
            write_deadline_seconds=20,
        )
        self.store = LocalStore.open(config, geometry)
        # Paged memory: engine blocks are used in a shuffled order, as an engine's allocator hands them out.
        self.view = torch.empty((self.layers, 2 * self.blocks, object_bytes), dtype=torch.uint8, device="cuda")
        self.view.random_(0, 256, generator=torch.Generator("cuda").manual_seed(arguments.seed))
        order = np.random.default_rng(arguments.seed).permutation(2 * self.blocks).astype(np.uint32)
        self.from_blocks, self.to_blocks = order[: self.blocks], order[self.blocks :]
        self.store.register(list(self.view))
        self.in_memory = all_in_memory(self.store._pool.devices)
        self.served_by = executor_module.choose_executor("auto", in_memory=self.in_memory)[0]
        self.threads = arguments.lanes or executor_module.default_lanes(self.served_by, in_memory=self.in_memory)
        self.keys = [hashlib.sha256(b"bench %d" % index).digest() for index in range(self.blocks)]
        self.pinned = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        self.seconds: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def timed(self, name: str, action: Callable[[], float | None]) -> None:
        """Runs one contestant; `action` returns seconds, or None to be timed here."""
        torch.cuda.synchronize()
        cpu, begin = time.process_time(), time.perf_counter()
        seconds = action() or time.perf_counter() - begin
        self.cpu.setdefault(name, []).append(time.process_time() - cpu)
        self.seconds.setdefault(name, []).append(seconds)

    def retrieve(self) -> None:
        """Into the other half of the blocks."""
        self.store.retrieve(self.keys, self.to_blocks).wait().raise_for_status()

    def ranges(self) -> tuple[np.ndarray, np.ndarray]:
        """Descriptors and offsets of all objects, block by block."""
        slots = {entry.key: entry.slot for entry in self.store.entries()}
        pool = self.store._pool
        fields = self.store._table.records(pool.slot_table, np.array(list(slots.values()), dtype=np.uint32))
        rots = dict(zip(slots.values(), fields["rots"].tolist(), strict=True))
        fds, offsets = [], []
        for block, layer in itertools.product(range(self.blocks), range(self.layers)):
            slot = slots[self.keys[block]]
            device, offset = pool.layout.address(slot, rots[slot], layer)
            fds.append(pool.devices[device].direct_fd)
            offsets.append(offset)
        return np.array(fds, dtype=np.int32), np.array(offsets, dtype=np.uint64)

    def raw(self, write: bool, depth: int) -> float:
        """The same ranges without a GPU, through as many slots as stay in the processor's cache."""
        fds, offsets = self.ranges()
        slots = self.threads * max(_SLOT_SETS, depth)
        addresses = self.pinned.data_ptr() + (np.arange(len(fds), dtype=np.uint64) % slots) * self.object_bytes
        memory = [(self.pinned.data_ptr(), self.pinned.data_ptr() + slots * self.object_bytes)] if depth else []
        seconds, _ = _native.raw_transfer(fds, offsets, addresses, self.object_bytes, write, self.threads, depth, memory)
        return float(seconds)

    def copy(self, to_gpu: bool) -> float:
        """Seconds that one copy of as many bytes takes over PCIe, by copies of 1 GiB."""
        device = torch.empty_like(self.pinned, device="cuda")
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        repeats = 4
        begin.record()
        for _ in range(repeats):
            device.copy_(self.pinned, non_blocking=True) if to_gpu else self.pinned.copy_(device, non_blocking=True)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end) * 1e-3 / repeats / self.pinned.numel() * self.bytes)

    def copy_each(self) -> float:
        """Seconds of one cudaMemcpyAsync per object into the same places: what there is without a kernel that scatters."""
        objects = self.pinned[: self.pinned.numel() // self.object_bytes * self.object_bytes].view(-1, self.object_bytes)
        begin = time.perf_counter()
        number: int = min(self.blocks, 256)
        for layer in range(self.layers):
            for block in self.to_blocks[:number].tolist():
                self.view[layer, block].copy_(objects[block % len(objects)], non_blocking=True)
        torch.cuda.synchronize()
        return float((time.perf_counter() - begin) * self.blocks / number)  # of a part: copies are all alike

    def same(self) -> bool:
        """Whether the blocks that were read equal those that were stored."""
        source = torch.from_numpy(self.from_blocks.astype(np.int64)).cuda()
        target = torch.from_numpy(self.to_blocks.astype(np.int64)).cuda()
        return all(torch.equal(layer[source], layer[target]) for layer in self.view)

    def run(self, report: Report, suffix: str) -> None:
        """All rounds of one size."""
        chance = random.Random(self.arguments.seed)
        self.store.store(self.keys, self.from_blocks).wait().raise_for_status()

        def ours_store() -> None:
            self.store.clear()
            self.timed("store", lambda: self.store.store(self.keys, self.from_blocks).wait().raise_for_status())

        def ours_retrieve() -> None:
            self.view[:, torch.from_numpy(self.to_blocks.astype(np.int64)).cuda()] = 0
            self.timed("retrieve", self.retrieve)
            if not self.same():
                raise SystemExit("bench gpu: bytes differ from what was stored")

        def raw_read() -> None:
            self.timed("raw plain read", lambda: self.raw(False, 0))
            self.timed("raw uring read", lambda: self.raw(False, self.arguments.queue_depth))

        def raw_write() -> None:
            # Of whatever lies in the slots: the blocks are stored again after it.
            self.timed("raw plain write", lambda: self.raw(True, 0))
            self.timed("raw uring write", lambda: self.raw(True, self.arguments.queue_depth))
            ours_store()
            self.seconds["store"].pop()
            self.cpu["store"].pop()

        def copies() -> None:
            self.timed("copy to gpu", lambda: self.copy(True))
            self.timed("copy to host", lambda: self.copy(False))

        actions = [ours_store, ours_retrieve, raw_read, raw_write, copies]
        for round_ in range(self.arguments.rounds + 1):  # the first one warms up
            chance.shuffle(actions)
            for action in actions:
                action()
            if round_ == 0:
                self.seconds.clear()
                self.cpu.clear()
        self.timed("copy each", self.copy_each)
        self.report(report, suffix)
        counters = self.store.stats()
        self.store.close()
        report.notes.append(
            f"{suffix.strip('_') or 'first'}: {self.blocks} blocks x {self.layers} objects of {self.object_bytes >> 10} KiB on "
            f"{self.arguments.devices} {'RAM-backed' if self.in_memory else 'disk'} files, {self.threads} threads by {self.served_by}, "
            f"{self.io_blocks} thread blocks; {counters['executor']}: {counters['executor_note'] or 'nothing to remark'}"
        )

    def report(self, report: Report, suffix: str) -> None:
        """Medians; ratios within rounds."""
        gigabytes = self.bytes / 1e9
        for what, raw, copy, goal in (
            ("retrieve", "read", "copy to gpu", ">= 0.95"),
            ("store", "write", "copy to host", ">= 0.90"),
        ):
            ours = self.seconds[what]
            raws = [min(pair) for pair in zip(self.seconds[f"raw plain {raw}"], self.seconds[f"raw uring {raw}"], strict=True)]
            limits = [max(pair) for pair in zip(raws, self.seconds[copy], strict=True)]
            report.add(f"{what}_gb_per_s{suffix}", [gigabytes / seconds for seconds in ours], "GB/s")
            report.add(f"raw_{raw}_gb_per_s{suffix}", [gigabytes / seconds for seconds in raws], "GB/s")
            report.add(f"{copy.replace(' ', '_')}_gb_per_s{suffix}", [gigabytes / seconds for seconds in self.seconds[copy]], "GB/s")
            report.add(f"{what}_vs_limit{suffix}", [limit / mine for mine, limit in zip(ours, limits, strict=True)], "ratio", goal)
            report.add(f"{what}_cpu_seconds_per_gb{suffix}", [cpu / gigabytes for cpu in self.cpu[what]], "s/GB")
        report.add(f"memcpy_per_object_gb_per_s{suffix}", [gigabytes / seconds for seconds in self.seconds["copy each"]], "GB/s")
