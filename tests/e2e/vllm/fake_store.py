"""A store and a rank's mover whose moves end when the test says so, for the connector's halves without an engine and without a disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from tutti_mooncake import Result, Status
from tutti_mooncake.config import EngineConfig
from tutti_mooncake.connectors.vllm.accounting import Accounting
from tutti_mooncake.connectors.vllm.policy import LoadPolicy
from tutti_mooncake.connectors.vllm.registry import EngineStore
from tutti_mooncake.connectors.vllm.spans import Spans
from tutti_mooncake.schedule import LoadCost
from tutti_mooncake.store.moves import Move, MoveReport, RankedMover
from tutti_mooncake.store.request_log import RequestLog


def move(blocks: Sequence[int], move_id: int = 1, *, write: bool = False) -> Move:
    """A move of engine blocks; where they lie on disk is of no account here."""
    words = np.array(blocks, dtype=np.uint32)
    return Move(move_id, write, words, words, words.astype(np.uint8), words, -1.0)


@dataclass
class FakeOperation:
    """Ends as its plan does."""

    keys: list[bytes]
    block_ids: list[int]
    parent: bytes | None
    plan: Any

    def done(self) -> bool:
        return bool(self.plan.done())

    def wait(self, timeout_seconds: float | None = None) -> Result:
        assert self.plan.done()
        statuses = self.plan.statuses()
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
    mover: RankedMover = field(default_factory=lambda: RankedMover(1, 4, 1000, reports_by_itself=False))

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

    def store(
        self, keys: Sequence[bytes], block_ids: Sequence[Sequence[int]], *, parent: bytes | None, admit: bool = False
    ) -> FakeOperation:
        self._check()
        self.stores.append(self._operation(keys, block_ids[0], parent, write=True))
        return self.stores[-1]

    def retrieve(self, keys: Sequence[bytes], block_ids: Sequence[Sequence[int]]) -> FakeOperation:
        self._check()
        self.retrieves.append(self._operation(keys, block_ids[0], None, write=False))
        return self.retrieves[-1]

    def clear(self) -> int:
        self._check()
        self.resident.clear()
        return 0

    def close(self) -> None:
        return

    def _operation(self, keys: Sequence[bytes], block_ids: Sequence[int], parent: bytes | None, *, write: bool) -> FakeOperation:
        words = np.array(block_ids, dtype=np.uint32)
        plan = self.mover.submit(
            write=write, slots=words, generations=words, rots=words.astype(np.uint8), blocks=words, deadline_seconds=-1.0
        )
        return FakeOperation(list(keys), list(block_ids), parent, plan)

    def _check(self) -> None:
        if self.broken:
            raise OSError("the device is gone")


def end(operation: FakeOperation, *statuses: Status) -> list[MoveReport]:
    """The report with which the one rank ends a move: all blocks OK unless told otherwise."""
    found = np.array(list(statuses) or [Status.OK] * len(operation.keys), dtype=np.uint8)
    return [MoveReport(operation.plan.move.id, 0, found, 0.001, {})]


def engine_store(store: FakeStore) -> EngineStore:
    """What the registry would hand out for `store`."""
    return EngineStore("engine", store, store.mover, geometry=None)  # type: ignore[arg-type]


def accounting(ours: EngineStore, block_tokens: int) -> Accounting:
    """Counts, and notes that nobody reads."""
    return Accounting(ours.counters, RequestLog(), Spans(None), block_tokens)


def policy(load: str = "asynchronous", clock: Any = None, **settings: Any) -> LoadPolicy:
    """Loads every hit."""
    config = EngineConfig(load=load, load_threshold="none", **settings)
    seams = {} if clock is None else {"clock": clock}
    return LoadPolicy(config, LoadCost(), may_wait=True, largest_step=512, **seams)


@dataclass
class FakePlan:
    """Runs until `end` is called; drained from then on, unless told otherwise."""

    move: Move
    result: list[Status] | None = None
    is_drained: bool = False
    cancelled: bool = False
    layers_waited: list[int] = field(default_factory=list)
    seconds: float = 0.0
    layers: int = 4

    def end(self, *statuses: Status, drained: bool = True) -> None:
        self.result = list(statuses) or [Status.OK] * len(self.move.slots)
        self.is_drained = drained

    def done(self) -> bool:
        return self.result is not None

    def drained(self) -> bool:
        return self.is_drained

    def cancel(self) -> None:
        self.cancelled = True

    def wait(self, seconds: float) -> bool:
        if self.result is None and self.cancelled:
            self.end(*[Status.CANCELLED] * len(self.move.slots))
        if self.result is None and seconds < 0:
            raise AssertionError("this would wait for ever")
        return self.done()

    def wait_layer(self, layer: int, seconds: float) -> bool:
        self.layers_waited.append(layer)
        return True

    def statuses(self) -> Any:
        assert self.result is not None
        return np.array(self.result, dtype=np.uint8)


@dataclass
class FakeMover:
    """Begins moves, unless `broken`; remembers which ones it refused."""

    plans: list[FakePlan] = field(default_factory=list)
    refused: list[tuple[int, Status]] = field(default_factory=list)
    broken: bool = False
    closed: bool = False

    def begin(self, work: Move) -> FakePlan | None:
        if self.broken:
            return None
        self.plans.append(FakePlan(work))
        return self.plans[-1]

    def refuse(self, work: Move, status: Status) -> None:
        self.refused.append((work.id, status))

    def poll(self) -> None:
        return

    def close(self) -> None:
        self.closed = True
