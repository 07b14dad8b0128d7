"""What the scheduler half tells the workers, and what they answer, once per engine step.

Invariants:
- Every asynchronous load in a step's metadata is answered by exactly one entry of `finished_recving` of each worker, cancelled or not.
- Every request in `finishing` is answered by exactly one entry of `finished_sending` of each worker; a request is never in both answers.
- Every move is answered by exactly one report of each worker.
- Every fetch is answered by exactly one `Fetched`, in the step in which its load is reported ended.
- Work is taken out of the metadata, so that hooks which vLLM calls once or twice per step submit it only once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from tutti_mooncake.keys import KeyArray
from tutti_mooncake.remote.fetcher import Fetched
from tutti_mooncake.remote.wire import Peer
from tutti_mooncake.store.moves import Move, MoveReport


@dataclass(frozen=True)
class FetchWork:
    """Fill the engine blocks `block_ids` from other nodes: from `owners` in turn, within `seconds`. `keys`: salted, one for each."""

    owners: tuple[Peer, ...]
    keys: KeyArray
    block_ids: list[int]
    seconds: float


@dataclass(frozen=True)
class LoadWork:
    """Fill the engine blocks `block_ids` of a request (with several KV cache groups: those of the first), and those of `fetch` behind them.

    `move`: how; `None` when the store refused it, and then all of `block_ids` stay without content. `layerwise`: the request is computed in
    this very step, and each layer waits for its part; else it is computed after the load was reported finished.
    """

    request_id: str
    block_ids: list[int]
    move: Move | None
    layerwise: bool = False
    fetch: FetchWork | None = None


@dataclass(frozen=True)
class StoreWork:
    """Store engine blocks of a request when the step's KV is in place."""

    request_id: str
    move: Move


@dataclass
class TuttiConnectorMetadata(KVConnectorMetadata):
    """One step's work.

    `preempted`: requests whose blocks are free for others from this step on; their running stores must end first.
    `finishing`: ended requests whose blocks vLLM keeps until their stores are done.
    `cancelled_loads`: requests that ended while their load was running.
    `idle`: no token is computed in this step, so that waiting a moment for I/O delays nobody.
    """

    loads: list[LoadWork] = field(default_factory=list)
    stores: list[StoreWork] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finishing: list[str] = field(default_factory=list)
    cancelled_loads: list[str] = field(default_factory=list)
    idle: bool = False

    def take_loads(self) -> list[LoadWork]:
        """The loads not yet taken."""
        loads, self.loads = self.loads, []
        return loads

    def take_stores(self) -> list[StoreWork]:
        """The stores not yet taken."""
        stores, self.stores = self.stores, []
        return stores


@dataclass
class TuttiWorkerMetadata(KVConnectorWorkerMetadata):
    """What the workers report in one step.

    `fetched`: by request, how fetches ended. `layers_not_waited`: a worker's model didn't wait for every layer of a layer-wise load, so
    such loads must not be used again.
    """

    reports: list[MoveReport] = field(default_factory=list)
    fetched: dict[str, Fetched] = field(default_factory=dict)
    layers_not_waited: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> TuttiWorkerMetadata:
        """Both together."""
        assert isinstance(other, TuttiWorkerMetadata)
        return TuttiWorkerMetadata(
            self.reports + other.reports, self.fetched | other.fetched, self.layers_not_waited or other.layers_not_waited
        )
