"""The class that vLLM loads; it checks the set-up and passes each hook on to the scheduler half or the worker half.

A load is asynchronous (vLLM computes other requests meanwhile) or layer-wise (the request is computed in the same step, and each layer
waits for its own part). One that fails is always computed again, whatever `kv_load_failure_policy` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger

from tutti_mooncake._native import FaultInjector
from tutti_mooncake.config import read_settings
from tutti_mooncake.connectors.vllm import namespace, registry
from tutti_mooncake.connectors.vllm.accounting import Accounting
from tutti_mooncake.connectors.vllm.events import Events
from tutti_mooncake.connectors.vllm.metadata import TuttiConnectorMetadata, TuttiWorkerMetadata
from tutti_mooncake.connectors.vllm.policy import LoadPolicy
from tutti_mooncake.connectors.vllm.scheduler import SchedulerHalf
from tutti_mooncake.connectors.vllm.spans import Spans
from tutti_mooncake.connectors.vllm.stats import TuttiPromMetrics, TuttiStats
from tutti_mooncake.connectors.vllm.worker import Outbox, WorkerHalf
from tutti_mooncake.errors import ConfigError
from tutti_mooncake.schedule import LOAD_COST, LoadCost
from tutti_mooncake.store.moves import MoveReport
from tutti_mooncake.store.rank_mover import RankMover

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from tutti_mooncake.connectors.vllm.elsewhere import Elsewhere

logger = init_logger(f"vllm.{__name__}")


def hit_source() -> Any:
    """The label of our hits in vLLM's metrics: the disk; `None` in releases that don't label hits."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.DISK


class TuttiConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps vLLM's KV blocks on NVMe. Works for engines whose ranks are on one machine.

    `kv_connector_extra_config` is a `StoreConfig`, an `EngineConfig` and a `ClusterConfig` as one mapping. Raises `ConfigError` and what
    `LocalStore.open` and `Node` raise while the engine starts; afterwards no failure of the store reaches vLLM, each is counted and treated
    as a miss.
    """

    _cache_hit_source = hit_source()
    faults: FaultInjector | None = None
    """The seam at which tests make I/O of this process fail."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        namespace.check_supported(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.engine_id is None:
            raise ConfigError("TuttiConnector needs --kv-transfer-config")
        self._engine_id: str = transfer.engine_id
        self._store_config, self._engine_config, self._cluster_config = read_settings(dict(transfer.kv_connector_extra_config))
        if self._cluster_config.endpoints:
            namespace.check_cluster(vllm_config, kv_cache_config)
        self._worker: WorkerHalf | None = None
        self._scheduler: SchedulerHalf | None = None
        self._layers_wait = False
        if transfer.kv_load_failure_policy != "recompute":
            transfer.kv_load_failure_policy = "recompute"
            logger.info("kv_load_failure_policy is recompute: blocks that can't be loaded are computed")
        if role == KVConnectorRole.SCHEDULER:
            ranks = vllm_config.parallel_config.tensor_parallel_size
            scheduler = vllm_config.scheduler_config
            block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
            windows = namespace.has_windows(kv_cache_config)
            engine_store = registry.open_store(
                self._engine_id,
                self._store_config,
                ranks,
                kv_cache_config.num_blocks,
                len(kv_cache_config.kv_cache_groups),
                windows=windows,
                faults=self.faults,
            )
            elsewhere = None
            if self._cluster_config.endpoints:
                from tutti_mooncake.connectors.vllm.elsewhere import Elsewhere  # needs the modules of a cluster

                try:
                    elsewhere = Elsewhere(engine_store, self._cluster_config)
                except BaseException:
                    registry.close_store(engine_store)
                    raise
            announced = vllm_config.kv_events_config
            events = None
            if announced is not None and announced.enable_kv_cache_events:
                events = Events(block_tokens, engine_store.store.salted)
                engine_store.store.history.listen(events.removed)
            self._scheduler = SchedulerHalf(
                engine_store,
                # With asynchronous scheduling the next step is on its way before a failed load is known; with windows vLLM
                # can't be told which blocks of a running request failed.
                LoadPolicy(
                    self._engine_config,
                    LoadCost.from_dict(engine_store.store.memory.get(LOAD_COST, {})),
                    may_wait=not scheduler.async_scheduling and not windows,
                    largest_step=scheduler.max_num_batched_tokens,
                ),
                Accounting(engine_store.counters, engine_store.store.requests, Spans(vllm_config), block_tokens),
                block_tokens,
                may_load=transfer.is_kv_consumer,
                may_store=transfer.is_kv_producer,
                events=events,
                elsewhere=elsewhere,
            )
            logger.info("TuttiConnector: %s", engine_store.store.recovery)

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store is a later miss, nothing more."""
        return False

    @property
    def pins_held(self) -> int:
        """Pins that the scheduler half will still give back; 0 when no request waits for a load."""
        return self._require_scheduler().pins_held

    @property
    def steps_under_way(self) -> int:
        """Steps that the workers have not answered; 0 when the engine is at rest."""
        return self._require_scheduler().steps_under_way

    @property
    def elsewhere(self) -> Elsewhere | None:
        """The other nodes, as this one sees them; `None` when it is alone."""
        return self._require_scheduler().elsewhere

    def settle_stores(self, timeout_seconds: float) -> None:
        """Returns when all stores that workers have ended are committed too, which otherwise happens a moment later and on its own."""
        self._require_scheduler().settle_stores(timeout_seconds)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layers wait for their part of a load, which a whole graph would leave out."""
        return extra_config.get("load", "auto") != "asynchronous"

    # Worker half

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Opens the pool under the geometry of these tensors, which must live as long as the engine; makes it if it isn't there."""
        self._shutdown_worker()
        geometry, tensors, layers, groups = namespace.build_geometry(self._vllm_config, self._kv_cache_config, kv_caches)
        outbox = Outbox()

        def deliver(report: MoveReport) -> None:
            if not registry.deliver(self._engine_id, report):
                outbox.put(report)

        rank = namespace.tensor_parallel_rank(geometry.tp_size)
        mover = RankMover(
            self._store_config, geometry, tensors, deliver, rank=rank, user=self._engine_id, groups=groups, faults=self.faults
        )
        fetches = None
        if self._cluster_config.endpoints:
            from tutti_mooncake.connectors.vllm.fetches import Fetches

            try:
                fetches = Fetches(self._cluster_config, self._store_config, geometry, tensors)
            except BaseException:
                mover.close()
                raise
        self._worker = WorkerHalf(mover, layers, outbox, fetches=fetches, by_request=namespace.has_windows(self._kv_cache_config))
        registry.worker_opened(self._engine_id)
        logger.info("TuttiConnector: rank %d of %s; %s: %s", mover.rank, geometry, mover.executor, mover.executor_reason)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        metadata = _ours(kv_connector_metadata)
        if metadata.preempted:
            self._require_worker().end_stores_of(metadata.preempted)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._layers_wait = any(load.layerwise for load in _ours(connector_metadata).loads)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._require_worker().start_loads(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Returns when this layer's part of the step's layer-wise loads has ended."""
        if self._layers_wait:  # asked once for each layer of each step
            self._require_worker().wait_for_layer(self._metadata(), layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        """Nothing to do: blocks are stored whole, by `wait_for_save`."""

    def wait_for_save(self) -> None:
        """Submits the step's stores and returns; `finished_sending` and `handle_preemptions` guard their blocks."""
        self._require_worker().start_stores(self._metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = self._require_worker().finished(self._metadata())
        return sent or None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Asked for by releases that know of requests whose loads failed, which is how failures are told with windows."""
        sent, received = self._require_worker().finished(self._metadata())
        return base.KVConnectorTransferResults(sent, received, self._require_worker().take_failed_requests())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._require_worker().take_load_errors()

    def build_connector_worker_meta(self) -> TuttiWorkerMetadata | None:
        return self._require_worker().take_metadata()

    # Scheduler half

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._require_scheduler().match(request, num_computed_tokens)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._require_scheduler().bind_block_pool(gpu_block_pool)

    def has_pending_push_work(self) -> bool:
        """Keeps vLLM stepping while workers in other processes have moves to report."""
        return self._require_scheduler().has_moves

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._require_scheduler().allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TuttiConnectorMetadata:
        return self._require_scheduler().build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._require_scheduler().worker_output(connector_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._require_scheduler().take_events()

    def get_kv_connector_stats(self) -> TuttiStats | None:
        """The scheduler half's; workers have none of their own."""
        return None if self._scheduler is None else self._scheduler.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TuttiStats:
        return TuttiStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> TuttiPromMetrics:
        return TuttiPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._require_scheduler().finished(request), None

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self._require_scheduler().finished(request, block_ids), None

    def reset_cache(self) -> bool | None:
        """Empties the store: after an update of the weights none of its blocks is right any more."""
        return self._require_scheduler().clear()

    # Both

    def shutdown(self) -> None:
        """Lets running transfers end, gives pins back, and closes the pool. May be called more than once."""
        self._shutdown_worker()
        if self._scheduler is not None:
            self._scheduler.shutdown()
            self._scheduler.engine_store.store.memory[LOAD_COST] = self._scheduler.load_cost.as_dict()
            registry.close_store(self._scheduler.engine_store)
            self._scheduler = None

    def _shutdown_worker(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            registry.worker_closed(self._engine_id)
            self._worker = None

    def _metadata(self) -> TuttiConnectorMetadata:
        return _ours(self._get_connector_metadata())

    def _require_worker(self) -> WorkerHalf:
        if self._worker is None:
            raise RuntimeError("TuttiConnector: a worker hook was called before register_kv_caches or after shutdown")
        return self._worker

    def _require_scheduler(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise RuntimeError("TuttiConnector: a scheduler hook was called on the worker half or after shutdown")
        return self._scheduler


def _ours(metadata: KVConnectorMetadata) -> TuttiConnectorMetadata:
    if not isinstance(metadata, TuttiConnectorMetadata):
        raise TypeError(f"TuttiConnector got {type(metadata).__name__}, the metadata of another connector")
    return metadata
