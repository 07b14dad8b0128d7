"""The blocks that this node holds, as spans, and what of them the control plane doesn't know yet.

Blocks come in runs, as a prompt's blocks become durable, and go from the ends of chains, as eviction takes them. A run that goes on where a
span ends becomes part of it. Invariants: a block is in at most one span; `take` gives each change once, and `put_back` what couldn't be
written, unless it has changed again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tutti_mooncake.directory.records import MOST_SPAN_BLOCKS, ShortHashes, SpanRecord


@dataclass
class _Span:
    namespace: bytes
    start: int
    parent: int
    hashes: list[int] = field(default_factory=list)

    def record(self) -> SpanRecord:
        return SpanRecord(self.namespace, self.start, self.parent, np.array(self.hashes, dtype="<u8"))


class SpanBook:
    """Thread-safe."""

    def __init__(self, most_blocks: int = MOST_SPAN_BLOCKS) -> None:
        self._most = most_blocks
        self._lock = threading.Lock()
        self._spans: dict[int, _Span] = {}
        self._span_of: dict[tuple[bytes, int], int] = {}
        self._dirty: dict[int, None] = {}
        self._taken: set[int] = set()  # spans that may have been written
        self._abandoned = False
        self._next = 1

    @property
    def blocks(self) -> int:
        """Blocks in the book."""
        return len(self._span_of)

    @property
    def waiting(self) -> int:
        """Spans that have changed since they were taken."""
        return len(self._dirty)

    def add(self, namespace: bytes, start: int, parent: int, hashes: ShortHashes) -> None:
        """Blocks at positions `start`, ... of a chain, behind the block `parent` (0 at its beginning). Those that are known stay as they
        are.
        """
        with self._lock:
            if self._abandoned:
                return
            before = parent
            for offset, short in enumerate(hashes.tolist()):
                if (namespace, short) not in self._span_of:
                    self._add_one(namespace, start + offset, before, short)
                before = short

    def remove(self, namespace: bytes, hashes: ShortHashes) -> None:
        """Blocks that aren't held any more, in any order; those that are unknown are left out."""
        with self._lock:
            of_span: dict[int, set[int]] = {}
            for short in hashes.tolist():
                number = self._span_of.pop((namespace, short), None)
                if number is not None:
                    of_span.setdefault(number, set()).add(short)
            for number, gone in of_span.items():
                self._cut(number, gone)

    def join(self) -> int:
        """Joins spans that continue each other; how many there are fewer."""
        with self._lock:
            joined = 0
            for number in list(self._spans):
                span = self._spans.get(number)
                first = None if span is None or span.parent == 0 else self._span_of.get((span.namespace, span.parent))
                if span is None or first is None or first == number:
                    continue
                head = self._spans[first]
                if head.hashes[-1] != span.parent or len(head.hashes) + len(span.hashes) > self._most:
                    continue
                head.hashes += span.hashes
                for short in span.hashes:
                    self._span_of[span.namespace, short] = first
                del self._spans[number]
                self._dirty[first] = None
                if number in self._taken:
                    self._dirty[number] = None
                else:
                    self._dirty.pop(number, None)
                joined += 1
            return joined

    def take(self, most: int) -> list[tuple[int, SpanRecord | None]]:
        """Up to `most` changes, the oldest first: a span's number and its record, None where it is no more."""
        with self._lock:
            numbers = [number for number, _ in zip(self._dirty, range(most), strict=False)]
            for number in numbers:
                del self._dirty[number]
                if number in self._spans:
                    self._taken.add(number)
                else:
                    self._taken.discard(number)
            return [(number, self._spans[number].record() if number in self._spans else None) for number in numbers]

    def put_back(self, numbers: Sequence[int]) -> None:
        """These couldn't be written, as far as is known: they are taken again, first of all."""
        with self._lock:
            self._dirty = dict.fromkeys(numbers) | self._dirty
            self._taken.update(numbers)

    def abandon(self) -> None:
        """Forgets everything, for good: nobody will take it."""
        with self._lock:
            self._abandoned = True
            self._spans, self._span_of, self._dirty, self._taken = {}, {}, {}, set()

    def all(self) -> Iterator[tuple[int, SpanRecord]]:
        """All spans, as of now."""
        with self._lock:
            records = [(number, span.record()) for number, span in self._spans.items()]
        yield from records

    # --- under the lock ---

    def _add_one(self, namespace: bytes, position: int, before: int, short: int) -> None:
        number = self._span_of.get((namespace, before)) if before else None
        span = None if number is None else self._spans[number]
        if number is None or span is None or span.hashes[-1] != before or len(span.hashes) >= self._most:
            number, span = self._next, _Span(namespace, position, before)
            self._next += 1
            self._spans[number] = span
        span.hashes.append(short)
        self._span_of[namespace, short] = number
        self._dirty[number] = None

    def _cut(self, number: int, gone: set[int]) -> None:
        """Leaves what is before the first that is gone; runs behind it become spans of their own."""
        span = self._spans[number]
        self._dirty[number] = None
        kept = span.hashes
        first = next(i for i, short in enumerate(kept) if short in gone)
        span.hashes = kept[:first]
        if not span.hashes:
            del self._spans[number]
            if number not in self._taken:  # nobody has heard of it
                del self._dirty[number]
        new = None
        for i in range(first, len(kept)):
            if kept[i] in gone:
                new = None
                continue
            if new is None:
                new = _Span(span.namespace, span.start + i, kept[i - 1])
                own, self._next = self._next, self._next + 1
                self._spans[own] = new
                self._dirty[own] = None
            new.hashes.append(kept[i])
            self._span_of[span.namespace, kept[i]] = own
