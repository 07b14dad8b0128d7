"""What became of the last requests, on the pool, for `tutti explain --request`: a ring of 2,048 frames of 256 bytes on device 0.

A frame (docs/format.md): magic, ordinal, JSON padded with zeros, checksum. Frames that fail their check are left out.
"""

from __future__ import annotations

import json
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from tutti_mooncake.store.format import HEADER_BYTES, checksum

LOG_OFFSET = 512 << 10
LOG_FRAMES = (HEADER_BYTES - LOG_OFFSET) // 256
_HEAD = struct.Struct("<4sHHQ")  # magic, length, unused, ordinal
_MAGIC = b"TRQ1"
_FRAME_BYTES = 256
_LONGEST_ID = 64


@dataclass(frozen=True)
class RequestNote:
    """How the blocks of one request's prompt were come by; blocks unless said otherwise.

    `id`: the engine's name of it, its last 64 characters. `prompt`: tokens. `full`: blocks that the prompt fills. `hbm`: found in the
    engine's own cache. `found`: leading blocks that the store had. `loaded`: that were loaded well; `failed`: that were to be. `why`: why
    blocks that the store had were not loaded, empty where they were. `missing`: first 8 bytes (hex) of the first key that it didn't have.
    `elsewhere`: blocks behind those found that another node held; `fetched`: of these, that were fetched well.
    """

    id: str
    time: int
    prompt: int
    full: int
    hbm: int
    found: int
    loaded: int = 0
    failed: int = 0
    why: str = ""
    missing: str = ""
    elsewhere: int = 0
    fetched: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


_NAMES = [field.name for field in fields(RequestNote)]


class RequestLog:
    """Thread-safe. Notes wait in memory, at most a ring's worth, until `write`."""

    def __init__(self, next_ordinal: int = 0) -> None:
        self._lock = threading.Lock()
        self._next = next_ordinal
        self._waiting: deque[RequestNote] = deque(maxlen=LOG_FRAMES)
        self.total = 0
        """Notes taken since the store was opened."""

    def add(self, note: RequestNote) -> None:
        """Takes a note."""
        with self._lock:
            self._waiting.append(note)
            self.total += 1

    def write(self, descriptor: int) -> None:
        """Leaves the notes on device 0. Raises OSError."""
        with self._lock:
            notes, first = list(self._waiting), self._next
            self._waiting.clear()
            self._next += len(notes)
        for ordinal, note in enumerate(notes, first):
            os.pwrite(descriptor, _encode(note, ordinal), LOG_OFFSET + ordinal % LOG_FRAMES * _FRAME_BYTES)

    @classmethod
    def read(cls, descriptor: int) -> RequestLog:
        """Goes on where an earlier owner stopped."""
        return cls(max((ordinal for ordinal, _ in _frames(descriptor)), default=-1) + 1)


def read_notes(descriptor: int) -> list[RequestNote]:
    """All notes on device 0, the oldest first."""
    return [note for _, note in sorted(_frames(descriptor), key=lambda item: item[0])]


def _encode(note: RequestNote, ordinal: int) -> bytes:
    room = _FRAME_BYTES - _HEAD.size - 8
    values = [note.id[-_LONGEST_ID:], *(getattr(note, name) for name in _NAMES[1:])]
    payload = _json(values)
    while len(payload) > room and values[0]:  # names of many bytes per character
        values[0] = values[0][len(values[0]) // 2 + 1 :]
        payload = _json(values)
    body = (_HEAD.pack(_MAGIC, len(payload), 0, ordinal) + payload).ljust(_FRAME_BYTES - 8, b"\0")
    return body + struct.pack("<Q", checksum(body))


def _json(values: list[Any]) -> bytes:
    return json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")  # names may hold anything


def _frames(descriptor: int) -> Iterator[tuple[int, RequestNote]]:
    data = os.pread(descriptor, LOG_FRAMES * _FRAME_BYTES, LOG_OFFSET)
    for at in range(0, len(data) - _FRAME_BYTES + 1, _FRAME_BYTES):
        frame = data[at : at + _FRAME_BYTES]
        if frame[:4] != _MAGIC or struct.unpack("<Q", frame[-8:])[0] != checksum(frame[:-8]):
            continue
        _, length, _, ordinal = _HEAD.unpack_from(frame)
        yield ordinal, RequestNote(*json.loads(frame[_HEAD.size : _HEAD.size + length]))
