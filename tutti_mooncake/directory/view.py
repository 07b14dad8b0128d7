"""What one process knows of the cluster: who is alive, and how much of a prefix each node holds. Answers come from memory alone.

Invariants:
- A block counts for a node only while the node's record is there and names the epoch of the block's span.
- Spans may overlap, as while they are being joined: a block is there as long as one of them has it.
- Changes of one call are seen together or not at all.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tutti_mooncake.directory.broker import Change
from tutti_mooncake.directory.records import Keys, NodeRecord, RecordError, ShortHashes, SpanRecord

Incarnation = tuple[str, int]
"""A node's name and one of its epochs."""


@dataclass
class ViewStats:
    """`refused`: records that were not ours to read; their text is in `last_refusal`."""

    nodes: int = 0
    spans: int = 0
    blocks: int = 0
    refused: int = 0
    last_refusal: str = ""


class DirectoryView:
    """Thread-safe; no call waits for more than a batch of changes. `own`: node that is left out of answers."""

    def __init__(self, keys: Keys, own: str = "") -> None:
        self._keys = keys
        self._own = own
        self._lock = threading.Lock()
        self._state = _State(keys)

    def replace(self, items: Mapping[str, bytes]) -> None:
        """All there is, as of a snapshot."""
        state = _State(self._keys)  # made beside the one that answers meanwhile: a large one takes seconds
        state.apply(Change(key, value) for key, value in items.items())
        with self._lock:
            state.refused += self._state.refused
            state.last_refusal = state.last_refusal or self._state.last_refusal
            self._state = state

    def apply(self, changes: Iterable[Change]) -> None:
        """Changes in their order."""
        with self._lock:
            self._state.apply(changes)

    def nodes(self) -> list[NodeRecord]:
        """The nodes that are alive, by name."""
        with self._lock:
            return [self._state.nodes[node] for node in sorted(self._state.nodes)]

    def node(self, node: str) -> NodeRecord | None:
        """Its record, if it is alive."""
        with self._lock:
            return self._state.nodes.get(node)

    def holders(self, namespace: bytes, hashes: ShortHashes, begin: int = 0) -> list[tuple[NodeRecord, int]]:
        """Nodes that hold `hashes[begin]`, and how many blocks from there on without a gap; the longest first, else by name."""
        with self._lock:
            found = self._state.holders(namespace, hashes[begin:].tolist())
        return sorted((one for one in found if one[0].node != self._own), key=lambda one: (-one[1], one[0].node))

    def stats(self) -> ViewStats:
        """Sizes; dead epochs' spans count until they are deleted."""
        with self._lock:
            state = self._state
            blocks = sum(len(known) for known in state.known.values())
            return ViewStats(len(state.nodes), len(state.spans), blocks, state.refused, state.last_refusal)

    def spans(self) -> list[tuple[str, int, SpanRecord]]:
        """All spans with their node and epoch, also of epochs that aren't alive."""
        with self._lock:
            return [(*incarnation, span) for incarnation, span in self._state.spans.values()]

    def dead(self) -> set[Incarnation]:
        """Epochs that have spans and aren't alive."""
        with self._lock:
            return {one for one in self._state.spans_of if not self._state.lives(one)}


class _State:
    """`known`: by namespace and short hash, a bit for each incarnation that holds the block. `again`: how many more spans of one
    incarnation have it.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.nodes: dict[str, NodeRecord] = {}
        self.spans: dict[str, tuple[Incarnation, SpanRecord]] = {}
        self.spans_of: Counter[Incarnation] = Counter()
        self.known: dict[bytes, dict[int, int]] = {}
        self.refused = 0
        self.last_refusal = ""
        self._again: Counter[tuple[bytes, int, int]] = Counter()
        self._bits: dict[Incarnation, int] = {}
        self._free_bits: list[int] = []
        self._alive = 0

    def lives(self, incarnation: Incarnation) -> bool:
        """Whether it is the node's own epoch."""
        record = self.nodes.get(incarnation[0])
        return record is not None and record.epoch == incarnation[1]

    def holders(self, namespace: bytes, hashes: list[int]) -> list[tuple[NodeRecord, int]]:
        """See DirectoryView, in no order."""
        known = self.known.get(namespace)
        if known is None or not hashes:
            return []
        going, ended = self._alive, []
        for position, short in enumerate(hashes):
            left = going & ~known.get(short, 0)
            if left and position:
                ended.append((left, position))
            going &= ~left
            if not going:
                break
        else:
            ended.append((going, len(hashes)))
        return [
            (self.nodes[incarnation[0]], blocks) for bits, blocks in ended for incarnation, bit in self._bits.items() if bits >> bit & 1
        ]

    def apply(self, changes: Iterable[Change]) -> None:
        """Changes in their order."""
        for change in changes:
            try:
                if change.key.startswith(self._keys.nodes):
                    self._change_node(change)
                elif change.key.startswith(self._keys.spans):
                    self._change_span(change)
            except RecordError as error:
                self.refused += 1
                self.last_refusal = str(error)
        self._alive = sum(1 << bit for incarnation, bit in self._bits.items() if self.lives(incarnation))

    def _change_node(self, change: Change) -> None:
        node = self._keys.parse_node(change.key)
        self.nodes.pop(node, None)  # also before a value that can't be read
        if change.value is not None:
            self.nodes[node] = NodeRecord.decode(node, change.value)

    def _change_span(self, change: Change) -> None:
        before = self.spans.pop(change.key, None)
        if before is not None:
            self._remove(*before)
        if change.value is None:
            return
        node, epoch, _ = self._keys.parse_span(change.key)
        span = SpanRecord.decode(change.key, change.value)
        self.spans[change.key] = ((node, epoch), span)
        self._add((node, epoch), span)

    def _add(self, incarnation: Incarnation, span: SpanRecord) -> None:
        bit = self._bits.get(incarnation)
        if bit is None:
            bit = self._bits[incarnation] = self._free_bits.pop() if self._free_bits else len(self._bits)
        self.spans_of[incarnation] += 1
        mask = 1 << bit
        known = self.known.setdefault(span.namespace, {})
        for short in span.hashes.tolist():
            held = known.get(short, 0)
            if held & mask:
                self._again[span.namespace, bit, short] += 1
            else:
                known[short] = held | mask

    def _remove(self, incarnation: Incarnation, span: SpanRecord) -> None:
        bit = self._bits[incarnation]
        known = self.known[span.namespace]
        for short in span.hashes.tolist():
            again = (span.namespace, bit, short)
            if self._again[again] > 0:
                self._again[again] -= 1
            elif held := known[short] & ~(1 << bit):
                known[short] = held
            else:
                del known[short]
            if not self._again[again]:
                del self._again[again]
        if not known:
            del self.known[span.namespace]
        self.spans_of[incarnation] -= 1
        if not self.spans_of[incarnation]:
            del self.spans_of[incarnation], self._bits[incarnation]
            self._free_bits.append(bit)
