"""The tiny model, and engines on a pool of the test's own; one engine runs at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed (scripts/setup --with-vllm)")

from tests.e2e.vllm import faulty_engine
from tests.e2e.vllm.tiny_model import make_tiny_model
from tutti_mooncake.demo.engine_client import EngineProcess

BLOCK_TOKENS = 128
CAPACITY = "256MiB"

StartEngine = Callable[..., EngineProcess]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that most tests run."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that stands for the module's device."""
    return tmp_path_factory.mktemp("pool")


@pytest.fixture
def start_engine(tiny_model: Path, pool: Path, tmp_path: Path) -> Iterator[StartEngine]:
    """Starts an engine with TuttiConnector on the module's pool; `settings` are added to those of `vllm.LLM`, `store` to the store's.

    `faulty`: one whose I/O can be made to fail (`faulty_engine`).
    """
    running: list[EngineProcess] = []

    def start(
        environment: dict[str, str] | None = None, store: dict[str, Any] | None = None, *, faulty: bool = False, **settings: Any
    ) -> EngineProcess:
        for engine in running:
            engine.kill()
        arguments = {
            "model": str(tiny_model),
            "block_size": BLOCK_TOKENS,
            "max_model_len": 4096,
            "max_num_batched_tokens": 512,
            **settings,
        }
        variables = {"OMP_NUM_THREADS": "1", **(environment or {})}  # more threads wait busily where cores are few
        others: dict[str, Any] = {"connector": faulty_engine.CONNECTOR, "server": faulty_engine.MODULE} if faulty else {}
        engine = EngineProcess(arguments, [str(pool)], tmp_path / "engine.log", CAPACITY, variables, store=store, **others)
        running.append(engine)
        return engine

    yield start
    for engine in running:
        engine.kill()
