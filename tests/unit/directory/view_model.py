"""What a view is asked, answered from records by the plainest means."""

from __future__ import annotations

from collections.abc import Iterable

from tutti_mooncake.directory.broker import Change
from tutti_mooncake.directory.records import Keys, NodeRecord, RecordError, SpanRecord


class ViewModel:
    """Keeps the records that can be read, by their keys."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.nodes: dict[str, NodeRecord] = {}
        self.spans: dict[str, tuple[str, int, SpanRecord]] = {}

    def apply(self, changes: Iterable[Change]) -> None:
        for key, value in ((change.key, change.value) for change in changes):
            try:
                if key.startswith(self._keys.nodes):
                    node = self._keys.parse_node(key)
                    self.nodes.pop(node, None)
                    if value is not None:
                        self.nodes[node] = NodeRecord.decode(node, value)
                else:
                    self.spans.pop(key, None)
                    if value is not None:
                        node, epoch, _ = self._keys.parse_span(key)
                        self.spans[key] = (node, epoch, SpanRecord.decode(key, value))
            except RecordError:
                pass

    def holders(self, namespace: bytes, hashes: list[int], begin: int = 0) -> list[tuple[str, int]]:
        found = []
        for node, record in self.nodes.items():
            has: set[int] = set()
            for name, epoch, span in self.spans.values():
                if (name, epoch, span.namespace) == (node, record.epoch, namespace):
                    has.update(span.hashes.tolist())
            wanted = hashes[begin:]
            run = next((i for i, short in enumerate(wanted) if short not in has), len(wanted))
            if run:
                found.append((node, run))
        return sorted(found, key=lambda one: (-one[1], one[0]))

    @property
    def blocks(self) -> int:
        """Distinct ones."""
        return len({(span.namespace, short) for _, _, span in self.spans.values() for short in span.hashes.tolist()})

    @property
    def span_blocks(self) -> int:
        """Of all spans."""
        return sum(len(span.hashes) for _, _, span in self.spans.values())

    def dead(self) -> set[tuple[str, int]]:
        return {(node, epoch) for node, epoch, _ in self.spans.values() if node not in self.nodes or self.nodes[node].epoch != epoch}
