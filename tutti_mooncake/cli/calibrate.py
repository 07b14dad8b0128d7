"""`tutti calibrate`: measures what a load costs on these devices, so that an engine knows it from its first request on."""

from __future__ import annotations

import argparse
import secrets
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from tutti_mooncake.cli.output import print_json, print_section
from tutti_mooncake.cli.store_arguments import add_store_arguments, store_config
from tutti_mooncake.errors import ConfigError

if TYPE_CHECKING:
    from tutti_mooncake.schedule import LinearCost
    from tutti_mooncake.store import LocalStore

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_CALIBRATE = """\
Measures how long loads of 1 to 64 blocks take, on blocks that it stores for that and removes again, and leaves the result in
the pool; of a full pool it takes the room of up to 8 blocks, those used least recently. An engine then knows from its first
request which hits are faster to load than to compute; it goes on measuring by itself, as it does with the speed of
computing, which only an engine can measure. No engine may have the pool open.
"""
_MOST_BLOCKS = 64
_SCRATCH_BYTES = 1 << 30


def add_commands(commands: Subparsers) -> None:
    """Adds the command."""
    calibrate = commands.add_parser("calibrate", help="measure what a load costs", description=_CALIBRATE)
    add_store_arguments(calibrate)
    calibrate.add_argument("--repeats", type=int, default=8, metavar="N", help="loads of each size (default: 8)")
    calibrate.set_defaults(run=run_calibrate)


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Measures, remembers, prints."""
    import torch

    from tutti_mooncake.schedule import LOAD_COST, LoadCost
    from tutti_mooncake.store import LocalStore, read_geometry

    if not 1 <= arguments.repeats <= 1000:
        raise ConfigError(f"--repeats {arguments.repeats}: give a number of loads from 1 to 1000")
    config = store_config(arguments)
    geometry = read_geometry(config)
    if geometry.tp_size != 1:
        raise ConfigError(f"calibrate measures pools of one rank; this one has {geometry.tp_size}. Its engine measures by itself")
    with LocalStore.open(config, geometry, create=False) as store:
        counts = store.stats()
        room = max(counts["free_blocks"], min(8, counts["slots"] // 2))
        blocks = min(_MOST_BLOCKS, room, max(1, _SCRATCH_BYTES // geometry.payload_bytes_per_block))
        if blocks < 1:
            raise ConfigError(f"the pool has {counts['slots']} slots, too few to measure anything")
        shape = (blocks, geometry.object_bytes)
        store.register([torch.zeros(shape, dtype=torch.uint8) for _ in range(geometry.objects_per_block)])
        load = _measure(store, blocks, arguments.repeats)
        kept = LoadCost.from_dict(store.memory.get(LOAD_COST, {}))
        kept.load = load
        store.memory[LOAD_COST] = kept.as_dict()
    result: dict[str, Any] = {
        "blocks_measured": blocks,
        "load_fixed_ms": round(load.fixed * 1e3, 4),
        "load_ms_per_block": round(load.each * 1e3, 4),
        "load_gb_per_s": round(geometry.payload_bytes_per_block / load.each / 1e9, 2) if load.each else None,
    }
    if kept.step.known:
        saved = kept.step.each * geometry.block_tokens - load.each
        result["compute_ms_per_block"] = round(kept.step.each * geometry.block_tokens * 1e3, 4)
        result["worth_from_blocks"] = int(load.fixed / saved) + 1 if saved > 0 else None
    if arguments.json:
        print_json(result)
    else:
        print_section("calibration", result)
        if "worth_from_blocks" not in result:
            print("how fast an engine computes isn't known yet: it measures that by itself")
    return 0


def _measure(store: LocalStore, blocks: int, repeats: int) -> LinearCost:
    from tutti_mooncake.schedule import LinearCost

    keys = [secrets.token_bytes(32) for _ in range(blocks)]
    stored = store.store(keys, range(blocks), admit=True).wait()
    stored.raise_for_status()
    if stored.ok_blocks < blocks:
        store.drop(keys)
        raise ConfigError(f"the pool took {stored.ok_blocks} of {blocks} blocks to measure with: raise write_budget_bytes_per_day for this")
    cost = LinearCost()
    try:
        sizes = sorted({1, blocks, *(size for size in (2, 4, 8, 16, 32, 64) if size < blocks)})
        rounds = np.random.default_rng(1).permutation(np.repeat(sizes, repeats))
        for size in rounds.tolist():
            begin = time.perf_counter()
            store.retrieve(keys[:size], range(size)).wait().raise_for_status()
            cost.observe(size, time.perf_counter() - begin)
    finally:
        store.drop(keys)
    return cost
