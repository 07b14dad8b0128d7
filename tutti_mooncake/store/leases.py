"""Pins and their leases: protection from eviction that ends by itself when its owner forgets it. Called under the store's lock."""

from __future__ import annotations

from collections.abc import Callable

from tutti_mooncake import _native
from tutti_mooncake.keys import KeyArray
from tutti_mooncake.store.reports import Pin


class Leases:
    """The pins that are held. `clock` gives seconds."""

    def __init__(self, table: _native.BlockTable, clock: Callable[[], float]) -> None:
        self._table = table
        self._clock = clock
        self._pins: dict[Pin, None] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, keys: KeyArray, now: int, lease_seconds: float) -> Pin:
        """Pins the leading resident blocks of salted keys. One of no blocks is given out and not held."""
        slot, generation, blocks = self._table.pin_prefix(keys, now)
        pin = Pin(slot, generation, blocks, self._clock() + lease_seconds)
        if blocks:
            if pin in self._pins:  # the same block, pinned in the same instant: tell them apart
                pin = Pin(slot, generation, blocks, pin.expires + 1e-6 * (1 + len(self._pins)))
            self._pins[pin] = None
        return pin

    def end(self, pin: Pin) -> None:
        """Ends a pin that is held; others are ignored."""
        if pin in self._pins:
            del self._pins[pin]
            self._table.unpin(pin.slot, pin.generation)

    def expire(self) -> None:
        """Ends those whose lease is over."""
        now = self._clock()
        for pin in [pin for pin in self._pins if pin.expires <= now]:
            self.end(pin)
