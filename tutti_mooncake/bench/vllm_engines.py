"""What benchmarks of several vLLM engines side by side have in common."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tutti_mooncake.demo.engine_client import EngineFailed, EngineProcess


@dataclass(frozen=True)
class Engines:
    """`root`: folder for pools and logs. `running`: by name; the benchmark adds and removes. `say`: tells on standard error."""

    root: Path
    say: Callable[[str], None]
    running: dict[str, EngineProcess] = field(default_factory=dict)


@contextmanager
def engines(bench: str, directory: str) -> Iterator[Engines]:
    """A folder below `directory` and no engine yet; at the end kills those that run and removes the folder.

    Raises `SystemExit` without vLLM, and for an engine that fails.
    """
    if importlib.util.find_spec("vllm") is None:
        raise SystemExit(f"bench {bench}: vLLM is not installed (scripts/setup --with-vllm)")
    made = Engines(
        Path(tempfile.mkdtemp(prefix="tutti-bench-", dir=directory)), lambda text: print(f"[{bench}] {text}", file=sys.stderr, flush=True)
    )
    try:
        yield made
    except EngineFailed as error:
        raise SystemExit(f"bench {bench}: {error}") from error
    finally:
        for engine in made.running.values():
            engine.kill()
        shutil.rmtree(made.root, ignore_errors=True)
