"""Scheduler half: what to load for a waiting request, and which blocks to store as they fill.

Invariants:
- A pin lives from the lookup until its load has ended. An offer that vLLM does not take up in the same step gives its
  pin back in that step, so that the number of pins returns to 0 whatever becomes of the requests.
- A request with a running load ends through `finished_recving` alone, one with stores behind it through
  `finished_sending` alone: vLLM frees a request's blocks exactly once.
- At most one load of a request may fail; after that it is offered nothing more.
- Requests with a LoRA adapter are left out: vLLM's block hashes know the adapter's name only, not its weights.

All methods are called from vLLM's scheduler thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tutti_mooncake.connectors.vllm.metadata import BlockTransfer, TuttiConnectorMetadata
from tutti_mooncake.connectors.vllm.registry import EngineStore

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from tutti_mooncake import Pin

PIN_LEASE_SECONDS = 300.0
"""Longer than any load; it only matters when an engine forgets a pin."""


@dataclass
class Offer:
    """Blocks `[begin, end)` of a request's chain that were found in the store, and the pin that keeps them there."""

    pin: Pin
    begin: int
    end: int


@dataclass
class Load:
    """A load on its way: the engine blocks it fills, the position of the first one in its chain, and its pin."""

    pin: Pin
    begin: int
    block_ids: list[int]
    counts_as_hit: bool


@dataclass
class RequestState:
    """What is known of one unfinished request."""

    request: Request
    block_ids: list[int] = field(default_factory=list)
    next_store: int = 0
    """Position of the first block that is neither stored nor planned."""
    local_tokens: int = 0
    """Tokens found in vLLM's own cache at the last lookup."""
    offer: Offer | None = None
    admitted: bool = False
    load_failed: bool = False
    has_stores: bool = False


class SchedulerHalf:
    """`block_tokens`: tokens per block. `may_load`, `may_store`: what the engine's KV role allows."""

    def __init__(self, engine_store: EngineStore, block_tokens: int, *, may_load: bool, may_store: bool) -> None:
        self.engine_store = engine_store
        self._store = engine_store.store
        self._counters = engine_store.counters
        self._block_tokens = block_tokens
        self._may_load = may_load
        self._may_store = may_store
        self._states: dict[str, RequestState] = {}
        self._offers: dict[str, RequestState] = {}
        self._loads: dict[str, Load] = {}
        self._new_loads: list[BlockTransfer] = []
        self._last_stores: list[BlockTransfer] = []
        self._finishing: list[str] = []
        self._cancelled: list[str] = []

    @property
    def pins_held(self) -> int:
        """Pins that this half will still give back."""
        return len(self._offers) + len(self._loads)

    def match(self, request: Request, computed_tokens: int) -> int:
        """Tokens that can be loaded beyond the `computed_tokens` leading ones that vLLM has; a multiple of the block
        size.

        Never the last token of the request: vLLM needs one token to compute. Looks up the whole chain even if vLLM
        has it all, to learn which of its blocks are missing from the store, and to mark the others as used.
        """
        if request.lora_request is not None:
            return 0
        state = self._states.setdefault(request.request_id, RequestState(request))
        self._withdraw(request.request_id, state)
        state.local_tokens = computed_tokens
        keys = request.block_hashes
        resident = self._lookup(keys)
        state.next_store = resident
        if not self._may_load or state.load_failed or getattr(request, "skip_reading_prefix_cache", False):
            return 0
        begin = computed_tokens // self._block_tokens
        end = min(resident, (request.num_tokens - 1) // self._block_tokens)
        if end <= begin:
            return 0
        pin = self._pin(keys[:end])
        if pin is None:
            return 0
        end = min(end, pin.blocks)
        if end <= begin:
            self._unpin(pin)
            return 0
        state.offer = Offer(pin, begin, end)
        self._offers[request.request_id] = state
        return (end - begin) * self._block_tokens

    def allocated(self, request: Request, block_ids: list[int], external_tokens: int) -> None:
        """vLLM has given the request all blocks of `block_ids`, `external_tokens` of them to be loaded."""
        state = self._states.get(request.request_id)
        if state is None:
            return
        first_admission = not state.admitted
        if first_admission:
            state.admitted = True
            self._counters.requests += 1
            self._counters.requested_tokens += request.num_prompt_tokens
            self._counters.local_hit_tokens += min(state.local_tokens, request.num_prompt_tokens)
        offer = state.offer
        if offer is None:
            return
        if external_tokens == 0:
            self._withdraw(request.request_id, state)
            return
        state.offer = None
        del self._offers[request.request_id]
        end = min(offer.end, offer.begin + external_tokens // self._block_tokens)
        transfer = self._transfer(state, offer.begin, end, block_ids)
        self._loads[request.request_id] = Load(offer.pin, offer.begin, transfer.block_ids, first_admission)
        self._new_loads.append(transfer)

    def build_metadata(self, output: SchedulerOutput) -> TuttiConnectorMetadata:
        """This step's work. Ends the step: offers that were not taken up are withdrawn."""
        for request_id, state in list(self._offers.items()):
            self._withdraw(request_id, state)
        metadata = TuttiConnectorMetadata(
            loads=self._new_loads,
            stores=self._last_stores,
            preempted=sorted(output.preempted_req_ids or ()),
            finishing=self._finishing,
            cancelled_loads=self._cancelled,
            idle=output.total_num_scheduled_tokens == 0,
        )
        self._new_loads, self._last_stores, self._finishing, self._cancelled = [], [], [], []
        self._counters.preemptions += len(metadata.preempted)
        for request_id in metadata.preempted:
            if (preempted := self._states.get(request_id)) is not None:
                preempted.block_ids = []
                preempted.has_stores = False
        for new in output.scheduled_new_reqs:
            self._scheduled(metadata, output, new.req_id, new.num_computed_tokens, list(new.block_ids[0]), replace=True)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            new_ids = cached.new_block_ids[index]
            self._scheduled(
                metadata,
                output,
                request_id,
                cached.num_computed_tokens[index],
                list(new_ids[0]) if new_ids else [],
                replace=request_id in cached.resumed_req_ids,
            )
        return metadata

    def worker_output(self, output: KVConnectorOutput) -> None:
        """The worker half's answer: ends loads, and sets back what a failed load left undone."""
        for request_id in output.finished_recving or ():
            load = self._loads.pop(request_id, None)
            if load is None:
                continue
            self._unpin(load.pin)
            failed = [i for i, block_id in enumerate(load.block_ids) if block_id in output.invalid_block_ids]
            state = self._states.get(request_id)
            if state is None:
                continue
            if failed:
                state.load_failed = True
                state.next_store = min(state.next_store, load.begin + failed[0])
            if load.counts_as_hit:
                loaded = failed[0] if failed else len(load.block_ids)
                self._counters.hit_tokens += loaded * self._block_tokens

    def finished(self, request: Request) -> bool:
        """The request has ended, well or not. `True`: vLLM keeps its blocks until the worker half reports them sent."""
        request_id = request.request_id
        state = self._states.pop(request_id, None)
        if state is None:
            return False
        self._withdraw(request_id, state)
        if request_id in self._loads:
            self._cancelled.append(request_id)
            return False
        transfer = self._plan_store(state, min(request.num_computed_tokens, request.num_tokens - 1))
        if transfer is not None:
            self._last_stores.append(transfer)
        if state.has_stores:
            self._finishing.append(request_id)
        return state.has_stores

    def clear(self) -> bool:
        """Empties the store, as after a change of the model's weights. `False` when it could not."""
        try:
            self._store.clear()
        except Exception as error:
            self.engine_store.report("clearing the store", error)
            return False
        for state in self._states.values():
            state.next_store = 0
        return True

    def shutdown(self) -> None:
        """Gives all pins back."""
        for request_id, state in list(self._offers.items()):
            self._withdraw(request_id, state)
        for load in self._loads.values():
            self._unpin(load.pin)
        self._loads.clear()
        self._states.clear()

    def _scheduled(
        self,
        metadata: TuttiConnectorMetadata,
        output: SchedulerOutput,
        request_id: str,
        computed_tokens: int,
        block_ids: list[int],
        *,
        replace: bool,
    ) -> None:
        state = self._states.get(request_id)
        if state is None:
            return
        state.block_ids = block_ids if replace else state.block_ids + block_ids
        transfer = self._plan_store(state, computed_tokens + output.num_scheduled_tokens.get(request_id, 0))
        if transfer is not None:
            metadata.stores.append(transfer)

    def _plan_store(self, state: RequestState, computed_tokens: int) -> BlockTransfer | None:
        """The blocks that are full once `computed_tokens` are computed, and neither stored nor planned.

        A block counts as full only when vLLM has hashed it, which leaves out guessed tokens that may yet be rejected.
        """
        if not self._may_store:
            return None
        begin = state.next_store
        end = min(computed_tokens // self._block_tokens, len(state.request.block_hashes), len(state.block_ids))
        if end <= begin:
            return None
        state.next_store = end
        state.has_stores = True
        return self._transfer(state, begin, end, state.block_ids)

    def _transfer(self, state: RequestState, begin: int, end: int, block_ids: list[int]) -> BlockTransfer:
        keys = state.request.block_hashes
        return BlockTransfer(
            request_id=state.request.request_id,
            keys=[bytes(key) for key in keys[begin:end]],
            block_ids=block_ids[begin:end],
            parent=bytes(keys[begin - 1]) if begin else None,
        )

    def _withdraw(self, request_id: str, state: RequestState) -> None:
        if state.offer is not None:
            self._unpin(state.offer.pin)
            state.offer = None
            del self._offers[request_id]

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
