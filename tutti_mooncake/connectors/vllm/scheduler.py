"""Scheduler half: what to load for a waiting request, and which blocks to store as they fill. It owns the store.

Invariants:
- A pin lives from the lookup until its load has begun, and the load holds its own. An offer that vLLM does not take up in the same step
  gives its pin back in that step, so that the number of pins returns to 0 whatever becomes of the requests.
- A request with a running asynchronous load ends through `finished_recving` alone, one with stores behind it through `finished_sending`
  alone: vLLM frees a request's blocks exactly once.
- At most one load of a request may fail; after that it is offered nothing more.
- Requests with a LoRA adapter are neither loaded nor stored: vLLM's block hashes know the adapter's name only, not its weights.

All methods are called from vLLM's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tutti_mooncake.connectors.vllm.accounting import Accounting, Finding
from tutti_mooncake.connectors.vllm.events import Events
from tutti_mooncake.connectors.vllm.load_queue import LoadQueue
from tutti_mooncake.connectors.vllm.metadata import StoreWork, TuttiConnectorMetadata, TuttiWorkerMetadata
from tutti_mooncake.connectors.vllm.policy import Decision, LoadPolicy
from tutti_mooncake.connectors.vllm.registry import EngineStore
from tutti_mooncake.connectors.vllm.request_state import BlockTables, Offer, RequestState, asked
from tutti_mooncake.connectors.vllm.stats import ALONE, StatsReader, TuttiStats, Values
from tutti_mooncake.connectors.vllm.store_queue import StoreQueue
from tutti_mooncake.schedule import LoadCost

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from tutti_mooncake import Pin
    from tutti_mooncake.agent.sources import FetchPlan
    from tutti_mooncake.connectors.vllm.elsewhere import Elsewhere

PIN_LEASE_SECONDS = 300.0
"""Longer than any load; it only matters when an engine forgets a pin."""


class SchedulerHalf:
    """`block_tokens`: tokens per block. `may_load`, `may_store`: what the engine's KV role allows. `events`: where to announce blocks.
    `elsewhere`: other nodes, in a cluster.
    """

    def __init__(
        self,
        engine_store: EngineStore,
        policy: LoadPolicy,
        accounting: Accounting,
        block_tokens: int,
        *,
        may_load: bool,
        may_store: bool,
        events: Events | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._elsewhere = elsewhere
        self.engine_store = engine_store
        self._store = engine_store.store
        self._mover = engine_store.mover
        self._counters = engine_store.counters
        self._policy = policy
        self._accounting = accounting
        self._events = events
        self._stores = StoreQueue(engine_store, policy, block_tokens, events)
        self._loads = LoadQueue(engine_store, policy, accounting, self._stores, block_tokens, elsewhere)
        self._stats = StatsReader(engine_store.counters)
        self._windows = engine_store.windows
        self._block_tokens = block_tokens
        self._may_load = may_load
        self._may_store = may_store
        self._states: dict[str, RequestState] = {}
        self._offers: dict[str, RequestState] = {}
        self._last_stores: list[StoreWork] = []
        self._finishing: list[str] = []
        self._running: set[str] = set()

    @property
    def load_cost(self) -> LoadCost:
        """What loading and computing have been measured to cost."""
        return self._policy.cost

    @property
    def pins_held(self) -> int:
        """Pins that this half will still give back."""
        return len(self._offers) + self._loads.running

    @property
    def elsewhere(self) -> Elsewhere | None:
        """Other nodes, in a cluster."""
        return self._elsewhere

    @property
    def steps_under_way(self) -> int:
        """Steps that the workers have not answered."""
        return self._policy.steps_under_way

    @property
    def has_moves(self) -> bool:
        """Whether steps are needed: for workers to report, or to let go of held blocks."""
        return self._stores.holds_blocks or self._loads.fetching or (not self._mover.reports_by_itself and self._mover.running > 0)

    def bind_block_pool(self, block_pool: BlockPool) -> None:
        """vLLM's block pool, from whose prefix cache blocks are taken that were computed from a failed load."""
        self._stores.block_pool = block_pool

    def match(self, request: Request, computed_tokens: int) -> tuple[int, bool]:
        """Tokens that can be loaded beyond the `computed_tokens` leading ones that vLLM has, a multiple of the block size; and whether the
        request has to wait for them.

        Never the last token of the request: vLLM needs one token to compute. Looks up the whole chain even if vLLM has it all, to learn
        which of its blocks are missing from the store, and to mark the others as used.
        """
        state = self._states.setdefault(request.request_id, RequestState(request))
        self._withdraw(request.request_id, state)
        keys = request.block_hashes
        resident = 0 if request.lora_request is not None else self._lookup(keys)
        state.next_store = resident
        begin, most = computed_tokens // self._block_tokens, (request.num_tokens - 1) // self._block_tokens
        local_end = max(begin, min(resident, most))
        state.finding = Finding(computed_tokens, resident, self._why_not(state))
        plan = None
        if self._elsewhere is not None and not state.finding.why:
            plan = self._elsewhere.plan(keys[local_end:most])
            state.finding.elsewhere = 0 if plan is None else plan.blocks
        if state.finding.why or (local_end == begin and plan is None):
            return 0, False
        offer = self._offer(state, begin, local_end, plan)
        if offer is None:
            return 0, False
        state.offer = offer
        self._offers[request.request_id] = state
        return (offer.end - begin) * self._block_tokens, not offer.layerwise

    def allocated(self, request: Request, block_ids: BlockTables, external_tokens: int) -> None:
        """vLLM has given the request all blocks of `block_ids`, `external_tokens` of them to be loaded."""
        state = self._states.get(request.request_id)
        if state is None:
            return
        first_admission = not state.admitted
        if first_admission:
            state.admitted = True
            if state.offer is None or external_tokens == 0:
                self._accounting.settle(request, state.finding)
        offer = state.offer
        if offer is None or external_tokens == 0 or offer.layerwise:
            self._running.add(request.request_id)  # computed in this step: whoever is asked about next isn't alone
        if offer is None:
            return
        if external_tokens == 0:
            self._withdraw(request.request_id, state)
            return
        end = min(offer.end, offer.begin + external_tokens // self._block_tokens)
        self._loads.begin(state, offer, end, tuple(ids[offer.begin : end] for ids in block_ids), counts_as_hit=first_admission)
        self._withdraw(request.request_id, state)

    def build_metadata(self, output: SchedulerOutput) -> TuttiConnectorMetadata:
        """This step's work. Ends the step: offers that were not taken up are withdrawn."""
        for request_id, state in list(self._offers.items()):
            self._withdraw(request_id, state)
        loads, cancelled = self._loads.take_work()
        metadata = TuttiConnectorMetadata(
            loads=loads,
            stores=self._last_stores,
            preempted=sorted(output.preempted_req_ids or ()),
            finishing=self._finishing,
            cancelled_loads=cancelled,
            idle=output.total_num_scheduled_tokens == 0,
        )
        self._last_stores, self._finishing = [], []
        self._counters.preemptions += len(metadata.preempted)
        for request_id in metadata.preempted:
            if (preempted := self._states.get(request_id)) is not None:
                preempted.block_ids = ()
                preempted.has_stores = False
        for new in output.scheduled_new_reqs:
            self._scheduled(metadata, output, new.req_id, new.num_computed_tokens, new.block_ids, replace=True)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            new_ids = cached.new_block_ids[index]
            self._scheduled(
                metadata,
                output,
                request_id,
                cached.num_computed_tokens[index],
                new_ids or (),
                replace=request_id in cached.resumed_req_ids,
            )
        self._running = set(output.num_scheduled_tokens)
        waits = any(load.layerwise for load in metadata.loads)
        self._policy.step_begins(output.total_num_scheduled_tokens, measure=not waits and not metadata.idle)
        return metadata

    def worker_output(self, output: KVConnectorOutput) -> None:
        """The workers' answer to a step: ends loads, and sets back what a failed load left undone."""
        answer = output.kv_connector_worker_meta
        if isinstance(answer, TuttiWorkerMetadata):
            self._mover.take(answer.reports)
            self._loads.take_fetched(answer.fetched)
            if answer.layers_not_waited:
                self._policy.may_wait = False
        self._policy.step_ended()
        self._loads.reap(self._states, output.finished_recving or (), output.invalid_block_ids)
        self._stores.reap(self._states)

    def finished(self, request: Request, block_ids: BlockTables | None = None) -> bool:
        """The request has ended, well or not. `True`: vLLM keeps its blocks until the workers report them sent.

        `block_ids`: its blocks now, where vLLM tells them.
        """
        request_id = request.request_id
        self._running.discard(request_id)
        state = self._states.pop(request_id, None)
        if state is None:
            return False
        self._withdraw(request_id, state)
        if self._loads.cancel(request_id):
            return False
        if block_ids is not None:
            state.block_ids = block_ids
        work = self._plan_store(state, min(request.num_computed_tokens, request.num_tokens - 1))
        if work is not None:
            self._last_stores.append(work)
        if state.has_stores:
            self._finishing.append(request_id)
        return state.has_stores

    def settle_stores(self, timeout_seconds: float) -> None:
        """Returns when the blocks of all running stores are durable, or have failed, and are counted. Raises TimeoutError."""
        self._stores.settle(self._states, timeout_seconds)

    def clear(self) -> bool:
        """Empties the store, as after a change of the model's weights. `False` when it could not."""
        if self._elsewhere is not None:  # also when the store can't be emptied
            self._elsewhere.leave()
        try:
            self._store.clear()
        except Exception as error:
            self.engine_store.report("clearing the store", error)
            return False
        for state in self._states.values():
            state.next_store = 0
        return True

    def take_events(self) -> Sequence[KVCacheEvent]:
        """KV events since the last call."""
        return () if self._events is None else self._events.take()

    def take_stats(self) -> TuttiStats | None:
        """What has grown since the last call; None when nothing did."""
        if not self._stats.changed():
            return None
        try:
            store = self._store.stats()
        except Exception as error:
            self.engine_store.report("reading the store's statistics", error)
            return None
        breakers = {"loads": float(self._policy.loads.state), "stores": float(self._policy.stores.state)}
        gauges: Values = {
            "tutti_breaker_state": breakers,
            "tutti_resident_blocks": {"": store["resident_blocks"]},
            "tutti_capacity_blocks": {"": store["slots"]},
            "tutti_pins": {"": self.pins_held},
            **ALONE,
        }
        others: Values = {"tutti_evicted_blocks_total": {"": store.get("evicted_blocks", 0)}}
        if self._elsewhere is not None:
            gauges |= self._elsewhere.gauges()
            others |= self._elsewhere.served()
        return self._stats.read(gauges, others)

    def shutdown(self) -> None:
        """Gives all pins back."""
        for request_id, state in list(self._offers.items()):
            self._withdraw(request_id, state)
        self._stores.reap({})
        self._loads.clear()
        self._states.clear()
        if self._elsewhere is not None:
            self._elsewhere.close()

    # --- loads ---

    def _why_not(self, state: RequestState) -> str:
        """Why nothing of the request may be loaded, whatever the store has; empty when it may."""
        if state.request.lora_request is not None:
            return "the request has an adapter"
        if not asked(state.request, "tutti_load", default=True):
            return "the request asked for no load"
        if not self._may_load:
            return "the engine's kv_role only stores"
        if getattr(state.request, "skip_reading_prefix_cache", False):
            return "the request skips reading the cache"
        return "an earlier load of the request failed" if state.load_failed else ""

    def _offer(self, state: RequestState, begin: int, local_end: int, plan: FetchPlan | None) -> Offer | None:
        """Blocks `[begin, local_end)` of the store, pinned, and what `plan` has behind them; `None` when they are better computed."""
        if plan is not None and not self._policy.cost.worth_fetching(plan.blocks, plan.blocks * self._block_tokens):
            self._counters.blocks_not_worth_fetching += plan.blocks
            state.finding.why = "faster to compute than to fetch"
            plan = None
        end = local_end + (0 if plan is None else plan.blocks)
        if local_end == begin:
            return None if plan is None else Offer(None, begin, begin, end, plan=plan)
        decision = self._decide(state, begin, local_end, fetching=plan is not None)
        pin = None if decision is None else self._pin(state.request.block_hashes[:local_end])
        if pin is None:
            return None
        if pin.blocks < local_end:
            local_end = end = pin.blocks
            plan = None
        if end <= begin:
            self._unpin(pin)
            return None
        return Offer(pin, begin, local_end, end, decision is Decision.LAYERWISE and plan is None, plan)

    def _decide(self, state: RequestState, begin: int, end: int, *, fetching: bool) -> Decision | None:
        """How to load blocks `[begin, end)`; `None` when they are better computed, which is counted. `fetching`: together with others that
        are worth it.
        """
        request, blocks = state.request, end - begin
        rest = request.num_tokens - end * self._block_tokens
        alone = not self._running - {request.request_id}
        decision = self._policy.decide(blocks, blocks * self._block_tokens, rest, alone=alone)
        if decision is Decision.NOT_WORTH_IT and not fetching:
            state.finding.why = "faster to compute"
            self._counters.blocks_not_worth_loading += blocks
            return None
        if decision is Decision.BYPASSED:
            state.finding.why = "the breaker of loads was open"
            self._counters.blocks_bypassed += blocks
            return None
        return decision

    def _withdraw(self, request_id: str, state: RequestState) -> None:
        if state.offer is not None:
            if state.offer.pin is not None:
                self._unpin(state.offer.pin)
            state.offer = None
            del self._offers[request_id]

    # --- steps ---

    def _scheduled(
        self,
        metadata: TuttiConnectorMetadata,
        output: SchedulerOutput,
        request_id: str,
        computed_tokens: int,
        new_ids: Sequence[Sequence[int]],
        *,
        replace: bool,
    ) -> None:
        state = self._states.get(request_id)
        if state is None:
            return
        if replace or not state.block_ids:
            state.block_ids = tuple(list(ids) for ids in new_ids)
        elif new_ids:
            for known, new in zip(state.block_ids, new_ids, strict=True):
                known.extend(new)
        if self._windows and state.next_store < len(state.request.block_hashes):
            # Blocks that a window has left behind are replaced without a word: ask for what is there now.
            state.block_ids = output.kv_connector_block_state.resolve_block_ids(request_id)
        work = self._plan_store(state, computed_tokens + output.num_scheduled_tokens.get(request_id, 0))
        if work is not None:
            metadata.stores.append(work)

    def _plan_store(self, state: RequestState, computed_tokens: int) -> StoreWork | None:
        if not self._may_store or state.request.lora_request is not None or not asked(state.request, "tutti_store", default=True):
            return None
        return self._stores.plan(state, computed_tokens)

    # --- calls to the store that must not reach vLLM as exceptions ---

    def _lookup(self, keys: list[bytes]) -> int:
        if not keys:
            return 0
        try:
            return self._store.lookup(keys)
        except Exception as error:
            self.engine_store.report("looking up blocks", error)
            return 0

    def _pin(self, keys: list[bytes]) -> Pin | None:
        try:
            return self._store.pin(keys, PIN_LEASE_SECONDS)
        except Exception as error:
            self.engine_store.report("pinning blocks", error)
            return None

    def _unpin(self, pin: Pin) -> None:
        try:
            self._store.unpin(pin)
        except Exception as error:
            self.engine_store.report("unpinning blocks", error)
