"""Stores for tests, on every executor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pattern import PatternTensors, device_of, geometry
from tutti_mooncake import Geometry, LocalStore, StoreConfig, _native

EXECUTORS = ["uring", "posix", "gio-threads", "nvme-model", *([] if _native.probe_cuda() else ["uring-gpu"])]


@pytest.fixture(params=EXECUTORS)
def executor(request: pytest.FixtureRequest) -> str:
    """Each executor in turn; one that this machine refuses is skipped with the machine's reason."""
    if request.param == "uring" and (refusal := _native.probe_uring()):
        pytest.skip(f"io_uring: {refusal}")
    return str(request.param)


class Stores:
    """Opens stores on one set of devices; closes what a test leaves open."""

    def __init__(self, root: Path, executor: str) -> None:
        self.root = root
        self.executor = executor
        self._open = contextlib.ExitStack()

    def config(self, **settings: Any) -> StoreConfig:
        """Two devices and 16 MiB unless changed."""
        devices = settings.pop("devices", [str(self.root / "nvme0"), str(self.root / "nvme1")])
        return StoreConfig(**{"devices": devices, "capacity": "16MiB", "executor": self.executor, **settings})

    def open(
        self,
        shape: Geometry | None = None,
        blocks: int = 64,
        align_offset: int = 0,
        faults: Any = None,
        clock: Callable[[], float] | None = None,
        **settings: Any,
    ) -> tuple[LocalStore, PatternTensors]:
        """A store with registered pattern tensors."""
        seams = {} if clock is None else {"clock": clock}
        config = self.config(**settings)
        store = LocalStore.open(config, shape or geometry(), faults=faults, **seams)
        self._open.callback(store.close)
        tensors = PatternTensors(store.geometry, blocks, align_offset, device=device_of(config.executor))
        store.register(tensors.tensors)
        return store, tensors

    def close_all(self) -> None:
        """Closes every store that is still open."""
        self._open.close()


@pytest.fixture
def stores(tmp_path: Path, executor: str) -> Iterator[Stores]:
    """Stores under a temporary directory, per executor."""
    made = Stores(tmp_path, executor)
    yield made
    made.close_all()
