"""Worker half: moves blocks between the engine's KV tensors and the store.

Invariants:
- Nothing waits for I/O while tokens are being computed, but for `end_stores_of`, which keeps vLLM from overwriting
  blocks that are still being written to disk.
- A load is reported finished only when none of its I/O can touch the engine's memory any more (`drained`), even if its
  deadline passed long before; the blocks that did not arrive whole are reported in the same step.
- Blocks of an ended request are reported sent only when the same holds for its stores.

All methods are called from vLLM's worker thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from vllm.logger import init_logger

from tutti_mooncake import Result, RetrieveOperation, Status, StoreOperation
from tutti_mooncake.connectors.vllm.metadata import BlockTransfer, TuttiConnectorMetadata
from tutti_mooncake.connectors.vllm.registry import EngineStore

logger = init_logger(f"vllm.{__name__}")

IDLE_WAIT_SECONDS = 0.002
"""How long an idle engine waits for I/O before it looks again."""
DRAIN_POLL_SECONDS = 0.001
DRAIN_SECONDS = 30.0
"""How long past its own end an operation may take until it no longer touches memory, before that is called a fault."""


@dataclass
class RunningLoad:
    """A load; `operation` is `None` when the store refused it."""

    transfer: BlockTransfer
    operation: RetrieveOperation | None
    cancelled: bool = False


@dataclass
class RunningStore:
    """A store of consecutive blocks of one request."""

    transfer: BlockTransfer
    operation: StoreOperation


class WorkerHalf:
    """Runs the transfers of one engine."""

    def __init__(self, engine_store: EngineStore) -> None:
        self.engine_store = engine_store
        self._store = engine_store.store
        self._counters = engine_store.counters
        self._loads: dict[str, RunningLoad] = {}
        self._stores: list[RunningStore] = []
        self._stores_of: Counter[str] = Counter()
        self._keys_being_stored: set[bytes] = set()
        self._finishing: set[str] = set()
        self._load_errors: set[int] = set()

    @property
    def stores_running(self) -> int:
        """Stores that have not ended."""
        return len(self._stores)

    def start_loads(self, metadata: TuttiConnectorMetadata) -> None:
        """Submits the step's loads and cancels those whose requests have ended."""
        for transfer in metadata.take_loads():
            operation = None
            try:
                operation = self._store.retrieve(transfer.keys, transfer.block_ids)
            except Exception as error:
                self.engine_store.report("loading blocks", error)
            self._loads[transfer.request_id] = RunningLoad(transfer, operation)
        for request_id in metadata.cancelled_loads:
            load = self._loads.get(request_id)
            if load is not None:
                load.cancelled = True
                if load.operation is not None:
                    load.operation.cancel()

    def start_stores(self, metadata: TuttiConnectorMetadata) -> None:
        """Submits the step's stores. Call it when the step's KV is in place."""
        for transfer in metadata.take_stores():
            transfer = self._without_running(transfer)
            if not transfer.keys:
                continue
            try:
                operation = self._store.store(transfer.keys, transfer.block_ids, parent=transfer.parent)
            except Exception as error:
                self.engine_store.report("storing blocks", error)
                self._counters.blocks_store_failed += len(transfer.keys)
                continue
            self._stores.append(RunningStore(transfer, operation))
            self._stores_of[transfer.request_id] += 1
            self._keys_being_stored.update(transfer.keys)

    def finished(self, metadata: TuttiConnectorMetadata) -> tuple[set[str], set[str]]:
        """`(sent, received)`: ended requests whose blocks are free, and requests whose load has ended since the last
        call.
        """
        self._finishing.update(metadata.finishing)
        if metadata.idle:
            self.start_stores(metadata)
            self._wait_a_moment()
        self._reap_stores()
        unsubmitted = {transfer.request_id for transfer in metadata.stores}
        sent = {request_id for request_id in self._finishing - unsubmitted if not self._stores_of[request_id]}
        self._finishing -= sent
        ended = [load for load in self._loads.values() if load.operation is None or _over(load.operation)]
        for load in ended:
            del self._loads[load.transfer.request_id]
            self._end_load(load)
        return sent, {load.transfer.request_id for load in ended}

    def take_load_errors(self) -> set[int]:
        """Engine block ids that the loads reported by the last `finished` left without valid content."""
        errors, self._load_errors = self._load_errors, set()
        return errors

    def end_stores_of(self, request_ids: Iterable[str]) -> None:
        """Cancels the stores of these requests and returns when none of them reads the engine's memory any more."""
        wanted = set(request_ids)
        running = [store for store in self._stores if store.transfer.request_id in wanted]
        for store in running:
            store.operation.cancel()
        for store in running:
            self._wait_until_over(store.operation)
        self._reap_stores()

    def shutdown(self) -> None:
        """Cancels loads, lets stores end, and returns when the engine's memory is its own again."""
        for load in self._loads.values():
            if load.operation is not None:
                load.operation.cancel()
        for operation in [load.operation for load in self._loads.values()] + [store.operation for store in self._stores]:
            if operation is not None:
                self._wait_until_over(operation)
        self._loads.clear()
        self._reap_stores()

    def _without_running(self, transfer: BlockTransfer) -> BlockTransfer:
        """`transfer` without the leading blocks that another request is storing at this moment."""
        skip = 0
        while skip < len(transfer.keys) and transfer.keys[skip] in self._keys_being_stored:
            skip += 1
        if not skip:
            return transfer
        self._counters.blocks_already_stored += skip
        return BlockTransfer(transfer.request_id, transfer.keys[skip:], transfer.block_ids[skip:], parent=transfer.keys[skip - 1])

    def _wait_a_moment(self) -> None:
        operations: list[RetrieveOperation | StoreOperation] = [
            load.operation for load in self._loads.values() if load.operation is not None
        ]
        operations += [store.operation for store in self._stores if store.transfer.request_id in self._finishing]
        if not operations or any(_over(operation) for operation in operations):
            return
        if operations[0].done():
            time.sleep(DRAIN_POLL_SECONDS)
            return
        try:
            operations[0].wait(IDLE_WAIT_SECONDS)
        except TimeoutError:
            return

    def _wait_until_over(self, operation: RetrieveOperation | StoreOperation) -> None:
        try:
            operation.wait()
        except Exception as error:
            self.engine_store.report("waiting for an operation", error)
        deadline = time.monotonic() + DRAIN_SECONDS
        while not operation.drained():
            if time.monotonic() > deadline:
                logger.error("I/O did not end within %.0f s after its operation; check the devices", DRAIN_SECONDS)
                deadline += DRAIN_SECONDS
            time.sleep(DRAIN_POLL_SECONDS)

    def _reap_stores(self) -> None:
        running = []
        for store in self._stores:
            if not _over(store.operation):
                running.append(store)
                continue
            self._stores_of[store.transfer.request_id] -= 1
            self._keys_being_stored.difference_update(store.transfer.keys)
            self._count_store(store)
        self._stores = running
        self._stores_of = Counter({request_id: count for request_id, count in self._stores_of.items() if count > 0})

    def _count_store(self, store: RunningStore) -> None:
        result = self._result(store.operation, "storing blocks")
        if result is None:
            self._counters.blocks_store_failed += len(store.transfer.keys)
            return
        statuses = Counter(result.statuses.tolist())
        stored, existing, refused = (statuses.pop(status.value, 0) for status in (Status.OK, Status.EXISTS, Status.REJECTED))
        self._counters.blocks_stored += stored
        self._counters.blocks_already_stored += existing
        self._counters.blocks_refused += refused
        self._counters.blocks_store_failed += statuses.total()

    def _end_load(self, load: RunningLoad) -> None:
        self._counters.loads += 1
        result = None if load.operation is None else self._result(load.operation, "loading blocks")
        if result is not None:
            self._counters.blocks_loaded += result.ok_blocks
            self._counters.bytes_loaded += result.bytes
            self._counters.load_seconds += result.seconds
        if load.cancelled:
            self._counters.loads_cancelled += 1
            return
        block_ids = load.transfer.block_ids
        failed = block_ids
        if result is not None:
            failed = [block_id for block_id, status in zip(block_ids, result.statuses, strict=True) if status != Status.OK]
        if failed:
            self._counters.loads_failed += 1
            self._load_errors.update(failed)

    def _result(self, operation: RetrieveOperation | StoreOperation, action: str) -> Result | None:
        try:
            return operation.wait(0.0)
        except Exception as error:
            self.engine_store.report(action, error)
            return None


def _over(operation: RetrieveOperation | StoreOperation) -> bool:
    return operation.done() and operation.drained()
