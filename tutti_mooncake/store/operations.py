"""Running and finished operations, and what they result in."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tutti_mooncake.errors import OperationFailed, Status, TensorError

if TYPE_CHECKING:
    from tutti_mooncake.store.moves import PlanLike

_NOT_FAILURES = (Status.OK, Status.EXISTS, Status.REJECTED)


@dataclass(frozen=True)
class Result:
    """How an operation ended: `statuses` is uint8 of shape (blocks,), values of Status; `bytes` counts payload of ok blocks."""

    statuses: npt.NDArray[np.uint8]
    bytes: int
    seconds: float

    @property
    def ok_blocks(self) -> int:
        """Blocks that this operation moved."""
        return int(np.count_nonzero(self.statuses == Status.OK))

    @property
    def failed(self) -> list[int]:
        """Positions of blocks that failed; EXISTS and REJECTED are no failures."""
        return [int(position) for position in np.flatnonzero(~np.isin(self.statuses, [int(status) for status in _NOT_FAILURES]))]

    def raise_for_status(self) -> None:
        """Raises OperationFailed when a block failed, naming how many and why."""
        if self.failed:
            names, counts = np.unique(self.statuses[self.failed], return_counts=True)
            reasons = ", ".join(f"{count} {Status(name).name}" for name, count in zip(names, counts, strict=True))
            raise OperationFailed(
                f"{len(self.failed)} of {len(self.statuses)} blocks failed: {reasons}; first at position {self.failed[0]}"
            )


class Operation:
    """What stores and retrieves have in common. Thread-safe.

    `statuses` holds what was decided before any I/O; `positions` are the blocks that the plan moves, and `slots`, `generations` and
    `keys` (salted) run parallel to it.
    """

    slots: npt.NDArray[np.uint32]
    generations: npt.NDArray[np.uint32]
    keys: npt.NDArray[np.uint8]
    ticket: int

    def __init__(
        self,
        statuses: npt.NDArray[np.uint8],
        positions: npt.NDArray[np.uint32],
        plan: PlanLike | None,
        payload_bytes_per_block: int,
        finish: Callable[[Operation], None],
    ) -> None:
        self.statuses = statuses
        self.positions = positions
        self.plan = plan
        self._payload_bytes = payload_bytes_per_block
        self._finish = finish
        self._finishing = threading.Lock()
        self._finished = threading.Event()
        if plan is None:
            self._finished.set()

    def done(self) -> bool:
        """True once wait() would return at once. Never blocks."""
        return self._finished.is_set()

    def drained(self) -> bool:
        """True once no I/O of this operation can touch its memory any more."""
        return self.plan is None or self.plan.drained()

    def cancel(self) -> None:
        """What has not ended yet ends as CANCELLED."""
        if self.plan is not None:
            self.plan.cancel()

    def finish_once(self) -> None:
        """Takes the results of a plan that is done into the store, once; for the store's own threads and for waiters."""
        with self._finishing:
            if not self._finished.is_set():
                self._finish(self)
                self._finished.set()

    def give_up(self) -> None:
        """Ends the operation as BAD_STATE: its results could not be taken in."""
        self.statuses[self.positions] = Status.BAD_STATE
        self._finished.set()

    def _result(self) -> Result:
        moved = int(np.count_nonzero(self.statuses[self.positions] == Status.OK)) if len(self.positions) else 0
        return Result(self.statuses.copy(), moved * self._payload_bytes, self.plan.seconds if self.plan is not None else 0.0)


class StoreOperation(Operation):
    """A running store; done when its blocks are durable and can be found.

    `parent`: the running store that wrote the block below which this one hangs, None when that block is resident.
    `deadline`: in seconds of time.monotonic(); a parent that isn't committed by then makes this store's blocks end as TIMEOUT.
    """

    parent: StoreOperation | None = None
    deadline: float = math.inf

    def may_commit(self, now: float) -> bool:
        """True when nothing but its own plan is to be waited for."""
        return self.parent is None or self.parent.done() or now >= self.deadline

    def holds(self, key: npt.NDArray[np.uint8]) -> bool:
        """Whether this store writes the block of a salted key."""
        return bool((self.keys == key).all(axis=1).any())

    def wait(self, timeout_seconds: float | None = None) -> Result:
        """Waits for the end. Raises TimeoutError after `timeout_seconds`; the operation goes on then."""
        if not self._finished.wait(timeout_seconds):
            raise TimeoutError(f"the store of {len(self.statuses)} blocks still runs after {timeout_seconds} s")
        return self._result()


class RetrieveOperation(Operation):
    """A running retrieve."""

    def done(self) -> bool:
        """True once wait() would return at once. Never blocks."""
        return self._finished.is_set() or (self.plan is not None and bool(self.plan.done()))

    def wait(self, timeout_seconds: float | None = None) -> Result:
        """Waits for the end. Raises TimeoutError after `timeout_seconds`; the operation goes on then."""
        if self.plan is not None:
            if not self.plan.wait(-1.0 if timeout_seconds is None else timeout_seconds):
                raise TimeoutError(f"the retrieve of {len(self.statuses)} blocks still runs after {timeout_seconds} s")
            self.finish_once()
        return self._result()

    def wait_layer(self, layer: int, timeout_seconds: float | None = None) -> None:
        """Returns when this layer of every block has ended, well or not. Raises TimeoutError after `timeout_seconds`."""
        if self.plan is not None and not 0 <= layer < self.plan.layers:
            raise TensorError(f"layer {layer} is outside 0 to {self.plan.layers - 1}")
        if self.plan is not None and not self.plan.wait_layer(layer, -1.0 if timeout_seconds is None else timeout_seconds):
            raise TimeoutError(f"layer {layer} of {len(self.statuses)} blocks is still being read after {timeout_seconds} s")
