"""A node in a process of its own: `python -m tests.integration.agent.node_process ROOT NAME ETCD PROMPT BLOCKS`.

Stores the prompt's blocks, joins, says so in a line, and stays until its input ends.
"""

from __future__ import annotations

import sys

from tests.pattern import PatternTensors, chain, geometry
from tutti_mooncake import LocalStore, StoreConfig
from tutti_mooncake.agent.node import Node
from tutti_mooncake.config import ClusterConfig


def main() -> None:
    """See above."""
    root, name, etcd, prompt, blocks = sys.argv[1:]
    keys = chain(prompt, int(blocks))
    with LocalStore.open(StoreConfig(devices=(root,), capacity="16MiB", executor="posix"), geometry()) as store:
        tensors = PatternTensors(geometry(), 200)
        store.register(tensors.tensors)
        tensors.write(keys)
        store.store(keys, range(len(keys))).wait(30)
        node = Node(store, ClusterConfig(etcd=etcd, node_name=name, node_ttl_seconds=2, publish_seconds=0.1))
        print("ready", store.recovery.recovered_blocks, flush=True)
        sys.stdin.read()
        node.close()


main()
