"""An engine whose store can be made to fail on command: the server, and the name of the connector that it gives vLLM.

`python -m tests.e2e.vllm.faulty_engine` takes the commands of `engine_server`, and those of `FaultyServer`.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from tutti_mooncake._native import FaultInjector
from tutti_mooncake.demo.engine_server import EngineServer, main, prompt_keys

MODULE = "tests.e2e.vllm.faulty_engine"
CONNECTOR = {"kv_connector": "FaultyConnector", "kv_connector_module_path": "tests.e2e.vllm.faulty_connector"}


class FaultyServer(EngineServer):
    """Commands that make I/O fail, hang or lie, and requests of every kind."""

    def add_fault(self, **fault: Any) -> None:
        """See `FaultInjector.add`."""
        _faults().add(**fault)

    def clear_faults(self) -> int:
        """Ends all faults and lets go of what hangs; how many there were so far."""
        _faults().clear()
        _faults().release()
        return int(_faults().injected)

    def release_later(self, seconds: float) -> None:
        """Lets go of what hangs after `seconds`, as a drive that answers at last."""
        threading.Timer(seconds, _faults().release).start()

    def run_scenario(self, requests: list[dict[str, Any]], actions: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Runs requests to their ends, each added before the engine step `add_at` and aborted before the step `abort_at` if it has one.

        `actions`: by step, what happens before it: `{"do": name of a command, ...}`. Answers hold token ids and, per token, the two best
        tokens with their log probabilities. Raises TimeoutError when nothing moves for 30 s.
        """
        answers: list[dict[str, Any]] = [{"token_ids": [], "best": [], "finish_reason": None} for _ in requests]
        position_of: dict[str, int] = {}
        step, moved = 0, time.monotonic()
        last = max([request["add_at"] for request in requests] + [int(at) for at in actions])
        while step <= last or self._engine.has_unfinished_requests():
            for action in actions.get(str(step), []):
                getattr(self, action["do"])(**{name: value for name, value in action.items() if name != "do"})
            for position, request in enumerate(requests):
                if request["add_at"] == step:
                    position_of[self._add_one(request)] = position
                if request.get("abort_at") == step:
                    self._engine.abort_request([name for name, known in position_of.items() if known == position])
            for output in self._engine.step():
                moved = time.monotonic()
                answer, completion = answers[position_of[output.request_id]], output.outputs[0]
                answer["token_ids"], answer["finish_reason"] = list(completion.token_ids), completion.finish_reason
                answer["best"] = [
                    sorted(((float(found.logprob), token) for token, found in chosen.items()), reverse=True)[:2]
                    for chosen in completion.logprobs or []
                ]
            if time.monotonic() - moved > 30:
                raise TimeoutError(f"nothing has moved for 30 s, at step {step}")
            step += 1
        return answers

    def reset_while_busy(self) -> None:
        """Asks for an empty cache, which vLLM refuses while requests run."""
        self._engine.reset_prefix_cache()

    def _add_one(self, request: dict[str, Any]) -> str:
        from vllm import SamplingParams

        parameters = SamplingParams(
            temperature=0.0, max_tokens=request["max_tokens"], logprobs=2, skip_reading_prefix_cache=request.get("skip_reading")
        )
        prompt: Any = {"prompt_token_ids": request["prompt"]}
        if request.get("cache_salt"):
            prompt["cache_salt"] = request["cache_salt"]
        name = str(self._next_id)
        self._next_id += 1
        self._engine.add_request(name, prompt, parameters, priority=request.get("priority", 0))
        return name

    def drop_blocks(self, tokens: list[int]) -> int:
        """Takes a prompt's blocks out of the store."""
        from tutti_mooncake.connectors.vllm.registry import open_stores

        (engine_store,) = open_stores()
        return engine_store.store.drop(prompt_keys(engine_store.geometry, tokens))

    def truncate_pool(self, device: str) -> None:
        """As if the pool's file had been lost under the running engine."""
        for path in Path(device).glob("*.pool"):
            os.truncate(path, 1 << 20)


def _faults() -> FaultInjector:
    from tests.e2e.vllm.faulty_connector import FAULTS  # late: what vLLM prints must not come before the server's first answer

    return FAULTS


if __name__ == "__main__":
    main(FaultyServer)
