"""Two real vLLM nodes and a real etcd: the second answers about a document that only the first one has read."""

from __future__ import annotations

import contextlib
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tutti_mooncake.demo.document import Document
from tutti_mooncake.demo.engine_client import EngineProcess
from tutti_mooncake.demo.etcd_process import EtcdProcess
from tutti_mooncake.demo.model import MODEL_NAME
from tutti_mooncake.demo.report import side_by_side
from tutti_mooncake.demo.run import Say, ask, prompt_of, start

NODES = ("node-a", "node-b")
SEEN_SECONDS = 30.0


@dataclass(frozen=True)
class ClusterOutcome:
    """What was measured. Times to first token are in seconds, from submission; answers hold token ids and text."""

    document: str
    question: str
    prompt_tokens: int
    cold: dict[str, Any]
    fetched: dict[str, Any]
    blocks_fetched: int
    bytes_fetched: int
    fetch_seconds: float
    transport: str

    @property
    def answers_equal(self) -> bool:
        """Both answers are the same tokens, and there are some."""
        return bool(self.cold["token_ids"]) and self.cold["token_ids"] == self.fetched["token_ids"]

    @property
    def fault(self) -> str:
        """What went wrong; empty when nothing did."""
        if not self.answers_equal:
            return "the answers differ"
        return "" if self.blocks_fetched else "nothing was fetched from the other node"

    def as_dict(self) -> dict[str, Any]:
        """The machine-readable result."""
        return {
            "cold_ttft_s": self.cold["ttft_seconds"],
            "fetched_ttft_s": self.fetched["ttft_seconds"],
            "tokens": self.prompt_tokens,
            "answers_equal": self.answers_equal,
            "blocks_fetched": self.blocks_fetched,
            "fetch_gb_per_s": self.bytes_fetched / self.fetch_seconds / 1e9 if self.fetch_seconds else 0.0,
            "transport": self.transport,
        }

    def render(self) -> str:
        """The outcome as people read it."""
        cold, fetched = self.cold["ttft_seconds"], self.fetched["ttft_seconds"]
        megabytes = self.bytes_fetched / 1e6
        return "\n".join(
            [
                "",
                f"{MODEL_NAME}, {self.prompt_tokens:,} tokens: {self.document}",
                "",
                f"{'':38}{'time to first token':>20}{'of cold':>10}",
                f"{NODES[0] + ': every token computed':38}{cold:>18.2f} s{1:>10.1%}",
                f"{NODES[1] + ': fetched from ' + NODES[0]:38}{fetched:>18.2f} s{fetched / cold:>10.1%}",
                "",
                f"Q: {self.question}",
                "",
                *side_by_side(f"{NODES[0]}, computed", self.cold["text"], f"{NODES[1]}, fetched", self.fetched["text"]),
                "",
                f"The answers are {'the same, token by token' if self.answers_equal else 'DIFFERENT'}.",
                f"Fetched: {self.blocks_fetched} blocks, {megabytes:,.0f} MB in {self.fetch_seconds:.2f} s by {self.transport}.",
            ]
        )


def run(model: Path, document: Document, cache: Path, say: Say) -> ClusterOutcome:
    """Runs the demonstration. `cache`: where pools and logs go; they are made anew."""
    root = cache / "cluster"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    with contextlib.ExitStack() as running:
        say("starting etcd")
        etcd = running.enter_context(EtcdProcess(root / "etcd")).start()
        settings = {"etcd": etcd.endpoint, "node_host": "127.0.0.1"}
        first, second = (
            running.enter_context(start(model, root / name, root / f"{name}.log", say, {**settings, "node_name": name})) for name in NODES
        )
        prompt = prompt_of(first, document)
        say(f"{NODES[0]}: asking about {document.name}: {len(prompt):,} tokens, nothing is cached")
        cold = ask(first, prompt, say)
        first.call("drain")
        blocks = _seen(second, prompt)
        say(f"{NODES[1]} sees {blocks} blocks of it on {NODES[0]}; asking {NODES[1]}")
        before = second.call("report")["counters"]
        fetched = ask(second, prompt, say)
        report = second.call("report")
        for engine in (second, first):
            engine.stop()
    grown = {name: report["counters"][name] - before[name] for name in ("blocks_fetched", "bytes_fetched", "fetch_seconds")}
    return ClusterOutcome(
        document=document.name,
        question=document.question,
        prompt_tokens=len(prompt),
        cold=cold,
        fetched=fetched,
        transport=report["cluster"]["transport"],
        **grown,
    )


def _seen(engine: EngineProcess, prompt: list[int]) -> int:
    """Blocks of the prompt that the engine knows of elsewhere, once there are some. Raises RuntimeError."""
    deadline = time.monotonic() + SEEN_SECONDS
    while not (blocks := int(engine.call("held_elsewhere", tokens=prompt))):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{NODES[1]} didn't hear of {NODES[0]}'s blocks within {SEEN_SECONDS:.0f} s: {engine.call('report')['cluster']}"
            )
        time.sleep(0.1)
    return blocks
