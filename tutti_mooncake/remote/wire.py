"""Messages between who fetches and who serves: msgpack maps in frames with their length before them, over TCP.

A connection begins with a hello from both ends, which name protocol version, node, epoch and namespace: whoever answers on a port is the
node that was meant, in the life that was meant, or nothing is asked of it.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

import msgpack

from tutti_mooncake.errors import TuttiError

PROTOCOL_VERSION = 1
MOST_FRAME_BYTES = 4 << 20
_LENGTH = struct.Struct("<I")


class WireError(TuttiError):
    """The other end is gone, too slow, or doesn't speak this protocol."""


@dataclass(frozen=True)
class Peer:
    """A node in one of its lives. `address`: where it serves others, host:port."""

    node: str
    epoch: int
    address: str = ""


class Connection:
    """Frames over a socket, which it owns. One thread sends and one receives at a time. `peer`: for texts."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self._socket = sock
        self.peer = peer
        with contextlib.suppress(OSError):  # of a socket that isn't TCP's
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any], deadline: float) -> None:
        """`deadline`: on `time.monotonic()`. Raises WireError."""
        body = msgpack.packb(message)
        if len(body) > MOST_FRAME_BYTES:
            raise WireError(f"{self.peer}: a message of {len(body)} bytes, more than {MOST_FRAME_BYTES}")
        try:
            self._socket.settimeout(_left(deadline))
            self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise WireError(f"{self.peer}: {error or type(error).__name__}") from error

    def receive(self, deadline: float) -> dict[str, Any]:
        """The next message. Raises WireError."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if not 0 < length <= MOST_FRAME_BYTES:
            raise WireError(f"{self.peer}: a frame of {length} bytes; it doesn't speak this protocol")
        try:
            message = msgpack.unpackb(self._read(length, deadline))
        except WireError:
            raise
        except Exception as error:  # msgpack raises several kinds
            raise WireError(f"{self.peer}: a frame that isn't a message ({error})") from error
        if not isinstance(message, dict):
            raise WireError(f"{self.peer}: a message that is {type(message).__name__}")
        return message

    def readable(self, seconds: float) -> bool:
        """Whether something has come, or the other end has gone, within that time."""
        try:
            poll = select.poll()  # which takes descriptors of any number
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(max(0.0, seconds) * 1000))
        except (OSError, ValueError) as error:  # closed meanwhile
            raise WireError(f"{self.peer}: {error}") from error

    def close(self) -> None:
        """Whoever waits in another thread gets an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                self._socket.settimeout(_left(deadline))
                part = self._socket.recv(min(size - len(data), 1 << 20))
            except OSError as error:
                raise WireError(f"{self.peer}: {error or type(error).__name__}") from error
            if not part:
                raise WireError(f"{self.peer}: the connection has ended")
            data += part
        return bytes(data)


def field(message: dict[str, Any], name: str, kind: type, where: str) -> Any:
    """A field of a message, of this kind. Raises WireError."""
    value = message.get(name)
    if type(value) is not kind:
        raise WireError(f"{where}: {name} is {type(value).__name__}, not {kind.__name__}")
    return value


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left
