"""Time to the first token of a long prompt in a real vLLM: cold, from the engine's own memory, and from a tier below it.

One engine process per tier, all alive at once, so that turns can be taken in random order; each has its share of the accelerator's
memory. A turn empties the engine's prefix cache, overwrites its KV memory with zeros and asks again. What a tier doesn't bring is missing
in `kv_written`, the elements of KV memory that aren't zero afterwards over those after computing; what comes too late shows in
`logprob_difference`, of the first token from that of the engine's own hit (little, with dummy weights). `over_floor`: ours over the
engine's own hit plus the bytes at `--limit`, the slower of raw reads and the copy to the engine's memory (`scripts/bench gpu` and `local`
measure both).
`partial`: prompts of `--partial-total` tokens that begin with so many of the longest prompt's; the engine computes the rest.
`tutti-layerwise` is our tier with vLLM's synchronous scheduler, where it computes while later layers are on their way.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tutti_mooncake import _native
from tutti_mooncake.bench.report import Report, positive
from tutti_mooncake.bench.vllm_engines import Engines, engines
from tutti_mooncake.config import parse_bytes
from tutti_mooncake.demo.engine_client import EngineFailed, EngineProcess
from tutti_mooncake.demo.model import prepare_model

OURS = "tutti"
LAYERWISE = "tutti-layerwise"
TIERS = (OURS, LAYERWISE, "lmcache-disk", "lmcache-dram", "vllm-cpu")
HBM_TURNS = 5
SAMPLING = {"ignore_eos": True, "detokenize": False, "logprobs": 1}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 262144,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""A model of the shape of Llama 3 8B. Its weights are vLLM's dummy ones: how long things take doesn't depend on them."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--directory", default="/dev/shm", help="where pools are made (default: RAM-backed files)")
    parser.add_argument("--devices", type=positive, default=4, help="files to stripe over")
    parser.add_argument("--capacity", default="", help="of the pool and of each peer (default: twice all of --tokens)")
    parser.add_argument("--model", choices=("auto", "llama-8b", "smollm2"), default="auto", help="auto: llama-8b where there is a GPU")
    parser.add_argument("--tokens", default="", help="lengths of prompts, with commas between (default: 65536,98304; smollm2: 4096)")
    parser.add_argument("--partial", default="", help="lengths of stored prefixes of a longer prompt, with commas between (default: none)")
    parser.add_argument("--partial-total", type=positive, default=131072, metavar="TOKENS", help="length of those longer prompts")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--tiers", default=OURS, help=f"with commas between, of {', '.join(TIERS)}")
    parser.add_argument("--limit", type=float, default=0.0, metavar="GB/S", help="raw reads or the copy, whichever is slower")
    parser.add_argument("--cache", type=Path, metavar="DIR", default=Path(".cache/demo"), help="where smollm2 is, or is made")
    parser.add_argument("--seed", type=int, default=1)


def run(arguments: argparse.Namespace) -> Report:
    """Starts the engines and runs the rounds."""
    tiers = arguments.tiers.split(",")
    if OURS not in tiers or not set(tiers) <= set(TIERS):
        raise SystemExit(f"bench ttft: --tiers must be of {', '.join(TIERS)}, and {OURS} among them")
    with engines("ttft", arguments.directory) as side_by_side:  # killed at the end, as a peer may hang there; nothing of ours is kept
        return _Ttft(arguments, tiers, side_by_side).run()


@dataclass
class _Times:
    """Milliseconds until the first token."""

    cold: list[float] = field(default_factory=list)
    hbm: list[float] = field(default_factory=list)
    tier: list[float] = field(default_factory=list)
    bytes: int = 0
    """That a turn of our tier loads."""
    load: list[float] = field(default_factory=list)
    """That our tier takes to load them, of `tier`."""
    cached: list[float] = field(default_factory=list)
    """Tokens that the engine didn't compute in a turn, as it says itself: a tier that finds less isn't faster."""
    whole: int = 0
    """Elements of KV memory that aren't zero after computing the prompt."""
    written: list[float] = field(default_factory=list)
    """Over them, in each turn."""
    hit: float = 0.0
    """Logarithm of the probability of the first token, by the engine's own hit."""
    differences: list[float] = field(default_factory=list)
    """From it, in each turn."""


class _Ttft:
    def __init__(self, arguments: argparse.Namespace, tiers: list[str], side_by_side: Engines) -> None:
        self.arguments = arguments
        self.tiers = tiers
        self.root = side_by_side.root
        self.say = side_by_side.say
        self.engines = side_by_side.running
        self.llama = arguments.model == "llama-8b" or (arguments.model == "auto" and not _native.probe_cuda())
        lengths = arguments.tokens or ("65536,98304" if self.llama else "4096")
        self.lengths = sorted(int(length) for length in lengths.split(","))
        token_bytes = 32 * 2 * 8 * 128 * 2 if self.llama else 30 * 2 * 3 * 64 * 4
        self.partial = [int(length) for length in arguments.partial.split(",") if length]
        if self.partial and not max(self.partial) <= self.lengths[-1] < arguments.partial_total:
            raise SystemExit("bench ttft: --partial must be at most the longest of --tokens, which is shorter than --partial-total")
        self.longest = arguments.partial_total if self.partial else self.lengths[-1]
        self.capacity = parse_bytes(arguments.capacity or 2 * sum(self.lengths) * token_bytes + (1 << 28), "--capacity")
        self.chance = random.Random(arguments.seed)
        self.report = Report("ttft")

    def run(self) -> Report:
        """All lengths, then the report."""
        settings = self.settings()
        for tier in self.tiers:
            self.start(tier, settings)
        for tokens in self.lengths:
            times = {tier: _Times() for tier in self.engines}
            prompt = self.chance.choices(range(1000, 31000), k=tokens)
            for tier, of_tier in times.items():
                self.ask(tier, self.chance.choices(range(1000, 31000), k=256))  # the first prompt compiles
                self.empty(tier)
                of_tier.cold.append(_milliseconds(self.ask(tier, prompt)))
                of_tier.whole = self.engines[tier].call("kv_memory_written")
                for _ in range(HBM_TURNS):
                    answer = self.ask(tier, prompt)
                    of_tier.hbm.append(_milliseconds(answer))
                    of_tier.hit = answer["logprobs"][0]
            for round_ in range(self.arguments.rounds):
                for tier in self.chance.sample(list(self.engines), len(self.engines)):
                    self.turn(tier, prompt, times[tier])
                self.say(f"{tokens} tokens, round {round_ + 1} of {self.arguments.rounds}")
            self.add(tokens, times)
        for stored in sorted(self.partial, reverse=True):  # what a shorter one doesn't touch, its stores may evict
            self.add_partial(stored, prompt)  # the longest
        return self.report

    def add_partial(self, stored: int, prompt: list[int]) -> None:
        """Rows of prompts that begin with `stored` tokens of `prompt`."""
        times = {tier: _Times() for tier in self.engines}
        for _ in range(self.arguments.rounds):
            rest = self.chance.choices(range(1000, 31000), k=self.arguments.partial_total - stored)
            for tier in self.chance.sample(list(self.engines), len(self.engines)):
                self.turn(tier, prompt[:stored] + rest, times[tier])
        self.say(f"{stored} of {self.arguments.partial_total} tokens stored")
        for tier, of_tier in times.items():
            prefix = _prefix(tier)
            self.report.add(f"{prefix}partial_ms_{stored // 1024}k", of_tier.tier, "ms")
            self.report.add(f"{prefix}partial_cached_tokens_{stored // 1024}k", of_tier.cached, "tokens")
            self.add_ratio("partial_vs", f"{stored // 1024}k", tier, times, "<= 1.00" if tier == "lmcache-dram" else "")

    def add_ratio(self, name: str, length: str, tier: str, times: dict[str, _Times], goal: str = "") -> None:
        """Ours over a peer's, turn by turn."""
        if tier != OURS:
            ratios = [ours / theirs for ours, theirs in zip(times[OURS].tier, times[tier].tier, strict=True)]
            self.report.add(f"{name}_{_prefix(tier)}{length}", ratios, "ratio", goal)

    def settings(self) -> dict[str, Any]:
        """What all engines have in common."""
        if not self.llama:
            model = prepare_model(self.arguments.cache.resolve(), self.say)
            return {"model": str(model), "max_model_len": self.longest + 256, "max_num_batched_tokens": 1024}
        folder = self.root / "llama-8b"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA))
        return {
            "model": str(folder),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_model_len": self.longest + 256,
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.88 / len(self.tiers),
        }

    def start(self, tier: str, settings: dict[str, Any]) -> None:
        """One engine; a peer that doesn't start is left out and noted."""
        self.say(f"starting vLLM: {tier}")
        folder = self.root / tier
        devices = [str(folder / str(i)) for i in range(self.arguments.devices)]
        for device in devices:
            os.makedirs(device)
        environment = {"PYTHONHASHSEED": "0"}
        if tier == LAYERWISE:
            settings = {**settings, "async_scheduling": False}
        elif tier != OURS:
            connector, theirs = _peer(tier, folder, self.capacity)
            settings = {**settings, "kv_transfer_config": connector}
            environment |= theirs
        try:
            self.engines[tier] = EngineProcess(
                settings, devices, self.root / f"{tier}.log", str(self.capacity), environment, store={"prewrite": True}
            )
        except EngineFailed as error:
            if tier in (OURS, LAYERWISE):
                raise
            self.report.notes.append(f"{tier} failed: {str(error).strip().splitlines()[-1]}")

    def ask(self, tier: str, prompt: list[int]) -> dict[str, Any]:
        """The engine's answer, of one token."""
        (answer,) = self.engines[tier].call("generate", prompts=[prompt], max_tokens=1, sampling=SAMPLING)
        return dict(answer)

    def turn(self, tier: str, prompt: list[int], times: _Times) -> None:
        """Asks again with the engine's own cache empty."""
        self.empty(tier)
        bytes_before, seconds_before = self.loaded(tier)
        answer = self.ask(tier, prompt)
        bytes_after, seconds_after = self.loaded(tier)
        times.tier.append(_milliseconds(answer))
        times.cached.append(float(answer["cached_tokens"]))
        times.differences.append(abs(answer["logprobs"][0] - times.hit))
        if times.whole:
            times.written.append(self.engines[tier].call("kv_memory_written") / times.whole)
        if tier in (OURS, LAYERWISE):
            times.load.append(1e3 * (seconds_after - seconds_before))
            times.bytes = bytes_after - bytes_before
            if not times.bytes:
                raise SystemExit(f"bench ttft: nothing was loaded: {self.engines[tier].call('report')['counters']}")

    def empty(self, tier: str) -> None:
        """Empties the engine's prefix cache, and its KV memory."""
        if not self.engines[tier].call("reset_prefix_cache"):
            raise SystemExit(f"bench ttft: {tier} still holds blocks, so that its prefix cache can't be emptied")
        self.engines[tier].call("overwrite_kv_memory")

    def loaded(self, tier: str) -> tuple[int, float]:
        """Bytes that a tier of ours has loaded so far, and how many seconds that took."""
        if tier not in (OURS, LAYERWISE):
            return 0, 0.0
        counters = self.engines[tier].call("report")["counters"]
        return int(counters["bytes_loaded"]), float(counters["load_seconds"])

    def add(self, tokens: int, times: dict[str, _Times]) -> None:
        """Rows of one length."""
        name = f"{tokens // 1024}k"
        for tier, of_tier in times.items():
            prefix = _prefix(tier)
            self.report.add(f"{prefix}ttft_ms_{name}", of_tier.tier, "ms")
            self.report.add(f"{prefix}cached_tokens_{name}", of_tier.cached, "tokens")
            self.report.add(f"{prefix}cold_ms_{name}", of_tier.cold, "ms")
            self.report.add(f"{prefix}hbm_ms_{name}", of_tier.hbm, "ms")
            self.report.add(f"{prefix}logprob_difference_{name}", of_tier.differences, "nats")
            self.report.add(f"{prefix}kv_written_{name}", of_tier.written, "ratio")
            self.add_ratio("vs", name, tier, times)
            if of_tier.load:
                self.report.add(f"{prefix}load_ms_{name}", of_tier.load, "ms")
                self.report.add(f"{prefix}load_gb_per_s_{name}", [of_tier.bytes / (1e6 * load) for load in of_tier.load], "GB/s")
            if of_tier.load and self.arguments.limit:
                floor = statistics.median(of_tier.hbm) + of_tier.bytes / (1e6 * self.arguments.limit)
                self.report.add(f"{prefix}over_floor_{name}", [time / floor for time in of_tier.tier], "ratio", "<= 1.10")
        kind = "llama-8b's shape, dummy weights" if self.llama else "smollm2, float32"
        self.report.notes.append(
            f"{tokens} tokens of {kind}; {len(self.engines)} engines side by side, pool on {self.arguments.devices} files in "
            f"{'memory' if str(self.root).startswith('/dev/shm') else self.arguments.directory}"
        )


def _milliseconds(answer: dict[str, Any]) -> float:
    """Until the first token."""
    return 1e3 * float(answer["ttft_seconds"])


def _prefix(tier: str) -> str:
    """Of the names of a tier's figures."""
    return "" if tier == OURS else f"{tier.replace('-', '_')}_"


def _peer(tier: str, folder: Path, capacity: int) -> tuple[dict[str, Any], dict[str, str]]:
    """A peer's `kv_transfer_config`, and what it takes from the environment."""
    if tier == "vllm-cpu":
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": capacity},
        }, {}
    gigabytes = f"{capacity / 1024**3:.1f}"
    environment = {
        "LMCACHE_CHUNK_SIZE": "256",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": gigabytes,
        "LMCACHE_LOCAL_CPU": str(tier == "lmcache-dram"),
    }
    if tier == "lmcache-disk":
        environment |= {"LMCACHE_LOCAL_DISK": f"file://{folder}/", "LMCACHE_MAX_LOCAL_DISK_SIZE": gigabytes}
    return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, environment
