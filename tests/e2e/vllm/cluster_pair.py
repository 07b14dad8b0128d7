"""Two real engines on pools of their own, a real etcd and Mooncake's Transfer Engine, and what may happen to them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.vllm import faulty_engine
from tests.e2e.vllm.checks import assert_same_answer, make_prompt
from tests.e2e.vllm.conftest import BLOCK_TOKENS, CAPACITY
from tests.e2e.vllm.test_restart import ask, counters, growth
from tests.etcd_server import EtcdServer
from tests.waiting import wait_for
from tutti_mooncake.demo.engine_client import EngineProcess

BLOCKS = 8
PROMPTS = [make_prompt(700 + i, BLOCKS * BLOCK_TOKENS + 20) for i in range(12)]
LONGEST_SECONDS = 20.0
"""Of an answer, whatever happens: the deadline of a fetch, and computing on a slow machine."""


class Engine:
    """One node: an engine with a pool."""

    def __init__(self, root: Path, name: str, model: Path, etcd: str, executor: str) -> None:
        self.root, self.name, self.model, self.etcd, self.executor = root, name, model, etcd, executor
        self.start()

    def start(self) -> None:
        self.process = EngineProcess(
            {
                "model": str(self.model),
                "block_size": BLOCK_TOKENS,
                "max_model_len": 4096,
                "max_num_batched_tokens": 512,
                "distributed_executor_backend": self.executor,
            },
            [str(self.root / self.name)],
            self.root / f"{self.name}.log",
            CAPACITY,
            {"OMP_NUM_THREADS": "1"},
            store={
                "etcd": self.etcd,
                "node_name": self.name,
                "etcd_timeout_seconds": 1,
                "node_ttl_seconds": 2,
                "publish_seconds": 0.1,
                "fetch_deadline_seconds": 5,
                "load_threshold": "none",
            },
            connector=faulty_engine.CONNECTOR,
            server=faulty_engine.MODULE,
        )

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        return ask(self.process, prompt)

    def computes(self, prompt: list[int]) -> dict[str, Any]:
        """Asks, and returns when what was computed can be found by others."""
        answer = self.ask(prompt)
        self.process.call("drain")
        return answer

    def again(self, prompt: list[int], cold: dict[str, Any], what: str) -> dict[str, int]:
        """Asks with vLLM's own cache empty, compares the answer, and tells what grew."""
        assert self.process.call("reset_prefix_cache")
        before = counters(self.process)
        assert_same_answer(self.ask(prompt), cold, what)
        self.process.call("drain")
        return growth(before, counters(self.process))

    def cluster(self) -> dict[str, Any]:
        return dict(self.process.call("report")["cluster"])


@dataclass
class Pair:
    """Two nodes and etcd."""

    a: Engine
    b: Engine
    etcd: EtcdServer

    @classmethod
    def start(cls, root: Path, model: Path) -> Pair:
        """Under `root`."""
        etcd = EtcdServer(root / "etcd").start()
        b = Engine(root, "b", model, etcd.endpoint, "mp")  # its worker is a process of its own
        return cls(Engine(root, "a", model, etcd.endpoint, "uni"), b, etcd)

    def kill(self) -> None:
        self.a.process.kill()
        self.b.process.kill()
        self.etcd.kill()

    def b_sees(self, prompt: list[int]) -> None:
        wait_for(lambda: self.b.process.call("held_elsewhere", tokens=prompt) == BLOCKS)


KINDS = ("kill", "pause", "etcd paused", "etcd wiped", "disk lies")


def disturb(pair: Pair, kind: str) -> Callable[[], None]:
    """Does it to the node `a` or to etcd; what is returned ends it, with everything running again."""
    if kind == "kill":
        pair.a.process.kill()
        return pair.a.start
    if kind == "pause":
        pair.a.process.pause()
        return pair.a.process.resume
    if kind == "etcd paused":
        pair.etcd.pause()
        return pair.etcd.resume
    if kind == "etcd wiped":
        pair.etcd.wipe()
        return lambda: pair.etcd.start() and None
    pair.a.process.call("add_fault", write=False, kind="corrupt", every=3)
    return lambda: pair.a.process.call("clear_faults") and None


def disturbed_round(pair: Pair, cold: list[dict[str, Any]], seed: int, kind: str = "") -> dict[str, int]:
    """`b`, which has nothing of a prompt that `a` has, is asked; something happens at a random moment. `cold`: answers to `PROMPTS`.

    The answer is compared, with its time; what grew at `b` is returned. Raises AssertionError with the seed.
    """
    rng = random.Random(seed)
    kind = kind or rng.choice(KINDS)
    prompt = rng.randrange(len(cold))
    pair.b.process.call("drain")
    pair.b.process.call("drop_blocks", tokens=PROMPTS[prompt])
    end: list[Callable[[], None]] = []
    thread = threading.Timer(rng.choice((0.0, rng.uniform(0, 0.5))), lambda: end.append(disturb(pair, kind)))
    thread.start()
    begin = time.monotonic()
    try:
        grown = pair.b.again(PROMPTS[prompt], cold[prompt], f"seed {seed}: {kind}")
        seconds = time.monotonic() - begin
    finally:
        thread.join()
        for restore in end:
            restore()
    assert seconds < LONGEST_SECONDS, f"seed {seed}: {kind}: {seconds:.1f} s"
    report = pair.b.process.call("report")
    assert (report["pins_held"], report["stats"]["pins"], report["steps_under_way"]) == (0, 0, 0), f"seed {seed}: {kind}: {report}"
    return grown
