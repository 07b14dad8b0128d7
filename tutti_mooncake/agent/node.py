"""One store in a cluster: announced to the others, served to them, and fed from them. The pieces, put together.

What it holds is announced through etcd; others' records are followed; blocks are pushed to others and fetched from them. Nothing of this is
waited for by the store, and each piece goes on alone when another fails.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tutti_mooncake.agent.sources import Sources
from tutti_mooncake.directory.announcer import announce
from tutti_mooncake.directory.broker import Broker, BrokerError
from tutti_mooncake.directory.etcd_broker import EtcdBroker, EtcdOptions
from tutti_mooncake.directory.follower import Follower
from tutti_mooncake.directory.member import Member
from tutti_mooncake.directory.records import Keys, NodeRecord
from tutti_mooncake.directory.span_book import SpanBook
from tutti_mooncake.directory.view import DirectoryView
from tutti_mooncake.remote.fetcher import Fetcher
from tutti_mooncake.remote.owner import Owner
from tutti_mooncake.remote.transport import MooncakeTransport, Transport
from tutti_mooncake.remote.wire import Peer
from tutti_mooncake.store import LocalStore

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeOptions:
    """`name`: of the node, unlike all others'. `host`: its address as others reach it; `port`: 0 = any. `protocol`, `device`: of the
    Transfer Engine. `prefix`: of the cluster's keys in etcd.
    """

    name: str
    host: str
    etcd: EtcdOptions = field(default_factory=EtcdOptions)
    port: int = 0
    zone: str = ""
    prefix: str = "tutti/v1"
    protocol: str = "tcp"
    device: str = ""
    ttl_seconds: float = 10.0
    publish_seconds: float = 1.0
    most_stale_seconds: float = 30.0


class Node:
    """Starts at once, whether etcd answers or not. `tensors`: the engine's KV tensors, which fetches fill; the store's own.

    Close it before the store. Raises OSError, TransportError, RecordError, ConfigError.
    """

    def __init__(
        self,
        store: LocalStore,
        tensors: Sequence[torch.Tensor],
        options: NodeOptions,
        *,
        broker: Callable[[], Broker] | None = None,
        transport: Transport | None = None,
    ) -> None:
        keys = Keys(options.prefix)
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as started:
            connect = broker or (lambda: EtcdBroker(options.etcd))
            reading, writing = connect(), connect()
            started.callback(reading.close)
            started.callback(writing.close)
            transport = transport or MooncakeTransport(options.host, options.protocol, options.device)
            owner = Owner(store, self._peer, transport, host=options.host, port=options.port)
            started.callback(owner.close)
            record = NodeRecord(options.name, time.time_ns(), owner.address, options.zone)
            self.owner = owner
            self.view = DirectoryView(keys, options.name)
            self.book = SpanBook()
            self.follower = Follower(reading, keys, self.view, most_stale_seconds=options.most_stale_seconds)
            self.member = Member(
                writing,
                keys,
                record,
                self.book,
                self.view,
                usable=lambda: self.follower.usable,
                ttl_seconds=options.ttl_seconds,
                publish_seconds=options.publish_seconds,
            )
            fetcher = Fetcher(options.name, store.geometry, transport, tensors)
            started.callback(fetcher.close)
            self.sources = Sources(self.view, lambda: self.follower.usable, fetcher, store.geometry.namespace_id, zone=options.zone)
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
