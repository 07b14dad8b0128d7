"""What one process knows of the cluster: who is alive, and how much of a prefix each node holds. Answers come from memory alone.

Invariants:
- A block counts for a node only while the node's record is there and names the epoch of the block's span.
- Spans may overlap, as while they are being joined: a block is there as long as one of them has it.
- Changes of one `apply` are seen together or not at all. A snapshot comes in beside the answers: its nodes at once, then its spans, and at
  last goes what it doesn't have; what is in both is never missing.
- Memory has a bound. Where it is reached, the blocks deepest in their chains are left out: answers get shorter, never wrong.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tutti_mooncake import _native
from tutti_mooncake.directory.broker import Change
from tutti_mooncake.directory.records import Keys, NodeRecord, RecordError, ShortHashes, SpanRecord

Incarnation = tuple[str, int]
"""A node's name and one of its epochs."""

MOST_BYTES = 2 << 30
"""By default. About 107 million blocks in spans of 1,024, 77 million in spans of 10."""
SLICE = 256
"""Spans of a snapshot between two chances for others to ask."""
PLACES = 1 << 16
"""Places for spans that are looked through at once."""


@dataclass
class ViewStats:
    """`blocks`: distinct ones that are kept. `left_out_blocks`: of all spans, for want of room. `bytes`: of the bound, in use.
    `refused`: records that were not ours to read; their text is in `last_refusal`.
    """

    nodes: int = 0
    spans: int = 0
    blocks: int = 0
    left_out_blocks: int = 0
    bytes: int = 0
    refused: int = 0
    last_refusal: str = ""


class DirectoryView:
    """Thread-safe; no call waits for more than a batch of changes, or until the deepest blocks are left out. `own`: node that is left out
    of answers. `most_bytes`: for spans and blocks; spans themselves (80 bytes each) are never left out.
    """

    def __init__(self, keys: Keys, own: str = "", *, most_bytes: int = MOST_BYTES) -> None:
        self._keys = keys
        self._own = own
        self._lock = threading.Lock()
        self._nodes: dict[str, NodeRecord] = {}
        self._numbers: dict[Incarnation, int] = {}  # of those that have spans: what the index calls them
        self._incarnations: list[Incarnation] = []  # by that number, also of those that had spans
        self._free: list[int] = []
        self._index = _native.HolderIndex(most_bytes)
        self._refused = 0
        self._last_refusal = ""

    def replace(self, items: Mapping[str, bytes]) -> None:
        """All there is, as of a snapshot. Takes no second copy of what is there already. Nobody else may change the view meanwhile."""
        nodes = [Change(key, value) for key, value in items.items() if key.startswith(self._keys.nodes)]
        with self._lock:
            self._index.begin_snapshot()
            gone = set(self._nodes) - {change.key.removeprefix(self._keys.nodes) for change in nodes}
            self._apply(Change(self._keys.node(node), None) for node in gone)
            self._apply(nodes)
        spans = (Change(key, value) for key, value in items.items() if key.startswith(self._keys.spans))
        while some := list(itertools.islice(spans, SLICE)):
            with self._lock:
                self._apply(some)
        first, more = 0, True
        while more:
            with self._lock:
                more = self._index.sweep(first, PLACES)
                first += PLACES
        with self._lock:
            self._free_numbers(list(self._numbers))

    def apply(self, changes: Iterable[Change]) -> None:
        """Changes in their order."""
        with self._lock:
            self._apply(changes)

    def nodes(self) -> list[NodeRecord]:
        """The nodes that are alive, by name."""
        with self._lock:
            return [self._nodes[node] for node in sorted(self._nodes)]

    def node(self, node: str) -> NodeRecord | None:
        """Its record, if it is alive."""
        with self._lock:
            return self._nodes.get(node)

    def holders(self, namespace: bytes, hashes: ShortHashes, begin: int = 0) -> list[tuple[NodeRecord, int]]:
        """Nodes that hold `hashes[begin]`, and how many blocks from there on without a gap; the longest first, else by name."""
        wanted = np.ascontiguousarray(hashes[begin:], dtype=np.uint64)
        with self._lock:
            numbers, blocks = self._index.holders(namespace, wanted)
            found = [(self._nodes[self._incarnations[i][0]], n) for i, n in zip(numbers.tolist(), blocks.tolist(), strict=True)]
        return sorted((one for one in found if one[0].node != self._own), key=lambda one: (-one[1], one[0].node))

    def stats(self) -> ViewStats:
        """Sizes; dead epochs' spans count until they are deleted."""
        with self._lock:
            counts = self._index.counts()
            return ViewStats(
                len(self._nodes),
                counts["spans"],
                counts["distinct_blocks"],
                counts["left_out_blocks"],
                self._index.used_bytes,
                self._refused,
                self._last_refusal,
            )

    def spans(self) -> Iterator[tuple[str, int, SpanRecord]]:
        """Spans with their node and epoch, also of epochs that aren't alive, each as far as it is kept. While there are changes, some may
        come twice or not at all.
        """
        for first in itertools.count(0, PLACES):
            with self._lock:
                if first >= self._index.places:
                    return
                some = [(self._incarnations[span[0]], span[3:]) for span in self._index.spans(first, PLACES)]
            for (node, epoch), (namespace, start, parent, hashes) in some:
                if len(hashes):
                    yield node, epoch, SpanRecord(namespace, start, parent, hashes)

    def dead(self) -> set[Incarnation]:
        """Epochs that have spans and aren't alive."""
        with self._lock:
            return {one for one in self._numbers if not self._lives(one)}

    # --- under the lock ---

    def _lives(self, incarnation: Incarnation) -> bool:
        record = self._nodes.get(incarnation[0])
        return record is not None and record.epoch == incarnation[1]

    def _apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            try:
                if change.key.startswith(self._keys.nodes):
                    self._change_node(change)
                elif change.key.startswith(self._keys.spans):
                    self._change_span(change)
            except RecordError as error:
                self._refused += 1
                self._last_refusal = str(error)

    def _change_node(self, change: Change) -> None:
        node = self._keys.parse_node(change.key)
        before = self._nodes.pop(node, None)  # also before a value that can't be read
        if before is not None:
            self._set_alive((node, before.epoch), False)
        if change.value is not None:
            record = self._nodes[node] = NodeRecord.decode(node, change.value)
            self._set_alive((node, record.epoch), True)

    def _set_alive(self, incarnation: Incarnation, alive: bool) -> None:
        number = self._numbers.get(incarnation)
        if number is not None:
            self._index.set_alive(number, alive)

    def _change_span(self, change: Change) -> None:
        try:
            node, epoch, number = self._keys.parse_span(change.key)
        except RecordError:
            if change.value is None:  # of something that was refused
                return
            raise
        incarnation = (node, epoch)
        try:
            span = None if change.value is None else SpanRecord.decode(change.key, change.value)
        except RecordError:
            self._remove(incarnation, number)
            raise
        if span is None:
            self._remove(incarnation, number)
        else:
            self._index.put(self._number_of(incarnation), number, span.namespace, span.start, span.parent, span.hashes)

    def _remove(self, incarnation: Incarnation, number: int) -> None:
        if incarnation in self._numbers:
            self._index.remove(self._numbers[incarnation], number)
            self._free_numbers([incarnation])

    def _number_of(self, incarnation: Incarnation) -> int:
        number = self._numbers.get(incarnation)
        if number is None:
            if self._free:
                number = self._free.pop()
                self._incarnations[number] = incarnation
            else:
                number = len(self._incarnations)
                self._incarnations.append(incarnation)
            self._numbers[incarnation] = number
            self._index.set_alive(number, self._lives(incarnation))
        return number

    def _free_numbers(self, incarnations: Iterable[Incarnation]) -> None:
        """Of those without a span."""
        for incarnation in incarnations:
            number = self._numbers[incarnation]
            if not self._index.spans_of(number):
                self._index.set_alive(number, False)
                del self._numbers[incarnation]
                self._free.append(number)
