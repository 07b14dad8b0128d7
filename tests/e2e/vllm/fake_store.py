"""A store whose operations end when the test says so, for the connector's halves without an engine and without a
disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from tutti_mooncake import Result, Status
from tutti_mooncake.connectors.vllm.registry import EngineStore, StoreId


@dataclass
class FakeOperation:
    """Runs until `end` is called; drained from `drain` on, which `end` calls unless told otherwise."""

    keys: list[bytes]
    block_ids: list[int]
    parent: bytes | None = None
    statuses: list[Status] | None = None
    is_drained: bool = False
    cancelled: bool = False

    def end(self, *statuses: Status, drained: bool = True) -> None:
        self.statuses = list(statuses) or [Status.OK] * len(self.keys)
        self.is_drained = drained

    def done(self) -> bool:
        return self.statuses is not None

    def drained(self) -> bool:
        return self.is_drained

    def cancel(self) -> None:
        self.cancelled = True

    def wait(self, timeout_seconds: float | None = None) -> Result:
        if self.statuses is None and self.cancelled:
            self.end(*[Status.CANCELLED] * len(self.keys))
        if self.statuses is None:
            raise TimeoutError
        statuses = np.array(self.statuses, dtype=np.uint8)
        return Result(statuses, bytes=int((statuses == Status.OK).sum()), seconds=0.0)


@dataclass
class FakeStore:
    """Finds what is in `resident`. `broken`: every call raises."""

    resident: set[bytes] = field(default_factory=set)
    pins: int = 0
    most_pins: int = 0
    broken: bool = False
    stores: list[FakeOperation] = field(default_factory=list)
    retrieves: list[FakeOperation] = field(default_factory=list)

    def lookup(self, keys: Sequence[bytes]) -> int:
        self._check()
        return next((i for i, key in enumerate(keys) if key not in self.resident), len(keys))

    def pin(self, keys: Sequence[bytes], lease_seconds: float) -> Any:
        self.pins += 1
        self.most_pins = max(self.most_pins, self.pins)
        return SimpleNamespace(blocks=self.lookup(keys))

    def unpin(self, pin: Any) -> None:
        assert self.pins > 0, "unpinned more often than pinned"
        self.pins -= 1

    def store(self, keys: Sequence[bytes], block_ids: Sequence[int], *, parent: bytes | None) -> FakeOperation:
        self._check()
        self.stores.append(FakeOperation(list(keys), list(block_ids), parent))
        return self.stores[-1]

    def retrieve(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> FakeOperation:
        self._check()
        self.retrieves.append(FakeOperation(list(keys), list(block_ids)))
        return self.retrieves[-1]

    def clear(self) -> int:
        self._check()
        self.resident.clear()
        return 0

    def close(self) -> None:
        return

    def _check(self) -> None:
        if self.broken:
            raise OSError("the device is gone")


def engine_store(store: FakeStore) -> EngineStore:
    """What the registry would hand out for `store`."""
    return EngineStore(StoreId("engine", ("fake",)), store, geometry=None)  # type: ignore[arg-type]
