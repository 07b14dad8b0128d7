"""Starts, asks, kills and stops a vLLM engine that runs in a process of its own (`engine_server`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CONNECTOR = {
    "kv_connector": "TuttiConnector",
    "kv_connector_module_path": "tutti_mooncake.connectors.vllm",
    "kv_role": "kv_both",
}

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
"""Engine core in the process that is started, threads left to the scheduler of the OS, 1 GiB of KV cache, no network,
and no compiler: it would spend seconds on small helpers of vLLM's sampler.
"""


class EngineFailed(RuntimeError):
    """The engine ended, or answered with an error; the text holds what it said."""


class EngineProcess:
    """One running engine. Not for use from several threads.

    `settings`: keyword arguments of `vllm.LLM`, `model` among them; a `kv_transfer_config` among them takes the place of ours, and `None`
    there runs without a connector. `devices`, `capacity`: the store's. `log`: file that gets all output of the engine. `store`: more
    settings of the store and the connector. `connector`: another class and module than ours. `server`: the module that serves the engine.
    Raises `EngineFailed` when the engine doesn't start.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        devices: list[str],
        log: Path,
        capacity: str = "1GiB",
        environment: Mapping[str, str] | None = None,
        *,
        store: Mapping[str, Any] | None = None,
        connector: Mapping[str, str] | None = None,
        server: str = "tutti_mooncake.demo.engine_server",
    ) -> None:
        self._log = log
        options = {"devices": devices, "capacity": capacity, **(store or {})}
        arguments = {
            "enforce_eager": True,
            "dtype": "float32",
            "seed": 0,
            "kv_transfer_config": {**CONNECTOR, **(connector or {}), "kv_connector_extra_config": options},
            **settings,
        }
        threads = {"OMP_NUM_THREADS": str(min(len(os.sched_getaffinity(0)), 8))}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", server],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env={**threads, **os.environ, **ENVIRONMENT, **(environment or {})},
            )
        try:
            self.start_seconds = float(self._exchange(arguments)["start_seconds"])
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def call(self, command: str, **arguments: Any) -> Any:
        """Runs a method of `EngineServer` in the engine's process and returns its result."""
        return self._exchange({"command": command, **arguments})["result"]

    def kill(self) -> None:
        """Ends the process as a crash would (`SIGKILL`). Does nothing if it has ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass

    def pause(self) -> None:
        """Stops the process (`SIGSTOP`): its ports take connections, and nothing answers."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Ends a pause."""
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ends the engine in good order: running stores become durable, the pool is marked clean."""
        self.call("shutdown")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self.kill()

    def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise EngineFailed(f"the engine ended with code {code}; the end of {self._log}:\n{self._log_tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-60:])
