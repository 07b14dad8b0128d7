"""A circuit breaker: after several failures in a row nothing is tried for a while, then one attempt decides.

States: CLOSED, everything is tried. OPEN, nothing is, until `wait_seconds` have passed. HALF_OPEN, one attempt is under way; if it
succeeds the breaker closes, if it fails it opens again and waits twice as long, at most `longest_wait_seconds`.
"""

from __future__ import annotations

import enum
from collections.abc import Callable


class BreakerState(enum.IntEnum):
    """The value is what metrics show."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Not thread-safe. `clock` gives seconds and never runs backwards."""

    def __init__(self, failures: int, wait_seconds: float, clock: Callable[[], float], *, longest_wait_seconds: float = 60.0) -> None:
        self._failures = failures
        self._first_wait = wait_seconds
        self._longest_wait = longest_wait_seconds
        self._clock = clock
        self._in_a_row = 0
        self._wait = wait_seconds
        self._opened_at: float | None = None
        self._trying_since: float | None = None
        self.opened = 0
        """How often it opened."""

    @property
    def state(self) -> BreakerState:
        """The state now."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._trying_since is None else BreakerState.HALF_OPEN

    def allows(self) -> bool:
        """Whether an attempt may be made now. Asking changes nothing: `attempt()` claims it."""
        if self._opened_at is None:
            return True
        since = self._opened_at if self._trying_since is None else self._trying_since
        return self._clock() - since >= self._wait

    def attempt(self) -> None:
        """An attempt begins. One whose end is never told counts for `wait_seconds`."""
        if self._opened_at is not None:
            self._trying_since = self._clock()

    def success(self) -> None:
        """An attempt succeeded."""
        self._in_a_row = 0
        self._opened_at = self._trying_since = None
        self._wait = self._first_wait

    def undecided(self) -> None:
        """An attempt ended and told nothing of what is behind the breaker: the next one may be made at once.

        Else attempts that can't tell, and come in the rhythm of the wait, would keep those away that can.
        """
        self._trying_since = None

    def failure(self) -> None:
        """An attempt failed."""
        self._in_a_row += 1
        if self._trying_since is not None:
            self._wait = min(2 * self._wait, self._longest_wait)
            self._opened_at, self._trying_since = self._clock(), None
            self.opened += 1
        elif self._opened_at is None and self._in_a_row >= self._failures:
            self._opened_at = self._clock()
            self.opened += 1
