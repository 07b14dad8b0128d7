"""The store's own thread: takes the results of finished operations into the store.

Stores are committed in order of submission, so that a parent is published before its children are called stored. Who waits for a retrieve
takes its results in himself; the thread only looks after those for which nobody waited, and so is not woken by them.
"""

from __future__ import annotations

import collections
import logging
import queue
import threading
from collections.abc import Callable

from tutti_mooncake import _native
from tutti_mooncake.io.executor import FOREVER
from tutti_mooncake.store.operations import Operation, RetrieveOperation, StoreOperation

logger = logging.getLogger(__name__)
_TICK_SECONDS = 0.1


class Committer:
    """Thread-safe. Nothing may be added once stop() has begun."""

    def __init__(self) -> None:
        self._stores: queue.SimpleQueue[StoreOperation | None] = queue.SimpleQueue()
        self._retrieves: collections.deque[RetrieveOperation] = collections.deque()
        self._undrained: collections.deque[Callable[[], bool]] = collections.deque()
        self._thread = threading.Thread(target=self._run, name="tutti-commit", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def add_store(self, operation: StoreOperation) -> None:
        """Takes over a running store."""
        self._stores.put(operation)

    def add_retrieve(self, operation: RetrieveOperation) -> None:
        """Takes over a running retrieve."""
        self._retrieves.append(operation)

    def when_drained(self, plan: _native.Plan, action: Callable[[], None]) -> None:
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
        self._stores.put(None)
        self._thread.join()

    def _run(self) -> None:
        running = True
        while running:
            try:
                store = self._stores.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                pass
            else:
                running = store is not None
                if store is not None:
                    _take_in(store)
            for retrieve in list(self._retrieves):
                if not running or retrieve.done():
                    _take_in(retrieve)
                    self._retrieves.remove(retrieve)
            for _ in range(len(self._undrained)):  # other threads append meanwhile
                attempt = self._undrained.popleft()
                if not attempt():
                    self._undrained.append(attempt)


def _take_in(operation: Operation) -> None:
    """Waits for an operation's plan and takes its results in; whatever goes wrong, the operation ends."""
    if operation.plan is not None:
        operation.plan.wait(FOREVER)
    try:
        operation.finish_once()
    except Exception:
        logger.exception("taking in the results of an operation failed; its blocks count as not stored")
        operation.give_up()
