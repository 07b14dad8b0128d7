"""The stores of this process's engines, and which of their workers run in this process too.

The scheduler half owns the store. Workers in processes of their own answer it through vLLM's step output; a worker in the same process
answers directly, so that blocks become durable and can be found even while the engine takes no steps.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from vllm.logger import init_logger

from tutti_mooncake import Geometry, LocalStore, StoreConfig
from tutti_mooncake._native import FaultInjector
from tutti_mooncake.connectors.vllm.counters import Counters
from tutti_mooncake.errors import ConfigError
from tutti_mooncake.store.moves import MoveReport, RankedMover
from tutti_mooncake.store.pool import read_geometry

logger = init_logger(f"vllm.{__name__}")


@dataclass
class EngineStore:
    """An open store, its movers, and the counts and the seen kinds of errors of its engine."""

    engine_id: str
    store: LocalStore
    mover: RankedMover
    geometry: Geometry
    windows: bool = False
    """Whether the model has sliding windows, so that some blocks of some layers come to be missing."""
    counters: Counters = field(default_factory=Counters)
    _seen: set[tuple[str, type[BaseException]]] = field(default_factory=set)

    def report(self, action: str, error: BaseException) -> None:
        """Counts a call that raised; logs the first of its kind with its traceback. The caller goes on without the store."""
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
_open: dict[str, EngineStore] = {}
_workers: set[str] = set()


def worker_opened(engine_id: str) -> None:
    """A worker half of the engine runs in this process."""
    with _lock:
        _workers.add(engine_id)


def worker_closed(engine_id: str) -> None:
    """It has ended."""
    with _lock:
        _workers.discard(engine_id)


def open_store(
    engine_id: str,
    config: StoreConfig,
    ranks: int,
    blocks: int,
    groups: int = 1,
    *,
    windows: bool = False,
    faults: FaultInjector | None = None,
) -> EngineStore:
    """Opens the engine's store, whose pool the workers have made or checked. Raises what `LocalStore.open` raises.

    `ranks`: tensor-parallel workers; `blocks`: engine blocks that each has; `groups`: its KV cache groups; `windows`: see there; `faults`:
    makes reads for other nodes fail.
    """
    geometry = read_geometry(config)
    if geometry.tp_size != ranks:
        raise ConfigError(f"the pool holds KV of {geometry.tp_size} tensor-parallel ranks, this engine has {ranks}; give it another `pool`")
    with _lock:
        if engine_id in _open:
            raise ConfigError(f"engine {engine_id} has already opened the pool on {', '.join(map(str, config.devices))}")
        mover = RankedMover(ranks, geometry.layers, blocks, groups, reports_by_itself=engine_id in _workers)
        store = LocalStore.open(config, geometry, create=False, mover=mover, user=engine_id, faults=faults)
        _open[engine_id] = EngineStore(engine_id, store, mover, geometry, windows)
        return _open[engine_id]


def deliver(engine_id: str, report: MoveReport) -> bool:
    """Hands a worker's report to the engine's store; False if that isn't in this process."""
    with _lock:
        engine_store = _open.get(engine_id)
    if engine_store is None:
        return False
    engine_store.mover.take([report])
    return True


def close_store(engine_store: EngineStore) -> None:
    """Logs the counters and closes the store."""
    logger.info("TuttiConnector counters: %s", engine_store.counters.as_dict())
    try:
        engine_store.store.close()  # waits for reports, which find it through the registry
    except Exception as error:
        engine_store.report("closing the store", error)
    with _lock:
        _open.pop(engine_store.engine_id, None)


def open_stores() -> list[EngineStore]:
    """The stores of this process's engines, for tests and reports."""
    with _lock:
        return list(_open.values())
