"""What an engine tells of the store: metrics, KV events, and explanations that another process reads from the pool."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.e2e.vllm.checks import make_prompt
from tests.e2e.vllm.conftest import BLOCK_TOKENS, CAPACITY, StartEngine
from tests.e2e.vllm.test_restart import block_hashes as vllm_block_hashes
from tutti_mooncake import LocalStore, StoreConfig
from tutti_mooncake.block_hashes import block_hashes
from tutti_mooncake.connectors.vllm.namespace import hash_seed
from tutti_mooncake.demo.engine_client import EngineProcess
from tutti_mooncake.metrics import ENGINE_METRICS
from tutti_mooncake.store import read_geometry

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PROMPT = make_prompt(700, 5 * BLOCK_TOKENS + 17)
OTHER = make_prompt(701, 2 * BLOCK_TOKENS + 5)
ELSEWHERE = make_prompt(799, 3 * BLOCK_TOKENS)
MIXED = PROMPT[: 4 * BLOCK_TOKENS] + OTHER


def external(prompt: list[int]) -> list[Any]:
    """The hashes of a prompt's full blocks as vLLM publishes them."""
    return [maybe_convert_block_hash(key) for key in vllm_block_hashes(prompt)]


def tutti(*arguments: str) -> tuple[int, str]:
    """Exit status and output of the command."""
    done = subprocess.run([sys.executable, "-m", "tutti_mooncake.cli", *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


def samples(text: str) -> dict[str, float]:
    """Our metrics by name and own label."""
    found = {}
    for line in text.splitlines():
        if line.startswith("tutti_") and "_created" not in line:
            name, labels, value = re.fullmatch(r"(\w+)\{(.*)\} (\S+)", line).groups()  # type: ignore[union-attr]
            own = [value for key, value in re.findall(r'(\w+)="([^"]*)"', labels) if key in ("tier", "reason", "result", "of")]
            found[" ".join([name, *own])] = float(value)
    return found


def read_events(socket: zmq.Socket[bytes]) -> tuple[list[int], list[Any]]:
    """Sequence numbers, and the events of medium STORAGE."""
    numbers, events = [], []
    while socket.poll(500):
        _, number, payload = socket.recv_multipart()
        numbers.append(int.from_bytes(number, "big"))
        events += msgspec.msgpack.decode(payload, type=KVEventBatch).events
    return numbers, [event for event in events if getattr(event, "medium", "") == "STORAGE"]


def test_engine_tells_where_its_tokens_came_from(start_engine: StartEngine, pool: Path, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    events_config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": "kv"}
    engine = start_engine(disable_log_stats=False, kv_events_config=events_config)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(endpoint)
        socket.setsockopt_string(zmq.SUBSCRIBE, "")
        check(engine, socket, pool, tmp_path)
    engine.stop()


def check(engine: EngineProcess, socket: zmq.Socket[bytes], pool: Path, tmp_path: Path) -> None:
    for attempt in range(100):  # ZeroMQ drops what is published before the subscription has arrived
        engine.call("generate", prompts=[make_prompt(7000 + attempt, BLOCK_TOKENS + 1)], max_tokens=1)
        engine.call("drain")
        if socket.poll(100):
            break
    read_events(socket)
    assert engine.call("reset_connector")
    engine.call("generate", prompts=[make_prompt(703, 20)], max_tokens=1)
    engine.call("drain")
    read_events(socket)
    before = samples(engine.call("metrics"))
    assert engine.call("report")["stats"]["resident_blocks"] == 0
    engine.call("generate", prompts=[PROMPT, OTHER], max_tokens=2)
    assert engine.call("reset_prefix_cache")
    engine.call("generate", prompts=[PROMPT], max_tokens=2)
    engine.call("generate", prompts=[MIXED], max_tokens=2)
    engine.call("drain")
    after = samples(engine.call("metrics"))
    check_metrics({name: value - (before.get(name, 0) if "_total" in name else 0) for name, value in after.items()})
    check_events(socket)
    check_explanations(pool, tmp_path, str(engine.call("last_request_id")))
    check_removals(engine, socket, pool, tmp_path)


def check_metrics(found: dict[str, float]) -> None:
    assert {name.split(" ")[0] for name in found} == {metric.name for metric in ENGINE_METRICS}
    requested = 2 * len(PROMPT) + len(OTHER) + 4 * BLOCK_TOKENS + len(OTHER)
    assert found["tutti_requests_total"] == 4
    assert found["tutti_requested_tokens_total"] == requested
    assert found["tutti_hit_tokens_total ssd"] == 5 * BLOCK_TOKENS
    assert found["tutti_hit_tokens_total hbm"] == 4 * BLOCK_TOKENS
    assert found["tutti_miss_tokens_total"] == requested - 9 * BLOCK_TOKENS
    blocks = found["tutti_hit_blocks_total ssd"] + found["tutti_hit_blocks_total hbm"] + found["tutti_miss_blocks_total"]
    assert blocks == found["tutti_requested_blocks_total"] == 5 + 2 + 5 + 6
    assert found["tutti_loads_total ok"] == 1 and found["tutti_loads_total failed"] == 0
    assert found["tutti_store_blocks_total stored"] == found["tutti_resident_blocks"] == 5 + 2 + 2
    assert found["tutti_load_bytes_total"] > 0 and found["tutti_load_seconds_total"] > 0
    assert found["tutti_breaker_state loads"] == found["tutti_breaker_state stores"] == found["tutti_pins"] == 0


def check_events(socket: zmq.Socket[bytes]) -> None:
    numbers, events = read_events(socket)
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "a sequence number is missing"
    assert events and all(isinstance(event, BlockStored) for event in events)
    announced = {key for event in events for key in event.block_hashes}
    assert announced == {*external(PROMPT), *external(OTHER), *external(MIXED)}
    keys = external(PROMPT)
    for event in events:
        assert event.block_size == BLOCK_TOKENS and len(event.token_ids) == BLOCK_TOKENS * len(event.block_hashes)
        if event.block_hashes[0] in keys:
            begin = keys.index(event.block_hashes[0])
            assert event.parent_block_hash == (keys[begin - 1] if begin else None)
            assert event.token_ids == PROMPT[begin * BLOCK_TOKENS : (begin + len(event.block_hashes)) * BLOCK_TOKENS]


def check_explanations(pool: Path, tmp_path: Path, last_request: str) -> None:
    """The engine still runs; what it has settled is on the pool within seconds."""
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(PROMPT + make_prompt(702, 2 * BLOCK_TOKENS)))
    status, said = tutti("explain", "--devices", str(pool), "--tokens", str(tokens), "--json")
    blocks = json.loads(said)["blocks"]
    assert status == 1
    assert [block["state"] for block in blocks] == ["resident"] * 5 + ["not stored, as far as is known"] * 2
    deadline = time.monotonic() + 20
    while True:
        status, said = tutti("explain", "--devices", str(pool), "--request", str(int(last_request) - 1), "--json")
        if status == 0:
            break
        assert time.monotonic() < deadline, said
    note = json.loads(said)[-1]
    assert (note["full"], note["hbm"], note["found"], note["loaded"], note["failed"]) == (5, 0, 5, 5, 0)


def check_removals(engine: EngineProcess, socket: zmq.Socket[bytes], pool: Path, tmp_path: Path) -> None:
    """After `reset_cache`, as after an update of weights: events say so, and explanations why."""
    engine.call("reset_connector")
    engine.call("generate", prompts=[make_prompt(703, 20)], max_tokens=1)
    engine.call("drain")
    _, events = read_events(socket)
    removed = [key for event in events if isinstance(event, BlockRemoved) for key in event.block_hashes]
    assert sorted(removed) == sorted({*external(PROMPT), *external(OTHER), *external(MIXED)})
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(PROMPT))
    deadline = time.monotonic() + 20
    while True:
        _, said = tutti("explain", "--devices", str(pool), "--tokens", str(tokens), "--json")
        states = {block["state"].split(",")[0] for block in json.loads(said)["blocks"]}
        if states == {"cleared on request"}:
            return
        assert time.monotonic() < deadline, said


def test_hashes_made_without_vllm_are_vllms() -> None:
    seed = hash_seed("sha256")
    assert block_hashes(PROMPT, BLOCK_TOKENS, "sha256", seed) == vllm_block_hashes(PROMPT)
    assert block_hashes(PROMPT[:10], BLOCK_TOKENS, "sha256", seed) == []


def test_explain_names_the_pool_of_another_namespace(pool: Path, tmp_path: Path) -> None:
    mine = read_geometry(StoreConfig(devices=[str(pool)]))
    with LocalStore.open(StoreConfig(devices=[str(pool)], pool="theirs", capacity=CAPACITY), replace(mine, model="theirs")) as store:
        store.register([torch.zeros(8, mine.object_bytes, dtype=torch.uint8) for _ in range(mine.objects_per_block)])
        store.store(vllm_block_hashes(ELSEWHERE)[:2], [0, 1]).wait().raise_for_status()
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(ELSEWHERE))
    _, said = tutti("explain", "--devices", str(pool), "--tokens", str(tokens), "--json")
    states = [block["state"] for block in json.loads(said)["blocks"]]
    assert states[:2] == [states[0]] * 2 and states[2] == "not stored, as far as is known"
    assert states[0].startswith("in another namespace: pool theirs (model: ") and "!= 'theirs'" in states[0]
