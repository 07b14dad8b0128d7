"""Blocks of another process's store, fetched into this one's tensors, against a raw transfer of the same bytes.

Both processes are on this machine, and Mooncake's Transfer Engine moves the bytes over TCP on loopback, whose speed is the processor's.
The raw transfer goes from the owner's registered memory to the requester's in pieces of the same sizes, without a store, a check or a copy.
Turns are in random order; every fetch is compared with what was stored.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch

from tutti_mooncake import Geometry, LocalStore, StoreConfig
from tutti_mooncake.bench.report import Report, positive
from tutti_mooncake.keys import as_key_array
from tutti_mooncake.remote.fetcher import Fetcher
from tutti_mooncake.remote.owner import Owner
from tutti_mooncake.remote.transport import MooncakeTransport, Piece
from tutti_mooncake.remote.windows import Windows, blocks_of_a_window
from tutti_mooncake.remote.wire import Peer

HOST = "127.0.0.1"
SECONDS = 120.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--directory", default="/dev/shm", help="where the owner's pool is made (default: RAM-backed files)")
    parser.add_argument("--devices", type=positive, default=1, help="files to stripe over")
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--blocks", type=positive, default=128)
    parser.add_argument("--layers", type=positive, default=32)
    parser.add_argument("--object-kib", type=positive, default=64)
    parser.add_argument("--seed", type=int, default=1)


def run(arguments: argparse.Namespace) -> Report:
    """Starts the owner's process and runs the rounds."""
    with tempfile.TemporaryDirectory(prefix="tutti-bench-", dir=arguments.directory) as root:
        command = [sys.executable, "-m", "tutti_mooncake.bench.remote", root]
        command += [str(value) for value in (arguments.devices, arguments.blocks, arguments.layers, arguments.object_kib)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
            try:
                return _rounds(arguments, owner)
            finally:
                owner.kill()


def _rounds(arguments: argparse.Namespace, owner: subprocess.Popen[str]) -> Report:
    geometry = _geometry(arguments.layers, arguments.object_kib)
    peer = Peer("owner", 1, _said(owner, "address"))
    memory = torch.zeros((arguments.layers, arguments.blocks, geometry.object_bytes), dtype=torch.uint8)
    wanted = _content(arguments.blocks, arguments.layers, geometry.object_bytes)
    transport = MooncakeTransport(HOST)
    fetcher = Fetcher("bench", geometry, transport, list(memory))
    landing = Windows(geometry, transport, count=2, window_blocks=blocks_of_a_window(geometry))  # of raw transfers
    keys, blocks = as_key_array(_keys(arguments.blocks)), np.arange(arguments.blocks, dtype=np.uint32)
    size = arguments.blocks * geometry.payload_bytes_per_block
    raw: list[float] = []
    ours: list[float] = []
    first: list[float] = []

    def transfer() -> None:
        assert owner.stdin is not None
        owner.stdin.write(f"{transport.segment} {landing.base}\n")
        owner.stdin.flush()
        raw.append(float(_said(owner, "seconds")))

    def fetch() -> None:
        memory.zero_()
        result = fetcher.fetch(peer, keys, blocks, seconds=SECONDS)
        if result.blocks != arguments.blocks or not torch.equal(memory, wanted):
            raise SystemExit(f"bench remote: {result.blocks} of {arguments.blocks} blocks came, {result.status.name} {result.why}")
        ours.append(result.seconds)
        first.append(1e3 * result.first_window_seconds)

    chance = random.Random(arguments.seed)
    for round_ in range(arguments.rounds + 1):  # the first one warms up
        for turn in chance.sample([transfer, fetch], 2):
            turn()
        if round_ == 0:
            for values in (raw, ours, first):
                values.clear()
    report = Report("remote")
    report.add("remote_vs_raw_te", [theirs / mine for theirs, mine in zip(raw, ours, strict=True)], "ratio", ">= 0.90")
    report.add("remote_gb_per_s", [size / 1e9 / seconds for seconds in ours], "GB/s")
    report.add("raw_te_gb_per_s", [size / 1e9 / seconds for seconds in raw], "GB/s")
    report.add("first_layer_ms", first, "ms")
    report.notes.append(
        f"{arguments.blocks} blocks x {arguments.layers} objects of {arguments.object_kib} KiB, windows of {blocks_of_a_window(geometry)} "
        f"blocks; {transport.protocol} on loopback; first_layer_ms: until the first window, with all its layers, was announced"
    )
    fetcher.close()
    return report


def _said(owner: subprocess.Popen[str], what: str) -> str:
    """The rest of the owner's next line that begins so."""
    assert owner.stdout is not None
    for line in owner.stdout:
        if line.startswith(what + " "):
            return line.split()[1]
    raise SystemExit("bench remote: the owner's process has ended")


def _geometry(layers: int, object_kib: int) -> Geometry:
    return Geometry("bench", layers, 1, 16, 8, 128, "bfloat16", "packed", "sha256", "none", object_bytes=object_kib << 10)


def _keys(blocks: int) -> list[bytes]:
    return [hashlib.sha256(b"remote %d" % block).digest() for block in range(blocks)]


def _content(blocks: int, layers: int, object_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (layers, blocks, object_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def serve(root: str, devices: int, blocks: int, layers: int, object_kib: int) -> None:
    """The owner's process: a raw transfer of all blocks for each line of input, `SEGMENT ADDRESS`."""
    geometry = _geometry(layers, object_kib)
    size = blocks * geometry.payload_bytes_per_block
    paths = tuple(f"{root}/{device}" for device in range(devices))
    with LocalStore.open(StoreConfig(devices=paths, capacity=size + size // 16 + (64 << 20), prewrite=True), geometry) as store:
        store.register(list(_content(blocks, layers, geometry.object_bytes)))
        store.store(_keys(blocks), range(blocks)).wait(SECONDS).raise_for_status()
        transport = MooncakeTransport(HOST)
        owner = Owner(store, lambda: Peer("owner", 1), transport, host=HOST)
        source = Windows(geometry, transport, count=2, window_blocks=blocks_of_a_window(geometry))
        print("address", owner.address, flush=True)
        for line in sys.stdin:
            segment, address = line.split()
            begin = time.perf_counter()
            for start in range(0, blocks, source.window_blocks):
                window = start // source.window_blocks % 2
                pieces: list[Piece] = source.pieces(
                    window, min(source.window_blocks, blocks - start), int(address), source.blocks, source.first_block(window)
                )
                transport.write(segment, pieces)
            print("seconds", time.perf_counter() - begin, flush=True)
        owner.close()


if __name__ == "__main__":
    serve(sys.argv[1], *map(int, sys.argv[2:]))
