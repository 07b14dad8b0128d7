"""One store in a cluster: announced to the others, served to them, and knowing whom to ask. The pieces, put together.

What it holds is announced through etcd; others' records are followed; blocks are pushed to others. Nothing of this is waited for by the
store, and each piece goes on alone when another fails. Fetching is done where the engine's tensors are (`remote.fetcher`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import socket
import time
from collections.abc import Callable
from typing import Any

from tutti_mooncake.agent.sources import Sources
from tutti_mooncake.config import ClusterConfig, StoreConfig
from tutti_mooncake.directory.announcer import announce
from tutti_mooncake.directory.broker import Broker, BrokerError
from tutti_mooncake.directory.etcd_broker import EtcdBroker, EtcdOptions
from tutti_mooncake.directory.follower import Follower
from tutti_mooncake.directory.member import Member
from tutti_mooncake.directory.records import Keys, NodeRecord
from tutti_mooncake.directory.span_book import SpanBook
from tutti_mooncake.directory.view import DirectoryView
from tutti_mooncake.errors import ConfigError
from tutti_mooncake.remote.owner import Owner
from tutti_mooncake.remote.transport import MooncakeTransport, Transport
from tutti_mooncake.remote.wire import Peer
from tutti_mooncake.store import LocalStore

logger = logging.getLogger(__name__)


def etcd_options(config: ClusterConfig) -> EtcdOptions:
    """How to reach etcd."""
    return EtcdOptions(
        config.endpoints,
        config.etcd_timeout_seconds,
        config.etcd_ca,
        config.etcd_certificate,
        config.etcd_key,
        config.etcd_user,
        config.etcd_password if config.etcd_user else "",
    )


def node_name(config: ClusterConfig, store: StoreConfig) -> str:
    """As configured; else the host's name, the pool's, and what tells pools of one name on a host apart. The same after a restart."""
    if config.node_name:
        return config.node_name
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname().split(".")[0]).strip("-") or "node"
    return f"{host}-{store.pool}-{hashlib.sha256(store.devices[0].encode()).hexdigest()[:4]}"


def node_host(config: ClusterConfig) -> str:
    """As configured; else the address from which this node reaches the first endpoint of etcd that has one. Raises ConfigError."""
    if config.node_host:
        return config.node_host
    for endpoint in config.endpoints:
        host, _, port = endpoint.rpartition(":")
        with contextlib.suppress(OSError):
            family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
    raise ConfigError(f"node_host: no way to etcd at {config.etcd} was found; set the address at which others reach this node")


def make_transport(config: ClusterConfig) -> MooncakeTransport:
    """What moves blocks between nodes. Raises TransportError, ConfigError."""
    return MooncakeTransport(node_host(config), config.transfer_protocol, config.transfer_device)


class Node:
    """Starts at once, whether etcd answers or not. Close it before the store.

    `stats`: what is counted here, for whoever asks. `broker`, `transport`: in place of etcd and of Mooncake's. Raises OSError,
    TransportError, RecordError, ConfigError.
    """

    def __init__(
        self,
        store: LocalStore,
        config: ClusterConfig,
        *,
        stats: Callable[[], dict[str, Any]] = dict,
        broker: Callable[[], Broker] | None = None,
        transport: Transport | None = None,
    ) -> None:
        keys = Keys(config.etcd_prefix)
        host = node_host(config)
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as started:
            connect = broker or (lambda: EtcdBroker(etcd_options(config)))
            reading, writing = connect(), connect()
            started.callback(reading.close)
            started.callback(writing.close)
            self.transport = transport or make_transport(config)
            owner = Owner(store, self._peer, self.transport, host=host, port=config.node_port, stats=stats)
            started.callback(owner.close)
            record = NodeRecord(node_name(config, store.config), time.time_ns(), owner.address, config.node_zone)
            self.owner = owner
            self.view = DirectoryView(keys, record.node)
            self.book = SpanBook()
            self.follower = Follower(reading, keys, self.view, most_stale_seconds=config.most_stale_seconds)
            self.member = Member(
                writing,
                keys,
                record,
                self.book,
                self.view,
                usable=lambda: self.follower.usable,
                ttl_seconds=config.node_ttl_seconds,
                publish_seconds=config.publish_seconds,
            )
            self.sources = Sources(self.view, lambda: self.follower.usable, store.geometry.namespace_id, zone=config.node_zone)
            started.callback(announce(store, self.book))
            self.follower.start()
            started.callback(self.follower.stop)
            self.member.start()
            started.callback(self._leave)
            self._closing = started.pop_all()

    def close(self) -> None:
        """Leaves the directory, ends what others are being served, and frees ports and memory. No fetch may run. Any number of times."""
        self._closing.close()

    def _peer(self) -> Peer:
        record = self.member.record
        return Peer(record.node, record.epoch, record.address)

    def _leave(self) -> None:
        try:
            self.member.leave()
        except BrokerError as error:
            logger.warning("directory: %s; node %s is taken for alive until its lease runs out", error, self.member.record.node)
