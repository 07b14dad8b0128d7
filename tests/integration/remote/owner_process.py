"""An owner in a process of its own, with Mooncake's Transfer Engine: `python owner_process.py ROOT EPOCH PORT BLOCKS`.

Says its address in a line, and serves until its input ends.
"""

from __future__ import annotations

import sys

from tests.pattern import PatternTensors, chain, geometry
from tutti_mooncake import LocalStore, StoreConfig
from tutti_mooncake.remote.owner import Owner
from tutti_mooncake.remote.transport import MooncakeTransport
from tutti_mooncake.remote.wire import Peer


def main() -> None:
    """See above."""
    root, epoch, port, blocks = sys.argv[1], *map(int, sys.argv[2:])
    shape = geometry(head_dim=1024)
    with LocalStore.open(StoreConfig(devices=[root], capacity="256MiB", executor="posix"), shape) as store:
        tensors = PatternTensors(shape, blocks)
        store.register(tensors.tensors)
        keys = chain("remote", blocks)
        tensors.write(keys)
        store.store(keys, range(blocks)).wait(30)
        owner = Owner(store, lambda: Peer("owner", epoch), MooncakeTransport("127.0.0.1"), host="127.0.0.1", port=port, window_blocks=8)
        print(owner.address, flush=True)
        sys.stdin.read()
        owner.close()


main()
