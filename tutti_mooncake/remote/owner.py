"""Serves other nodes' reads: blocks of this node's store go through registered windows into the requester's memory.

A request names keys of one prefix chain, and memory of the requester in windows of the same size. The blocks are pinned while it runs; a
window is read from the store, its checksums known from the store's records, pushed by the transport, and announced. Blocks come in the
order of the prefix, so that whatever has arrived when something fails can be used. The requester gives each of its windows back before it
is used again. While one window is on its way, the next is read.

Invariants: a window of ours is used again only when no read of the store can touch it; what was announced has been pushed whole.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tutti_mooncake import Status
from tutti_mooncake.keys import KEY_BYTES, KeyArray
from tutti_mooncake.remote.transport import Transport, TransportError
from tutti_mooncake.remote.windows import Windows, WindowsBusy, blocks_of_a_window
from tutti_mooncake.remote.wire import PROTOCOL_VERSION, Connection, Peer, WireError, field
from tutti_mooncake.store import LocalStore
from tutti_mooncake.store.operations import RetrieveOperation

logger = logging.getLogger(__name__)

HELLO_SECONDS = 5.0
IDLE_SECONDS = 300.0
"""How long a connection may ask for nothing."""
LONGEST_SECONDS = 300.0
"""Of a request, whatever deadline it names."""
QUARANTINE_SECONDS = 60.0
"""Of a window whose transfer failed: the Transfer Engine may go on with parts of it for a while."""
MOST_CONNECTIONS = 64


@dataclass(frozen=True)
class _Request:
    keys: KeyArray
    segment: str
    base: int
    blocks: int
    windows: list[int]
    deadline: float


class Owner:
    """Listens on `host`:`port` (0 = any). `record`: this node's, at the time of a connection. `windows`, each of `window_blocks` (about
    8 MiB unless given), bound its memory and how many requests it serves at a time. `stats`: what this node counts, as msgpack takes it,
    for whoever asks. Close it before the store.

    Raises OSError, TransportError, and what `LocalStore.reader` raises.
    """

    def __init__(
        self,
        store: LocalStore,
        record: Callable[[], Peer],
        transport: Transport,
        *,
        host: str,
        port: int = 0,
        windows: int = 8,
        window_blocks: int | None = None,
        stats: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._stats = stats
        self._store = store
        self._record = record
        self._transport = transport
        self._namespace = store.geometry.namespace_id
        size = window_blocks or blocks_of_a_window(store.geometry)
        with contextlib.ExitStack() as made:
            self._listener = socket.create_server((host, port))
            made.callback(self._listener.close)
            self._windows = Windows(store.geometry, transport, count=windows, window_blocks=size)
            made.callback(self._windows.close)
            self._reader = store.reader(self._windows.tensors)
            made.pop_all()
        self._lock = threading.Lock()
        self._closed = False
        self._connections: dict[Connection, threading.Thread] = {}
        self.counters = {"requests": 0, "blocks": 0, "bytes": 0, "failed": 0, "refused": 0}
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="tutti-owner", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all requests. Any number of times."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            running = dict(self._connections)
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        for connection in running:
            connection.close()
        self._thread.join()
        self._listener.close()
        for thread in running.values():
            thread.join()
        self._reader.close()  # before its memory goes
        self._windows.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # out of descriptors: others will be closed
                continue
            connection = Connection(sock, f"{peer[0]}:{peer[1]}")
            with self._lock:
                if self._closed or len(self._connections) >= MOST_CONNECTIONS:
                    self.counters["refused"] += 1
                    connection.close()
                    continue
                thread = threading.Thread(target=self._serve, args=(connection,), name="tutti-owner-connection", daemon=True)
                try:
                    thread.start()  # waits for the lock at its end, not before
                except RuntimeError as error:
                    logger.error("remote reads: %s; %s is sent away", error, connection.peer)
                    self.counters["refused"] += 1
                    connection.close()
                    continue
                self._connections[connection] = thread

    def _serve(self, connection: Connection) -> None:
        try:
            self._greet(connection)
            while True:
                message = connection.receive(time.monotonic() + IDLE_SECONDS)
                if "stats" in message:
                    connection.send({"stats": {**self._stats(), "served": self.counters}}, time.monotonic() + HELLO_SECONDS)
                elif "credit" not in message and "stop" not in message:  # of a request that is over
                    self._answer(connection, message)
        except WireError as error:
            logger.debug("remote reads: %s", error)
        except Exception:
            logger.exception("remote reads: a defect while serving %s", connection.peer)
        finally:
            connection.close()
            with self._lock:
                self._connections.pop(connection, None)

    def _greet(self, connection: Connection) -> None:
        record = self._record()
        hello = {"v": PROTOCOL_VERSION, "node": record.node, "epoch": record.epoch, "namespace": self._namespace}
        connection.send(hello, time.monotonic() + HELLO_SECONDS)
        theirs = connection.receive(time.monotonic() + HELLO_SECONDS)
        if theirs.get("v") != PROTOCOL_VERSION:
            raise WireError(f"{connection.peer}: protocol {theirs.get('v')!r}; this one is {PROTOCOL_VERSION}")

    def _answer(self, connection: Connection, message: dict[str, Any]) -> None:
        request = self._parse(connection.peer, message)
        self.counters["requests"] += 1
        blocks, status, why, clean = 0, Status.NOT_FOUND, "", True
        pin = self._store.pin(self._store.salted(request.keys), LONGEST_SECONDS)
        try:
            if pin.blocks:
                blocks, status, why = self._push(connection, request, pin.blocks)
        except WindowsBusy as error:
            status, why = Status.RETRY, str(error)
        except TransportError as error:
            status, why, clean = Status.RETRY, str(error), False
        finally:
            self._store.unpin(pin)
        self.counters["failed"] += status not in (Status.OK, Status.NOT_FOUND, Status.CANCELLED)
        end = {"end": True, "blocks": blocks, "status": int(status), "why": why, "clean": clean}
        connection.send(end, request.deadline + HELLO_SECONDS)

    def _push(self, connection: Connection, request: _Request, resident: int) -> tuple[int, Status, str]:
        """Blocks that were pushed, and how it ended."""
        size = self._windows.window_blocks
        starts = range(0, resident, size)
        reads: dict[int, tuple[int, RetrieveOperation]] = {}
        pushed = credits = 0
        try:
            for number, start in enumerate(starts):
                if number not in reads:
                    reads[number] = self._read(request, start, min(start + size, resident), self._left(request))
                if number + 1 < len(starts):  # only where a window is free: who waits for one and holds another may wait for himself
                    with contextlib.suppress(WindowsBusy):
                        reads[number + 1] = self._read(request, start + size, min(start + 2 * size, resident), 0.0)
                window, operation = reads[number]
                while number - credits >= len(request.windows) or connection.readable(0.0):
                    message = connection.receive(request.deadline)
                    if "stop" in message:
                        return pushed, Status.CANCELLED, "the requester wants no more"
                    if field(message, "credit", int, connection.peer) != credits:
                        raise WireError(f"{connection.peer}: window {message['credit']} given back where {credits} was due")
                    credits += 1
                statuses = operation.wait(max(0.0, self._left(request))).statuses
                bad = np.flatnonzero(np.asarray(statuses) != Status.OK)
                good = int(bad[0]) if len(bad) else len(statuses)
                if good:
                    target = request.windows[number % len(request.windows)]
                    pieces = self._windows.pieces(window, good, request.base, request.blocks, target)
                    if self._left(request) <= 0:  # as after a pause of the whole process: their memory may be in other use by now
                        return pushed, Status.TIMEOUT, "the deadline of the request has passed"
                    try:
                        self._transport.write(request.segment, pieces)
                    except TransportError:  # a part of it may still be on its way, out of this window
                        del reads[number]
                        self._windows.quarantine(window, QUARANTINE_SECONDS)
                        raise
                    sums = operation.plan.sums()[: good * self._windows.objects]  # type: ignore[union-attr]
                    connection.send({"window": number, "blocks": good, "sums": sums.tobytes()}, request.deadline)
                    pushed += good
                    self.counters["blocks"] += good
                    self.counters["bytes"] += good * self._windows.objects * self._windows.object_bytes
                if good < len(statuses):
                    status = Status(int(statuses[good]))
                    return pushed, status, f"block {start + good} of the request: {status.name}"
                self._give_back(*reads.pop(number))
            return pushed, Status.OK, ""
        finally:
            for window, operation in reads.values():
                operation.cancel()
                self._give_back(window, operation)

    def _read(self, request: _Request, begin: int, end: int, seconds: float) -> tuple[int, RetrieveOperation]:
        """Begins to read into a window that is free within so many seconds. Raises WindowsBusy."""
        window = self._windows.acquire(max(0.0, seconds))
        first = self._windows.first_block(window)
        try:
            keys = self._store.salted(request.keys[begin:end])
            blocks = range(first, first + end - begin)
            return window, self._reader.retrieve(keys, blocks, deadline_seconds=max(0.001, self._left(request)))
        except BaseException:
            self._windows.release(window)
            raise

    def _give_back(self, window: int, operation: RetrieveOperation) -> None:
        plan = operation.plan
        if plan is None or plan.drained():
            self._windows.release(window)
        else:
            self._windows.release_when(window, plan.drained)

    def _parse(self, peer: str, message: dict[str, Any]) -> _Request:
        keys = field(message, "keys", bytes, peer)
        windows = field(message, "windows", list, peer)
        if not keys or len(keys) % KEY_BYTES:
            raise WireError(f"{peer}: {len(keys)} bytes of keys of {KEY_BYTES}")
        if field(message, "window_blocks", int, peer) != self._windows.window_blocks:
            raise WireError(f"{peer}: windows of {message['window_blocks']} blocks, and ours have {self._windows.window_blocks}")
        if not windows or not all(type(first) is int and first >= 0 for first in windows):
            raise WireError(f"{peer}: windows {windows!r}")
        seconds = min(max(0.0, field(message, "seconds", float, peer)), LONGEST_SECONDS)
        return _Request(
            np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES),
            field(message, "segment", str, peer),
            field(message, "base", int, peer),
            field(message, "blocks", int, peer),
            windows,
            time.monotonic() + seconds,
        )

    @staticmethod
    def _left(request: _Request) -> float:
        return request.deadline - time.monotonic()
