"""Keeps a DirectoryView up to date: a snapshot, then a watch; after a gap, or when another cluster answers, a snapshot again.

Whoever asks the view never waits for the control plane. While it can't be reached the last view goes on for `most_stale_seconds`; after
that `usable` is false, and nobody is sent to other nodes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tutti_mooncake.directory.broker import Broker, Watch, WatchLost
from tutti_mooncake.directory.records import Keys
from tutti_mooncake.directory.repeater import Repeater
from tutti_mooncake.directory.view import DirectoryView

logger = logging.getLogger(__name__)


class Follower:
    """`check_seconds`: how often a quiet control plane is asked whether it still answers. `resync_seconds`: how often all is read anew, as
    a watch may end without a word. `step` is for those who don't `start`.
    """

    def __init__(
        self,
        broker: Broker,
        keys: Keys,
        view: DirectoryView,
        *,
        check_seconds: float = 2.0,
        most_stale_seconds: float = 30.0,
        resync_seconds: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._prefix = f"{keys.prefix}/"
        self._view = view
        self._check_seconds = check_seconds
        self._most_stale_seconds = most_stale_seconds
        self._resync_seconds = resync_seconds
        self._synced = float("-inf")
        self._clock = clock
        self._watch: Watch | None = None
        self._cluster = 0
        self._revision = 0
        self._contact = float("-inf")
        self._repeater = Repeater("tutti-directory", self._repeat)
        self.resyncs = 0
        """Snapshots so far."""
        self.last_error = ""
        """Of the control plane; empty while it answers."""

    @property
    def stale_seconds(self) -> float:
        """Since the control plane last answered; infinite before the first snapshot."""
        return self._clock() - self._contact

    @property
    def usable(self) -> bool:
        """Whether the view is fresh enough to decide from."""
        return self.stale_seconds <= self._most_stale_seconds

    def start(self) -> None:
        """Follows in a thread of its own, until `stop`."""
        self._repeater.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self._repeater.stop()
        self._lose()

    def step(self, timeout_seconds: float) -> bool:
        """Takes in what comes within that time; whether anything did. Raises BrokerError; the next step begins with a snapshot then."""
        try:
            if self._watch is None or self._clock() - self._synced >= self._resync_seconds:
                self._lose()
                self._resync()
                return True
            got = self._watch.next(timeout_seconds)
            if got is not None:
                changes, self._revision = got
                self._view.apply(changes)
                self._heard()
                return True
            if self.stale_seconds >= self._check_seconds:
                self._check()
            return False
        except Exception as error:
            self._lose()
            if not isinstance(error, WatchLost):
                self.last_error = str(error)
            raise

    def _repeat(self) -> float:
        self.step(self._check_seconds / 4)
        return 0.0

    def _resync(self) -> None:
        snapshot = self._broker.snapshot(self._prefix)
        self._watch = self._broker.watch(self._prefix, snapshot.revision)
        self._view.replace(snapshot.items)
        self._cluster, self._revision = snapshot.cluster, snapshot.revision
        self.resyncs += 1
        self._synced = self._clock()
        self._heard()

    def _check(self) -> None:
        cluster, revision = self._broker.head()
        if cluster != self._cluster or revision < self._revision:
            raise WatchLost(f"the control plane went from revision {self._revision} to {revision}: it was replaced or restored")
        self._heard()

    def _heard(self) -> None:
        self._contact = self._clock()
        self.last_error = ""

    def _lose(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            try:
                watch.close()
            except Exception as error:
                logger.debug("closing a watch: %s", error)
