"""Loads of blocks into an engine's memory: begun by the scheduler half, carried out by the workers, counted when they are over.

Invariants: a load that was begun ends once; what was computed behind a block that didn't arrive is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tutti_mooncake import Result, RetrieveOperation, Status
from tutti_mooncake.connectors.vllm.accounting import Accounting
from tutti_mooncake.connectors.vllm.metadata import LoadWork
from tutti_mooncake.connectors.vllm.policy import TIER_FAILURES, LoadPolicy
from tutti_mooncake.connectors.vllm.registry import EngineStore
from tutti_mooncake.connectors.vllm.request_state import NULL_BLOCK, BlockTables, Load, Offer, RequestState
from tutti_mooncake.connectors.vllm.store_queue import StoreQueue
from tutti_mooncake.keys import NO_BLOCK
from tutti_mooncake.remote.fetcher import Fetched
from tutti_mooncake.store.moves import RankedPlan

if TYPE_CHECKING:
    from tutti_mooncake.connectors.vllm.elsewhere import Elsewhere

NOT_FETCHED = Fetched(0, Status.CANCELLED, 0, 0.0, [])


class LoadQueue:
    """`block_tokens`: tokens per block. `elsewhere`: other nodes, in a cluster. Called from vLLM's scheduler thread."""

    def __init__(
        self,
        engine_store: EngineStore,
        policy: LoadPolicy,
        accounting: Accounting,
        stores: StoreQueue,
        block_tokens: int,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._elsewhere = elsewhere
        self._engine_store = engine_store
        self._policy = policy
        self._accounting = accounting
        self._counters = engine_store.counters
        self._stores = stores
        self._block_tokens = block_tokens
        self._loads: dict[str, Load] = {}
        self._work: list[LoadWork] = []
        self._cancelled: list[str] = []

    @property
    def running(self) -> int:
        """Loads that have not ended."""
        return len(self._loads)

    @property
    def fetching(self) -> bool:
        """Whether a load waits for another node."""
        return any(load.plan is not None for load in self._loads.values())

    def begin(self, state: RequestState, offer: Offer, end: int, tables: BlockTables, *, counts_as_hit: bool) -> None:
        """Blocks `[offer.begin, end)` of a request go into `tables`."""
        operation, move, fetch = None, None, None
        block_ids = tables[0]
        local = min(offer.local_end, end) - offer.begin
        if local:
            keys = [bytes(key) for key in state.request.block_hashes[offer.begin : offer.begin + local]]
            try:
                operation = self._engine_store.store.retrieve(keys, self._with_holes(tuple(ids[:local] for ids in tables)))
                move = operation.plan.move if isinstance(operation.plan, RankedPlan) else None
            except Exception as error:
                self._engine_store.report("loading blocks", error)
        plan = offer.plan if offer.begin + local < end else None
        if plan is not None and self._elsewhere is not None:
            fetch = self._elsewhere.begin(plan, block_ids[local:])
        request = state.request
        self._loads[request.request_id] = Load(
            operation, offer.begin, block_ids, local, counts_as_hit, offer.layerwise, request, state.finding, plan
        )
        self._work.append(LoadWork(request.request_id, block_ids[:local], move, offer.layerwise, fetch))
        if local:
            self._policy.load_begins(local, request.num_tokens - end * self._block_tokens, layerwise=offer.layerwise)

    def cancel(self, request_id: str) -> bool:
        """The request has ended; whether an asynchronous load of it is running, at whose end vLLM frees its blocks."""
        load = self._loads.get(request_id)
        if load is None or load.layerwise:
            return False
        load.cancelled = True
        self._cancelled.append(request_id)
        return True

    def take_work(self) -> tuple[list[LoadWork], list[str]]:
        """Loads that have begun and requests whose loads were cancelled since the last call."""
        taken = self._work, self._cancelled
        self._work, self._cancelled = [], []
        return taken

    def reap(self, states: Mapping[str, RequestState], received: Iterable[str], invalid: set[int]) -> None:
        """Takes in what is over. `received`: requests whose loads the workers have ended; `invalid`: engine blocks without content."""
        ended = set(received)
        for request_id, load in list(self._loads.items()):
            if request_id in ended or (load.layerwise and _done(load.operation)):
                del self._loads[request_id]
                self._end(states.get(request_id), load, invalid)

    def take_fetched(self, fetched: Mapping[str, Fetched]) -> None:
        """How the workers' fetches ended, by request, before `reap` is told that their loads did."""
        for request_id, how in fetched.items():
            load = self._loads.get(request_id)
            if load is not None:
                load.fetched = how

    def clear(self) -> None:
        """Forgets all of them."""
        self._loads.clear()

    def _end(self, state: RequestState | None, load: Load, invalid: set[int]) -> None:
        self._counters.loads += 1
        self._counters.loads_layerwise += load.layerwise
        result = None if load.operation is None else self._result(load.operation)
        statuses = [Status.BAD_STATE] * load.local if result is None else [Status(status) for status in result.statuses]
        ok_blocks, moved_bytes, seconds = (0, 0, 0.0) if result is None else (result.ok_blocks, result.bytes, result.seconds)
        self._counters.blocks_loaded += ok_blocks
        self._counters.bytes_loaded += moved_bytes
        self._counters.load_seconds += seconds
        sick = any(status in TIER_FAILURES for status in statuses)
        fetched = self._end_fetch(load)
        if fetched is not None:
            statuses += [Status.OK] * fetched.blocks + [Status.RETRY] * (len(load.block_ids) - load.local - fetched.blocks)
            ok_blocks, moved_bytes, seconds = ok_blocks + fetched.blocks, moved_bytes + fetched.bytes, max(seconds, fetched.seconds)
        self._accounting.load_ended(load.request, seconds, len(load.block_ids), ok_blocks, moved_bytes, layerwise=load.layerwise)
        if load.cancelled:
            self._counters.loads_cancelled += 1
            if load.local:
                self._policy.loads.undecided()
            if load.counts_as_hit:
                self._accounting.settle(load.request, load.finding, cancelled=True)
            return
        failed = [
            i
            for i, (block_id, status) in enumerate(zip(load.block_ids, statuses, strict=True))
            if status != Status.OK or block_id in invalid
        ]
        if load.local:
            self._policy.load_ended(load.local, 0.0 if result is None else result.seconds, failed=sick)
        if failed:
            self._counters.loads_failed += 1
            if state is not None:
                self._set_back(state, load, failed[0])
        else:
            self._counters.loads_ok += 1
        if load.counts_as_hit:
            good = failed[0] if failed else len(load.block_ids)
            loaded = min(good, load.local)
            self._accounting.settle(load.request, load.finding, loaded=loaded, fetched=good - loaded, failed=len(failed))

    def _end_fetch(self, load: Load) -> Fetched | None:
        """Counts how its fetch ended; `None` when it had none."""
        if load.plan is None:
            return None
        fetched = load.fetched or NOT_FETCHED
        wanted = len(load.block_ids) - load.local
        if self._elsewhere is not None:
            self._elsewhere.ended(load.plan, fetched)
        if fetched.blocks == wanted:
            self._policy.cost.fetch.observe(wanted, fetched.seconds)
        counters = self._counters
        counters.fetches += 1
        counters.fetches_ok += fetched.blocks == wanted
        counters.fetches_failed += fetched.blocks < wanted and not load.cancelled
        counters.blocks_fetched += fetched.blocks
        counters.bytes_fetched += fetched.bytes
        counters.fetch_seconds += fetched.seconds
        return fetched

    def _set_back(self, state: RequestState, load: Load, first: int) -> None:
        state.load_failed = True
        state.next_store = min(state.next_store, load.begin + first)
        if load.layerwise and self._stores.block_pool is not None:
            # What was computed behind a block that didn't arrive may be wrong, and is computed again.
            behind = state.block_ids[0][load.begin + first :] if state.block_ids else []
            self._stores.block_pool.evict_blocks({*load.block_ids[first:], *behind})

    def _with_holes(self, tables: BlockTables) -> BlockTables:
        """Block tables for the store: vLLM's null block means that a group doesn't want the block."""
        if not self._engine_store.windows:
            return tables
        return tuple([NO_BLOCK if block_id == NULL_BLOCK else block_id for block_id in ids] for ids in tables)

    def _result(self, operation: RetrieveOperation) -> Result | None:
        try:
            return operation.wait(0.0)
        except Exception as error:
            self._engine_store.report("loading blocks", error)
            return None


def _done(operation: RetrieveOperation | None) -> bool:
    return operation is None or operation.done()
