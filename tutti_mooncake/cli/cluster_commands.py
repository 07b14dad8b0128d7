"""Commands that look at a cluster through its directory: nodes, replicas."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from tutti_mooncake.cli.etcd_arguments import add_etcd_arguments, read_directory
from tutti_mooncake.cli.output import print_json, print_table
from tutti_mooncake.cli.prompts import add_prompt_arguments, prompt_keys, prompt_tokens
from tutti_mooncake.cli.store_arguments import add_store_arguments, store_config
from tutti_mooncake.errors import ConfigError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_NODES = """\
Lists the nodes that are alive, with their epoch, address and zone, and how many blocks each has announced; then the epochs
that have ended and whose blocks are still recorded. Reads etcd once.
"""

_REPLICAS = """\
Lists which living nodes hold a block, by its key (hexadecimal, at least its first 8 bytes), or the leading blocks of a
prompt, as announced in etcd. For a prompt, name a pool of the model (--devices): its geometry says how the engine hashes.
"""


def add_commands(commands: Subparsers) -> None:
    """Adds this file's commands."""
    nodes = commands.add_parser("nodes", help="list the nodes of a cluster and what they hold", description=_NODES)
    add_etcd_arguments(nodes)
    nodes.add_argument("--json", action="store_true", help="print one JSON value")
    nodes.set_defaults(run=run_nodes)
    replicas = commands.add_parser("replicas", help="list the nodes that hold a block or a prompt", description=_REPLICAS)
    replicas.add_argument("--block", metavar="HEX", help="a block's key, in place of a prompt")
    add_prompt_arguments(replicas)
    add_etcd_arguments(replicas)
    add_store_arguments(replicas)
    replicas.set_defaults(run=run_replicas)


def run_nodes(arguments: argparse.Namespace) -> int:
    """Prints one line per node."""
    view = read_directory(arguments)
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


def run_replicas(arguments: argparse.Namespace) -> int:
    """One line per node; 1 when nobody holds the first block."""
    if sum(value is not None for value in (arguments.block, arguments.prompt, arguments.tokens)) != 1:
        raise ConfigError("replicas: give one of --block HEX, PROMPT and --tokens FILE")
    return _replicas_of_block(arguments) if arguments.block is not None else _replicas_of_prompt(arguments)


def _replicas_of_block(arguments: argparse.Namespace) -> int:
    try:
        short = int.from_bytes(bytes.fromhex(arguments.block)[:8], "little")
        if len(arguments.block) < 16:
            raise ValueError("less than 8 bytes")
    except ValueError as error:
        raise ConfigError(f"--block {arguments.block!r}: {error}; give at least 16 hexadecimal digits of a key") from None
    view = read_directory(arguments)
    found: dict[tuple[str, bytes], dict[str, Any]] = {}
    for node, epoch, span in view.spans():
        record = view.node(node)
        at = np.flatnonzero(span.hashes == short)
        if len(at) and record is not None and record.epoch == epoch:
            position = span.start + int(at[0])
            found[node, span.namespace] = {
                "node": node,
                "address": record.address,
                "zone": record.zone,
                "namespace": span.namespace.hex(),
                "position": position,
            }
    replicas = [found[key] for key in sorted(found)]
    if arguments.json:
        print_json({"replicas": replicas})
    else:
        columns = ("node", "address", "zone", "namespace", "position")
        print_table(columns, [[str(one[column]) or "-" for column in columns] for one in replicas])
    return 0 if replicas else 1


def _replicas_of_prompt(arguments: argparse.Namespace) -> int:
    from tutti_mooncake.directory.records import short_hashes
    from tutti_mooncake.keys import as_key_array, salt_mask
    from tutti_mooncake.store import read_geometry

    config = store_config(arguments, read_only=True)
    geometry = read_geometry(config)
    tokens = prompt_tokens(arguments)
    keys = as_key_array(prompt_keys(geometry, tokens, arguments.cache_salt), salt_mask(config.tenant_salt))
    held = read_directory(arguments).holders(geometry.namespace_id, short_hashes(keys)) if len(keys) else []
    replicas = [{"node": record.node, "address": record.address, "zone": record.zone, "blocks": blocks} for record, blocks in held]
    if arguments.json:
        print_json({"tokens": len(tokens), "blocks": len(keys), "replicas": replicas})
    else:
        print(f"{len(tokens)} tokens: {len(keys)} full blocks of {geometry.block_tokens}")
        columns = ("node", "address", "zone", "blocks")
        print_table(columns, [[str(one[column]) or "-" for column in columns] for one in replicas])
    return 0 if replicas else 1
