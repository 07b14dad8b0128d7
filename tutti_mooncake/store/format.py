"""Bytes at the start of each device: two copies of the superblock, a state block and a block of counters (docs/format.md)."""

from __future__ import annotations

import json
import os
import struct
from typing import Any

import numpy as np

from tutti_mooncake import _native
from tutti_mooncake.errors import FormatVersionError, PoolCorrupt
from tutti_mooncake.geometry import FORMAT_VERSION

SUPERBLOCK_MAGIC = b"TUTTIKV1"
STATE_MAGIC = b"TUTTIST1"
COUNTERS_MAGIC = b"TUTTICT1"
FRAME_BYTES = 4096
SUPERBLOCK_OFFSETS = (0, FRAME_BYTES)
STATE_OFFSET = 2 * FRAME_BYTES
COUNTERS_OFFSET = 3 * FRAME_BYTES
HEADER_BYTES = 1 << 20
_HEAD = struct.Struct("<8sII")


def checksum(data: bytes) -> int:
    """multilinear64 of bytes."""
    return int(_native.multilinear64(np.frombuffer(data, dtype=np.uint8)))


def encode_frame(magic: bytes, values: dict[str, Any]) -> bytes:
    """A 4 KiB frame: magic, format version, length, JSON, zeros, checksum."""
    payload = json.dumps(values, sort_keys=True).encode()
    if len(payload) > FRAME_BYTES - _HEAD.size - 8:
        raise PoolCorrupt(f"{magic.decode()} frame needs {len(payload)} bytes, more than a frame holds")
    body = (_HEAD.pack(magic, FORMAT_VERSION, len(payload)) + payload).ljust(FRAME_BYTES - 8, b"\0")
    return body + struct.pack("<Q", checksum(body))


def decode_frame(magic: bytes, frame: bytes) -> dict[str, Any] | None:
    """The values of a frame; None when it is damaged. Raises FormatVersionError for an undamaged frame of another version."""
    if len(frame) != FRAME_BYTES or struct.unpack("<Q", frame[-8:])[0] != checksum(frame[:-8]):
        return None
    found, version, length = _HEAD.unpack_from(frame)
    if found != magic:
        return None
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"the pool has format version {version}, this program reads {FORMAT_VERSION}; use the program that wrote it, or make a new pool"
        )
    values: dict[str, Any] = json.loads(frame[_HEAD.size : _HEAD.size + length])
    return values


def read_superblock(fd: int, path: str) -> dict[str, Any] | None:
    """The superblock, from whichever copy is whole; None for a device without one (all zeros). Raises PoolCorrupt when both are damaged."""
    frames = [os.pread(fd, FRAME_BYTES, offset) for offset in SUPERBLOCK_OFFSETS]
    for frame in frames:
        values = decode_frame(SUPERBLOCK_MAGIC, frame)
        if values is not None:
            return values
    if not any(any(frame) for frame in frames):
        return None
    if not any(frame.startswith(SUPERBLOCK_MAGIC) for frame in frames):
        raise PoolCorrupt(f"{path} holds something that is no pool; `tutti init --force` overwrites it")
    raise PoolCorrupt(
        f"{path}: both copies of the superblock are damaged; nothing can be recovered: make the pool anew with `tutti init --force`"
    )


def write_superblock(fd: int, values: dict[str, Any]) -> None:
    """Both copies."""
    frame = encode_frame(SUPERBLOCK_MAGIC, values)
    for offset in SUPERBLOCK_OFFSETS:
        os.pwrite(fd, frame, offset)


def repair_superblock(fd: int, values: dict[str, Any]) -> int:
    """Rewrites damaged copies; how many there were."""
    frame = encode_frame(SUPERBLOCK_MAGIC, values)
    damaged = [offset for offset in SUPERBLOCK_OFFSETS if os.pread(fd, FRAME_BYTES, offset) != frame]
    for offset in damaged:
        os.pwrite(fd, frame, offset)
    return len(damaged)


def read_state(fd: int) -> dict[str, Any]:
    """The state block; empty when it is damaged or was never written."""
    return _read_frame(fd, STATE_MAGIC, STATE_OFFSET)


def write_state(fd: int, values: dict[str, Any]) -> None:
    """Replaces the state block."""
    os.pwrite(fd, encode_frame(STATE_MAGIC, values), STATE_OFFSET)


def read_counters(fd: int) -> dict[str, Any]:
    """The owner's counters; empty when they are damaged or were never written."""
    return _read_frame(fd, COUNTERS_MAGIC, COUNTERS_OFFSET)


def write_counters(fd: int, values: dict[str, Any]) -> None:
    """Replaces the counters."""
    os.pwrite(fd, encode_frame(COUNTERS_MAGIC, values), COUNTERS_OFFSET)


def _read_frame(fd: int, magic: bytes, offset: int) -> dict[str, Any]:
    try:
        return decode_frame(magic, os.pread(fd, FRAME_BYTES, offset)) or {}
    except FormatVersionError:
        return {}
