"""Commands that make or change a pool: init, pin, clear."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti_mooncake.cli.output import Progress, duration_text, plain, print_json, print_section
from tutti_mooncake.cli.store_arguments import add_store_arguments, open_existing, store_config
from tutti_mooncake.errors import ConfigError, KeyFormatError
from tutti_mooncake.geometry import Geometry
from tutti_mooncake.keys import KEY_BYTES

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_INIT = """\
Makes a pool, so that an engine finds it ready. An engine makes its pool by itself when there is none: use this to
choose the moment, to write the whole pool once (--prewrite, so that later writes find allocated blocks), or to check
the sizes. The geometry has to be the engine's: "geometry" in `tutti stat --json` of an existing pool is what --geometry
takes. A pool that is there already is left as it is; --force removes it first, with all its blocks, also when it is
damaged.
"""
_PIN = """\
Protects the leading blocks of a prefix from eviction for as long as this command runs: until the lease ends or it is
interrupted. The process holds the pool meanwhile, so no engine can open it.
"""


def add_commands(commands: Subparsers) -> None:
    """Adds this file's commands."""
    init = commands.add_parser("init", help="make a pool", description=_INIT)
    add_store_arguments(init)
    init.add_argument("--prewrite", action="store_true", help="write the whole pool once")
    init.add_argument("--force", action="store_true", help="remove a pool of this name that is there, with its blocks")
    geometry = init.add_argument_group("geometry")
    geometry.add_argument("--geometry", metavar="FILE", help="all fields in a JSON file")
    for field in fields(Geometry):
        needed = "" if field.default is MISSING else f" (default: {field.default!r})"
        geometry.add_argument(
            f"--{field.name.replace('_', '-')}",
            dest=f"geometry_{field.name}",
            type=int if field.type in (int, "int") else str,
            metavar="N" if field.type in (int, "int") else "TEXT",
            help=f"Geometry.{field.name}{needed}",
        )
    init.set_defaults(run=run_init)

    pin = commands.add_parser("pin", help="protect a prefix from eviction", description=_PIN)
    add_store_arguments(pin)
    pin.add_argument("keys", nargs="+", metavar="KEY", help="block keys of one chain, 64 hex digits each, first one first")
    pin.add_argument("--lease-seconds", type=float, default=600, metavar="S", help="at most this long (default: 600)")
    pin.set_defaults(run=run_pin)

    clear = commands.add_parser("clear", help="remove every block", description="Removes every block; the pool stays.")
    add_store_arguments(clear)
    clear.add_argument("--yes", action="store_true", help="don't ask")
    clear.set_defaults(run=run_clear)


def run_init(arguments: argparse.Namespace) -> int:
    """Makes the pool and prints its sizes."""
    from tutti_mooncake.store import LocalStore
    from tutti_mooncake.store.pool import has_pool, remove_pool

    overrides = {"prewrite": True} if arguments.prewrite else {}
    config = store_config(arguments, **overrides)
    geometry = geometry_from_arguments(arguments)
    removed = remove_pool(config, geometry) if arguments.force else []
    was_there = has_pool(config)
    with Progress("prewrite", unit="bytes") as progress, LocalStore.open(config, geometry, progress=progress) as store:
        statistics = store.stats()
    result = {"made": not was_there, "removed": removed, "config": config.as_dict(), "geometry": geometry.as_dict(), "stats": statistics}
    if arguments.json:
        print_json(result)
    else:
        print("the pool was there already; nothing was changed" if was_there else "the pool was made")
        print_section(f"pool {config.pool} on {', '.join(config.devices)}", statistics)
    return 0


def geometry_from_arguments(arguments: argparse.Namespace) -> Geometry:
    """The file's fields, overridden by the single arguments. Raises ConfigError naming what is missing."""
    values: dict[str, Any] = {}
    if arguments.geometry:
        try:
            values.update(json.loads(Path(arguments.geometry).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"--geometry {arguments.geometry}: {error}") from error
    for field in fields(Geometry):
        given = getattr(arguments, f"geometry_{field.name}")
        if given is not None:
            values[field.name] = given
    missing = [field.name for field in fields(Geometry) if field.default is MISSING and field.name not in values]
    if missing:
        names = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ConfigError(f"the geometry is incomplete: give {names}, or a file with --geometry")
    return Geometry.from_dict(values)


def run_pin(arguments: argparse.Namespace) -> int:
    """Pins the prefix until the lease ends or the command is interrupted."""
    keys = [parse_key(text) for text in arguments.keys]
    with open_existing(arguments, read_only=False) as store:
        pin = store.pin(keys, arguments.lease_seconds)
        if arguments.json:
            print_json({"keys": len(keys), "blocks": pin.blocks, "lease_seconds": arguments.lease_seconds})
        else:
            print(f"{pin.blocks} of {len(keys)} blocks are pinned for {duration_text(arguments.lease_seconds)}")
        sys.stdout.flush()
        if pin.blocks == 0:
            return 1
        try:
            threading.Event().wait(arguments.lease_seconds)
        except KeyboardInterrupt:
            print("tutti: pin given back", file=sys.stderr)
        store.unpin(pin)
    return 0


def parse_key(text: str) -> bytes:
    """A block key from hex digits. Raises KeyFormatError."""
    try:
        key = bytes.fromhex(text)
    except ValueError as error:
        raise KeyFormatError(f"{text!r} is no block key: {error}") from None
    if len(key) != KEY_BYTES:
        raise KeyFormatError(f"{text!r} has {len(key)} bytes; a block key has {KEY_BYTES}")
    return key


def run_clear(arguments: argparse.Namespace) -> int:
    """Empties the pool after asking."""
    with open_existing(arguments, read_only=False) as store:
        if not arguments.yes and not _confirmed(store.stats()):
            raise ConfigError("nothing was removed: confirm on a terminal, or give --yes")
        removed = store.clear()
    if arguments.json:
        print_json({"removed_blocks": removed})
    else:
        print(f"{removed} blocks removed")
    return 0


def _confirmed(statistics: dict[str, Any]) -> bool:
    if not sys.stdin.isatty():
        return False
    print(f"remove {plain(statistics).get('resident_blocks', 'all')} blocks? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
