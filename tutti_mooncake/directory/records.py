"""What nodes write into the control plane: who they are, and which blocks they hold.

A node is one record under a lease, gone when its node is. Blocks are recorded as spans, runs of consecutive blocks of one prefix chain,
which name the epoch of their node and carry no lease: readers ignore those of an epoch that isn't alive. See docs/directory.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from tutti_mooncake.errors import TuttiError

RECORD_VERSION = 1
SHORT_BYTES = 8
NAMESPACE_BYTES = 16
MOST_SPAN_BLOCKS = 1024
MOST_VALUE_BYTES = 16 << 10
"""Of a record. The largest span has 8 KiB of hashes."""
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

ShortHashes = npt.NDArray[np.uint64]
"""The first 8 bytes of (salted) keys, little-endian. Enough to find a holder, who compares whole keys."""


class RecordError(TuttiError, ValueError):
    """A key or value in the control plane that isn't one of ours, or that this version can't read."""


@dataclass(frozen=True)
class NodeRecord:
    """`epoch`: of this start of the node, larger than those before. `address`: where it serves others, host:port; empty when it doesn't.
    `zone`: a label; nodes of one zone are near each other.
    """

    node: str
    epoch: int
    address: str = ""
    zone: str = ""

    def __post_init__(self) -> None:
        if not NODE_NAME.fullmatch(self.node):
            raise RecordError(f"node name {self.node!r}: letters, digits, '.', '_' and '-', at most 128, beginning with a letter or digit")
        if not 0 < self.epoch < 1 << 63:
            raise RecordError(f"node {self.node}: epoch {self.epoch} is not a positive 63-bit number")

    def encode(self) -> bytes:
        """As stored."""
        return bytes(msgpack.packb({"v": RECORD_VERSION, "epoch": self.epoch, "address": self.address, "zone": self.zone}))

    @classmethod
    def decode(cls, node: str, value: bytes) -> NodeRecord:
        """Raises RecordError."""
        fields = _unpack(f"node {node}", value, {"epoch": int, "address": str, "zone": str})
        return cls(node, fields["epoch"], fields["address"], fields["zone"])


@dataclass(frozen=True)
class SpanRecord:
    """`hashes`: of the blocks at positions `start`, `start + 1`, ... of a chain. `parent`: short hash of the block before; 0 at the start
    of a prompt. `namespace`: 16 bytes; blocks of others are never found.
    """

    namespace: bytes
    start: int
    parent: int
    hashes: ShortHashes

    def __post_init__(self) -> None:
        if len(self.namespace) != NAMESPACE_BYTES:
            raise RecordError(f"a span's namespace has {len(self.namespace)} bytes, not {NAMESPACE_BYTES}")
        if not 0 < len(self.hashes) <= MOST_SPAN_BLOCKS:
            raise RecordError(f"a span of {len(self.hashes)} blocks; it has 1 to {MOST_SPAN_BLOCKS}")
        if not (0 <= self.start < 1 << 31 and 0 <= self.parent < 1 << 64):
            raise RecordError(f"a span that starts at {self.start} behind {self.parent}")

    @property
    def end(self) -> int:
        """Position behind the last block."""
        return self.start + len(self.hashes)

    def encode(self) -> bytes:
        """As stored."""
        fields = {"v": RECORD_VERSION, "ns": self.namespace, "start": self.start, "parent": self.parent, "hashes": self.hashes.tobytes()}
        return bytes(msgpack.packb(fields))

    @classmethod
    def decode(cls, where: str, value: bytes) -> SpanRecord:
        """`where`: for the error's text. Raises RecordError."""
        fields = _unpack(where, value, {"ns": bytes, "start": int, "parent": int, "hashes": bytes})
        if len(fields["hashes"]) % SHORT_BYTES:
            raise RecordError(f"{where}: {len(fields['hashes'])} bytes of hashes of {SHORT_BYTES}")
        return cls(fields["ns"], fields["start"], fields["parent"], np.frombuffer(fields["hashes"], dtype="<u8"))


@dataclass(frozen=True)
class Keys:
    """Where records lie. `prefix`: of all keys of one cluster, without a slash at its end."""

    prefix: str = "tutti/v1"

    @property
    def nodes(self) -> str:
        """Prefix of the nodes' keys."""
        return f"{self.prefix}/nodes/"

    @property
    def spans(self) -> str:
        """Prefix of the spans' keys."""
        return f"{self.prefix}/spans/"

    def node(self, node: str) -> str:
        """Key of a node's record."""
        return self.nodes + node

    def spans_of(self, node: str, epoch: int | None = None) -> str:
        """Prefix of a node's spans, of one epoch or of all."""
        return f"{self.spans}{node}/" + ("" if epoch is None else f"{epoch:016x}/")

    def span(self, node: str, epoch: int, number: int) -> str:
        """Key of a span."""
        return f"{self.spans_of(node, epoch)}{number:016x}"

    def parse_node(self, key: str) -> str:
        """The node of a node's key. Raises RecordError."""
        node = key.removeprefix(self.nodes)
        if node == key or not NODE_NAME.fullmatch(node):
            raise RecordError(f"{key}: not a node's key")
        return node

    def parse_span(self, key: str) -> tuple[str, int, int]:
        """Node, epoch and number of a span's key. Raises RecordError."""
        parts = key.removeprefix(self.spans).split("/")
        if not key.startswith(self.spans) or len(parts) != 3 or not NODE_NAME.fullmatch(parts[0]):
            raise RecordError(f"{key}: not a span's key")
        if not all(re.fullmatch(r"[0-9a-f]{16}", part) for part in parts[1:]):
            raise RecordError(f"{key}: epoch and number have 16 hexadecimal digits")
        return parts[0], int(parts[1], 16), int(parts[2], 16)


def short_hashes(keys: npt.NDArray[np.uint8]) -> ShortHashes:
    """Of (salted) keys, uint8 of shape (n, 32); a new array of shape (n,)."""
    return np.ascontiguousarray(keys[:, :SHORT_BYTES]).view("<u8").reshape(-1)


def _unpack(where: str, value: bytes, kinds: dict[str, type]) -> dict[str, Any]:
    """The fields of a record, each of its kind. Raises RecordError."""
    if len(value) > MOST_VALUE_BYTES:
        raise RecordError(f"{where}: {len(value)} bytes, more than {MOST_VALUE_BYTES}")
    try:
        fields = msgpack.unpackb(value)
    except Exception as error:  # msgpack raises several kinds, with ValueError among them
        raise RecordError(f"{where}: not a record ({error})") from error
    if not isinstance(fields, dict) or fields.get("v") != RECORD_VERSION:
        version = fields.get("v") if isinstance(fields, dict) else None
        raise RecordError(f"{where}: version {version!r}; this one reads {RECORD_VERSION}")
    for name, kind in kinds.items():
        if type(fields.get(name)) is not kind:
            raise RecordError(f"{where}: {name} is {type(fields.get(name)).__name__}, not {kind.__name__}")
    return fields
