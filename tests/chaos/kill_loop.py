"""A store/evict/reuse loop that is killed at random points, and the check of what it left.

The loop tells its parent, through a pipe, each block that the store called durable and each that it removed; after the kill the pool is
opened again and must hold nothing wrong and everything that was promised and not evicted since.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.pattern import PatternTensors, chain, geometry
from tutti_mooncake import LocalStore, Status, StoreConfig

PROMPTS = 40
BLOCKS = 12
TENSOR_BLOCKS = 32


def prompt_keys(prompt: int) -> list[bytes]:
    """Prompts share their first three blocks in groups of four."""
    shared = chain(("group", prompt // 4), 3)
    return chain(("prompt", prompt), BLOCKS, shared)


def loop(config: StoreConfig, seed: int, pipe: int) -> None:
    """Runs until it is killed. Lines on the pipe: `+ PROMPT EVICTED` (its blocks are durable; so many were evicted so far)."""
    torch.set_num_threads(1)  # torch's thread pool doesn't survive the fork
    store = LocalStore.open(config, geometry())
    tensors = PatternTensors(store.geometry, TENSOR_BLOCKS)
    store.register(tensors.tensors)
    os.write(pipe, b"open\n")
    chance = random.Random(seed)
    while True:
        prompt = chance.randrange(PROMPTS)
        keys = prompt_keys(prompt)
        action = chance.random()
        if action < 0.75:
            tensors.write(keys)
            result = store.store(keys, range(BLOCKS)).wait(30)
            if all(Status(status) in (Status.OK, Status.EXISTS) for status in result.statuses):
                os.write(pipe, f"+ {prompt} {store.stats().get('evicted_blocks', 0)}\n".encode())
        elif action < 0.9:
            os.write(pipe, b"-\n")  # before: from here on older promises may be evicted
            store.evict(chance.randrange(1, 10))
        else:
            os.write(pipe, b"-\n")
            store.drop([keys[chance.randrange(BLOCKS)]])


def run_once(root: Path, seed: int, executor: str, durability: str = "data") -> Iterator[str]:
    """One kill; yields what is wrong (nothing, if all is well). The pool is small, so that every store evicts and reuses."""
    root.mkdir(exist_ok=True)
    config = StoreConfig(devices=[str(root / "a"), str(root / "b")], capacity="8MiB", executor=executor, durability=durability)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            loop(config, seed, write_end)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write_end)
    chance = random.Random(seed * 7919)
    lines = b""
    try:
        while b"open\n" not in lines:
            lines += _read_some(read_end, 30)
        end = time.monotonic() + chance.uniform(0.0, 0.05)
        while (left := end - time.monotonic()) > 0:
            lines += _read_some(read_end, left)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    while chunk := os.read(read_end, 65536):
        lines += chunk
    os.close(read_end)
    yield from check(config, lines.decode().split("\n")[1:], seed)


def _read_some(descriptor: int, seconds: float) -> bytes:
    ready, _, _ = select.select([descriptor], [], [], seconds)
    if not ready:
        return b""
    data = os.read(descriptor, 65536)
    if not data:
        raise RuntimeError("the loop ended by itself")
    return data


def check(config: StoreConfig, lines: list[str], seed: int) -> Iterator[str]:
    """Opens the pool that a killed loop left, and compares it with its promises."""
    promised: set[int] = set()
    evicted = 0
    for line in lines:
        if line.startswith("+ ") and len(line.split()) == 3:
            _, prompt, now_evicted = line.split()
            if int(now_evicted) > evicted:  # making room for it may have taken others
                promised.clear()
                evicted = int(now_evicted)
            promised.add(int(prompt))
        elif line == "-":
            promised.clear()
    # A last, unfinished store may have evicted too: only the newest promise is certain to be younger than any victim.
    store = LocalStore.open(config, geometry())
    try:
        tensors = PatternTensors(store.geometry, TENSOR_BLOCKS)
        store.register(tensors.tensors)
        resident_before = store.stats()["resident_blocks"]
        for prompt in range(PROMPTS):
            keys = prompt_keys(prompt)
            hit = store.lookup(keys)
            result = store.retrieve(keys[:hit], range(hit)).wait(30)
            for position in range(hit):
                if Status(result.statuses[position]) != Status.OK:
                    name = Status(result.statuses[position]).name
                    yield f"seed {seed}: block {position} of prompt {prompt} was recovered and fails: {name}"
                elif not tensors.holds(keys[position], position):
                    yield f"seed {seed}: WRONG BYTES in block {position} of prompt {prompt}"
        newest = next((int(line.split()[1]) for line in reversed(lines) if line.startswith("+ ") and len(line.split()) == 3), None)
        if newest is not None and newest in promised and store.lookup(prompt_keys(newest)) != BLOCKS:
            yield f"seed {seed}: prompt {newest} was promised and {store.lookup(prompt_keys(newest))} of {BLOCKS} blocks are there"
        stats = store.stats()
        if stats["resident_blocks"] + stats["free_blocks"] != stats["slots"] or stats["resident_blocks"] > resident_before:
            yield f"seed {seed}: accounting: {stats['resident_blocks']} resident + {stats['free_blocks']} free != {stats['slots']} slots"
        physical = sum(path.stat().st_blocks * 512 for device in config.devices for path in Path(device).iterdir())
        if physical > config.capacity_bytes:
            yield f"seed {seed}: {physical} bytes on disk, cap {config.capacity_bytes}"
    finally:
        store.close()
