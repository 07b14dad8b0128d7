"""A thread that does one thing again and again, and isn't ended by what goes wrong."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tutti_mooncake.directory.broker import BrokerError, WatchLost

logger = logging.getLogger(__name__)

LEAST_PAUSE_SECONDS = 0.1
MOST_PAUSE_SECONDS = 5.0


class Repeater:
    """`step` returns seconds until it is called again, or None to end. After errors it is called after pauses that double, up to 5 s, and
    at once after a watch that was lost.
    """

    def __init__(self, name: str, step: Callable[[], float | None]) -> None:
        self._name = name
        self._step = step
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def start(self) -> None:
        """Begins, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended. Any number of times."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        pause = LEAST_PAUSE_SECONDS
        while not self._stopping.is_set():
            try:
                wait = self._step()
                if wait is None:
                    return
                pause = LEAST_PAUSE_SECONDS
            except WatchLost as error:
                logger.info("directory: %s; reading it anew", error)
                wait = 0.0
            except Exception as error:
                if isinstance(error, BrokerError):
                    logger.warning("directory: %s; trying again in %.1f s", error, pause)
                else:
                    logger.exception("directory: a defect; trying again in %.1f s", pause)
                wait, pause = pause, min(2 * pause, MOST_PAUSE_SECONDS)
            self._stopping.wait(wait)
