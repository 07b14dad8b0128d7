"""Commands that look at a cluster through its directory: nodes."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from typing import TYPE_CHECKING

from tutti_mooncake.cli.output import print_json, print_table
from tutti_mooncake.errors import ConfigError

if TYPE_CHECKING:
    from tutti_mooncake.directory.etcd_broker import EtcdOptions

    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_NODES = """\
Lists the nodes that are alive, with their epoch, address and zone, and how many blocks each has announced; then the epochs
that have ended and whose blocks are still recorded. Reads etcd once.
"""


def add_commands(commands: Subparsers) -> None:
    """Adds this file's commands."""
    nodes = commands.add_parser("nodes", help="list the nodes of a cluster and what they hold", description=_NODES)
    nodes.add_argument("--etcd", default="127.0.0.1:2379", metavar="HOST:PORT", help="endpoints, with commas between (%(default)s)")
    nodes.add_argument("--prefix", default="tutti/v1", help="of the cluster's keys (%(default)s)")
    nodes.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="of each call (%(default)s)")
    nodes.add_argument("--ca", default="", metavar="FILE", help="PEM file of the authority; turns TLS on")
    nodes.add_argument("--certificate", default="", metavar="FILE", help="of this client")
    nodes.add_argument("--key", default="", metavar="FILE", help="of this client")
    nodes.add_argument("--user", default="", help="with the password in TUTTI_ETCD_PASSWORD")
    nodes.add_argument("--json", action="store_true", help="print one JSON value")
    nodes.set_defaults(run=run_nodes)


def run_nodes(arguments: argparse.Namespace) -> int:
    """Prints one line per node."""
    try:
        from tutti_mooncake.directory.etcd_broker import EtcdBroker
    except ImportError as error:
        raise ConfigError(f"this needs the module etcd3 ({error}): pip install 'tutti-mooncake[etcd]'") from error
    from tutti_mooncake.directory.records import Keys
    from tutti_mooncake.directory.view import DirectoryView

    keys = Keys(arguments.prefix)
    view = DirectoryView(keys)
    broker = EtcdBroker(etcd_options(arguments))
    try:
        view.replace(broker.snapshot(f"{keys.prefix}/").items)
    finally:
        broker.close()
    spans: Counter[tuple[str, int]] = Counter()
    blocks: Counter[tuple[str, int]] = Counter()
    for node, epoch, span in view.spans():
        spans[node, epoch] += 1
        blocks[node, epoch] += len(span.hashes)
    alive = [
        {
            "node": record.node,
            "epoch": record.epoch,
            "address": record.address,
            "zone": record.zone,
            "spans": spans[record.node, record.epoch],
            "blocks": blocks[record.node, record.epoch],
        }
        for record in view.nodes()
    ]
    dead = [
        {"node": node, "epoch": epoch, "spans": spans[node, epoch], "blocks": blocks[node, epoch]} for node, epoch in sorted(view.dead())
    ]
    stats = view.stats()
    if arguments.json:
        print_json({"nodes": alive, "ended": dead, "distinct_blocks": stats.blocks, "refused_records": stats.refused})
        return 0
    columns = ("node", "epoch", "address", "zone", "spans", "blocks")
    print_table(columns, [[str(node[column]) or "-" for column in columns] for node in alive])
    for one in dead:
        print(f"ended: node {one['node']}, epoch {one['epoch']}: {one['blocks']} blocks in {one['spans']} spans, to be deleted")
    print(f"{len(alive)} nodes, {stats.blocks} distinct blocks" + (f", {stats.refused} records can't be read" if stats.refused else ""))
    return 0


def etcd_options(arguments: argparse.Namespace) -> EtcdOptions:
    """Of the arguments. Raises ConfigError."""
    from tutti_mooncake.directory.etcd_broker import EtcdOptions

    return EtcdOptions(
        [endpoint.strip() for endpoint in arguments.etcd.split(",")],
        arguments.timeout,
        arguments.ca,
        arguments.certificate,
        arguments.key,
        arguments.user,
        os.environ.get("TUTTI_ETCD_PASSWORD", "") if arguments.user else "",
    )
