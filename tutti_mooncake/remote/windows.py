"""Registered memory for blocks on their way, handed out in windows of a few blocks.

Memory is laid out as KV tensors are: for each object index all blocks. A window is a range of blocks, for all object indexes. Invariant: a
window that others may still write into isn't handed out again: it is quarantined first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from tutti_mooncake.geometry import Geometry
from tutti_mooncake.remote.transport import Piece, Transport

_PAGE = 4096


WINDOW_BYTES = 8 << 20
"""About the size of a window, unless its blocks are given: many transfers' worth, and soon there."""


def blocks_of_a_window(geometry: Geometry) -> int:
    """The same at both ends, as their geometries are."""
    return max(1, min(256, WINDOW_BYTES // geometry.payload_bytes_per_block))


class WindowsBusy(Exception):
    """None became free in time."""


class Windows:
    """`count` windows of `window_blocks` blocks, registered with `transport` until `close`. Thread-safe; who waits is served in turn."""

    def __init__(
        self,
        geometry: Geometry,
        transport: Transport,
        *,
        count: int,
        window_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.window_blocks = window_blocks
        self.blocks = count * window_blocks
        self.objects = geometry.objects_per_block
        self.object_bytes = geometry.object_bytes
        size = self.objects * self.blocks * self.object_bytes
        memory = torch.zeros(size + _PAGE, dtype=torch.uint8)
        begin = -memory.data_ptr() % _PAGE
        self._view = memory[begin : begin + size].view(self.objects, self.blocks, self.object_bytes)
        self.tensors = [self._view[index] for index in range(self.objects)]
        self._transport = transport
        self._clock = clock
        self._changed = threading.Condition()
        self._free = deque(range(count))
        self._quarantined: list[tuple[float, int]] = []
        self._busy: list[tuple[Callable[[], bool], int]] = []
        self._turn, self._served = 0, 0
        self._gone: set[int] = set()  # turns that are over before those ahead of them
        transport.register(self.base, size)

    @property
    def base(self) -> int:
        """Address of the first block of the first object."""
        return int(self._view.data_ptr())

    @property
    def quarantined(self) -> int:
        """Windows that others may still write into."""
        with self._changed:
            self._take_back()
            return len(self._quarantined)

    def acquire(self, timeout_seconds: float) -> int:
        """A window's number. Raises WindowsBusy."""
        deadline = self._clock() + timeout_seconds
        with self._changed:
            turn, self._turn = self._turn, self._turn + 1
            try:
                while turn != self._served or not self._ready():
                    left = deadline - self._clock()
                    if left <= 0:
                        raise WindowsBusy(f"no window of registered memory became free in {timeout_seconds:.1f} s")
                    self._changed.wait(min(left, 0.1))  # quarantines end by time
                return self._free.popleft()
            finally:
                self._leave(turn)

    def release(self, window: int) -> None:
        """It may be handed out again."""
        with self._changed:
            self._free.append(window)
            self._changed.notify_all()

    def quarantine(self, window: int, seconds: float) -> None:
        """It may be handed out again after that time."""
        with self._changed:
            self._quarantined.append((self._clock() + seconds, window))

    def release_when(self, window: int, over: Callable[[], bool]) -> None:
        """It may be handed out again once `over()`, which is asked when somebody wants one."""
        with self._changed:
            self._busy.append((over, window))
            self._changed.notify_all()

    def first_block(self, window: int) -> int:
        """Of a window."""
        return window * self.window_blocks

    def address(self, index: int, block: int) -> int:
        """Of one object."""
        return self.base + (index * self.blocks + block) * self.object_bytes

    def pieces(self, window: int, blocks: int, target_base: int, target_blocks: int, target_first: int) -> list[Piece]:
        """The window's leading blocks, on their way to memory that is laid out alike."""
        source = self.first_block(window)
        return [
            Piece(
                self.address(index, source),
                target_base + (index * target_blocks + target_first) * self.object_bytes,
                blocks * self.object_bytes,
            )
            for index in range(self.objects)
        ]

    def rows(self, index: int, window: int, blocks: int) -> npt.NDArray[np.uint8]:
        """One object index of the window's leading blocks: uint8 of shape (blocks, object_bytes), the memory itself."""
        first = self.first_block(window)
        rows: npt.NDArray[np.uint8] = self.tensors[index][first : first + blocks].numpy()
        return rows

    def close(self) -> None:
        """The memory is its own again."""
        self._transport.unregister(self.base)

    # --- under the lock ---

    def _ready(self) -> bool:
        self._take_back()
        return bool(self._free)

    def _take_back(self) -> None:
        now = self._clock()
        self._free.extend(window for until, window in self._quarantined if until <= now)
        self._quarantined = [(until, window) for until, window in self._quarantined if until > now]
        waiting = []
        for over, window in self._busy:
            if over():
                self._free.append(window)
            else:
                waiting.append((over, window))
        self._busy = waiting

    def _leave(self, turn: int) -> None:
        self._gone.add(turn)
        while self._served in self._gone:
            self._gone.discard(self._served)
            self._served += 1
        self._changed.notify_all()
