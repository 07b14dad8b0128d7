"""Store and retrieve through a whole LocalStore (index, records, checksums) against raw io_uring over the same ranges of the same files.

Each round runs every contestant once, in random order, on the same bytes; a retrieve is checked by comparing the tensors with what was
stored. Ratios are taken within a round, because disks drift between rounds.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from tutti_mooncake import Geometry, LocalStore, StoreConfig, _native
from tutti_mooncake.bench.lmcache_peer import LmcachePeer
from tutti_mooncake.bench.report import Report, positive
from tutti_mooncake.io.device import all_in_memory
from tutti_mooncake.io.executor import default_lanes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--directory", default="/dev/shm", help="where the pool is made (default: RAM-backed files)")
    parser.add_argument("--devices", type=positive, default=1, help="files to stripe over")
    parser.add_argument("--rounds", type=positive, default=12)
    parser.add_argument("--blocks", type=positive, default=256)
    parser.add_argument("--layers", type=positive, default=32)
    parser.add_argument("--object-kib", type=positive, default=64)
    parser.add_argument("--lanes", type=int, default=0)
    parser.add_argument("--queue-depth", type=positive, default=32)
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--durability", default="data", choices=("none", "data", "flush"))
    parser.add_argument(
        "--lmcache-site",
        metavar="DIR",
        help="a folder with LMCache installed (pip install --no-deps --target DIR lmcache==0.5.6)",
    )
    parser.add_argument("--seed", type=int, default=1)


@dataclass
class Contest:
    """Seconds of wall and processor time, one entry per round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> Report:
    """Runs the rounds."""
    torch.set_num_threads(1)  # else its threads, waiting for more work, count as our processor time
    root = tempfile.mkdtemp(prefix="tutti-bench-", dir=arguments.directory)
    try:
        return _Local(arguments, root).run()
    finally:
        shutil.rmtree(root, ignore_errors=True)


class _Local:
    def __init__(self, arguments: argparse.Namespace, root: str) -> None:
        self.arguments = arguments
        self.root = root
        self.object_bytes = arguments.object_kib << 10
        self.blocks, self.layers = arguments.blocks, arguments.layers
        self.bytes = self.blocks * self.layers * self.object_bytes
        geometry = Geometry("bench", self.layers, 1, 16, 8, 128, "bfloat16", "packed", "sha256", "none", object_bytes=self.object_bytes)
        config = StoreConfig(
            devices=tuple(os.path.join(root, f"device{index}") for index in range(arguments.devices)),
            capacity=int(self.bytes * 1.02) + (32 << 20),
            executor=arguments.executor,
            lanes=arguments.lanes,
            queue_depth=arguments.queue_depth,
            durability=arguments.durability,
            prewrite=True,
        )
        self.store = LocalStore.open(config, geometry)
        memory = torch.empty(2 * self.bytes + 4096, dtype=torch.uint8)
        start = -memory.data_ptr() % 4096
        self.view = memory[start : start + 2 * self.bytes].view(self.layers, 2 * self.blocks, self.object_bytes)
        self.store.register(list(self.view))  # before the memory is touched, as an engine's fresh KV tensors are
        self.view.random_(0, 256, generator=torch.Generator().manual_seed(arguments.seed))
        first, last = self.view.data_ptr(), self.view.data_ptr() + 2 * self.bytes
        piece = (1 << 30) // self.object_bytes * self.object_bytes  # as the store's lanes do: pinned once, outside the clock
        self.registered = [(at, min(at + piece, last)) for at in range(first, last, piece)]
        self.keys = [hashlib.sha256(b"bench %d" % index).digest() for index in range(self.blocks)]
        self.lanes = arguments.lanes or default_lanes(self.store.executor, in_memory=all_in_memory(self.store._pool.devices))
        self.contests: dict[str, Contest] = {}

    def timed(self, name: str, action: Callable[[], tuple[float, float] | None]) -> None:
        """Runs one contestant; `action` returns (wall, processor) seconds, or None to be timed here."""
        cpu, begin = time.process_time(), time.perf_counter()
        seconds = action() or (time.perf_counter() - begin, time.process_time() - cpu)
        contest = self.contests.setdefault(name, Contest())
        contest.wall.append(seconds[0])
        contest.cpu.append(seconds[1])

    def ours_store(self) -> None:
        """Everything anew: the pool is cleared before, outside the clock."""
        self.store.store(self.keys, range(self.blocks)).wait().raise_for_status()

    def ours_retrieve(self) -> None:
        """Into the second half of the tensors."""
        self.store.retrieve(self.keys, range(self.blocks, 2 * self.blocks)).wait().raise_for_status()

    def check(self) -> None:
        """The second half equals the first."""
        if not torch.equal(self.view[:, self.blocks :], self.view[:, : self.blocks]):
            raise SystemExit("bench local: bytes differ from what was stored")

    def raw(self, write: bool) -> tuple[float, float]:
        """The same ranges by plain io_uring, in the order in which they lie on the device."""
        slots = {entry.key: entry.slot for entry in self.store.entries()}
        pool = self.store._pool
        half = 0 if write else self.blocks
        fds, offsets, addresses = [], [], []
        fields = self.store._table.records(pool.slot_table, np.array(list(slots.values()), dtype=np.uint32))
        rots = dict(zip(slots.values(), fields["rots"].tolist(), strict=True))
        for block, layer in itertools.product(range(self.blocks), range(self.layers)):
            slot = slots[self.keys[block]]
            device, offset = pool.layout.address(slot, rots[slot], layer)
            fds.append(pool.devices[device].direct_fd)
            offsets.append(offset)
            addresses.append(self.view[layer, half + block].data_ptr())
        return _native.raw_transfer(
            np.array(fds, dtype=np.int32),
            np.array(offsets, dtype=np.uint64),
            np.array(addresses, dtype=np.uint64),
            self.object_bytes,
            write,
            self.lanes,
            self.arguments.queue_depth,
            self.registered,
        )

    def run(self) -> Report:
        """All rounds, then the report."""
        chance = random.Random(self.arguments.seed)
        peer = None
        if self.arguments.lmcache_site:
            peer = LmcachePeer(
                self.arguments.lmcache_site,
                os.path.join(self.root, "lmcache"),
                self.blocks,
                self.layers * self.object_bytes,
            )
            peer.store()
        self.ours_store()
        for round_ in range(self.arguments.rounds + 1):  # the first one warms up
            self.one_round(chance, peer)
            if round_ == 0:
                self.contests.clear()
        report = self.report(peer)
        if peer is not None:
            peer.close()
        self.store.close()
        return report

    def one_round(self, chance: random.Random, peer: LmcachePeer | None) -> None:
        """Each contestant once, in random order."""

        def raw_store() -> None:
            self.timed("raw store", lambda: self.raw(True))

        def ours_store() -> None:
            self.store.clear()
            self.timed("ours store", self.ours_store)

        def ours_retrieve() -> None:
            self.view[:, self.blocks :] = 0
            self.timed("ours retrieve", self.ours_retrieve)
            self.check()

        def raw_retrieve() -> None:
            self.view[:, self.blocks :] = 0
            self.timed("raw retrieve", lambda: self.raw(False))
            self.check()

        actions: list[Callable[[], None]] = [ours_store, ours_retrieve, raw_retrieve, raw_store]
        if peer is not None:
            actions += [functools.partial(self.peer, "store", peer), functools.partial(self.peer, "retrieve", peer)]
        chance.shuffle(actions)
        for action in actions:
            action()

    def peer(self, what: str, peer: LmcachePeer) -> None:
        """One peer run; its process measures itself."""
        wall, cpu = peer.store() if what == "store" else peer.retrieve()
        contest = self.contests.setdefault(f"lmcache {what}", Contest())
        contest.wall.append(wall)
        contest.cpu.append(cpu)

    def report(self, peer: LmcachePeer | None) -> Report:
        """Medians; ratios within rounds."""
        report = Report("local")
        gigabytes = self.bytes / 1e9
        goals = {"retrieve": (">= 0.95", ">= 3 on RAM-backed files"), "store": (">= 0.90", ">= 2 on RAM-backed files")}
        for what in ("retrieve", "store"):
            ours, raw = self.contests[f"ours {what}"], self.contests[f"raw {what}"]
            report.add(f"{what}_gb_per_s", [gigabytes / wall for wall in ours.wall], "GB/s")
            report.add(f"raw_{what}_gb_per_s", [gigabytes / wall for wall in raw.wall], "GB/s")
            report.add(f"{what}_vs_raw", [r / o for o, r in zip(ours.wall, raw.wall, strict=True)], "ratio", goals[what][0])
            if peer is not None:
                theirs = self.contests[f"lmcache {what}"]
                report.add(f"lmcache_{what}_gb_per_s", [gigabytes / wall for wall in theirs.wall], "GB/s")
                report.add(
                    f"{what}_vs_lmcache",
                    [t / o for o, t in zip(ours.wall, theirs.wall, strict=True)],
                    "ratio",
                    goals[what][1],
                )
        ours_cpu = [cpu / gigabytes for cpu in self.contests["ours retrieve"].cpu]
        report.add("cpu_seconds_per_gb", ours_cpu, "s/GB", "<= 1/4 of LMCache")
        report.add("raw_cpu_seconds_per_gb", [cpu / gigabytes for cpu in self.contests["raw retrieve"].cpu], "s/GB")
        if peer is not None:
            theirs_cpu = [cpu / gigabytes for cpu in self.contests["lmcache retrieve"].cpu]
            report.add("lmcache_cpu_seconds_per_gb", theirs_cpu, "s/GB")
            report.notes.append(peer.note)
        kind = "RAM-backed files" if self.root.startswith("/dev/shm") else "files on disk"
        report.notes.append(
            f"{self.blocks} blocks x {self.layers} objects of {self.object_bytes >> 10} KiB on {self.arguments.devices} {kind}; "
            f"{self.store.executor}, {self.lanes} lanes, depth {self.arguments.queue_depth}, "
            f"durability {self.arguments.durability}; every read compared"
        )
        return report
