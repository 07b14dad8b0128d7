"""A worker's fetches from other nodes: each in a thread of its own, a few at a time, the others wait.

A fetch that is over touches the engine's memory no more. Its time counts from when it was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
from vllm.logger import init_logger

from tutti_mooncake import Status
from tutti_mooncake.agent.node import make_transport, node_name
from tutti_mooncake.config import ClusterConfig, StoreConfig
from tutti_mooncake.connectors.vllm.metadata import FetchWork
from tutti_mooncake.geometry import Geometry
from tutti_mooncake.remote.fetcher import Cancel, Fetched, Fetcher

if TYPE_CHECKING:
    import torch

logger = init_logger(f"vllm.{__name__}")

MOST_AT_A_TIME = 4
"""What the fetcher's windows are enough for."""


class RunningFetch:
    """One fetch. Called from vLLM's worker thread."""

    def __init__(self, future: Future[Fetched], cancel: Cancel) -> None:
        self._future = future
        self._cancel = cancel

    def done(self) -> bool:
        """Whether it is over."""
        return self._future.done()

    def wait(self, seconds: float) -> None:
        """Returns when it is over, or after that time."""
        wait([self._future], seconds)

    def cancel(self) -> None:
        """It is over soon."""
        self._cancel.ask()

    def result(self) -> Fetched:
        """How it ended; it must be over."""
        error = self._future.exception()
        if error is not None:
            logger.error("a fetch failed, its blocks are computed: %s", error, exc_info=error)
            return Fetched(0, Status.BAD_STATE, 0, 0.0, [])
        return self._future.result()


class Fetches:
    """`tensors`: the engine's, as given to the mover. Raises ConfigError, TransportError, TensorError."""

    def __init__(self, cluster: ClusterConfig, store: StoreConfig, geometry: Geometry, tensors: Sequence[torch.Tensor]) -> None:
        transport = make_transport(cluster)
        self._fetcher = Fetcher(node_name(cluster, store), geometry, transport, tensors)
        self._threads = ThreadPoolExecutor(MOST_AT_A_TIME, "tutti-fetch")
        logger.info("TuttiConnector: blocks of other nodes come by %s to %s", transport.protocol, transport.segment)

    def begin(self, work: FetchWork) -> RunningFetch:
        """Starts one."""
        cancel = Cancel()
        return RunningFetch(self._threads.submit(self._fetch, work, time.monotonic() + work.seconds, cancel), cancel)

    def close(self) -> None:
        """Ends when all fetches have."""
        self._threads.shutdown(wait=True)
        self._fetcher.close()

    def _fetch(self, work: FetchWork, deadline: float, cancel: Cancel) -> Fetched:
        blocks = np.asarray(work.block_ids, dtype=np.uint32)
        return self._fetcher.fetch_from(work.owners, work.keys, blocks, seconds=deadline - time.monotonic(), cancel=cancel)
