"""The store that both halves of one engine share.

vLLM builds the worker half first and the scheduler half second, in one process when there is one rank. The worker half
opens the store, because only it sees the KV tensors; the scheduler half attaches to it. The store is closed by the last
half that lets go, or when the interpreter ends.
"""

from __future__ import annotations

import atexit
import threading
from dataclasses import dataclass, field

from vllm.logger import init_logger

from tutti_mooncake import Geometry, LocalStore, StoreConfig
from tutti_mooncake.connectors.vllm.counters import Counters
from tutti_mooncake.errors import ConfigError

logger = init_logger(f"vllm.{__name__}")

ONE_PROCESS = (
    "run vLLM's worker in the engine's process: one rank, --distributed-executor-backend uni, and on CPUs "
    "VLLM_ENABLE_V1_MULTIPROCESSING=0 in the environment"
)
"""What to set when vLLM would run its worker in a process of its own, as it does on CPUs by default."""


@dataclass(frozen=True)
class StoreId:
    """One engine's store: the engine's id and the devices of the pool."""

    engine_id: str
    devices: tuple[str, ...]


@dataclass
class EngineStore:
    """An open store with the counts and the seen kinds of errors of its engine."""

    store_id: StoreId
    store: LocalStore
    geometry: Geometry
    counters: Counters = field(default_factory=Counters)
    references: int = 1
    _seen: set[tuple[str, type[BaseException]]] = field(default_factory=set)

    def report(self, action: str, error: BaseException) -> None:
        """Counts a call that raised; logs the first of its kind with its traceback. The caller goes on without the
        store.
        """
        self.counters.store_errors += 1
        kind = (action, type(error))
        if kind not in self._seen:
            self._seen.add(kind)
            logger.error(
                "%s failed; the engine goes on without it, and more failures of this kind are only counted: %s",
                action,
                error,
                exc_info=error,
            )


_lock = threading.Lock()
_open: dict[StoreId, EngineStore] = {}


def open_store(engine_id: str, config: StoreConfig, geometry: Geometry) -> EngineStore:
    """Opens the engine's store and holds one reference. Raises what `LocalStore.open` raises."""
    store_id = StoreId(engine_id, tuple(str(device) for device in config.devices))
    with _lock:
        if store_id in _open:
            raise ConfigError(f"engine {engine_id} has already opened the pool on {', '.join(store_id.devices)}")
        store = LocalStore.open(config, geometry)
        engine_store = EngineStore(store_id, store, geometry)
        _open[store_id] = engine_store
    return engine_store


def attach(engine_id: str, config: StoreConfig) -> EngineStore:
    """The store that the worker half of the same engine opened, with one more reference.

    Raises `ConfigError` when there is none in this process: then vLLM runs its worker in a process of its own.
    """
    store_id = StoreId(engine_id, tuple(str(device) for device in config.devices))
    with _lock:
        engine_store = _open.get(store_id)
        if engine_store is None:
            raise ConfigError(f"the worker half of TuttiConnector is not in the scheduler's process; {ONE_PROCESS}")
        engine_store.references += 1
    return engine_store


def release(engine_store: EngineStore) -> None:
    """Gives one reference back; the last one logs the counters and closes the store."""
    with _lock:
        engine_store.references -= 1
        if engine_store.references > 0 or _open.pop(engine_store.store_id, None) is None:
            return
    _close(engine_store)


def open_stores() -> list[EngineStore]:
    """The stores of this process's engines, for tests and reports."""
    with _lock:
        return list(_open.values())


def _close(engine_store: EngineStore) -> None:
    logger.info("TuttiConnector counters: %s", engine_store.counters.as_dict())
    try:
        engine_store.store.close()
    except Exception as error:
        engine_store.report("closing the store", error)


def _close_all() -> None:
    with _lock:
        remaining = list(_open.values())
        _open.clear()
    for engine_store in remaining:
        _close(engine_store)


atexit.register(_close_all)
