"""Two real engines on pools of their own, a real etcd and Mooncake's Transfer Engine: what one has computed the other fetches.

The tests run in the order of the file; each leaves both engines alive.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.vllm.checks import assert_same_answer
from tests.e2e.vllm.cluster_pair import BLOCKS, KINDS, PROMPTS, Pair, disturbed_round
from tests.e2e.vllm.conftest import BLOCK_TOKENS
from tests.e2e.vllm.test_restart import counters, growth
from tests.etcd_server import etcd_binary
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
pytest.importorskip("etcd3", reason="the module etcd3 is not installed (scripts/setup)")
pytest.importorskip("mooncake.engine", reason="Mooncake's Transfer Engine can't be loaded", exc_type=ImportError)
if not etcd_binary():
    pytest.skip("there is no etcd (scripts/setup)", allow_module_level=True)

TUTTI = [sys.executable, "-m", "tutti_mooncake.cli"]


def tutti(*arguments: str) -> tuple[int, Any]:
    done = subprocess.run([*TUTTI, *arguments], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Pair]:
    root = tmp_path_factory.mktemp("cluster")
    made = Pair.start(root, tiny_model)
    yield made
    made.kill()


def test_one_engine_answers_with_the_blocks_of_the_other(pair: Pair) -> None:
    cold = pair.a.computes(PROMPTS[0])
    pair.b_sees(PROMPTS[0])
    grown = pair.b.again(PROMPTS[0], cold, "fetched from the other node")
    assert (grown["fetches"], grown["fetches_ok"], grown["blocks_fetched"]) == (1, 1, BLOCKS)
    assert (grown["fetched_tokens"], grown["hit_tokens"], grown["miss_tokens"]) == (BLOCKS * BLOCK_TOKENS, 0, 20)
    assert grown["fetched_blocks"] == BLOCKS and grown["loads_ok"] == 1
    assert pair.a.cluster()["served"]["blocks"] == BLOCKS
    grown = pair.b.again(PROMPTS[0], cold, "admitted to its own pool")
    assert (grown["hit_tokens"], grown["fetched_tokens"], grown["fetches"]) == (BLOCKS * BLOCK_TOKENS, 0, 0)
    cold = pair.b.computes(PROMPTS[11])
    wait_for(lambda: pair.a.process.call("held_elsewhere", tokens=PROMPTS[11]) == BLOCKS)
    assert pair.a.again(PROMPTS[11], cold, "the other way round")["blocks_fetched"] == BLOCKS


def test_a_prompt_comes_from_three_places(pair: Pair) -> None:
    """Its head from vLLM's own cache, more from the own pool, the rest from the other node."""
    prompt = PROMPTS[1]
    cold = pair.a.computes(prompt)
    pair.b_sees(PROMPTS[1])
    pair.b.computes(prompt[: 5 * BLOCK_TOKENS + 3])
    assert pair.b.process.call("reset_prefix_cache")
    pair.b.ask(prompt[: 2 * BLOCK_TOKENS + 3])
    before = counters(pair.b.process)
    assert_same_answer(pair.b.ask(prompt), cold, "from three places")
    grown = growth(before, counters(pair.b.process))
    blocks = (grown["local_hit_blocks"], grown["hit_blocks"], grown["fetched_blocks"], grown["miss_blocks"])
    assert blocks == (2, 3, 3, 0) and grown["miss_tokens"] == 20
    assert (grown["loads"], grown["loads_ok"], grown["fetches_ok"]) == (1, 1, 1)


def test_people_see_who_holds_and_who_does_what(pair: Pair, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(PROMPTS[1]))
    at = ["--etcd", pair.etcd.endpoint, "--json"]
    pool = ["--devices", str(pair.a.root / "a")]
    status, found = tutti("replicas", *at, *pool, "--tokens", str(tokens))
    assert status == 0 and [(one["node"], one["blocks"]) for one in found["replicas"]] == [("a", BLOCKS), ("b", BLOCKS)]
    status, missing = tutti("explain", *pool, "--json", "--tokens", str(tokens))
    key = missing["blocks"][3]["key"]
    status, found = tutti("replicas", *at, "--block", key)
    assert status == 0 and [(one["node"], one["position"]) for one in found["replicas"]] == [("a", 3), ("b", 3)]
    assert tutti("replicas", *at, "--block", "00" * 8) == (1, {"replicas": []})
    assert tutti("replicas", *at, "--block", "12")[0] == 1

    with subprocess.Popen([*TUTTI, "top", *at, "--interval", "2"], stdout=subprocess.PIPE, text=True) as watching:
        while watching.poll() is None:  # between its two looks, whenever these are
            pair.a.ask(PROMPTS[1])
        assert watching.stdout is not None
        top = json.loads(watching.stdout.read())
    a, b = top["nodes"]
    assert (a["node"], a["state"], b["node"], b["state"], top["cluster"]["up"]) == ("a", "up", "b", "up", 2)
    assert a["tokens_per_s"] > 0 and a["hbm_tokens_per_s"] > 0 and b["tokens_per_s"] == 0 and 0 < a["resident_blocks"] < a["slots"]


def test_a_request_that_ends_while_it_is_fetched(pair: Pair) -> None:
    cold = pair.a.computes(PROMPTS[2])
    pair.b_sees(PROMPTS[2])
    for step in range(4):
        pair.b.process.call("generate_and_abort", prompts=[PROMPTS[2]], max_tokens=4, abort_at_step={"0": step})
        pair.b.process.call("drain")
    pair.b.again(PROMPTS[2], cold, "after aborted requests")
    report = pair.b.process.call("report")
    assert (report["pins_held"], report["stats"]["pins"], report["steps_under_way"]) == (0, 0, 0)
    assert report["cluster"]["sources"]["failed_tries"] == 0


def test_blocks_that_are_gone_at_their_owner_are_computed(pair: Pair) -> None:
    cold = pair.a.computes(PROMPTS[3])
    pair.b_sees(PROMPTS[3])
    pair.etcd.pause()  # nobody hears of it
    pair.a.process.call("drop_blocks", tokens=PROMPTS[3])
    grown = pair.b.again(PROMPTS[3], cold, "the owner has dropped it")
    pair.etcd.resume()
    assert (grown["fetches_failed"], grown["fetched_tokens"], grown["loads_failed"]) == (1, 0, 1)


def test_blocks_that_their_owner_can_not_read_are_computed(pair: Pair) -> None:
    cold = pair.a.computes(PROMPTS[10])
    pair.b_sees(PROMPTS[10])
    pair.a.process.call("add_fault", write=False, kind="corrupt")
    grown = pair.b.again(PROMPTS[10], cold, "the owner's disk lies")
    pair.a.process.call("clear_faults")
    assert (grown["fetches_failed"], grown["fetched_tokens"]) == (1, 0)


def test_an_owner_that_is_killed_costs_no_answer(pair: Pair) -> None:
    cold = [pair.a.computes(prompt) for prompt in PROMPTS[4:6]]
    pair.b_sees(PROMPTS[5])
    pair.a.process.kill()
    grown = pair.b.again(PROMPTS[4], cold[0], "the owner was killed")
    assert grown["fetches_ok"] == 0 and grown["fetched_tokens"] == 0
    pair.a.start()
    pair.b_sees(PROMPTS[5])
    grown = pair.b.again(PROMPTS[5], cold[1], "fetched from the owner's next life")
    assert (grown["fetches_ok"], grown["blocks_fetched"]) == (1, BLOCKS)


def test_an_owner_that_stops_answering_costs_no_answer(pair: Pair) -> None:
    cold = pair.a.computes(PROMPTS[6])
    pair.b_sees(PROMPTS[6])
    pair.a.process.pause()
    grown = pair.b.again(PROMPTS[6], cold, "the owner is stopped")
    pair.a.process.resume()
    assert grown["fetches_ok"] == 0 and grown["fetched_tokens"] == 0 and grown["fetch_seconds"] < 7


def test_without_etcd_the_last_view_goes_on(pair: Pair) -> None:
    cold = pair.a.computes(PROMPTS[7])
    pair.b_sees(PROMPTS[7])
    pair.etcd.kill()
    grown = pair.b.again(PROMPTS[7], cold, "etcd is gone")
    assert (grown["fetches_ok"], grown["blocks_fetched"]) == (1, BLOCKS)
    local = pair.b.again(PROMPTS[7], cold, "etcd is gone, and the pool has it")
    assert local["hit_blocks"] == BLOCKS
    pair.etcd.start()
    cold = pair.a.computes(PROMPTS[8])
    pair.b_sees(PROMPTS[8])
    assert pair.b.again(PROMPTS[8], cold, "etcd is back")["fetches_ok"] == 1


def test_whatever_happens_while_it_is_asked_the_answer_is_the_same(pair: Pair) -> None:
    cold = [pair.a.computes(prompt) for prompt in PROMPTS[:3]]
    for seed, kind in enumerate(KINDS):
        wait_for(lambda: pair.b.cluster()["usable"] and "a" in pair.b.cluster()["nodes"])
        disturbed_round(pair, cold, seed, kind)
    pair.b.process.call("drop_blocks", tokens=PROMPTS[0])
    pair.b_sees(PROMPTS[0])
    assert pair.b.again(PROMPTS[0], cold[0], "after all that")["blocks_fetched"] == BLOCKS


def test_an_engine_whose_weights_change_leaves_the_cluster(pair: Pair) -> None:
    cold = pair.a.computes(PROMPTS[9])
    pair.b_sees(PROMPTS[9])
    assert pair.b.process.call("reset_connector")
    assert pair.b.cluster()["node"] == ""
    wait_for(lambda: pair.a.cluster()["nodes"] == ["a"])
    grown = pair.b.again(PROMPTS[9], cold, "of the own weights")
    assert grown["fetches"] == 0 and grown["miss_blocks"] == BLOCKS
    assert pair.b.again(PROMPTS[9], cold, "its own store goes on")["hit_blocks"] == BLOCKS
