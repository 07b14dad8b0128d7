"""Asks a real vLLM about a long document: cold, from vLLM's own cache, and after a kill -9 and restart, from disk."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti_mooncake.demo.document import DOCUMENT_TOKENS, Document, leading_lines
from tutti_mooncake.demo.engine_client import EngineProcess
from tutti_mooncake.demo.model import CONTEXT_TOKENS

ANSWER_TOKENS = 64
POOL_CAPACITY = "1GiB"
WARM_UP = "The quick brown fox jumps over the lazy dog. " * 30
"""Read once by each engine before anything is measured: a first forward pass is slower than all later ones."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What was measured. Times to first token are in seconds, from submission; answers hold token ids and text."""

    document: str
    question: str
    prompt_tokens: int
    cold: dict[str, Any]
    cached: dict[str, Any]
    restarted: dict[str, Any]
    start_seconds: float
    pool_blocks: int
    pool_payload_bytes: int
    pool_file_bytes: int
    blocks_loaded: int
    bytes_loaded: int
    load_seconds: float

    @property
    def answers_equal(self) -> bool:
        """All three answers are the same tokens, and there are some."""
        return bool(self.cold["token_ids"]) and (self.cold["token_ids"] == self.cached["token_ids"] == self.restarted["token_ids"])

    @property
    def fault(self) -> str:
        """What went wrong; empty when nothing did."""
        if not self.answers_equal:
            return "the answers differ"
        return "" if self.blocks_loaded else "nothing was loaded from disk"

    @property
    def load_gb_per_s(self) -> float:
        """Bandwidth of the loads after the restart, in 10^9 bytes per second."""
        return self.bytes_loaded / self.load_seconds / 1e9 if self.load_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The machine-readable result."""
        return {
            "cold_ttft_s": self.cold["ttft_seconds"],
            "cached_ttft_s": self.cached["ttft_seconds"],
            "restart_ttft_s": self.restarted["ttft_seconds"],
            "tokens": self.prompt_tokens,
            "answers_equal": self.answers_equal,
            "blocks_loaded": self.blocks_loaded,
            "load_gb_per_s": self.load_gb_per_s,
        }


def run(model: Path, document: Document, cache: Path, say: Say) -> Outcome:
    """Runs the demonstration. `cache`: where the pool and the engine's log go; the pool is made anew."""
    pool = cache / "pool"
    shutil.rmtree(pool, ignore_errors=True)
    pool.mkdir(parents=True)
    log = cache / "engine.log"
    log.unlink(missing_ok=True)

    with start(model, pool, log, say) as engine:
        prompt = prompt_of(engine, document)
        say(f"asking about {document.name}: {len(prompt):,} tokens, nothing is cached")
        cold = ask(engine, prompt, say)
        say("asking again: vLLM's own prefix cache has it")
        cached = ask(engine, prompt, say)
        engine.call("drain")
        stats = engine.call("report")["stats"]
        say(f"{stats['resident_blocks']} blocks are on disk; killing the engine (SIGKILL)")
        engine.kill()

    _drop_page_cache(pool)
    with start(model, pool, log, say) as engine:
        recovered = engine.call("report")["recovered_blocks"]
        before = engine.call("report")["counters"]
        say(f"asking the new process; it found {recovered} blocks on disk")
        restarted = ask(engine, prompt, say)
        after = engine.call("report")["counters"]
        engine.stop()
    loaded = {name: after[name] - before[name] for name in ("blocks_loaded", "bytes_loaded", "load_seconds")}
    return Outcome(
        document=document.name,
        question=document.question,
        prompt_tokens=len(prompt),
        cold=cold,
        cached=cached,
        restarted=restarted,
        start_seconds=engine.start_seconds,
        pool_blocks=stats["resident_blocks"],
        pool_payload_bytes=stats["resident_blocks"] * stats["block_bytes"],
        pool_file_bytes=stats["pool_bytes"],
        blocks_loaded=loaded["blocks_loaded"],
        bytes_loaded=loaded["bytes_loaded"],
        load_seconds=loaded["load_seconds"],
    )


def start(model: Path, pool: Path, log: Path, say: Say, store: Mapping[str, Any] | None = None) -> EngineProcess:
    """An engine that has computed something. `store`: more settings of the store and the connector."""
    say("starting vLLM")
    begin = time.monotonic()
    settings = {"model": str(model), "max_model_len": CONTEXT_TOKENS}
    engine = EngineProcess(settings, [str(pool)], log, POOL_CAPACITY, store=store)
    try:
        engine.call("generate", prompts=[engine.call("tokenize", text=WARM_UP)], max_tokens=2)
        engine.call("drain")
    except BaseException:
        engine.kill()
        raise
    say(f"vLLM is up after {time.monotonic() - begin:.0f} s")
    return engine


def prompt_of(engine: EngineProcess, document: Document) -> list[int]:
    """Token ids of the conversation: the document, cut to `DOCUMENT_TOKENS`, and the question below it."""
    text = leading_lines(document.text, lambda part: len(engine.call("tokenize", text=part)) <= DOCUMENT_TOKENS)
    message = {"role": "user", "content": f"{text}\n\n{document.question}"}
    return list(engine.call("chat", messages=[message]))


def ask(engine: EngineProcess, prompt: list[int], say: Say) -> dict[str, Any]:
    """Its answer."""
    (answer,) = engine.call("generate", prompts=[prompt], max_tokens=ANSWER_TOKENS)
    say(f"first token after {answer['ttft_seconds']:.2f} s")
    return dict(answer)


def _drop_page_cache(pool: Path) -> None:
    """Lets the kernel forget the pool's pages, so that the next reads come from the device."""
    os.sync()
    for file in pool.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
