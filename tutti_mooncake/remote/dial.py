"""The way to another node: a connection on which the one that was meant has answered."""

from __future__ import annotations

import socket
import time
from typing import Any

from tutti_mooncake.remote.wire import PROTOCOL_VERSION, Connection, Peer, WireError

CONNECT_SECONDS = 2.0
"""Within which a node that is there accepts a connection."""
PROGRESS_SECONDS = 5.0
"""A node that says nothing for so long is given up."""


def dial(owner: Peer, node: str, deadline: float, *, namespace: bytes | None = None) -> Connection:
    """A connection to a node in the life that was meant, which `namespace`, if given, must be that of. `node`: our name.

    Raises WireError.
    """
    host, _, port = owner.address.rpartition(":")
    if not host or not port.isdigit():
        raise WireError(f"node {owner.node} serves nobody: its address is {owner.address!r}")
    try:
        sock = socket.create_connection((host, int(port)), min(CONNECT_SECONDS, max(0.001, deadline - time.monotonic())))
    except OSError as error:
        raise WireError(f"node {owner.node} at {owner.address}: {error}") from error
    connection = Connection(sock, f"node {owner.node} at {owner.address}")
    try:
        theirs = connection.receive(min(deadline, time.monotonic() + PROGRESS_SECONDS))
        if theirs.get("v") != PROTOCOL_VERSION:
            raise WireError(f"{connection.peer}: protocol {theirs.get('v')!r}; this one is {PROTOCOL_VERSION}")
        if theirs.get("node") != owner.node or theirs.get("epoch") != owner.epoch:
            raise WireError(f"{connection.peer}: {theirs.get('node')!r} of epoch {theirs.get('epoch')!r} answers, not epoch {owner.epoch}")
        if namespace is not None and theirs.get("namespace") != namespace:
            raise WireError(f"{connection.peer}: its blocks are of another model, layout or dtype")
        connection.send({"v": PROTOCOL_VERSION, "node": node}, deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def ask_stats(owner: Peer, seconds: float) -> dict[str, Any]:
    """What a node counts, as its `Owner` was given it. Raises WireError."""
    deadline = time.monotonic() + seconds
    connection = dial(owner, "", deadline)
    try:
        connection.send({"stats": True}, deadline)
        stats = connection.receive(deadline).get("stats")
    finally:
        connection.close()
    if not isinstance(stats, dict):
        raise WireError(f"{connection.peer}: no statistics")
    return stats
