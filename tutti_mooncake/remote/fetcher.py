"""Fetches blocks that another node holds into this engine's KV tensors.

The owner pushes them into registered windows here; each window's bytes are copied into memory that nobody else can write, compared with
their checksums there, and copied on to where the engine wants them; then the window is given back to the owner. What fails a check, or
comes from anyone but the node and epoch that was meant, goes nowhere.

Invariants: blocks of the result are the leading ones, whole and right, whoever writes into windows whenever. A window into which the owner
may still write isn't used again before the owner has said that it is done and clean, or `QUARANTINE_SECONDS` have passed; what came
later still would make the next fetch fail its check, no more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tutti_mooncake import Status, _native
from tutti_mooncake.errors import TensorError
from tutti_mooncake.geometry import Geometry
from tutti_mooncake.keys import KeyArray
from tutti_mooncake.remote.dial import PROGRESS_SECONDS, dial
from tutti_mooncake.remote.transport import Transport
from tutti_mooncake.remote.windows import Windows, WindowsBusy, blocks_of_a_window
from tutti_mooncake.remote.wire import Connection, Peer, WireError, field

logger = logging.getLogger(__name__)

QUARANTINE_SECONDS = 10.0
CANCEL_SECONDS = 0.05
"""Within which a fetch that waits for its owner notices that it was cancelled."""
STOP_SECONDS = 1.0
"""Within which an owner that is there ends what it was told to stop."""
WINDOWS_OF_A_FETCH = 3
"""One is filled, one announced, one copied."""


@dataclass(frozen=True)
class FetchResult:
    """`blocks`: leading ones that are in the tensors. `status`: OK when these are all that were asked for; REJECTED when no memory of ours
    was free; NOT_FOUND when the owner holds no more. `why`: for people.
    """

    blocks: int
    status: Status
    why: str
    bytes: int
    seconds: float
    first_window_seconds: float


@dataclass(frozen=True)
class Fetched:
    """`blocks`: leading ones that are in the tensors. `status`: OK when these are all. `tries`: whom we asked, and how that ended."""

    blocks: int
    status: Status
    bytes: int
    seconds: float
    tries: list[tuple[Peer, FetchResult]]


class Cancel:
    """Breaks off a fetch from another thread. Of one fetch."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self) -> None:
        """The fetch returns soon, with what it has, and touches the blocks' memory no more. Any number of times."""
        self.asked = True


class _Cancelled(Exception):
    """Somebody asked for the end."""


class Fetcher:
    """`tensors`: the engine's, as given to `LocalStore.register`. Thread-safe. `windows`, each of `window_blocks` as at the owners' (about
    8 MiB unless given), bound memory and how many fetches run at a time.
    """

    def __init__(
        self,
        node: str,
        geometry: Geometry,
        transport: Transport,
        tensors: Sequence[torch.Tensor],
        *,
        windows: int = 12,
        window_blocks: int | None = None,
    ) -> None:
        if geometry.tp_size > 1:
            raise TensorError("blocks of several ranks can't be fetched yet")
        self._node = node
        self._geometry = geometry
        self._namespace = geometry.namespace_id
        self._transport = transport
        self._places = [_as_bytes(tensor, geometry.object_bytes) for tensor in tensors]
        size = window_blocks or blocks_of_a_window(geometry)
        self._windows = Windows(geometry, transport, count=windows, window_blocks=size)
        self._most = min(WINDOWS_OF_A_FETCH, windows)

    @property
    def quarantined_windows(self) -> int:
        """Into which owners that were lost may still write."""
        return self._windows.quarantined

    def fetch_from(
        self, owners: Sequence[Peer], keys: KeyArray, block_ids: npt.NDArray[np.uint32], *, seconds: float, cancel: Cancel | None = None
    ) -> Fetched:
        """As `fetch`, from several owners: each is asked for what those before didn't deliver, in the time that is left."""
        begin, cancel = time.monotonic(), cancel or Cancel()
        tries: list[tuple[Peer, FetchResult]] = []
        blocks, status = 0, Status.NOT_FOUND
        for owner in owners:
            left = begin + seconds - time.monotonic()
            if left <= 0 or cancel.asked:
                break
            result = self.fetch(owner, keys[blocks:], block_ids[blocks:], seconds=left, cancel=cancel)
            tries.append((owner, result))
            blocks += result.blocks
            status = result.status
            if status in (Status.OK, Status.REJECTED):  # all is there; or the shortage is ours
                break
        return Fetched(blocks, status, sum(result.bytes for _, result in tries), time.monotonic() - begin, tries)

    def fetch(
        self, owner: Peer, keys: KeyArray, block_ids: npt.NDArray[np.uint32], *, seconds: float, cancel: Cancel | None = None
    ) -> FetchResult:
        """Fetches consecutive blocks of one chain; returns within `seconds`, and a little more. `keys`: salted, uint8 of shape (n, 32).

        `block_ids`: where they belong, one for each. Their memory is the fetcher's until this returns, and not after.
        """
        begin, cancel = time.monotonic(), cancel or Cancel()
        run = _Run(begin, begin + seconds)
        windows: list[int] = []
        connection: Connection | None = None
        ended = False
        try:
            connection = dial(owner, self._node, run.deadline, namespace=self._namespace)
            windows = self._acquire(run.deadline)
            connection.send(
                {
                    "keys": keys.tobytes(),
                    "segment": self._transport.segment,
                    "base": self._windows.base,
                    "blocks": self._windows.blocks,
                    "windows": [self._windows.first_block(window) for window in windows],
                    "window_blocks": self._windows.window_blocks,
                    "seconds": float(seconds),
                },
                run.deadline,
            )
            ended = self._receive(connection, windows, block_ids, run, cancel)
        except WindowsBusy as error:
            run.status, run.why = Status.REJECTED, str(error)
        except _Cancelled:
            run.status, run.why = Status.CANCELLED, "it was cancelled"
            ended = connection is not None and _stop(connection)
        except WireError as error:
            run.status = Status.TIMEOUT if time.monotonic() >= run.deadline else Status.RETRY
            run.why = str(error)
        finally:
            if connection is not None:
                connection.close()
            for window in windows:
                if ended:
                    self._windows.release(window)
                else:
                    self._windows.quarantine(window, QUARANTINE_SECONDS)
        moved = run.blocks * self._geometry.objects_per_block * self._geometry.object_bytes
        return FetchResult(run.blocks, run.status, run.why, moved, time.monotonic() - begin, run.first_window)

    def close(self) -> None:
        """Lets the registered memory go. No fetch may run."""
        self._windows.close()

    def _acquire(self, deadline: float) -> list[int]:
        windows: list[int] = []
        try:
            while len(windows) < self._most:
                windows.append(self._windows.acquire(max(0.0, deadline - time.monotonic()) if not windows else 0.0))
        except WindowsBusy:
            if not windows:
                raise
        return windows  # at least one

    def _receive(self, connection: Connection, windows: list[int], block_ids: npt.NDArray[np.uint32], run: _Run, cancel: Cancel) -> bool:
        """True once the owner has said that it is done. Raises _Cancelled."""
        number = 0
        while True:
            until = min(run.deadline, time.monotonic() + PROGRESS_SECONDS)
            while not connection.readable(min(CANCEL_SECONDS, until - time.monotonic())) and time.monotonic() < until:
                if cancel.asked:
                    raise _Cancelled
            if cancel.asked:
                raise _Cancelled
            message = connection.receive(until)
            if "end" in message:
                status = field(message, "status", int, connection.peer)
                run.status = Status(status) if status in set(Status) else Status.RETRY
                run.why = run.why or field(message, "why", str, connection.peer)
                if run.status is Status.OK and run.blocks < len(block_ids):
                    run.status, run.why = Status.NOT_FOUND, f"{connection.peer} holds {run.blocks} of {len(block_ids)} blocks"
                return message.get("clean") is True
            window = windows[number % len(windows)]
            blocks, sums = self._check_message(connection.peer, message, number, len(block_ids) - run.blocks)
            run.first_window = run.first_window or time.monotonic() - run.begin
            mine = self._take(window, blocks)
            good = _right(mine, sums)
            self._place(mine[:, :good], block_ids[run.blocks : run.blocks + good])
            run.blocks += good
            if good < blocks:
                run.status, run.why = Status.CHECKSUM_ERROR, f"{connection.peer}: block {run.blocks} of the request failed its check here"
                return False
            connection.send({"credit": number}, run.deadline)
            number += 1

    def _check_message(self, peer: str, message: dict[str, Any], number: int, left: int) -> tuple[int, npt.NDArray[np.uint64]]:
        if field(message, "window", int, peer) != number:
            raise WireError(f"{peer}: window {message['window']} where {number} was due")
        blocks, sums = field(message, "blocks", int, peer), field(message, "sums", bytes, peer)
        if not 0 < blocks <= min(left, self._windows.window_blocks) or len(sums) != 8 * blocks * self._windows.objects:
            raise WireError(f"{peer}: {blocks} blocks with {len(sums)} bytes of checksums")
        return blocks, np.frombuffer(sums, dtype="<u8").reshape(blocks, self._windows.objects)

    def _take(self, window: int, blocks: int) -> npt.NDArray[np.uint8]:
        """A copy of the window's leading blocks, of shape (objects, blocks, object_bytes)."""
        return np.stack([self._windows.rows(index, window, blocks) for index in range(self._windows.objects)])

    def _place(self, rows: npt.NDArray[np.uint8], block_ids: npt.NDArray[np.uint32]) -> None:
        """Returns when the bytes are there."""
        ids = block_ids.astype(np.int64)
        for place, of_object in zip(self._places, rows, strict=True):
            if place.device.type == "cpu":
                place.numpy()[ids] = of_object  # a tenth of the time of index_copy_
            else:
                place.index_copy_(0, torch.from_numpy(ids).to(place.device), torch.from_numpy(of_object).to(place.device))
        device = self._places[0].device
        if device.type == "cuda":  # what engines do on other streams comes after it, and so does their next use of these blocks
            torch.cuda.current_stream(device).synchronize()


def _stop(connection: Connection) -> bool:
    """Tells the owner that nothing more is wanted; whether it has ended, and writes into no window any more."""
    try:
        connection.send({"stop": True}, time.monotonic() + STOP_SECONDS)
        until = time.monotonic() + STOP_SECONDS
        while True:
            message = connection.receive(until)
            if "end" in message:
                return message.get("clean") is True
    except WireError:
        return False


def _right(rows: npt.NDArray[np.uint8], sums: npt.NDArray[np.uint64]) -> int:
    """Leading blocks that have their checksums. `rows`: of shape (objects, blocks, object_bytes); `sums`: (blocks, objects)."""
    good = int(rows.shape[1])
    for index, of_object in enumerate(rows):
        wrong = np.flatnonzero(_native.multilinear64_rows(of_object) != sums[:, index])
        if len(wrong):
            good = min(good, int(wrong[0]))
    return good


def _as_bytes(tensor: torch.Tensor, object_bytes: int) -> torch.Tensor:
    """The same memory as uint8 of shape (blocks, object_bytes)."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    size = tensor.element_size()
    return memory.as_strided((tensor.shape[0], object_bytes), (tensor.stride(0) * size, 1), tensor.storage_offset() * size)


@dataclass
class _Run:
    begin: float
    deadline: float
    blocks: int = 0
    status: Status = Status.RETRY
    why: str = ""
    first_window: float = 0.0
