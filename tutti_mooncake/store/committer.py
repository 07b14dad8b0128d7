"""The store's own thread: takes the results of finished operations into the store.

A store is committed when its bytes are written and the store that it hangs on has been committed, so that a parent is published before
its children are called stored; stores that don't hang together don't wait for each other. Who waits for a retrieve takes its results in
himself; the thread only looks after those for which nobody waited, and so is not woken by them.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tutti_mooncake.io.executor import FOREVER
from tutti_mooncake.store.moves import PlanLike
from tutti_mooncake.store.operations import Operation, RetrieveOperation, StoreOperation

logger = logging.getLogger(__name__)
_IDLE_SECONDS = 0.1
_BUSY_SECONDS = 0.002  # between looks at several running stores


class Committer:
    """Thread-safe. Nothing may be added once stop() has begun. `tick` is called by the thread, several times a second."""

    def __init__(self, tick: Callable[[], None] | None = None) -> None:
        self._tick = tick
        self._stores: collections.deque[StoreOperation] = collections.deque()
        self._retrieves: collections.deque[RetrieveOperation] = collections.deque()
        self._undrained: collections.deque[Callable[[], bool]] = collections.deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tutti-commit", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add_store(self, operation: StoreOperation) -> None:
        """Takes over a running store. One at a time."""
        self._stores.append(operation)
        self._wake.set()

    def writer_of(self, key: npt.NDArray[np.uint8]) -> StoreOperation | None:
        """The running store that writes the block of a salted key (uint8 of shape (32,)); None when there is none."""
        return next((store for store in reversed(list(self._stores)) if store.holds(key)), None)

    def add_retrieve(self, operation: RetrieveOperation) -> None:
        """Takes over a running retrieve."""
        self._retrieves.append(operation)

    def when_drained(self, plan: PlanLike, action: Callable[[], None]) -> None:
        """Calls `action` once no I/O of the plan can touch its memory any more: now, or in the thread."""

        def attempt() -> bool:
            if not plan.drained():
                return False
            action()
            return True

        if not attempt():
            self._undrained.append(attempt)

    def stop(self) -> None:
        """Takes in everything that was added, then ends the thread. The lanes must have stopped, so that every plan is over."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        stopping = False
        while not stopping or self._stores:
            stopping = self._stopping  # once true, nothing is added and every plan is over
            if not stopping:
                self._wait()
            if self._tick is not None:
                self._tick()
            for store in list(self._stores):
                if store.plan is None or (store.plan.done() and store.may_commit(time.monotonic())):
                    _take_in(store)
                    store.parent = None  # else a chain keeps all its stores alive
                    self._stores.remove(store)
            for retrieve in list(self._retrieves):
                if stopping or retrieve.done():
                    _take_in(retrieve)
                    self._retrieves.remove(retrieve)
            for _ in range(len(self._undrained)):  # other threads append meanwhile
                attempt = self._undrained.popleft()
                if not attempt():
                    self._undrained.append(attempt)

    def _wait(self) -> None:
        """Waits until the oldest store is done or one is added, and not long."""
        oldest = self._stores[0].plan if self._stores else None
        if oldest is not None:
            oldest.wait(_BUSY_SECONDS)
        elif self._wake.wait(_IDLE_SECONDS):
            self._wake.clear()


def _take_in(operation: Operation) -> None:
    """Waits for an operation's plan and takes its results in; whatever goes wrong, the operation ends."""
    if operation.plan is not None:
        operation.plan.wait(FOREVER)
    try:
        operation.finish_once()
    except Exception:
        logger.exception("taking in the results of an operation failed; its blocks count as not stored")
        operation.give_up()
