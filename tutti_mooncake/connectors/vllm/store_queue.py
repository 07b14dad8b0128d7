"""Stores of an engine's blocks as they fill: planned by the scheduler half, moved by the workers, counted and announced when they are over.

Invariants: a block is planned once unless its store was cancelled. With several KV cache groups a stored block holds the layers of all of
them, so it is stored only while each group has it. As vLLM frees blocks behind a sliding window at any time, such a model's blocks are held
until their store is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from tutti_mooncake import Status
from tutti_mooncake.connectors.vllm.events import Events
from tutti_mooncake.connectors.vllm.metadata import StoreWork
from tutti_mooncake.connectors.vllm.policy import TIER_FAILURES, LoadPolicy
from tutti_mooncake.connectors.vllm.registry import EngineStore
from tutti_mooncake.connectors.vllm.request_state import NULL_BLOCK, RequestState, Store, asked
from tutti_mooncake.store.moves import RankedPlan

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class StoreQueue:
    """`block_tokens`: tokens per block. `events`: where to announce blocks. Called from vLLM's scheduler thread."""

    def __init__(self, engine_store: EngineStore, policy: LoadPolicy, block_tokens: int, events: Events | None) -> None:
        self._engine_store = engine_store
        self._policy = policy
        self._block_tokens = block_tokens
        self._events = events
        self._windows = engine_store.windows
        self._stores: list[Store] = []
        self._held: list[tuple[RankedPlan, list[KVCacheBlock]]] = []
        self.block_pool: BlockPool | None = None

    @property
    def holds_blocks(self) -> bool:
        """Whether a step is needed to let go of held blocks."""
        return bool(self._held)

    def plan(self, state: RequestState, computed_tokens: int) -> StoreWork | None:
        """Stores the blocks that are full once `computed_tokens` are computed, and neither stored nor planned.

        A block counts as full only when vLLM has hashed it, which leaves out guessed tokens that may yet be rejected.
        """
        if computed_tokens < (state.next_store + 1) * self._block_tokens:
            return None  # as in most steps
        begin, hashes = state.next_store, state.request.block_hashes
        end = min(computed_tokens // self._block_tokens, len(hashes), min(map(len, state.block_ids), default=0))
        if self._windows:
            end = next((i for i in range(begin, end) if any(ids[i] == NULL_BLOCK for ids in state.block_ids)), end)
        if end <= begin:
            return None
        state.next_store = end
        if not self._policy.stores.allows():
            self._engine_store.counters.blocks_store_bypassed += end - begin
            return None
        keys = [bytes(key) for key in hashes[begin:end]]
        try:
            tables = [ids[begin:end] for ids in state.block_ids]
            parent = bytes(hashes[begin - 1]) if begin else None
            operation = self._engine_store.store.store(
                keys, tables, parent=parent, admit=asked(state.request, "tutti_admit", default=False)
            )
        except Exception as error:
            self._engine_store.report("storing blocks", error)
            self._engine_store.counters.blocks_store_failed += len(keys)
            return None
        self._policy.stores.attempt()
        self._stores.append(Store(state.request, operation, begin))
        if not isinstance(operation.plan, RankedPlan):
            return None
        state.has_stores = True
        if self._windows:
            self._hold(operation.plan, [block_id for ids in tables for block_id in ids])
        return StoreWork(state.request.request_id, operation.plan.move)

    def reap(self, states: Mapping[str, RequestState]) -> None:
        """Takes in what is over; `states`: unfinished requests, whose cancelled stores are planned again."""
        self._let_go()
        running = []
        for store in self._stores:
            if store.operation.done():
                self._end(store, states)
            else:
                running.append(store)
        self._stores = running

    def settle(self, states: Mapping[str, RequestState], timeout_seconds: float) -> None:
        """Returns when what is running has ended and was taken in. Raises TimeoutError if it takes longer."""
        for store in self._stores:
            store.operation.wait(timeout_seconds)
        self.reap(states)

    def _end(self, store: Store, states: Mapping[str, RequestState]) -> None:
        try:
            result = store.operation.wait(0.0)
        except Exception as error:
            self._engine_store.report("storing blocks", error)
            return
        counters = self._engine_store.counters
        statuses = [Status(status) for status in result.statuses]
        counters.blocks_stored += statuses.count(Status.OK)
        counters.bytes_stored += result.bytes
        counters.blocks_already_stored += statuses.count(Status.EXISTS)
        counters.blocks_refused += statuses.count(Status.REJECTED)
        failed = [i for i, status in enumerate(statuses) if status not in (Status.OK, Status.EXISTS, Status.REJECTED)]
        counters.blocks_store_failed += len(failed)
        if any(status in TIER_FAILURES for status in statuses):
            self._policy.stores.failure()
        elif Status.OK in statuses:
            self._policy.stores.success()
        else:  # as of blocks whose parents were bypassed
            self._policy.stores.undecided()
        if self._events is not None:
            for first, last in _runs(statuses):
                self._events.stored(store.request, store.begin + first, store.begin + last)
        state = states.get(store.request.request_id)
        if state is not None and Status.CANCELLED in statuses:
            state.next_store = min(state.next_store, store.begin + failed[0])

    def _hold(self, plan: RankedPlan, block_ids: list[int]) -> None:
        """Keeps vLLM from giving these blocks to others until the plan is over."""
        if self.block_pool is not None:
            blocks = [self.block_pool.blocks[block_id] for block_id in block_ids]
            self.block_pool.touch(blocks)
            self._held.append((plan, blocks))

    def _let_go(self) -> None:
        if self._held and self.block_pool is not None:
            held, self._held = self._held, []
            for plan, blocks in held:
                if plan.done():
                    self.block_pool.free_blocks(reversed(blocks))
                else:
                    self._held.append((plan, blocks))


def _runs(statuses: Sequence[Status]) -> Iterator[tuple[int, int]]:
    """`(first, end)` of each run of blocks that were stored."""
    for status, run in itertools.groupby(enumerate(statuses), key=lambda item: item[1]):
        if status == Status.OK:
            positions = [position for position, _ in run]
            yield positions[0], positions[-1] + 1
