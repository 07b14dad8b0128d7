"""A vLLM engine, most often with TuttiConnector, as a process of its own: one JSON object per line in, one per line out.

`python -m tutti_mooncake.demo.engine_server` reads its settings from the first line (keyword arguments of `vllm.LLM`),
answers `{"ready": ...}`, then serves one command per line until `shutdown` or the end of its input. `engine_client` is
the other side. The engine's core runs in this process, so a `SIGKILL` takes the scheduler, the worker and the store
alike.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

from tutti_mooncake.block_hashes import block_hashes

if TYPE_CHECKING:
    from tutti_mooncake import Geometry

SETTLE_SECONDS = 60.0


def prompt_keys(geometry: Geometry, tokens: list[int]) -> list[bytes]:
    """What the full blocks of a prompt are called."""
    return block_hashes(tokens, geometry.block_tokens, geometry.hash_algorithm, geometry.hash_seed)


class EngineServer:
    """`llm`: a `vllm.LLM` whose core runs in this process. `report` and `metrics` need `TuttiConnector` in it."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine
        self._core = self._engine.engine_core.engine_core
        self._next_id = 0
        self._given: dict[str, int] = {}
        """Tokens that requests of `timed_steps` have got so far."""

    def generate(self, prompts: list[list[int]], max_tokens: int, logprobs: bool = False, **options: Any) -> list[dict[str, Any]]:
        """Answers all prompts (token ids) at once, greedily. `ttft_seconds` counts from the submission of the batch.

        `options`: as those of `_add`.
        """
        return self._run(self._add(prompts, max_tokens, logprobs, **options))

    def generate_and_abort(self, prompts: list[list[int]], max_tokens: int, abort_at_step: dict[str, int]) -> list[dict[str, Any]]:
        """As `generate`, but aborts prompt `int(i)` before engine step `abort_at_step[i]`; its answer stays empty."""
        ids = self._add(prompts, max_tokens, False)
        steps = {ids[int(position)]: step for position, step in abort_at_step.items()}
        return self._run(ids, steps)

    def timed_steps(self, steps: int, prompts: list[list[int]], max_tokens: int = 1) -> dict[str, Any]:
        """Submits `prompts`, which get `max_tokens` tokens whatever they say, and takes `steps` steps. Per step its `seconds`, the first
        one's from before the submission, and how many `tokens` it gave; `first_tokens`: per prompt seconds until its first one, null if
        it has none yet; `thread_seconds`: processor time of the engine's thread.
        """
        begin, cpu = time.perf_counter(), time.thread_time()
        first_tokens: dict[str, float | None] = dict.fromkeys(self._add(prompts, max_tokens, False, sampling={"ignore_eos": True}))
        ends, tokens = [begin], []
        for _ in range(steps):
            outputs = self._engine.step()
            ends.append(time.perf_counter())
            tokens.append(sum(len(output.outputs[0].token_ids) - self._given.get(output.request_id, 0) for output in outputs))
            for output in outputs:
                self._given[output.request_id] = len(output.outputs[0].token_ids)
                if output.request_id in first_tokens and first_tokens[output.request_id] is None:
                    first_tokens[output.request_id] = ends[-1] - begin
                if output.finished:
                    del self._given[output.request_id]
        return {
            "seconds": [end - start for start, end in itertools.pairwise(ends)],
            "tokens": tokens,
            "first_tokens": list(first_tokens.values()),
            "thread_seconds": time.thread_time() - cpu,
        }

    def drain(self) -> None:
        """Returns when every store of every ended request is durable."""
        while self._core.scheduler.has_requests():
            self._engine.step()
        settle = getattr(self._core.scheduler.get_kv_connector(), "settle_stores", None)  # other connectors have none
        if settle is not None:
            settle(SETTLE_SECONDS)

    def reset_prefix_cache(self) -> bool:
        """Empties vLLM's own cache, not the store."""
        self.drain()
        return bool(self._engine.reset_prefix_cache())

    def reset_connector(self) -> bool:
        """Empties vLLM's own cache and the store, as after an update of the model's weights."""
        self.drain()
        return bool(self._engine.reset_prefix_cache(reset_connector=True))

    def overwrite_kv_memory(self) -> None:
        """Zeros in the engine's KV tensors: what is right afterwards was computed or loaded afterwards. For an engine that is idle."""
        self._engine.collective_rpc(_overwrite_kv)

    def kv_memory_written(self) -> int:
        """Elements of the engine's KV tensors that aren't zero."""
        return sum(self._engine.collective_rpc(_kv_written))

    def last_request_id(self) -> str:
        """The id of the request added last."""
        return str(self._next_id - 1)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of `text`, without any added token."""
        return list(self._engine.get_tokenizer().encode(text, add_special_tokens=False))

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of the conversation in the model's chat template, up to where the assistant answers."""
        tokenizer = self._engine.get_tokenizer()
        return self.tokenize(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def report(self) -> dict[str, Any]:
        """Counters of the connector and statistics of the store."""
        from tutti_mooncake.connectors.vllm.registry import open_stores

        (engine_store,) = open_stores()
        connector = self._core.scheduler.get_kv_connector()
        return {
            "counters": engine_store.counters.as_dict(),
            "stats": engine_store.store.stats(),
            "geometry": asdict(engine_store.geometry),
            "recovered_blocks": engine_store.store.recovery.recovered_blocks,
            "pins_held": connector.pins_held,
            "steps_under_way": connector.steps_under_way,
            "kv_cache_groups": engine_store.mover.groups,
            "cluster": connector.elsewhere and connector.elsewhere.report(),
        }

    def held_elsewhere(self, tokens: list[int]) -> int:
        """Leading blocks of a prompt that another node holds that may be asked now."""
        from tutti_mooncake.connectors.vllm.registry import open_stores

        (engine_store,) = open_stores()
        elsewhere = self._core.scheduler.get_kv_connector().elsewhere
        plan = elsewhere and elsewhere.plan(prompt_keys(engine_store.geometry, tokens))
        return plan.blocks if plan else 0

    def metrics(self) -> str:
        """What `/metrics` of a server would say; needs `disable_log_stats=False`."""
        from prometheus_client import REGISTRY, generate_latest

        return str(generate_latest(REGISTRY).decode())

    def shutdown(self) -> None:
        """Ends the engine and closes the store."""
        self._engine.engine_core.shutdown()

    def _add(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        logprobs: bool,
        *,
        cache_salt: str | None = None,
        adapter: str | None = None,
        images: list[str] | None = None,
        priorities: list[int] | None = None,
        sampling: dict[str, Any] | None = None,
    ) -> list[str]:
        """`adapter`: directory of a LoRA adapter; `images`: a file per prompt; `sampling`: more settings of `SamplingParams`."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        settings = {"temperature": 0.0, "max_tokens": max_tokens, "logprobs": 1 if logprobs else None, **(sampling or {})}
        lora = LoRARequest(adapter, 1, adapter) if adapter else None
        ids = []
        for i, tokens in enumerate(prompts):
            prompt: dict[str, Any] = {"prompt_token_ids": tokens}
            if cache_salt is not None:
                prompt["cache_salt"] = cache_salt
            if images is not None:
                prompt["multi_modal_data"] = {"image": _image(images[i])}
            ids.append(str(self._next_id))
            self._next_id += 1
            priority = priorities[i] if priorities else 0
            self._engine.add_request(ids[-1], prompt, SamplingParams(**settings), lora_request=lora, priority=priority)
        return ids

    def _run(self, ids: list[str], abort_at_step: dict[str, int] | None = None) -> list[dict[str, Any]]:
        begin = time.perf_counter()
        answers: dict[str, dict[str, Any]] = {request_id: {"token_ids": [], "text": ""} for request_id in ids}
        pending = dict(abort_at_step or {})
        step = 0
        while self._engine.has_unfinished_requests():
            due = [request_id for request_id, at in pending.items() if at <= step]
            if due:
                self._engine.abort_request(due)
                for request_id in due:
                    del pending[request_id]
            for output in self._engine.step():
                if output.request_id not in answers or not output.outputs[0].token_ids:
                    continue
                answer, completion = answers[output.request_id], output.outputs[0]
                if completion.index:  # not the first of a request's samples, which arrive one by one
                    answer.setdefault("more_samples", {})[completion.index] = list(completion.token_ids)
                    continue
                answer.setdefault("ttft_seconds", time.perf_counter() - begin)
                answer |= {"token_ids": list(completion.token_ids), "text": completion.text, "cached_tokens": output.num_cached_tokens}
                answer["finish_reason"] = completion.finish_reason
                if completion.logprobs:
                    answer["logprobs"] = [
                        float(chosen[token].logprob) for token, chosen in zip(completion.token_ids, completion.logprobs, strict=True)
                    ]
            step += 1
        return [answers[request_id] for request_id in ids]


def serve(lines: IO[str], answers: IO[str], kind: type[EngineServer] = EngineServer) -> None:
    """Serves commands (methods of `kind`) from `lines` and writes to `answers` until `shutdown` or the end of the input."""
    settings = json.loads(lines.readline())
    begin = time.perf_counter()
    from vllm import LLM

    server = kind(LLM(**settings))
    _answer(answers, {"ready": True, "start_seconds": time.perf_counter() - begin})
    for line in lines:
        command = json.loads(line)
        name = command.pop("command")
        try:
            _answer(answers, {"result": getattr(server, name)(**command)})
        except Exception:
            _answer(answers, {"error": traceback.format_exc()})
        if name == "shutdown":
            return


def _overwrite_kv(worker: Any) -> None:
    for tensor in worker.model_runner.kv_caches:
        tensor.zero_()


def _kv_written(worker: Any) -> int:
    return sum(int(tensor.count_nonzero()) for tensor in worker.model_runner.kv_caches)


def _image(path: str) -> Any:
    from PIL import Image

    with Image.open(path) as image:
        return image.convert("RGB")


def _answer(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def main(kind: type[EngineServer] = EngineServer) -> None:
    """Keeps standard output for answers alone: whatever else prints goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, answers, kind)


if __name__ == "__main__":
    main()
