"""Commands that show or check what a pool holds: stat, ls, verify."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from tutti_mooncake.cli.output import Progress, duration_text, plain, print_json, print_section, print_table, size_text
from tutti_mooncake.cli.store_arguments import add_store_arguments, open_existing, store_config
from tutti_mooncake.errors import ConfigError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_STAT = """\
Shows a pool, also beside a running engine: its geometry; the process that owns it or owned it last; what an opening finds
on the devices (recovery: beside a running engine `clean_shutdown` is no); sizes, and the counters of that owner, which it
writes every few seconds.
"""
_VERIFY = """\
Reads every block and compares it with its checksums. Blocks that fail, and those that build on them, are removed, and
the exit status is then 1.
"""


def add_commands(commands: Subparsers) -> None:
    """Adds this file's commands."""
    stat = commands.add_parser("stat", help="show sizes, counters, owner and geometry of a pool", description=_STAT)
    add_store_arguments(stat)
    stat.set_defaults(run=run_stat)

    ls = commands.add_parser("ls", help="list the blocks of a pool")
    add_store_arguments(ls)
    ls.add_argument("--limit", type=int, metavar="N", help="at most N blocks (default: all)")
    ls.set_defaults(run=run_ls)

    verify = commands.add_parser("verify", help="read everything and check it", description=_VERIFY)
    add_store_arguments(verify)
    verify.set_defaults(run=run_verify)


def run_stat(arguments: argparse.Namespace) -> int:
    """Prints the geometry, the owner with the counters that it wrote last, and what an opening finds."""
    from tutti_mooncake.store import read_geometry
    from tutti_mooncake.store.owner import read_owner

    config = store_config(arguments, read_only=True)
    geometry, owner = read_geometry(config), read_owner(config)
    with open_existing(arguments, read_only=True) as store:
        result = {
            "pool": config.pool,
            "devices": list(config.devices),
            "geometry": {**geometry.as_dict(), "fingerprint": geometry.fingerprint()},
            "owner": owner,
            "recovery": plain(store.recovery),
            "stats": {**store.stats(), **owner.pop("counters", {})},
        }
    if arguments.json:
        print_json(result)
        return 0
    print(f"pool {config.pool} on {', '.join(config.devices)}")
    for section in ("geometry", "owner", "recovery", "stats"):
        print()
        print_section(section, result[section])
    return 0


def run_ls(arguments: argparse.Namespace) -> int:
    """Prints one line per block; with --json one array, written as it is read."""
    if arguments.limit is not None and arguments.limit < 0:
        raise ConfigError(f"--limit {arguments.limit}: give a number of blocks")
    with open_existing(arguments, read_only=True) as store:
        entries = store.entries(arguments.limit)
        if arguments.json:
            # Written piece by piece: a pool may hold millions of blocks.
            sys.stdout.write("[")
            for position, entry in enumerate(entries):
                sys.stdout.write(("," if position else "") + "\n  " + json.dumps(plain(entry)))
            sys.stdout.write("\n]\n")
            return 0
        now = time.time()
        rows: list[list[str]] = []
        names: list[str] = []
        for entry in entries:
            record = plain(entry)
            names = list(record)
            rows.append([_cell(name, value, now) for name, value in record.items()])
        if rows:
            print_table(names, rows)
        print(f"{len(rows)} blocks", file=sys.stderr)
    return 0


def _cell(name: str, value: Any, now: float) -> str:
    if value is None:
        return "-"
    if name in ("created", "last_use"):
        return f"{duration_text(max(0.0, now - value))} ago"
    if name == "expiry":
        return "never" if not value else f"in {duration_text(max(0.0, value - now))}"
    if name.endswith("bytes"):
        return size_text(value)
    return str(value)


def run_verify(arguments: argparse.Namespace) -> int:
    """Checks every block; 1 when something was dropped."""
    with open_existing(arguments, read_only=False) as store, Progress("verify") as progress:
        report = plain(store.verify(progress=progress))
    if arguments.json:
        print_json(report)
    else:
        print_section("verify", report)
    return 1 if report["dropped_blocks"] else 0
