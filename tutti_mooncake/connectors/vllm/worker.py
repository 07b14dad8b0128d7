"""Worker half: one rank's part of the moves between the engine's KV tensors and the pool.

Invariants:
- While tokens are being computed nothing waits for I/O, but a layer for its own part of a layer-wise load, and `end_stores_of`, which
  keeps vLLM from overwriting blocks that are still being written to disk.
- A load is reported finished only when none of its I/O can touch the engine's memory any more, even if its deadline passed long before;
  the blocks that did not arrive whole are reported in the same step.
- Blocks of an ended request are reported sent only when the same holds for its stores.

All methods are called from vLLM's worker thread, but for `take_report`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from tutti_mooncake import Status
from tutti_mooncake.connectors.vllm.metadata import LoadWork, StoreWork, TuttiConnectorMetadata, TuttiWorkerMetadata
from tutti_mooncake.remote.fetcher import Fetched
from tutti_mooncake.store.moves import MoveReport, PlanLike
from tutti_mooncake.store.rank_mover import RankMover

if TYPE_CHECKING:
    from tutti_mooncake.connectors.vllm.fetches import Fetches, RunningFetch

logger = init_logger(f"vllm.{__name__}")

IDLE_WAIT_SECONDS = 0.002
"""How long an idle engine waits for I/O before it looks again."""
DRAIN_POLL_SECONDS = 0.001
DRAIN_SECONDS = 30.0
"""How long past its own end a plan may take until it no longer touches memory, before that is called a fault."""
FOREVER = -1.0


@dataclass
class RunningLoad:
    """A load; `plan` is `None` when it has no blocks in the store, or could not begin."""

    work: LoadWork
    plan: PlanLike | None
    fetch: RunningFetch | None = None
    cancelled: bool = False

    def over(self) -> bool:
        """Whether none of it touches the engine's memory any more."""
        return (self.plan is None or _over(self.plan)) and (self.fetch is None or self.fetch.done())

    def cancel(self) -> None:
        """It is over soon."""
        self.cancelled = True
        if self.plan is not None:
            self.plan.cancel()
        if self.fetch is not None:
            self.fetch.cancel()

    def failed(self, fetched: Fetched | None = None, *, as_whole: bool) -> list[int]:
        """Engine blocks that it left without valid content; all of those from the store if one is, `as_whole`. `fetched`: how its fetch
        ended.
        """
        missing = [] if self.work.fetch is None else self.work.fetch.block_ids[0 if fetched is None else fetched.blocks :]
        return self._failed_in_store(as_whole) + missing

    def _failed_in_store(self, as_whole: bool) -> list[int]:
        if self.plan is None or self.work.move is None:
            return self.work.block_ids
        statuses = self.plan.statuses()
        if as_whole:
            whole = len(statuses) == len(self.work.block_ids) and bool((statuses == Status.OK).all())
            return [] if whole else self.work.block_ids
        arrived = {int(block) for block, status in zip(self.work.move.blocks, statuses, strict=True) if status == Status.OK}
        return [block_id for block_id in self.work.block_ids if block_id not in arrived]


@dataclass
class RunningStore:
    """A store of consecutive blocks of one request."""

    work: StoreWork
    plan: PlanLike


class Outbox:
    """Reports that wait for the next step's answer to the scheduler. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reports: list[MoveReport] = []

    def put(self, report: MoveReport) -> None:
        """Adds a report."""
        with self._lock:
            self._reports.append(report)

    def take(self) -> list[MoveReport]:
        """All of them, once."""
        if not self._reports:
            return []  # one that comes this moment is taken at the next step
        with self._lock:
            reports, self._reports = self._reports, []
            return reports


class WorkerHalf:
    """`layers`: index of each attention layer in the model, by vLLM's name of it. `outbox`: where the mover's reports wait for a step.
    `fetches`: what brings blocks of other nodes, in a cluster.

    `by_request`: vLLM is told which requests' loads failed, and not which blocks, as with sliding windows.
    """

    def __init__(
        self, mover: RankMover, layers: Mapping[str, int], outbox: Outbox, *, fetches: Fetches | None = None, by_request: bool = False
    ) -> None:
        self._mover = mover
        self._fetches = fetches
        self._fetched: dict[str, Fetched] = {}
        self._layers = dict(layers)
        self._layer_count = len(set(layers.values()))  # several names may show one layer's memory
        self._outbox = outbox
        self._loads: dict[str, RunningLoad] = {}
        self._layerwise: list[RunningLoad] = []
        self._waited: set[int] = set()
        self._layers_not_waited = False
        self._idle = False
        self._stores: list[RunningStore] = []
        self._stores_of: Counter[str] = Counter()
        self._finishing: set[str] = set()
        self._load_errors: set[int] = set()
        self._by_request = by_request
        self._failed_requests: set[str] = set()

    @property
    def stores_running(self) -> int:
        """Stores that have not ended."""
        return len(self._stores)

    def start_loads(self, metadata: TuttiConnectorMetadata) -> None:
        """Begins the step's loads and cancels those whose requests have ended."""
        for work in metadata.take_loads():
            fetch = None if work.fetch is None or self._fetches is None else self._fetches.begin(work.fetch)
            load = RunningLoad(work, None if work.move is None else self._mover.begin(work.move), fetch)
            if work.layerwise:
                self._layerwise.append(load)
            else:
                self._loads[work.request_id] = load
        for request_id in metadata.cancelled_loads:
            cancelled = self._loads.get(request_id)
            if cancelled is not None:
                cancelled.cancel()

    def wait_for_layer(self, metadata: TuttiConnectorMetadata, layer_name: str) -> None:
        """Returns when this layer of the step's layer-wise loads has arrived, or has failed, which `finished` reports."""
        if metadata.loads and any(work.layerwise for work in metadata.loads):
            self.start_loads(metadata)  # this vLLM begins loads after the forward pass
        if not self._layerwise:
            return
        layer = self._layers[layer_name]
        self._waited.add(layer)
        for load in self._layerwise:
            if load.plan is not None:
                load.plan.wait_layer(layer, FOREVER)  # the plan's own deadline ends it

    def start_stores(self, metadata: TuttiConnectorMetadata) -> None:
        """Begins the step's stores. Call it when the step's KV is in place.

        None of them after a layer-wise load that failed: whatever was computed in its step may have been computed from its blocks.
        """
        failed = self._end_layerwise()
        for work in metadata.take_stores():
            if failed:
                self._mover.refuse(work.move, Status.CANCELLED)
                continue
            plan = self._mover.begin(work.move)
            if plan is not None:
                self._stores.append(RunningStore(work, plan))
                self._stores_of[work.request_id] += 1

    def finished(self, metadata: TuttiConnectorMetadata) -> tuple[set[str], set[str]]:
        """`(sent, received)`: ended requests whose blocks are free, and requests whose load has ended since the last call."""
        self._finishing.update(metadata.finishing)
        self._idle = metadata.idle
        if not (metadata.idle or self._finishing or self._stores or self._loads or self._layerwise):
            return set(), set()
        if metadata.idle:
            self.start_stores(metadata)
            self._wait_a_moment()
        self._end_layerwise()
        self._reap_stores()
        unsubmitted = {work.request_id for work in metadata.stores}
        sent = {request_id for request_id in self._finishing - unsubmitted if not self._stores_of[request_id]}
        self._finishing -= sent
        ended = [load for load in self._loads.values() if load.over()]
        if ended:
            self._mover.poll()
        for load in ended:
            del self._loads[load.work.request_id]
            fetched = None if load.fetch is None else load.fetch.result()
            if fetched is not None:
                self._fetched[load.work.request_id] = fetched
            if load.cancelled or not (failed := load.failed(fetched, as_whole=self._by_request)):
                continue
            if self._by_request:
                self._failed_requests.add(load.work.request_id)
            else:
                self._load_errors.update(failed)
        return sent, {load.work.request_id for load in ended}

    def take_load_errors(self) -> set[int]:
        """Engine block ids that the loads reported by the last `finished` left without valid content."""
        errors, self._load_errors = self._load_errors, set()
        return errors

    def take_failed_requests(self) -> set[str]:
        """Requests whose loads, reported by the last `finished`, left them without valid content."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_metadata(self) -> TuttiWorkerMetadata | None:
        """What the scheduler half is to know; `None` when there is nothing.

        A step without tokens always has an answer: vLLM drops an empty one there, and the scheduler half counts answers.
        """
        reports = self._outbox.take()
        if not reports and not self._fetched and not self._layers_not_waited and not self._idle:
            return None
        metadata = TuttiWorkerMetadata(reports, self._fetched, self._layers_not_waited)
        self._fetched = {}
        self._layers_not_waited = False
        return metadata

    def end_stores_of(self, request_ids: Iterable[str]) -> None:
        """Cancels the stores of these requests and returns when none of them reads the engine's memory any more."""
        wanted = set(request_ids)
        running = [store for store in self._stores if store.work.request_id in wanted]
        for store in running:
            store.plan.cancel()
        for store in running:
            _wait_until_over(store.plan)
        self._reap_stores()

    def shutdown(self) -> None:
        """Cancels loads, lets stores end, and returns when the engine's memory is its own again."""
        loads = [*self._loads.values(), *self._layerwise]
        for load in loads:
            load.cancel()
        if self._fetches is not None:
            self._fetches.close()
            self._fetches = None
        for plan in [load.plan for load in loads] + [store.plan for store in self._stores]:
            if plan is not None:
                _wait_until_over(plan)
        self._loads.clear()
        self._layerwise.clear()
        self._reap_stores()
        self._mover.close()

    def _end_layerwise(self) -> bool:
        """Ends the step's layer-wise loads; whether one of them failed. A layer that nobody waited for counts as failed."""
        if not self._layerwise:
            return False
        before = len(self._load_errors)
        complete = len(self._waited) == self._layer_count
        for load in self._layerwise:
            if load.plan is not None:
                _wait_until_over(load.plan)
            self._load_errors.update(load.failed(as_whole=False) if complete else load.work.block_ids)
        if not complete:
            self._layers_not_waited = True
            logger.error(
                "the model waited for %d of %d layers of a load; its blocks are computed again, and loads are asynchronous from now on",
                len(self._waited),
                self._layer_count,
            )
        self._layerwise, self._waited = [], set()
        self._mover.poll()
        return len(self._load_errors) > before

    def _wait_a_moment(self) -> None:
        """Gives I/O a moment when there is nothing to compute, in place of a busy loop; less when something is over already."""
        loads = list(self._loads.values())
        if any(load.over() for load in loads) or any(_over(store.plan) for store in self._stores):
            return
        plans = [load.plan for load in loads if load.plan is not None and not _over(load.plan)] + [store.plan for store in self._stores]
        if plans and plans[0].done():
            time.sleep(DRAIN_POLL_SECONDS)
        elif plans:
            plans[0].wait(IDLE_WAIT_SECONDS)
        elif loads and loads[0].fetch is not None:
            loads[0].fetch.wait(IDLE_WAIT_SECONDS)

    def _reap_stores(self) -> None:
        running = []
        for store in self._stores:
            if _over(store.plan):
                self._stores_of[store.work.request_id] -= 1
            else:
                running.append(store)
        if len(running) != len(self._stores):
            self._mover.poll()
            self._stores = running
            self._stores_of = Counter({request_id: count for request_id, count in self._stores_of.items() if count > 0})


def _wait_until_over(plan: PlanLike) -> None:
    plan.wait(FOREVER)
    deadline = time.monotonic() + DRAIN_SECONDS
    while not plan.drained():
        if time.monotonic() > deadline:
            logger.error("I/O did not end within %.0f s after its operation; check the devices", DRAIN_SECONDS)
            deadline += DRAIN_SECONDS
        time.sleep(DRAIN_POLL_SECONDS)


def _over(plan: PlanLike) -> bool:
    return plan.done() and plan.drained()
