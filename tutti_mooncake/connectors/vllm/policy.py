"""Whether to load a hit at all, and how: the engine's own measurements and the breakers of its store.

Loads are tried only while the breaker of loads is closed, stores only while that of stores is. A hit is loaded when that is expected to
be faster than computing it. A load is layer-wise when nobody else would have to wait for it.
"""

from __future__ import annotations

import collections
import enum
import time
from collections.abc import Callable

from tutti_mooncake import Status
from tutti_mooncake.config import EngineConfig
from tutti_mooncake.schedule import Breaker, LoadCost

TIER_FAILURES = (Status.DEVICE_ERROR, Status.SHORT_IO, Status.NO_SPACE, Status.TIMEOUT, Status.BAD_STATE)
"""What says that the store is sick, and not only one block."""


class Decision(enum.Enum):
    """What becomes of a hit."""

    ASYNCHRONOUS = "asynchronous"
    LAYERWISE = "layerwise"
    NOT_WORTH_IT = "not worth it"
    BYPASSED = "bypassed"


class LoadPolicy:
    """Called from vLLM's scheduler thread alone. `may_wait`: whether the engine can load layer by layer; `largest_step`: tokens of the
    largest step.
    """

    def __init__(
        self, config: EngineConfig, cost: LoadCost, *, may_wait: bool, largest_step: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cost = cost
        self.may_wait = may_wait
        self.loads = Breaker(config.breaker_failures, config.breaker_wait_seconds, clock)
        self.stores = Breaker(config.breaker_failures, config.breaker_wait_seconds, clock)
        self._config = config
        self._largest_step = largest_step
        self._clock = clock
        self._steps: collections.deque[tuple[int, float]] = collections.deque()
        self._last_output = 0.0
        self._waiting_blocks = 0
        self._waiting_tokens = 0

    @property
    def steps_under_way(self) -> int:
        """Steps that have begun and not ended."""
        return len(self._steps)

    def decide(self, blocks: int, tokens: int, rest: int, *, alone: bool) -> Decision:
        """About a hit of `blocks` with `tokens`, of a request that has `rest` more tokens to compute; `alone`: nobody else is running."""
        if not self.loads.allows():
            return Decision.BYPASSED
        if self._config.load_threshold == "measured" and not self.cost.worth(blocks, tokens):
            return Decision.NOT_WORTH_IT
        return Decision.LAYERWISE if self._layerwise(blocks, rest, alone) else Decision.ASYNCHRONOUS

    def load_begins(self, blocks: int, rest: int, *, layerwise: bool) -> None:
        """A load that was decided on is on its way."""
        self.loads.attempt()
        if layerwise:
            self._waiting_blocks += blocks
            self._waiting_tokens += min(rest, self._largest_step)

    def load_ended(self, blocks: int, seconds: float, *, failed: bool) -> None:
        """How it ended. Cancelled loads say nothing of the store and are not told."""
        if failed:
            self.loads.failure()
        else:
            self.loads.success()
            self.cost.load.observe(blocks, seconds)

    def step_begins(self, tokens: int, *, measure: bool) -> None:
        """The engine computes `tokens` now. `measure`: nothing in the step waits for I/O."""
        self._steps.append((tokens if measure else 0, self._clock()))
        self._waiting_blocks = self._waiting_tokens = 0

    def step_ended(self) -> None:
        """The oldest step has ended. With several under way, a step lasts from the end of the one before."""
        now = self._clock()
        if self._steps:
            tokens, begin = self._steps.popleft()
            if tokens:
                self.cost.step.observe(tokens, now - max(begin, self._last_output))
        self._last_output = now

    def _layerwise(self, blocks: int, rest: int, alone: bool) -> bool:
        if not self.may_wait or self._config.load == "asynchronous":
            return False
        if self._config.load == "layerwise" or (alone and not self._waiting_blocks):
            return True
        return self.cost.hidden(self._waiting_blocks + blocks, self._waiting_tokens + min(rest, self._largest_step))
