"""The class that vLLM loads; it checks the set-up and passes each hook on to the scheduler half or the worker half.

Loads are asynchronous: vLLM keeps computing other requests while blocks arrive, so nothing has to be done layer by
layer in the forward pass. A load that fails is always computed again, whatever `kv_load_failure_policy` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger

from tutti_mooncake import StoreConfig
from tutti_mooncake.connectors.vllm import namespace, registry
from tutti_mooncake.connectors.vllm.metadata import TuttiConnectorMetadata
from tutti_mooncake.connectors.vllm.scheduler import SchedulerHalf
from tutti_mooncake.connectors.vllm.worker import WorkerHalf
from tutti_mooncake.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")


def hit_source() -> Any:
    """The label of our hits in vLLM's metrics: the disk; `None` in releases that don't label hits."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.DISK


class TuttiConnector(KVConnectorBase_V1):
    """Keeps vLLM's KV blocks on NVMe. Works for engines of one rank with one KV cache group.

    `kv_connector_extra_config` is a `StoreConfig` as a mapping. Raises `ConfigError` and what `LocalStore.open` raises
    while the engine starts; afterwards no failure of the store reaches vLLM, each is counted and treated as a miss.
    """

    _cache_hit_source = hit_source()

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        namespace.check_supported(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.engine_id is None:
            raise ConfigError("TuttiConnector needs --kv-transfer-config")
        self._engine_id: str = transfer.engine_id
        self._store_config = StoreConfig.from_mapping(dict(transfer.kv_connector_extra_config))
        self._worker: WorkerHalf | None = None
        self._scheduler: SchedulerHalf | None = None
        if transfer.kv_load_failure_policy != "recompute":
            transfer.kv_load_failure_policy = "recompute"
            logger.info("kv_load_failure_policy is recompute: blocks that can't be loaded are computed")
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(
                registry.attach(self._engine_id, self._store_config),
                kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
                may_load=transfer.is_kv_consumer,
                may_store=transfer.is_kv_producer,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store is a later miss, nothing more."""
        return False

    @property
    def pins_held(self) -> int:
        """Pins that the scheduler half will still give back; 0 when no request waits for a load."""
        return self._require_scheduler().pins_held

    # Worker half

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Opens the store under the geometry of these tensors, which must live as long as the engine."""
        self.shutdown()
        geometry, tensors = namespace.build_geometry(self._vllm_config, self._kv_cache_config, kv_caches)
        engine_store = registry.open_store(self._engine_id, self._store_config, geometry)
        try:
            engine_store.store.register(tensors)
        except BaseException:
            registry.release(engine_store)
            raise
        self._worker = WorkerHalf(engine_store)
        logger.info("TuttiConnector: %s; %s", geometry, engine_store.store.recovery)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        metadata = _ours(kv_connector_metadata)
        if metadata.preempted:
            self._require_worker().end_stores_of(metadata.preempted)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._require_worker().start_loads(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: vLLM schedules a request only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any) -> None:
        """Nothing to do: blocks are stored whole, by `wait_for_save`."""

    def wait_for_save(self) -> None:
        """Submits the step's stores and returns; `finished_sending` and `handle_preemptions` guard their blocks."""
        self._require_worker().start_stores(self._metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received = self._require_worker().finished(self._metadata())
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._require_worker().take_load_errors()

    # Scheduler half

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._require_scheduler().match(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._require_scheduler().allocated(request, list(blocks.get_block_ids()[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> TuttiConnectorMetadata:
        return self._require_scheduler().build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._require_scheduler().worker_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._require_scheduler().finished(request), None

    def reset_cache(self) -> bool | None:
        """Empties the store: after an update of the weights none of its blocks is right any more."""
        return self._require_scheduler().clear()

    # Both

    def shutdown(self) -> None:
        """Lets running transfers end, gives pins back, and lets go of the store. May be called more than once."""
        for half in (self._worker, self._scheduler):
            if half is not None:
                half.shutdown()
                registry.release(half.engine_store)
        self._worker = self._scheduler = None

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
