"""The scheduler half over a store in memory, with vLLM's own output classes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from tests.e2e.vllm.fake_store import FakeStore, accounting, end, engine_store, policy
from tutti_mooncake import Status
from tutti_mooncake.connectors.vllm.metadata import TuttiConnectorMetadata, TuttiWorkerMetadata
from tutti_mooncake.connectors.vllm.policy import LoadPolicy
from tutti_mooncake.connectors.vllm.scheduler import SchedulerHalf

T = 4
"""Tokens per block."""


def chain(name: str, blocks: int) -> list[bytes]:
    return [f"{name}-{i}".encode().ljust(32, b".") for i in range(blocks)]


def request(name: str, tokens: int, request_id: str | None = None) -> Any:
    """A request of `tokens` prompt tokens whose block hashes are those of `name`."""
    return SimpleNamespace(
        request_id=request_id or name,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        block_hashes=chain(name, tokens // T),
        lora_request=None,
        skip_reading_prefix_cache=False,
        kv_transfer_params=None,
    )


def output(
    new: dict[str, tuple[list[int], int, int]] | None = None,
    cached: dict[str, tuple[list[int] | None, int, int]] | None = None,
    resumed: set[str] | None = None,
    preempted: set[str] | None = None,
) -> SchedulerOutput:
    """A step: request id to (block ids, tokens computed before, tokens of this step)."""
    new, cached = new or {}, cached or {}
    result = SchedulerOutput.make_empty()
    result.scheduled_new_reqs = [
        SimpleNamespace(req_id=name, block_ids=(ids,), num_computed_tokens=computed)  # type: ignore[misc]
        for name, (ids, computed, _) in new.items()
    ]
    result.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(cached),
        resumed_req_ids=resumed or set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None if ids is None else (ids,) for ids, _, _ in cached.values()],
        num_computed_tokens=[computed for _, computed, _ in cached.values()],
        num_output_tokens=[0] * len(cached),
    )
    result.num_scheduled_tokens = {name: tokens for name, (_, _, tokens) in {**new, **cached}.items()}
    result.total_num_scheduled_tokens = sum(result.num_scheduled_tokens.values())
    result.preempted_req_ids = preempted or set()
    return result


def received(store: FakeStore, *request_ids: str, invalid: set[int] | None = None) -> KVConnectorOutput:
    """The step in which these requests' loads end, and every other move too; `invalid` are the blocks that didn't arrive."""
    reports = []
    for operation in [*store.retrieves, *store.stores]:
        if not operation.done():
            bad = invalid or set()
            reports += end(operation, *(Status.CHECKSUM_ERROR if block in bad else Status.OK for block in operation.block_ids))
    return KVConnectorOutput(
        finished_recving=set(request_ids), invalid_block_ids=invalid or set(), kv_connector_worker_meta=TuttiWorkerMetadata(reports)
    )


def stored(metadata: TuttiConnectorMetadata, store: FakeStore) -> list[tuple[str, list[bytes], list[int], bytes | None]]:
    operations = {operation.plan.move.id: operation for operation in store.stores}
    found = [(work.request_id, operations[work.move.id]) for work in metadata.stores]
    return [(request_id, operation.keys, operation.block_ids, operation.parent) for request_id, operation in found]


def scheduler(store: FakeStore, load_policy: LoadPolicy | None = None, **roles: bool) -> SchedulerHalf:
    ours = engine_store(store)
    return SchedulerHalf(ours, load_policy or policy(), accounting(ours, T), T, **{"may_load": True, "may_store": True, **roles})


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def half(store: FakeStore) -> SchedulerHalf:
    return scheduler(store, may_load=True, may_store=True)


def test_pins_return_to_zero_whatever_becomes_of_a_thousand_requests(half: SchedulerHalf, store: FakeStore) -> None:
    source = random.Random(7)
    store.resident = {key for i in range(50) for key in chain(f"p{i}", 5)}
    loading: list[Any] = []
    for i in range(1000):
        one = request(f"p{i % 50}", 5 * T + 1, f"r{i}")
        fate = source.choice(["aborted before the load", "loaded", "found locally", "aborted while loading", "not scheduled"])
        local = 5 * T if fate == "found locally" else 0
        tokens, _ = half.match(one, local)
        assert tokens == 5 * T - local
        if fate == "aborted before the load":
            half.finished(one)
        elif fate == "not scheduled":
            half.build_metadata(output())
            half.finished(one)
        else:
            half.allocated(one, (list(range(6)),), tokens)
            half.build_metadata(output())
            if fate == "aborted while loading":
                assert half.finished(one) is False
                assert half.build_metadata(output()).cancelled_loads == [one.request_id]
            if tokens:
                loading.append(one)
        if len(loading) > 20:
            ended = loading.pop(source.randrange(len(loading)))
            half.worker_output(received(store, ended.request_id))
    assert store.most_pins == 1 and len(store.retrieves) > 100
    half.worker_output(received(store, *(one.request_id for one in loading)))
    assert (store.pins, half.pins_held) == (0, 0)


def test_last_token_is_never_loaded(half: SchedulerHalf, store: FakeStore) -> None:
    store.resident = set(chain("a", 3))
    assert half.match(request("a", 3 * T), 0) == (2 * T, True)
    assert half.match(request("a", 3 * T + 1), 0) == (3 * T, True)
    assert half.match(request("a", 3 * T), 2 * T) == (0, False)
    half.build_metadata(output())
    assert (store.pins, half.pins_held) == (0, 0)


def test_load_covers_what_vllm_lacks(half: SchedulerHalf, store: FakeStore) -> None:
    store.resident = set(chain("a", 3))
    one = request("a", 3 * T + 2)
    assert half.match(one, T) == (2 * T, True)
    half.allocated(one, ([10, 11, 12, 13],), 2 * T)
    (load,) = half.build_metadata(output()).loads
    assert (store.retrieves[0].keys, load.block_ids) == (chain("a", 3)[1:], [11, 12])


def test_blocks_are_stored_as_they_fill(half: SchedulerHalf, store: FakeStore) -> None:
    one = request("a", 10)
    assert half.match(one, 0) == (0, False)
    half.allocated(one, ([5, 6, 7],), 0)
    keys = chain("a", 5)
    assert stored(half.build_metadata(output(new={"a": ([5, 6, 7], 0, 6)})), store) == [("a", keys[:1], [5], None)]
    assert stored(half.build_metadata(output(cached={"a": (None, 6, 4)})), store) == [("a", keys[1:2], [6], keys[0])]
    one.num_tokens, one.block_hashes = 12, keys[:3]
    assert stored(half.build_metadata(output(cached={"a": (None, 10, 1)})), store) == []
    assert stored(half.build_metadata(output(cached={"a": (None, 11, 1)})), store) == [("a", keys[2:3], [7], keys[1])]
    one.num_tokens, one.block_hashes, one.num_computed_tokens = 17, keys[:4], 16
    half.build_metadata(output(cached={"a": ([8], 12, 3)}))
    assert half.finished(one) is True
    last = half.build_metadata(output())
    assert stored(last, store) == [("a", keys[3:4], [8], keys[2])]
    assert last.finishing == ["a"] and last.idle


def test_guessed_tokens_are_not_stored(half: SchedulerHalf, store: FakeStore) -> None:
    one = request("a", 7)
    half.match(one, 0)
    half.allocated(one, ([5, 6],), 0)
    metadata = half.build_metadata(output(new={"a": ([5, 6], 0, 8)}))
    assert stored(metadata, store) == [("a", chain("a", 1), [5], None)]


def test_only_blocks_that_the_store_lacks_are_stored(half: SchedulerHalf, store: FakeStore) -> None:
    store.resident = set(chain("a", 2))
    one = request("a", 3 * T + 1)
    assert half.match(one, 3 * T) == (0, False)
    half.allocated(one, ([5, 6, 7, 8],), 0)
    metadata = half.build_metadata(output(new={"a": ([5, 6, 7, 8], 3 * T, 1)}))
    assert stored(metadata, store) == [("a", chain("a", 3)[2:], [7], chain("a", 2)[1])]


def test_resumed_request_stores_from_its_new_blocks(half: SchedulerHalf, store: FakeStore) -> None:
    one = request("a", 3 * T)
    half.match(one, 0)
    half.allocated(one, ([5, 6, 7],), 0)
    half.build_metadata(output(new={"a": ([5, 6, 7], 0, 8)}))
    metadata = half.build_metadata(output(preempted={"a"}))
    assert metadata.preempted == ["a"]
    store.resident = set(chain("a", 1))
    assert half.match(one, 0) == (T, True)
    half.allocated(one, ([1, 2, 3],), 0)
    metadata = half.build_metadata(output(cached={"a": ([1, 2, 3], 0, 12)}, resumed={"a"}))
    assert stored(metadata, store) == [("a", chain("a", 3)[1:], [2, 3], chain("a", 1)[0])]


def test_failed_load_has_its_blocks_stored_anew(half: SchedulerHalf, store: FakeStore) -> None:
    store.resident = set(chain("a", 3))
    one = request("a", 3 * T + 1)
    half.allocated(one, ([5, 6, 7, 8],), half.match(one, 0)[0])
    half.build_metadata(output())
    half.worker_output(received(store, "a", invalid={6}))
    assert half.engine_store.counters.hit_tokens == T
    metadata = half.build_metadata(output(new={"a": ([5, 6, 7, 8], T, 2 * T + 1)}))
    assert stored(metadata, store) == [("a", chain("a", 3)[1:], [6, 7], chain("a", 1)[0])]


def test_failed_load_is_not_offered_again(half: SchedulerHalf, store: FakeStore) -> None:
    store.resident = set(chain("a", 3))
    one = request("a", 3 * T + 1)
    half.allocated(one, ([5, 6, 7, 8],), half.match(one, 0)[0])
    half.build_metadata(output())
    half.worker_output(received(store, "a", invalid={5}))
    assert half.match(one, 0) == (0, False)
    assert half.match(request("a", 3 * T + 1, "another"), 0) == (3 * T, True)


def test_hit_rate_counts_all_prompt_tokens_once(half: SchedulerHalf, store: FakeStore) -> None:
    store.resident = set(chain("warm", 3))
    for name in ("cold", "warm"):
        one = request(name, 3 * T + 1)
        tokens, _ = half.match(one, 0)
        half.match(one, 0)
        half.allocated(one, ([1, 2, 3, 4],), tokens)
        half.build_metadata(output())
        half.worker_output(received(store, name) if tokens else KVConnectorOutput())
        half.allocated(one, ([1, 2, 3, 4],), 0)
    counters = half.engine_store.counters
    assert (counters.requests, counters.requested_tokens, counters.hit_tokens) == (2, 2 * (3 * T + 1), 3 * T)


def test_broken_store_is_a_miss(half: SchedulerHalf, store: FakeStore) -> None:
    store.broken = True
    for name in ("a", "b"):
        assert half.match(request(name, 3 * T), 0) == (0, False)
    assert half.engine_store.counters.store_errors == 2
    assert half.clear() is False


def test_requests_with_an_adapter_are_left_out(half: SchedulerHalf, store: FakeStore) -> None:
    store.resident = set(chain("a", 3))
    one = request("a", 3 * T + 1)
    one.lora_request = SimpleNamespace(lora_name="adapter")
    assert half.match(one, 0) == (0, False)
    half.allocated(one, ([1, 2, 3, 4],), 0)
    assert half.build_metadata(output(new={"a": ([1, 2, 3, 4], 0, 13)})).stores == []
    assert half.finished(one) is False


def test_role_decides_between_loading_and_storing(store: FakeStore) -> None:
    store.resident = set(chain("a", 3))
    producer = scheduler(store, may_load=False, may_store=True)
    assert producer.match(request("a", 3 * T + 1), 0) == (0, False)
    consumer = scheduler(store, may_load=True, may_store=False)
    one = request("b", 2 * T)
    consumer.match(one, 0)
    consumer.allocated(one, ([1, 2],), 0)
    assert consumer.build_metadata(output(new={"b": ([1, 2], 0, 8)})).stores == []
