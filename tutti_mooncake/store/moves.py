"""How a store and the processes that move its bytes work together, when they aren't one.

The store decides and hands out a `Move`: slots, generations, rotations and engine blocks. Each rank's `RankMover` does its part of the
move by arithmetic and answers with a `MoveReport`. Only when every rank has reported is the move done: so a block is published when all
ranks have written it, and one rank's failure makes it fail on all.

Invariants: each rank answers each move exactly once, and only when none of its I/O can touch memory or slots any more; a write is
reported as OK only after its checksums are on the device.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tutti_mooncake.errors import Status

logger = logging.getLogger(__name__)
Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Move:
    """What every rank is to do. Arrays have one entry per block; `blocks` has that many for each group of layers, group by group.

    `id` is unique in one store. `deadline_seconds` counts from when a rank begins; negative = none.
    """

    id: int
    write: bool
    slots: Words
    generations: Words
    rots: Bytes
    blocks: Words
    deadline_seconds: float


@dataclass(frozen=True)
class MoveReport:
    """How one rank's part of a move ended: a `Status` per block, how long it took, and the rank's I/O counters so far."""

    move_id: int
    rank: int
    statuses: Bytes
    seconds: float
    io: dict[str, int]


class PlanLike(Protocol):
    """A running move, as operations see it: a native plan, or a `RankedPlan`."""

    @property
    def seconds(self) -> float: ...
    @property
    def layers(self) -> int: ...
    def done(self) -> bool: ...
    def drained(self) -> bool: ...
    def wait(self, seconds: float) -> bool: ...
    def wait_layer(self, layer: int, seconds: float) -> bool: ...
    def cancel(self) -> None: ...
    def statuses(self) -> Bytes: ...


class MoverLike(Protocol):
    """What moves a store's bytes: `io.executor.Mover` in this process, or `RankedMover` in others."""

    blocks: int
    groups: int
    executor: str
    executor_reason: str

    @property
    def registered(self) -> bool: ...
    def submit(self, *, write: bool, slots: Words, generations: Words, rots: Bytes, blocks: Words, deadline_seconds: float) -> PlanLike: ...
    def seal(self, plan: Any) -> Bytes: ...
    def stop(self, grace_seconds: float) -> None: ...
    def counters(self) -> dict[str, int]: ...
    def stats(self) -> dict[str, int | str]: ...


class RankedPlan:
    """A move that one or more ranks work at. Thread-safe."""

    def __init__(self, move: Move, ranks: int, layers: int) -> None:
        self.move = move
        self.layers = layers
        self._ranks = ranks
        self._reports: dict[int, MoveReport] = {}
        self._changed = threading.Condition()
        self._begin = time.monotonic()
        self._abandoned = False

    @property
    def seconds(self) -> float:
        """Of the slowest rank; so far, while it runs."""
        with self._changed:
            if not self.done():
                return time.monotonic() - self._begin
            return max((report.seconds for report in self._reports.values()), default=0.0)

    def done(self) -> bool:
        """True once every rank has reported."""
        return self._abandoned or len(self._reports) == self._ranks

    def drained(self) -> bool:
        """The same: ranks report when they are drained."""
        return self.done()

    def wait(self, seconds: float) -> bool:
        """Waits until done; negative = for ever. Whether it is."""
        with self._changed:
            return self._changed.wait_for(self.done, None if seconds < 0 else seconds)

    def wait_layer(self, layer: int, seconds: float) -> bool:
        """Waits for the whole: layers are waited for where the bytes arrive."""
        return self.wait(seconds)

    def cancel(self) -> None:
        """Changes nothing here: each rank cancels its own plan."""

    def statuses(self) -> Bytes:
        """Per block the first rank's status that isn't OK; CANCELLED where a rank never answered."""
        with self._changed:
            result = np.full(len(self.move.slots), Status.OK, dtype=np.uint8)
            for rank in range(self._ranks):
                report = self._reports.get(rank)
                theirs = np.full(len(result), Status.CANCELLED, dtype=np.uint8) if report is None else report.statuses
                result = np.where(result == Status.OK, theirs, result)
            return result

    def take(self, report: MoveReport) -> bool:
        """Takes a rank's report; whether every rank has reported now. A second one of a rank, or one of other blocks, is ignored."""
        with self._changed:
            if report.rank not in self._reports and 0 <= report.rank < self._ranks and len(report.statuses) == len(self.move.slots):
                self._reports[report.rank] = report
                self._changed.notify_all()
            else:
                logger.error("move %d: rank %d reported %d blocks, which is ignored", self.move.id, report.rank, len(report.statuses))
            return len(self._reports) == self._ranks

    def abandon(self) -> None:
        """Ends it without the ranks that didn't answer."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()


class RankedMover:
    """Moves by other processes or threads: gives out moves, takes reports. Thread-safe.

    `ranks`: how many work at each move. `blocks`: engine blocks that each has, `groups`: its block tables. `reports_by_itself`: whether
    reports come without anybody asking, so that waiting for them at the end makes sense.
    """

    def __init__(self, ranks: int, layers: int, blocks: int, groups: int = 1, *, reports_by_itself: bool) -> None:
        self.blocks = blocks
        self.groups = groups
        self.executor = "ranks"
        self.executor_reason = "other processes move this store's bytes"
        self.reports_by_itself = reports_by_itself
        self._ranks = ranks
        self._layers = layers
        self._next_id = 0
        self._running: dict[int, RankedPlan] = {}
        self._io: dict[int, dict[str, int]] = {}
        self._lock = threading.Lock()

    @property
    def registered(self) -> bool:
        """Always: each rank has registered its own tensors."""
        return True

    @property
    def running(self) -> int:
        """Moves that not every rank has reported."""
        return len(self._running)

    def submit(self, *, write: bool, slots: Words, generations: Words, rots: Bytes, blocks: Words, deadline_seconds: float) -> RankedPlan:
        """A plan whose `move` the caller hands to every rank."""
        with self._lock:
            self._next_id += 1
            move = Move(self._next_id, write, slots, generations, rots, np.ascontiguousarray(blocks).reshape(-1), deadline_seconds)
            plan = RankedPlan(move, self._ranks, self._layers)
            self._running[move.id] = plan
        return plan

    def take(self, reports: Sequence[MoveReport]) -> None:
        """Takes reports; those of unknown moves are ignored."""
        for report in reports:
            with self._lock:
                plan = self._running.get(report.move_id)
                if plan is not None:
                    self._io[report.rank] = report.io
            if plan is not None and plan.take(report):
                with self._lock:
                    self._running.pop(report.move_id, None)

    def seal(self, plan: PlanLike) -> Bytes:
        """Statuses of a write that is done; the ranks have written its checksums."""
        return plan.statuses()

    def stop(self, grace_seconds: float) -> None:
        """Ends what runs: waits for reports that come by themselves, at most `grace_seconds`, and gives up the others."""
        until = time.monotonic() + (grace_seconds if self.reports_by_itself else 0.0)
        with self._lock:
            running = list(self._running.values())
        for plan in running:
            plan.wait(max(0.0, until - time.monotonic()))
        for plan in running:
            plan.abandon()
        with self._lock:
            self._running.clear()

    def counters(self) -> dict[str, int]:
        """Counters of the ranks' lanes, summed."""
        with self._lock:
            names = {name for io in self._io.values() for name in io}
            return {name: sum(io.get(name, 0) for io in self._io.values()) for name in sorted(names)}

    def stats(self) -> dict[str, int | str]:
        """The counters: ranks have nothing else to say here."""
        return {**self.counters()}


Deliver = Callable[[MoveReport], None]
