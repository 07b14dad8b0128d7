"""Models, KV cache types and requests of many kinds: each is answered cold and again from disk, and both answers are equal.

Between the two `reset_prefix_cache` empties vLLM's own cache, so what is found again was on disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.vllm.checks import assert_same_answer, make_prompt
from tests.e2e.vllm.conftest import StartEngine
from tests.e2e.vllm.random_models import (
    ADAPTER_RANK,
    IMAGE_TOKENS,
    LATENT_DIM,
    make_adapter,
    make_image,
    make_image_model,
    make_latent_model,
)
from tests.e2e.vllm.tiny_model import HEADS, make_tiny_model
from tutti_mooncake.demo.engine_client import EngineFailed, EngineProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

BLOCK_TOKENS = 32
EVERY_HIT = {"load_threshold": "none"}
"""The tiny models compute faster than any disk reads, so that a measured threshold would soon load nothing."""
ANSWER_TOKENS = 16
ROOM_BLOCKS = 17
"""One is vLLM's null block: two requests of 7 blocks fit, and what they say soon forces one out."""


@dataclass(frozen=True)
class Kind:
    """A tiny Llama, and how vLLM keeps its KV; `kept_as`: the type that the pool says; `load`: how it is loaded."""

    kv_heads: int
    block_tokens: int
    settings: dict[str, str]
    kept_as: str
    load: str


KINDS = {
    "all heads, float32, blocks of 32": Kind(HEADS, 32, {"dtype": "float32"}, "float32", "layerwise"),
    "grouped query, bfloat16, blocks of 64": Kind(HEADS // 4, 64, {"dtype": "bfloat16"}, "bfloat16", "asynchronous"),
    "multi-query, fp8, blocks of 32": Kind(1, 32, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, "fp8_e4m3", "layerwise"),
}


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """A pool per test: each has a model of its own."""
    return tmp_path / "pool"


def ask(engine: EngineProcess, prompt: list[int], max_tokens: int = ANSWER_TOKENS, **options: Any) -> dict[str, Any]:
    (answer,) = engine.call("generate", prompts=[prompt], max_tokens=max_tokens, logprobs=True, **options)
    return dict(answer)


def ask_and_count(engine: EngineProcess, prompt: list[int], **options: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """The answer, and by how much the counters have grown when all that it stored is durable."""
    before = engine.call("report")["counters"]
    answer = ask(engine, prompt, **options)
    engine.call("drain")
    after = engine.call("report")["counters"]
    return answer, {name: after[name] - before[name] for name in before}


def forget(engine: EngineProcess) -> None:
    """Leaves what is on disk as the only copy."""
    assert engine.call("reset_prefix_cache")


def check_prompt(engine: EngineProcess, prompt: list[int], blocks: int, what: str, **options: Any) -> dict[str, Any]:
    """Asks cold, and again with `blocks` from disk; returns the answer."""
    cold, grown = ask_and_count(engine, prompt, **options)
    assert (grown["hit_blocks"], grown["local_hit_blocks"]) == (0, 0), f"{what}: the prompt isn't new"
    forget(engine)
    from_disk, grown = ask_and_count(engine, prompt, **options)
    assert_same_answer(from_disk, cold, f"{what}, from disk")
    assert (grown["hit_blocks"], grown["blocks_loaded"], grown["local_hit_blocks"]) == (blocks, blocks, 0), f"{what}: {grown}"
    forget(engine)
    return cold


def check_lengths(engine: EngineProcess, block_tokens: int) -> None:
    """Whole blocks come from disk wherever the prompt ends; the last token is always computed."""
    lengths = {
        "ends inside a block": 9 * block_tokens + 11,
        "ends with a block": 4 * block_tokens,
        "ends with the first token of a block": 4 * block_tokens + 1,
        "is shorter than a block": block_tokens - 5,
    }
    said = set()
    for what, tokens in lengths.items():
        answer = check_prompt(engine, make_prompt(tokens, tokens), (tokens - 1) // block_tokens, f"a prompt that {what}")
        said.add(tuple(answer["token_ids"]))
    assert len(said) == len(lengths), "the model doesn't look at its prompt; comparing answers proves nothing"


def check_beside_local_hit(engine: EngineProcess, block_tokens: int) -> None:
    """vLLM has the first blocks of a prompt and the store gives those behind them; and the other way round, vLLM goes on with a part of
    what was loaded, which shows that each block is in its own place: attention over all of them doesn't see their order.
    """
    prompt = make_prompt(7, 8 * block_tokens + 3)
    part = prompt[: 3 * block_tokens + 5]
    whole = check_prompt(engine, prompt, 8, "a long prompt")
    computed, grown = ask_and_count(engine, part, sampling={"skip_reading_prefix_cache": True})
    assert grown["miss_blocks"] == 3
    forget(engine)

    _, grown = ask_and_count(engine, prompt)
    assert grown["blocks_loaded"] == 8
    answer, grown = ask_and_count(engine, part)
    assert_same_answer(answer, computed, "three of the eight blocks that vLLM got from disk")
    assert (grown["local_hit_blocks"], grown["blocks_loaded"]) == (3, 0)
    forget(engine)

    answer, grown = ask_and_count(engine, part)
    assert_same_answer(answer, computed, "three of the eight blocks on disk")
    assert grown["blocks_loaded"] == 3
    answer, grown = ask_and_count(engine, prompt)
    assert_same_answer(answer, whole, "three blocks from vLLM's own cache and five from disk")
    assert (grown["local_hit_blocks"], grown["hit_blocks"], grown["blocks_loaded"]) == (3, 5, 5)
    forget(engine)


def check_nothing_failed(engine: EngineProcess) -> dict[str, Any]:
    """Returns the engine's report."""
    engine.call("drain")
    report = dict(engine.call("report"))
    counters = report["counters"]
    assert counters["loads"] == counters["loads_ok"] > 0
    assert (counters["loads_failed"], counters["blocks_store_failed"], counters["store_errors"]) == (0, 0, 0)
    assert report["steps_under_way"] == 0
    assert (report["pins_held"], report["stats"]["pins"]) == (0, 0)
    return report


@pytest.mark.parametrize("name", KINDS)
def test_heads_types_and_block_sizes(start_engine: StartEngine, tmp_path: Path, name: str) -> None:
    """Each kind of attention head, KV type and block size gives the same answers from disk, and the pool says which it holds."""
    kind = KINDS[name]
    model = make_tiny_model(tmp_path / "model", kv_heads=kind.kv_heads)
    engine = start_engine(model=str(model), block_size=kind.block_tokens, store={**EVERY_HIT, "load": kind.load}, **kind.settings)
    check_lengths(engine, kind.block_tokens)
    check_beside_local_hit(engine, kind.block_tokens)
    report = check_nothing_failed(engine)
    assert report["counters"]["loads_layerwise"] == (report["counters"]["loads"] if kind.load == "layerwise" else 0)
    geometry = report["geometry"]
    assert (geometry["kv_heads"], geometry["block_tokens"], geometry["dtype"]) == (kind.kv_heads, kind.block_tokens, kind.kept_as)
    engine.stop()


def test_latent_attention(start_engine: StartEngine, tmp_path: Path) -> None:
    """Multi-head latent attention: one vector per token and layer, which is neither K nor V. vLLM keeps no prefix cache of its own for it
    on CPU, so that even what was just answered comes from disk.
    """
    model = make_latent_model(tmp_path / "model")
    # vLLM's compiled rotary embedding turns the wrong rows of the keys of latent attention on CPU: its own answers depend on the chunking.
    try:
        engine = start_engine(model=str(model), block_size=16, store=EVERY_HIT, compilation_config={"custom_ops": ["-rotary_embedding"]})
    except EngineFailed as failure:
        if "MLA is not supported on CPU" not in str(failure):
            raise
        pytest.skip("this vLLM has no latent attention on CPUs")
    check_lengths(engine, 16)
    prompt = make_prompt(8, 100)
    cold, _ = ask_and_count(engine, prompt)
    again, grown = ask_and_count(engine, prompt)
    assert_same_answer(again, cold, "with nothing forgotten")
    assert (grown["hit_blocks"], grown["local_hit_blocks"]) == (6, 0)
    geometry = check_nothing_failed(engine)["geometry"]
    assert (geometry["memory_layout"], geometry["kv_factor"], geometry["kv_heads"]) == ("latent", 1, 1)
    assert (geometry["head_dim"], geometry["object_bytes"]) == (LATENT_DIM, 16 * LATENT_DIM * 4)
    engine.stop()


def test_images(start_engine: StartEngine, tmp_path: Path) -> None:
    """Requests with equal text and different images share no block; with the same image they share all."""
    engine = start_engine(model=str(make_image_model(tmp_path / "model")), block_size=BLOCK_TOKENS, store=EVERY_HIT)
    text = make_prompt(20, 7 * BLOCK_TOKENS)
    images = [[str(make_image(tmp_path / f"{seed}.png", seed))] for seed in (1, 2)]
    answers = []
    for i, image in enumerate(images):
        answers.append(check_prompt(engine, text, (len(text) + IMAGE_TOKENS - 1) // BLOCK_TOKENS, f"image {i}", images=image))
    assert answers[0]["token_ids"] != answers[1]["token_ids"], "the model doesn't look at its image"
    first_again, grown = ask_and_count(engine, text, images=images[0])
    assert_same_answer(first_again, answers[0], "the first image, after the second")
    assert grown["hit_blocks"] == 7
    check_nothing_failed(engine)
    engine.stop()


def test_requests_of_many_kinds(start_engine: StartEngine, tmp_path: Path, tiny_model: Path) -> None:
    """Salts, adapters, log probabilities of the prompt and several samples, each beside plain requests for the same prompt."""
    engine = start_engine(model=str(tiny_model), block_size=BLOCK_TOKENS, store=EVERY_HIT, enable_lora=True, max_lora_rank=ADAPTER_RANK)
    check_salts(engine)
    check_adapter(engine, str(make_adapter(tmp_path / "adapter", 1)))
    check_prompt_logprobs(engine)
    check_samples(engine)
    check_nothing_failed(engine)
    engine.stop()


def check_salts(engine: EngineProcess) -> None:
    """Blocks are found under the salt that they were stored under, and under no other."""
    prompt = make_prompt(30, 5 * BLOCK_TOKENS + 9)
    answers = [check_prompt(engine, prompt, 5, f"salt {salt}", cache_salt=salt) for salt in ("one", "two", None)]
    for answer in answers[1:]:
        assert_same_answer(answer, answers[0], "the same prompt under another salt")
    again, grown = ask_and_count(engine, prompt, cache_salt="one")
    assert_same_answer(again, answers[0], "the first salt, after the others")
    assert (grown["hit_blocks"], grown["blocks_stored"]) == (5, 0)
    forget(engine)


def check_adapter(engine: EngineProcess, adapter: str) -> None:
    """Requests with an adapter load nothing and store nothing: neither what plain requests stored, nor for them, nor for each other."""
    prompt = make_prompt(40, 5 * BLOCK_TOKENS + 9)
    plain = check_prompt(engine, prompt, 5, "without an adapter")
    adapted = check_leaves_store_alone(engine, prompt, adapter)
    assert adapted["token_ids"] != plain["token_ids"], "the adapter changes nothing; comparing answers proves nothing"
    assert_same_answer(check_leaves_store_alone(engine, prompt, adapter), adapted, "with the adapter, again")
    from_disk, grown = ask_and_count(engine, prompt)
    assert_same_answer(from_disk, plain, "without the adapter, after it")
    assert grown["hit_blocks"] == 5
    forget(engine)
    new = make_prompt(41, 5 * BLOCK_TOKENS + 9)
    check_leaves_store_alone(engine, new, adapter)
    check_prompt(engine, new, 5, "without an adapter, after one")


def check_leaves_store_alone(engine: EngineProcess, prompt: list[int], adapter: str) -> dict[str, Any]:
    answer, grown = ask_and_count(engine, prompt, adapter=adapter)
    moved = ("loads", "blocks_loaded", "hit_blocks", "blocks_stored", "blocks_already_stored", "blocks_refused")
    assert {name: grown[name] for name in moved} == dict.fromkeys(moved, 0)
    assert grown["miss_blocks"] == 5
    forget(engine)
    return answer


def check_prompt_logprobs(engine: EngineProcess) -> None:
    """A request that must not read any cache, since it wants log probabilities of its prompt, loads nothing, but its blocks are stored."""
    prompt = make_prompt(50, 5 * BLOCK_TOKENS + 9)
    options = {"sampling": {"prompt_logprobs": 1}}
    cold, grown = ask_and_count(engine, prompt, **options)
    assert grown["blocks_stored"] >= 5
    forget(engine)
    again, grown = ask_and_count(engine, prompt, **options)
    assert_same_answer(again, cold, "computed again, though it is on disk")
    assert (grown["loads"], grown["hit_blocks"], grown["miss_blocks"], grown["blocks_stored"]) == (0, 0, 5, 0)
    forget(engine)
    from_disk, grown = ask_and_count(engine, prompt)
    assert_same_answer(from_disk, cold, "a plain request after them, from disk")
    assert grown["hit_blocks"] == 5
    forget(engine)


def check_samples(engine: EngineProcess) -> None:
    """Three samples of one prompt: each has the prompt's blocks from disk or from what another one has loaded."""
    prompt = make_prompt(60, 5 * BLOCK_TOKENS + 9)
    options = {"sampling": {"n": 3, "temperature": 1.0, "seed": 1}}
    cold, _ = ask_and_count(engine, prompt, **options)
    samples = [cold["token_ids"], *cold["more_samples"].values()]
    assert len({tuple(sample) for sample in samples}) == 3, "the samples are alike"
    forget(engine)
    from_disk, grown = ask_and_count(engine, prompt, **options)
    assert_same_answer(from_disk, cold, "the first of three samples")
    assert from_disk["more_samples"] == cold["more_samples"]
    assert (grown["requests"], grown["hit_blocks"] + grown["local_hit_blocks"], grown["miss_blocks"]) == (3, 15, 0)
    assert grown["hit_blocks"] >= 5
    forget(engine)


def test_priorities_and_short_chunks_when_memory_is_short(start_engine: StartEngine, tiny_model: Path) -> None:
    """Requests are computed in chunks of two blocks and preempted by priority; all answer as they do alone.

    The one that stays takes blocks of the one that is preempted, which gets them back from disk.
    """
    prompts = [make_prompt(70 + i, 6 * BLOCK_TOKENS + 20) for i in range(5)]
    priorities = [3, 0, 4, 1, 2]
    engine = start_engine(
        model=str(tiny_model),
        block_size=BLOCK_TOKENS,
        store=EVERY_HIT,
        scheduling_policy="priority",
        max_num_batched_tokens=2 * BLOCK_TOKENS,
        max_num_seqs=8,
        num_gpu_blocks_override=ROOM_BLOCKS,
        max_model_len=11 * BLOCK_TOKENS,
    )
    alone = [ask(engine, prompt, max_tokens=110) for prompt in prompts]
    forget(engine)
    assert engine.call("report")["counters"]["loads"] == 0
    answers = engine.call("generate", prompts=prompts, max_tokens=110, logprobs=True, priorities=priorities)
    for i, (answer, expected) in enumerate(zip(answers, alone, strict=True)):
        assert_same_answer(answer, expected, f"prompt {i} of priority {priorities[i]}")
    counters = check_nothing_failed(engine)["counters"]
    assert counters["preemptions"] > 0, "nothing was preempted: the test doesn't reach what it is for"
    assert counters["hit_blocks"] == 6 * len(prompts)
    assert counters["blocks_loaded"] > 6 * len(prompts), "nothing was loaded again after a preemption"
    engine.stop()
