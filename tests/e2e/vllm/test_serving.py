"""vLLM's own server as README starts it, its core and its worker in processes of their own, and the commands that talk to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.vllm.checks import make_prompt
from tests.e2e.vllm.conftest import BLOCK_TOKENS, CAPACITY
from tests.e2e.vllm.test_observability import samples, tutti
from tutti_mooncake import LocalStore, StoreConfig
from tutti_mooncake.block_hashes import block_hashes
from tutti_mooncake.demo.engine_client import ENVIRONMENT
from tutti_mooncake.store import read_geometry

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

PROMPTS = [make_prompt(500 + i, 3 * BLOCK_TOKENS + 11) for i in range(3)]


@pytest.fixture(scope="module")
def url(tiny_model: Path, pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose admission stores only what is offered a second time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    transfer = {
        "kv_connector": "TuttiConnector",
        "kv_connector_module_path": "tutti_mooncake.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"devices": [str(pool)], "capacity": CAPACITY, "admission": "second_touch"},
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--block-size", str(BLOCK_TOKENS), "--max-model-len", "2048", "--dtype", "float32"]
    command += ["--enforce-eager", "--kv-transfer-config", json.dumps(transfer)]
    environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = tmp_path_factory.mktemp("server") / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        while not answers(address + "/health"):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-4000:]
        yield address
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        time.sleep(0.2)
        return False


def ask(url: str, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, **more}).encode()
    with urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def stored_blocks(pool: Path, prompt: list[int]) -> int:
    """Leading blocks of a prompt that the pool holds, read beside the server."""
    config = StoreConfig(devices=[str(pool)], read_only=True)
    geometry = read_geometry(config)
    keys = block_hashes(prompt, geometry.block_tokens, geometry.hash_algorithm, geometry.hash_seed)
    with LocalStore.open(config, geometry, create=False) as store:
        return store.lookup(keys)


def test_warm_stores_prompts_through_a_server_whatever_the_admission(url: str, pool: Path, tmp_path: Path) -> None:
    model = json.loads(urllib.request.urlopen(url + "/v1/models").read())["data"][0]["id"]
    ask(url, PROMPTS[0], model=model)
    prompts = tmp_path / "prompts"
    prompts.write_text(f"{json.dumps(PROMPTS[1])}\n\n{json.dumps({'prompt': PROMPTS[2]})}\nA prompt that is text.\n")
    status, said = tutti("warm", str(prompts), "--url", url, "--json")
    result = json.loads(said)
    assert (status, result["prompts"], result["failed"]) == (0, 3, 0)
    assert result["prompt_tokens"] >= len(PROMPTS[1]) + len(PROMPTS[2])
    deadline = time.monotonic() + 20
    while stored_blocks(pool, PROMPTS[1]) < 3 or stored_blocks(pool, PROMPTS[2]) < 3:
        assert time.monotonic() < deadline
    assert stored_blocks(pool, PROMPTS[0]) == 0, "what was offered once has been stored"
    refused = ask(url, make_prompt(510, 2 * BLOCK_TOKENS + 3), model=model, kv_transfer_params={"tutti_store": False, "tutti_admit": True})
    assert refused["choices"][0]["finish_reason"] == "length"
    found = samples(urllib.request.urlopen(url + "/metrics").read().decode())
    assert found["tutti_store_blocks_total stored"] == 6 == found["tutti_resident_blocks"]
    assert found["tutti_store_blocks_total refused"] == 3
    assert found["tutti_requests_total"] == 5


def test_warm_says_which_lines_failed_and_who_does_not_answer(url: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text(f"{json.dumps(make_prompt(520, 40))}\n{json.dumps(make_prompt(521, 4000))}\n")
    status, said = tutti("warm", str(prompts), "--url", url, "--json")
    result = json.loads(said[: said.rindex("}") + 1])
    assert (status, result["failed"], result["failures"][0]["line"]) == (1, 1, 2)
    assert "HTTP 400" in result["failures"][0]["error"]
    status, said = tutti("warm", str(prompts), "--url", "http://127.0.0.1:9")
    assert status == 1 and "doesn't answer" in said and "--url" in said
    prompts.write_text('[1, 2]\n{"neither": 1}\n')
    status, said = tutti("warm", str(prompts), "--url", url)
    assert status == 1 and "line 2" in said
