"""One rank's half of a store that another process owns: opens the pool beside the owner and does this rank's part of each move."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tutti_mooncake import _native
from tutti_mooncake.config import StoreConfig
from tutti_mooncake.errors import Status, StoreClosed
from tutti_mooncake.geometry import Geometry
from tutti_mooncake.io.executor import ExecutorSettings, Mover
from tutti_mooncake.store.lifetime import track
from tutti_mooncake.store.moves import Deliver, Move, MoveReport
from tutti_mooncake.store.pool import Pool

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
_IDLE_SECONDS = 0.5
_BUSY_SECONDS = 0.002
_STOP_GRACE_SECONDS = 10.0


def mover_of(pool: Pool, config: StoreConfig, faults: _native.FaultInjector | None) -> Mover:
    """Executor of this process for an open pool's rank; its threads start when tensors are registered."""
    settings = ExecutorSettings(
        executor=config.executor,
        lanes=config.lanes,
        queue_depth=config.queue_depth,
        register_buffers=config.register_buffers,
        pinned_bytes=int(config.pinned_bytes),
        io_blocks=config.io_blocks,
        nvme_pointers=config.nvme_pointers,
    )
    return Mover(pool.layout, pool.devices, settings, slot_table=pool.slot_table, first_sum=pool.first_sum, faults=faults)


class RankMover:
    """Thread-safe. `deliver(report)` is called once per move, by a thread of its own or by `poll()`."""

    def __init__(
        self,
        config: StoreConfig,
        geometry: Geometry,
        tensors: Sequence[torch.Tensor],
        deliver: Deliver,
        *,
        rank: int,
        user: str,
        groups: Sequence[int] | None = None,
        faults: _native.FaultInjector | None = None,
    ) -> None:
        """Opens the pool, making it if it isn't there, and takes the rank's KV tensors (see `LocalStore.register`).

        `user`: name that the pool's owner and all its ranks share; others can't own the pool while a rank has it open. Raises what
        `LocalStore.open` and `LocalStore.register` raise.
        """
        self.rank = rank
        self._deliver = deliver
        self._lock = threading.Lock()
        self._delivering = threading.Lock()  # whoever polls knows that what was over before has been delivered
        self._running: dict[int, tuple[Move, _native.Plan]] = {}
        self._work = threading.Event()
        self._stopping = False
        self._pool = Pool.open(config, geometry, rank=rank, user=user, owner=False)
        try:
            self._mover = mover_of(self._pool, config, faults)
            self._mover.register(tensors, geometry, groups)
            self.executor, self.executor_reason = self._mover.executor, self._mover.executor_reason
        except BaseException:
            self._pool.close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"tutti-moves-{rank}", daemon=True)
        self._thread.start()
        track(self)

    def begin(self, move: Move) -> _native.Plan | None:
        """Starts this rank's part. Returns its plan, for waiting on layers, cancelling and asking how it ended; None if it couldn't begin,
        which is reported as BAD_STATE.
        """
        try:
            with self._lock:
                if self._stopping:
                    raise StoreClosed("the rank's mover is closed")
                plan = self._mover.submit(
                    write=move.write,
                    slots=move.slots,
                    generations=move.generations,
                    rots=move.rots,
                    blocks=move.blocks,
                    deadline_seconds=move.deadline_seconds,
                )
                self._running[move.id] = (move, plan)
        except Exception:
            logger.exception("rank %d could not begin a move of %d blocks", self.rank, len(move.slots))
            self.refuse(move, Status.BAD_STATE)
            return None
        self._work.set()
        return plan

    def refuse(self, move: Move, status: Status) -> None:
        """Reports a move that this rank won't begin."""
        self._report(move, np.full(len(move.slots), status, dtype=np.uint8), 0.0)

    def poll(self) -> None:
        """Reports the moves that are over; returns when every move that was over before has been reported."""
        with self._delivering:
            with self._lock:
                over = [(move, plan) for move, plan in self._running.values() if plan.done() and plan.drained()]
                for move, _ in over:
                    del self._running[move.id]
            for move, plan in over:
                self._report(move, self._mover.seal(plan) if move.write else plan.statuses(), plan.seconds)

    def close(self) -> None:
        """Lets running moves end (at most 10 s), reports them and closes the pool. Any number of times."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        self._mover.stop(_STOP_GRACE_SECONDS)
        self._work.set()
        self._thread.join()
        self.poll()
        self._pool.close()

    def abandon(self) -> None:
        """For a forked child: gives up the inherited descriptors."""
        self._lock, self._delivering = threading.Lock(), threading.Lock()
        self._stopping = True
        self._pool.close()

    def _report(self, move: Move, statuses: np.ndarray[tuple[int], np.dtype[np.uint8]], seconds: float) -> None:
        self._deliver(MoveReport(move.id, self.rank, statuses, seconds, self._mover.counters()))

    def _run(self) -> None:
        while not self._stopping:
            if not self._work.wait(_IDLE_SECONDS):
                continue
            with self._lock:
                oldest = next((plan for _, plan in self._running.values()), None)
                if oldest is None:
                    self._work.clear()
                    continue
            oldest.wait(_BUSY_SECONDS)
            if not oldest.drained():
                oldest.wait_drained(_BUSY_SECONDS)
            try:
                self.poll()
            except Exception:
                logger.exception("reporting moves of rank %d failed", self.rank)
