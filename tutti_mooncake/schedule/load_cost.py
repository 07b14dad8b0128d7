"""What a load costs and what it saves, as the engine itself has measured it.

Two straight lines are fitted, both with exponentially fading weights, so that they follow the machine: seconds of a load over its blocks,
and seconds of an engine step over its tokens. A load is worth it when it takes less time than computing its tokens would add to a step.
Nothing is a constant: on a fast GPU a single block of 16 tokens is cheaper to compute, on a CPU it never is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LOAD_COST = "load_cost"
"""Under which name a store remembers it."""
_FADE = 0.98
_LEAST_WEIGHT = 2.7
"""Of three measurements, of which the older ones have faded a little."""
_PROBE_EVERY = 16


class LinearCost:
    """`seconds = fixed + each * amount`, fitted to what was observed. Not thread-safe."""

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, amount: float, seconds: float) -> None:
        """One measurement."""
        self._weight = self._weight * _FADE + 1.0
        self._x = self._x * _FADE + amount
        self._y = self._y * _FADE + seconds
        self._xx = self._xx * _FADE + amount * amount
        self._xy = self._xy * _FADE + amount * seconds

    @property
    def known(self) -> bool:
        """Whether there are enough measurements."""
        return self._weight >= _LEAST_WEIGHT

    @property
    def each(self) -> float:
        """Seconds per unit, never negative. Where all amounts were alike, all of the time is taken to depend on them."""
        if not self._weight or not self._xx:
            return 0.0
        mean = self._x / self._weight
        spread = self._xx / self._weight - mean * mean
        if spread <= 1e-6 * mean * mean:
            return self._y / self._x
        slope = (self._xy / self._weight - mean * self._y / self._weight) / spread
        return min(max(slope, 0.0), self._y / self._x)

    @property
    def fixed(self) -> float:
        """Seconds that don't depend on the amount, never negative."""
        return max(0.0, (self._y - self.each * self._x) / self._weight) if self._weight else 0.0

    def seconds(self, amount: float) -> float:
        """Seconds to expect."""
        return self.fixed + self.each * amount

    def as_dict(self) -> dict[str, float]:
        """The fit, to be kept."""
        return {"weight": self._weight, "x": self._x, "y": self._y, "xx": self._xx, "xy": self._xy}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LinearCost:
        """The inverse of as_dict. What is not there, or not a number, is as if nothing had been measured."""
        cost = cls()
        numbers = [values.get(name) for name in ("weight", "x", "y", "xx", "xy")]
        if all(isinstance(number, int | float) and 0 <= number < 1e18 for number in numbers):
            cost._weight, cost._x, cost._y, cost._xx, cost._xy = (float(number) for number in numbers)  # type: ignore[arg-type]
        return cost


class LoadCost:
    """Decides between loading and computing. Not thread-safe. `load`, `fetch` (from another node): over blocks; `step`: over tokens."""

    def __init__(self, load: LinearCost | None = None, step: LinearCost | None = None, fetch: LinearCost | None = None) -> None:
        self.load = load or LinearCost()
        self.step = step or LinearCost()
        self.fetch = fetch or LinearCost()
        self._refused = self._refused_fetches = 0

    def worth(self, blocks: int, tokens: int) -> bool:
        """Whether loading `blocks` is expected to be faster than computing their `tokens`.

        True while too little has been measured; and once in sixteen refusals, so that a tier that has become fast is noticed.
        """
        self._refused = 0 if self._faster(self.load, blocks, tokens) else (self._refused + 1) % _PROBE_EVERY
        return self._refused == 0

    def worth_fetching(self, blocks: int, tokens: int) -> bool:
        """The same for blocks of another node."""
        self._refused_fetches = 0 if self._faster(self.fetch, blocks, tokens) else (self._refused_fetches + 1) % _PROBE_EVERY
        return self._refused_fetches == 0

    def hidden(self, blocks: int, tokens: int) -> bool:
        """Whether a step that computes `tokens` is expected to last longer than the load of `blocks`."""
        return self.load.known and self.step.known and self.load.seconds(blocks) <= self.step.seconds(tokens)

    def as_dict(self) -> dict[str, dict[str, float]]:
        """All fits, to be kept."""
        return {"load": self.load.as_dict(), "step": self.step.as_dict(), "fetch": self.fetch.as_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoadCost:
        """The inverse of as_dict; damaged or missing values count as not measured."""
        parts = [values.get(name) for name in ("load", "step", "fetch")]
        load, step, fetch = (LinearCost.from_dict(part) if isinstance(part, Mapping) else LinearCost() for part in parts)
        return cls(load, step, fetch)

    def _faster(self, cost: LinearCost, blocks: int, tokens: int) -> bool:
        return not cost.known or not self.step.known or cost.seconds(blocks) < self.step.each * tokens
