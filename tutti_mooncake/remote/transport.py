"""The seam to what moves bytes between nodes: Mooncake's Transfer Engine, or memory of this process.

Who owns memory registers it, and only then may others write into it. A write that has failed may still have moved some of its bytes, and
one that was given up may move them later: receivers check what is there when they use it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tutti_mooncake.errors import TuttiError

RDMA_DEVICES = Path("/sys/class/infiniband")


class TransportError(TuttiError):
    """A transfer that didn't end well, or a transport that can't be set up; the text says with whom and why."""


@dataclass(frozen=True)
class Piece:
    """Bytes that go from an address here to an address there."""

    source: int
    target: int
    bytes: int


class Transport(Protocol):
    """Thread-safe."""

    @property
    def segment(self) -> str:
        """What others call this end."""
        ...

    @property
    def protocol(self) -> str:
        """What really moves the bytes: "tcp", "rdma" or "memory"."""
        ...

    def register(self, address: int, size: int) -> None:
        """Others may read and write this memory, and it may be sent from. Raises TransportError."""
        ...

    def unregister(self, address: int) -> None:
        """The opposite."""
        ...

    def write(self, segment: str, pieces: Sequence[Piece]) -> None:
        """Returns when all pieces are there. Raises TransportError."""
        ...


class MooncakeTransport:
    """Mooncake's Transfer Engine. `host`: the address of this node that others reach. `metadata`: "P2PHANDSHAKE", or etcd://host:port.

    A module and an engine for each process; one engine per object. Its ports have no authentication: `host` is one of a trusted network.
    """

    def __init__(self, host: str, protocol: str = "tcp", device: str = "", metadata: str = "P2PHANDSHAKE") -> None:
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise TransportError(
                f"Mooncake's Transfer Engine can't be loaded ({error}); install tutti-mooncake[mooncake] and the system packages "
                "libibverbs1 libnuma1 libcurl4"
            ) from error
        # The engine itself takes TCP, without a word, in place of what it doesn't know or can't have.
        if protocol not in ("tcp", "rdma"):
            raise TransportError(f"protocol {protocol!r} of the Transfer Engine: tcp or rdma")
        if protocol == "rdma" and not (RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir())):
            raise TransportError(f"the Transfer Engine can't use RDMA: {RDMA_DEVICES} shows no device; choose tcp, or load its driver")
        if protocol == "tcp":  # else it takes RDMA where there is a device, whatever it was asked for
            os.environ.setdefault("MC_FORCE_TCP", "1")
        self.protocol = protocol
        self._engine: Any = TransferEngine()
        if self._engine.initialize(host, metadata, protocol, device) != 0:
            raise TransportError(f"Mooncake's Transfer Engine can't be set up at {host} with {protocol} {device}".rstrip())
        self.segment = f"{host}:{self._engine.get_rpc_port()}" if metadata == "P2PHANDSHAKE" else host

    def register(self, address: int, size: int) -> None:
        """See Transport."""
        if self._engine.register_memory(address, size) != 0:
            raise TransportError(f"the Transfer Engine didn't register {size} bytes of memory; is there a limit on locked memory?")

    def unregister(self, address: int) -> None:
        """See Transport."""
        self._engine.unregister_memory(address)

    def write(self, segment: str, pieces: Sequence[Piece]) -> None:
        """See Transport."""
        sources, targets = [piece.source for piece in pieces], [piece.target for piece in pieces]
        code = self._engine.batch_transfer_sync_write(segment, sources, targets, [piece.bytes for piece in pieces])
        if code != 0:
            raise TransportError(f"the Transfer Engine couldn't write to {segment} (code {code})")


class MemoryTransport:
    """Between stores of one process, for tests: a segment is a name in a table that all ends share."""

    def __init__(self, segment: str, ends: dict[str, MemoryTransport]) -> None:
        self.segment = segment
        self.protocol = "memory"
        self._ends = ends
        self._lock = threading.Lock()
        self._regions: dict[int, int] = {}
        ends[segment] = self

    def register(self, address: int, size: int) -> None:
        """See Transport."""
        with self._lock:
            self._regions[address] = size

    def unregister(self, address: int) -> None:
        """See Transport."""
        with self._lock:
            self._regions.pop(address, None)

    def write(self, segment: str, pieces: Sequence[Piece]) -> None:
        """See Transport."""
        end = self._ends.get(segment)
        if end is None:
            raise TransportError(f"there is no segment {segment}")
        for piece in pieces:
            if not (self._has(piece.source, piece.bytes) and end._has(piece.target, piece.bytes)):
                raise TransportError(f"{piece.bytes} bytes from {piece.source:#x} to {piece.target:#x} of {segment} aren't registered")
            ctypes.memmove(piece.target, piece.source, piece.bytes)

    def _has(self, address: int, size: int) -> bool:
        with self._lock:
            return any(begin <= address and address + size <= begin + length for begin, length in self._regions.items())
