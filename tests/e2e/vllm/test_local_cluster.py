"""What `scripts/cluster` starts: two vLLM servers and etcd, asked over HTTP; one fetches what the other has computed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.vllm.checks import make_prompt
from tests.etcd_server import etcd_binary
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
pytest.importorskip("etcd3", reason="the module etcd3 is not installed (scripts/setup)")
pytest.importorskip("mooncake.engine", reason="Mooncake's Transfer Engine can't be loaded", exc_type=ImportError)
if not etcd_binary():
    pytest.skip("there is no etcd (scripts/setup)", allow_module_level=True)

BLOCK_TOKENS = 128  # vLLM's default on CPUs
PROMPT = make_prompt(800, 6 * BLOCK_TOKENS + 9)


def cluster(root: Path, *arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "tutti_mooncake.demo.local_cluster", "--root", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("local-cluster")
    status, said, error = cluster(directory, "up", "2", "--model", str(tiny_model), "--capacity", "64MiB")
    assert status == 0, said + error
    yield directory
    cluster(directory, "down")


def processes(root: Path) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in json.loads(cluster(root, "status", "--json")[1])}


def ask(address: str) -> str:
    body = json.dumps({"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as answer:
        return sum(float(value) for value in re.findall(rf"^{name}{{[^}}]*}} ([\d.e+]+)$", answer.read().decode(), re.MULTILINE))


def test_what_one_server_computed_the_other_fetches(root: Path) -> None:
    found = processes(root)
    first, second = found["node-1"]["address"], found["node-2"]["address"]
    cold = ask(first)
    at = ["--etcd", found["etcd"]["address"], "--json"]

    def replicas() -> list[str]:
        tokens = root / "tokens.json"
        tokens.write_text(json.dumps(PROMPT))
        command = [sys.executable, "-m", "tutti_mooncake.cli", "replicas", *at, "--devices", str(root / "node-1"), "--tokens", str(tokens)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
        return [one["node"] for one in json.loads(said)["replicas"] if one["blocks"] == 6]

    wait_for(lambda: replicas() == ["node-1"])
    assert ask(second) == cold
    assert metric(second, "tutti_cluster_nodes") == 2 and metric(second, "tutti_transport_info") == 1
    assert metric(second, "tutti_fetch_blocks_total") == 6 and metric(second, "tutti_fetches_total") == 1
    wait_for(lambda: replicas() == ["node-1", "node-2"])


def test_it_ends_what_it_started_and_nothing_else(root: Path) -> None:
    assert cluster(root, "up", "1")[0] == 1, "one runs already"
    found = processes(root)
    os.killpg(found["node-2"]["pid"], signal.SIGKILL)
    wait_for(lambda: not processes(root)["node-2"]["alive"])
    status, said, _ = cluster(root, "down")
    assert status == 0 and "2 processes ended" in said
    assert cluster(root, "status")[0] == 1 and cluster(root, "down")[1] == "[cluster] 0 processes ended\n"
