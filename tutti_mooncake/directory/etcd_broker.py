"""The control plane in etcd (version 3.4 and later), by the module `etcd3`.

Calls take turns on one connection. After an error the connection is made anew at the next call, at another endpoint where there is one;
that renews an authentication token too. A watch that was there ends with an error then.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import etcd3
import grpc
from etcd3 import etcdrpc
from etcd3.events import DeleteEvent
from etcd3.exceptions import RevisionCompactedError

from tutti_mooncake.config import check_etcd
from tutti_mooncake.directory.broker import MOST_BATCH, BrokerError, Change, LeaseLost, Snapshot, WatchLost
from tutti_mooncake.errors import ConfigError

PAGE_KEYS = 256
"""Keys of a snapshot that are asked for at once: with the largest values, about gRPC's limit of 4 MiB on a message."""
RETRY_SECONDS = 0.5
"""Before an endpoint that failed is tried again."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class EtcdOptions:
    """`endpoints`: host:port. `ca`, `certificate`, `key`: PEM files; with `ca` the connection is by TLS, with all three mutual."""

    endpoints: Sequence[str] = ("127.0.0.1:2379",)
    timeout_seconds: float = 3.0
    ca: str = ""
    certificate: str = ""
    key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError("etcd: no endpoints")
        check_etcd(self.endpoints, self.ca, self.certificate, self.key, self.user, self.password)


class EtcdBroker:
    """See Broker. Nothing is connected before the first call."""

    def __init__(self, options: EtcdOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._client: Any = None

    def apply(self, changes: Sequence[Change], lease: int = 0) -> int:
        """See Broker."""
        if len(changes) > MOST_BATCH:
            raise BrokerError(f"a batch has at most {MOST_BATCH} changes, not {len(changes)}")
        if not changes:
            return self.head()[1]

        def call(client: Any) -> int:
            request = etcdrpc.TxnRequest()
            for change in changes:
                operation = request.success.add()
                if change.value is None:
                    operation.request_delete_range.key = change.key.encode()
                else:
                    operation.request_put.key = change.key.encode()
                    operation.request_put.value = change.value
                    operation.request_put.lease = lease
            answer = client.kvstub.Txn(
                request, self._options.timeout_seconds, credentials=client.call_credentials, metadata=client.metadata
            )
            return int(answer.header.revision)

        return self._call(call)

    def delete_prefix(self, prefix: str) -> int:
        """See Broker."""
        return self._call(lambda client: int(client.delete_prefix(prefix).deleted))

    def snapshot(self, prefix: str) -> Snapshot:
        """See Broker."""
        items: dict[str, bytes] = {}
        begin, end = prefix.encode(), _prefix_end(prefix.encode())
        revision = cluster = 0
        while True:
            page = self._page(begin, end, revision)
            revision, cluster = revision or int(page.header.revision), int(page.header.cluster_id)
            items |= {_text(one.key): one.value for one in page.kvs}
            if not page.more:
                return Snapshot(items, revision, cluster)
            begin = page.kvs[-1].key + b"\0"

    def watch(self, prefix: str, after_revision: int) -> EtcdWatch:
        """See Broker."""
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        client, number = self._call(
            lambda client: (client, client.add_watch_prefix_callback(prefix, arrived.put, start_revision=after_revision + 1))
        )

        def end() -> None:
            with self._lock:
                if self._client is client:  # else the watch went with its connection, and the number is another's
                    client.cancel_watch(number)

        return EtcdWatch(arrived, end)

    def head(self) -> tuple[int, int]:
        """See Broker."""
        header = self._call(lambda client: client.get_response(b"\0", count_only=True)).header
        return int(header.cluster_id), int(header.revision)

    def grant(self, ttl_seconds: float) -> int:
        """See Broker; whole seconds, at least one."""
        return self._call(lambda client: int(client.lease(max(1, round(ttl_seconds))).id))

    def keep_alive(self, lease: int) -> None:
        """See Broker."""
        answers = self._call(lambda client: list(client.refresh_lease(lease)))
        if not answers or answers[-1].TTL <= 0:
            raise LeaseLost(f"{self._where()}: lease {lease:x} is not there")

    def revoke(self, lease: int) -> None:
        """See Broker."""
        try:
            self._call(lambda client: client.revoke_lease(lease))
        except LeaseLost:
            return

    def close(self) -> None:
        """See Broker."""
        with self._lock:
            self._drop()

    def _page(self, begin: bytes, end: bytes, revision: int) -> Any:
        return self._call(lambda client: client.get_range_response(begin, end, limit=PAGE_KEYS, revision=revision or None))

    def _call(self, call: Callable[[Any], Answer]) -> Answer:
        with self._lock, self._errors():
            if self._client is None:
                self._client = self._connect()
            return call(self._client)

    def _connect(self) -> Any:
        options = self._options
        credentials = None
        if options.ca:
            credentials = etcd3.MultiEndpointEtcd3Client.get_secure_creds(options.ca, options.key or None, options.certificate or None)
        endpoints = []
        for endpoint in options.endpoints:
            host, _, port = endpoint.rpartition(":")
            endpoints.append(etcd3.Endpoint(host, int(port), bool(options.ca), credentials, RETRY_SECONDS))
        client = etcd3.MultiEndpointEtcd3Client(
            endpoints, options.timeout_seconds, options.user or None, options.password or None, failover=True
        )
        if not options.ca:
            client.call_credentials = None  # gRPC refuses them without TLS; the token goes as metadata too
        return client

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _where(self) -> str:
        return f"etcd at {', '.join(self._options.endpoints)}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns whatever the module raises into BrokerError."""
        try:
            yield
        except BrokerError:
            raise
        except grpc.RpcError as error:
            code = error.code() if callable(getattr(error, "code", None)) else None
            details = str(error.details()) if callable(getattr(error, "details", None)) else str(error)
            if code == grpc.StatusCode.NOT_FOUND and "lease" in details:
                raise LeaseLost(f"{self._where()}: {details}") from error
            self._drop()
            if "compacted" in details:
                raise WatchLost(f"{self._where()}: {details}") from error
            raise BrokerError(f"{self._where()}: {details or code}") from error
        except Exception as error:  # the module's own kinds have no text
            self._drop()
            raise BrokerError(f"{self._where()}: {type(error).__name__} {error}".rstrip()) from error


class EtcdWatch:
    """Of an EtcdBroker."""

    def __init__(self, arrived: queue.SimpleQueue[Any], end: Callable[[], None]) -> None:
        self._arrived = arrived
        self._end = end

    def next(self, timeout_seconds: float) -> tuple[Sequence[Change], int] | None:
        """See Watch."""
        try:
            answer = self._arrived.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
        if isinstance(answer, RevisionCompactedError):
            raise WatchLost(f"etcd: what the watch missed is compacted, up to revision {answer.compacted_revision}")
        if answer is None or isinstance(answer, Exception):
            raise BrokerError(f"etcd: the watch has ended ({answer})")
        changes = [Change(_text(event.key), None if isinstance(event, DeleteEvent) else event.value) for event in answer.events]
        return (changes, int(answer.header.revision)) if changes else None

    def close(self) -> None:
        """See Watch."""
        self._end()


def _text(key: bytes) -> str:
    """A key; somebody else's may be no text at all."""
    return key.decode(errors="replace")


def _prefix_end(prefix: bytes) -> bytes:
    """The least key that is greater than all that begin with `prefix`, which ends with an ASCII character."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
