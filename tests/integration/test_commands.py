"""Commands that read or measure a pool, on real pools, without an engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from tests.pattern import geometry
from tutti_mooncake import ConfigError, LocalStore, StoreConfig
from tutti_mooncake.block_hashes import block_hashes
from tutti_mooncake.config import EngineConfig, read_settings
from tutti_mooncake.schedule import LOAD_COST, LoadCost

SHAPE = geometry(hash_seed="vllm-none-hash")
TOKENS = list(range(30))


def tutti(*arguments: str, given: str = "") -> tuple[int, str, str]:
    """Exit status, output and errors."""
    command = [sys.executable, "-m", "tutti_mooncake.cli", *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def device(tmp_path: Path) -> str:
    """A pool that holds the first 3 of 7 blocks of TOKENS, of which the third was dropped."""
    device = str(tmp_path / "nvme0")
    with LocalStore.open(StoreConfig(devices=[device], capacity="8MiB"), SHAPE) as store:
        store.register([torch.zeros(8, SHAPE.object_bytes, dtype=torch.uint8) for _ in range(SHAPE.objects_per_block)])
        keys = block_hashes(TOKENS, SHAPE.block_tokens, "sha256_cbor", "vllm-none-hash")
        store.store(keys[:3], range(3)).wait().raise_for_status()
        assert store.drop(keys[2:3]) == 1
    return device


def test_explain_says_block_by_block_why(device: str, tmp_path: Path) -> None:
    status, said, _ = tutti("explain", "--devices", device, "--tokens", "-", "--json", given=json.dumps(TOKENS))
    found = json.loads(said)
    assert status == 1 and found["resident_blocks"] == 2 and found["tokens_in_no_full_block"] == 2
    states = [block["state"].split(",")[0] for block in found["blocks"]]
    assert states == ["resident"] * 2 + ["dropped on request"] + ["not stored"] * 4
    status, said, _ = tutti("explain", "--devices", device, "--tokens", "-", given=json.dumps(TOKENS[:8]))
    assert status == 0 and "0 to 1" in said and "resident" in said
    other, _, _ = tutti("explain", "--devices", device, "--tokens", "-", "--cache-salt", "x", given=json.dumps(TOKENS[:8]))
    assert other == 1, "another salt has other keys"


@pytest.mark.parametrize(
    ("arguments", "given", "message"),
    [
        ((), "", "give one of"),
        (("--tokens", "-", "--request", "1"), "", "give one of"),
        (("--tokens", "-"), "[1, -2]", "JSON array of token ids"),
        (("--tokens", "-"), "no json", "JSON array of token ids"),
        (("a text",), "", "--tokenizer"),
        (("--request", "chatcmpl-1"), "", "no request 'chatcmpl-1' among the last 0"),
    ],
)
def test_explain_says_what_is_wrong_with_its_arguments(device: str, arguments: tuple[str, ...], given: str, message: str) -> None:
    status, _, said = tutti("explain", "--devices", device, *arguments, given=given)
    assert status == 1 and message in said


def test_calibrate_measures_remembers_and_leaves_no_block(device: str) -> None:
    status, said, _ = tutti("calibrate", "--devices", device, "--repeats", "2", "--json")
    found = json.loads(said)
    assert status == 0 and found["load_fixed_ms"] + found["load_ms_per_block"] > 0 and "worth_from_blocks" not in found
    with LocalStore.open(StoreConfig(devices=[device]), SHAPE) as store:
        assert store.stats()["resident_blocks"] == 2
        cost = LoadCost.from_dict(store.memory[LOAD_COST])
        assert cost.load.known and not cost.step.known
        for tokens in range(8, 800, 8):  # as an engine would measure it: 10 ms, and 1 ms per token
            cost.step.observe(tokens, 0.01 + 0.001 * tokens)
        store.memory[LOAD_COST] = cost.as_dict()
    _, said, _ = tutti("calibrate", "--devices", device, "--json")
    found = json.loads(said)
    assert found["compute_ms_per_block"] == pytest.approx(SHAPE.block_tokens)
    assert found["worth_from_blocks"] == int(found["load_fixed_ms"] / (SHAPE.block_tokens - found["load_ms_per_block"])) + 1


def test_config_shows_the_connectors_settings_too(device: str) -> None:
    status, said, _ = tutti("config", "--devices", device, "--set", "load=layerwise", "--json")
    assert status == 0
    found = json.loads(said)
    assert found["config"]["load"] == "layerwise" and found["sources"]["load"] == "--set"
    assert found["config"]["breaker_failures"] == 3 and found["sources"]["breaker_failures"] == "default"
    status, _, said = tutti("config", "--devices", device, "--set", "load=layer")
    assert status == 1 and "asynchronous" in said


def test_read_only_store_forgets_what_its_owner_has_replaced(device: str) -> None:
    """A replica that serves an older view of the pool: what fails its check is a miss from then on, and nothing is written."""
    keys = block_hashes(TOKENS, SHAPE.block_tokens, "sha256_cbor", "vllm-none-hash")
    with LocalStore.open(StoreConfig(devices=[device], read_only=True), SHAPE, create=False) as replica:
        replica.register([torch.zeros(8, SHAPE.object_bytes, dtype=torch.uint8) for _ in range(SHAPE.objects_per_block)])
        assert replica.lookup(keys) == 2
        with LocalStore.open(StoreConfig(devices=[device]), SHAPE) as owner:
            owner.clear()
        result = replica.retrieve(keys[:2], [0, 1]).wait(10)
        assert result.ok_blocks == 0
        assert replica.lookup(keys) == 0
    with LocalStore.open(StoreConfig(devices=[device]), SHAPE) as owner:
        assert owner.recovery.recovered_blocks == 0


def test_settings_of_the_connector_are_checked() -> None:
    store, engine, _ = read_settings({"devices": "/x", "load": "asynchronous"}, {"TUTTI_BREAKER_FAILURES": "7"})
    assert (store.devices, engine.load, engine.breaker_failures) == (("/x",), "asynchronous", 7)
    with pytest.raises(ConfigError, match="did you mean 'load_threshold'"):
        read_settings({"devices": "/x", "load_treshold": "none"}, {})
    for wrong in ({"load": "always"}, {"breaker_failures": 0}, {"breaker_wait_seconds": 0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            EngineConfig(**wrong)  # type: ignore[arg-type]


def test_explain_passes_over_what_is_no_pool(device: str) -> None:
    os.mkfifo(Path(device) / "pipe.pool")
    (Path(device) / "folder.pool").mkdir()
    (Path(device) / "junk.pool").write_bytes(b"junk" * 5000)
    status, said, _ = tutti("explain", "--devices", device, "--tokens", "-", "--json", given=json.dumps(TOKENS))
    assert status == 1 and json.loads(said)["resident_blocks"] == 2


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000, b"[true, false]", b"{}"])
def test_hostile_token_files_are_refused_in_a_sentence(device: str, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokens").write_bytes(content)
    status, _, said = tutti("explain", "--devices", device, "--tokens", str(tmp_path / "tokens"))
    assert status == 1 and "Traceback" not in said and said.startswith("tutti: ")


@pytest.mark.parametrize("setting", ["write_budget_bytes_per_day=1000"])
def test_calibrate_says_when_the_pool_takes_no_block(device: str, setting: str) -> None:
    status, _, said = tutti("calibrate", "--devices", device, "--set", setting)
    assert status == 1 and "write_budget_bytes_per_day" in said
    status, _, said = tutti("calibrate", "--devices", device, "--repeats", "1000000000")
    assert status == 1 and "1 to 1000" in said


class OddServer(BaseHTTPRequestHandler):
    """Answers each path with what a server shouldn't."""

    def do_GET(self) -> None:
        self._say(b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        usage = {"fine": b'{"usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}}', "null": b'{"usage": null}'}
        self._say(usage.get(prompt, b"[]"), short=prompt == "short")

    def _say(self, body: bytes, *, short: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) + 10 * short))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing."""


def test_warm_counts_what_went_well_whatever_the_others_did(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    lines = ['"fine"', '"null"', '"list"', '"short"', json.dumps({"prompt": "fine", "kv_transfer_params": None}), '"a\u2028b"']
    prompts.write_text("\n".join(lines))
    with ThreadingHTTPServer(("127.0.0.1", 0), OddServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        status, said, _ = tutti("warm", str(prompts), "--url", f"http://127.0.0.1:{server.server_address[1]}", "--json")
        server.shutdown()
    result = json.loads(said)
    assert (status, result["prompts"], result["failed"]) == (1, 6, 4), "a line ends at a line feed and nowhere else"
    assert [failure["line"] for failure in result["failures"]] == [2, 3, 4, 6]
    assert (result["prompt_tokens"], result["cached_tokens"]) == (6, 4)


@pytest.mark.parametrize(
    ("content", "message"), [(b"\xff", "UTF-8"), (b"", "no prompt"), (b"[true]", "line 1"), (b"[" * 100_000, "line 1"), (b"3", "line 1")]
)
def test_warm_says_what_is_wrong_with_its_file(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "prompts").write_bytes(content)
    status, _, said = tutti("warm", str(tmp_path / "prompts"), "--url", "http://127.0.0.1:9")
    assert status == 1 and message in said and "Traceback" not in said
