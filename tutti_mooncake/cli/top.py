"""`tutti top`: what the nodes of a cluster do now, asked of each of them."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tutti_mooncake.cli.etcd_arguments import add_etcd_arguments, etcd_broker
from tutti_mooncake.cli.output import print_json, print_table
from tutti_mooncake.errors import ConfigError

if TYPE_CHECKING:
    from tutti_mooncake.directory.broker import Broker
    from tutti_mooncake.directory.records import NodeRecord

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_TOP = """\
Shows per node, every few seconds until it is interrupted: how full its pool is, requests and prompt tokens per second,
which part of these tokens came from the engine's own cache, its pool and other nodes, and the bytes that it loads, stores,
fetches from others and serves to them. The last line is the whole cluster. With --json or --once: one interval.
"""
ANSWER_SECONDS = 2.0
TOKENS = {"hbm": "local_hit_tokens", "ssd": "hit_tokens", "remote": "fetched_tokens"}
BYTES = {"loaded": "bytes_loaded", "stored": "bytes_stored", "fetched": "bytes_fetched"}


@dataclass(frozen=True)
class Sample:
    """What a node had counted at a time; `None` when it didn't answer."""

    record: NodeRecord
    seconds: float
    stats: dict[str, Any] | None


def add_commands(commands: Subparsers) -> None:
    """Adds the command."""
    top = commands.add_parser("top", help="what the nodes of a cluster do now", description=_TOP)
    add_etcd_arguments(top)
    top.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (%(default)s)")
    top.add_argument("--once", action="store_true", help="one interval")
    top.add_argument("--json", action="store_true", help="one interval, as one JSON value")
    top.set_defaults(run=run_top)


def run_top(arguments: argparse.Namespace) -> int:
    """0; 1 when there is no node."""
    if not arguments.interval > 0:
        raise ConfigError(f"--interval {arguments.interval}: give a positive number of seconds")
    broker = etcd_broker(arguments)
    try:
        with ThreadPoolExecutor(16) as threads:
            before = _look(broker, arguments.prefix, threads)
            while True:
                time.sleep(arguments.interval)
                now = _look(broker, arguments.prefix, threads)
                rows = [_row(before.get(key), sample) for key, sample in sorted(now.items())]
                total = _total(rows)
                if arguments.json:
                    print_json({"nodes": rows, "cluster": total})
                else:
                    _print(rows, total, clear=not arguments.once and sys.stdout.isatty())
                if arguments.json or arguments.once:
                    return 0 if rows else 1
                before = now
    finally:
        broker.close()


def _look(broker: Broker, prefix: str, threads: ThreadPoolExecutor) -> dict[tuple[str, int], Sample]:
    from tutti_mooncake.directory.records import Keys, NodeRecord, RecordError

    keys = Keys(prefix)
    records = []
    for key, value in broker.snapshot(keys.nodes).items.items():
        try:
            records.append(NodeRecord.decode(keys.parse_node(key), value))
        except RecordError as error:
            print(f"tutti: {error}", file=sys.stderr)
    return {(sample.record.node, sample.record.epoch): sample for sample in threads.map(_ask, records)}


def _ask(record: NodeRecord) -> Sample:
    from tutti_mooncake.remote.dial import ask_stats
    from tutti_mooncake.remote.wire import Peer, WireError

    try:
        stats: dict[str, Any] | None = ask_stats(Peer(record.node, record.epoch, record.address), ANSWER_SECONDS)
    except WireError:
        stats = None
    return Sample(record, time.monotonic(), stats)


def _row(before: Sample | None, now: Sample) -> dict[str, Any]:
    """Rates per second; those of a node that is new or silent are 0."""
    row: dict[str, Any] = {"node": now.record.node, "zone": now.record.zone, "state": "silent" if now.stats is None else "up"}
    stats = now.stats or {}
    store = stats.get("store", {})
    row |= {"resident_blocks": store.get("resident_blocks", 0), "slots": store.get("slots", 0)}
    earlier = before.stats if before is not None and before.stats is not None else None
    seconds = now.seconds - before.seconds if before is not None and earlier is not None and now.stats is not None else 0.0

    def rate(part: str, name: str) -> float:
        if earlier is None or not seconds:
            return 0.0
        return max(0.0, float(stats.get(part, {}).get(name, 0)) - float(earlier.get(part, {}).get(name, 0))) / seconds

    row["requests_per_s"] = rate("engine", "requests")
    row["tokens_per_s"] = rate("engine", "requested_tokens")
    row |= {f"{tier}_tokens_per_s": rate("engine", name) for tier, name in TOKENS.items()}
    row |= {f"{what}_bytes_per_s": rate("engine", name) for what, name in BYTES.items()}
    row["served_bytes_per_s"] = rate("served", "bytes")
    return row


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The cluster's: sums."""
    numbers = [name for name in (rows[0] if rows else {}) if name not in ("node", "zone", "state")]
    up = sum(row["state"] == "up" for row in rows)
    return {"nodes": len(rows), "up": up, **{name: sum(row[name] for row in rows) for name in numbers}}


def _print(rows: list[dict[str, Any]], total: dict[str, Any], *, clear: bool) -> None:
    if clear:
        print("\033[2J\033[H", end="")
    columns = ["node", "zone", "state", "pool", "req/s", "tok/s", *(f"{tier} %" for tier in TOKENS), *BYTES, "served"]
    lines = [[row["node"], row["zone"] or "-", row["state"], *_cells(row)] for row in rows]
    if rows:
        lines.append([f"{total['nodes']} nodes", "", f"{total['up']} up", *_cells(total)])
    print_table(columns, lines)
    print("loaded, stored, fetched and served in MB/s" if rows else "no node is alive", flush=True)


def _cells(row: dict[str, Any]) -> list[str]:
    tokens = row["tokens_per_s"]
    return [
        f"{row['resident_blocks'] / row['slots']:.1%}" if row["slots"] else "-",
        f"{row['requests_per_s']:.1f}",
        f"{tokens:,.0f}",
        *(f"{row[f'{tier}_tokens_per_s'] / tokens:.1%}" if tokens else "-" for tier in TOKENS),
        *(f"{row[f'{what}_bytes_per_s'] / 1e6:,.1f}" for what in (*BYTES, "served")),
    ]
