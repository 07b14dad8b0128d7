"""How a hit is loaded, and when not: the policy over a clock that the test steps."""

from __future__ import annotations

import pytest
from vllm.v1.outputs import KVConnectorOutput

from tests.clock import Clock
from tests.e2e.vllm.fake_store import FakeStore, accounting, end, engine_store, policy
from tests.e2e.vllm.test_scheduler import T, chain, output, received, request, scheduler, stored
from tutti_mooncake import Status
from tutti_mooncake.config import EngineConfig
from tutti_mooncake.connectors.vllm.metadata import TuttiWorkerMetadata
from tutti_mooncake.connectors.vllm.policy import Decision, LoadPolicy
from tutti_mooncake.connectors.vllm.scheduler import SchedulerHalf
from tutti_mooncake.schedule import BreakerState, LoadCost


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> FakeStore:
    found = FakeStore()
    found.resident = {key for name in "abcdefgh" for key in chain(name, 3)}
    return found


def measured(load_seconds_per_block: float, seconds_per_token: float, clock: Clock, **settings: object) -> LoadPolicy:
    cost = LoadCost()
    for amount in range(1, 50):
        cost.load.observe(amount, load_seconds_per_block * amount)
        cost.step.observe(8 * amount, 0.01 + seconds_per_token * 8 * amount)
    return LoadPolicy(EngineConfig(**settings), cost, may_wait=True, largest_step=512, clock=clock)  # type: ignore[arg-type]


def load_and_fail(half: SchedulerHalf, store: FakeStore, name: str) -> None:
    one = request(name, 3 * T + 1)
    tokens, _ = half.match(one, 0)
    half.allocated(one, ([5, 6, 7, 8],), tokens)
    half.build_metadata(output())
    operation = store.retrieves[-1]
    reports = end(operation, *[Status.DEVICE_ERROR] * 3)
    half.worker_output(
        KVConnectorOutput(finished_recving={name}, invalid_block_ids={5, 6, 7}, kv_connector_worker_meta=TuttiWorkerMetadata(reports))
    )


def test_tier_that_fails_always_is_bypassed_and_comes_back_by_itself(store: FakeStore, clock: Clock) -> None:
    half = scheduler(store, policy(clock=clock), may_load=True, may_store=True)
    for name in "abc":
        load_and_fail(half, store, name)
    one = request("d", 3 * T + 1)
    assert half.match(one, 0) == (0, False)
    counters = half.engine_store.counters
    assert (counters.blocks_bypassed, counters.loads_failed, len(store.retrieves)) == (3, 3, 3)
    clock.now += 1.0
    load_and_fail(half, store, "e")
    assert half.match(request("f", 3 * T + 1), 0) == (0, False), "the one attempt failed"
    clock.now += 2.0
    again = request("g", 3 * T + 1)
    assert half.match(again, 0) == (3 * T, True)
    half.allocated(again, ([5, 6, 7, 8],), 3 * T)
    assert half.match(request("h", 3 * T + 1), 0) == (0, False), "one attempt at a time"
    half.build_metadata(output())
    half.worker_output(received(store, "g"))
    assert half.match(request("h", 3 * T + 1), 0) == (3 * T, True)


def test_failed_check_of_a_block_opens_no_breaker(store: FakeStore, clock: Clock) -> None:
    half = scheduler(store, policy(clock=clock), may_load=True, may_store=True)
    for name in "abcd":
        one = request(name, 3 * T + 1)
        half.allocated(one, ([5, 6, 7, 8],), half.match(one, 0)[0])
        half.build_metadata(output())
        half.worker_output(received(store, name, invalid={6}))
    assert half.engine_store.counters.loads_failed == 4
    assert half.match(request("e", 3 * T + 1), 0) == (3 * T, True)


def test_stores_have_a_breaker_of_their_own(store: FakeStore, clock: Clock) -> None:
    load_policy = policy(clock=clock)
    half = scheduler(store, load_policy, may_load=True, may_store=True)
    for i in range(3):
        one = request(f"new{i}", T + 1)
        half.match(one, 0)
        half.allocated(one, ([5, 6],), 0)
        half.build_metadata(output(new={one.request_id: ([5, 6], 0, T + 1)}))
        reports = end(store.stores[-1], Status.NO_SPACE)
        half.worker_output(KVConnectorOutput(kv_connector_worker_meta=TuttiWorkerMetadata(reports)))
    assert load_policy.stores.state is BreakerState.OPEN and load_policy.loads.state is BreakerState.CLOSED
    one = request("new4", T + 1)
    half.match(one, 0)
    half.allocated(one, ([5, 6],), 0)
    assert stored(half.build_metadata(output(new={"new4": ([5, 6], 0, T + 1)})), store) == []
    assert half.engine_store.counters.blocks_store_bypassed == 1
    assert half.match(request("a", 3 * T + 1), 0) == (3 * T, True), "what is there can still be loaded"


def test_short_hits_are_computed_and_counted(store: FakeStore, clock: Clock) -> None:
    half = scheduler(store, measured(1.0, 0.001, clock), may_load=True, may_store=True)
    one = request("a", 3 * T + 1)
    assert half.match(one, 0) == (0, False)
    half.allocated(one, ([5, 6, 7, 8],), 0)
    counters = half.engine_store.counters
    assert (counters.blocks_not_worth_loading, counters.miss_tokens, counters.hit_tokens) == (3, 3 * T + 1, 0)
    assert store.pins == 0


def test_load_is_layerwise_only_when_nobody_else_would_wait(clock: Clock) -> None:
    slow = measured(0.1, 0.1, clock)
    assert slow.decide(30, 480, 100, alone=True) is Decision.LAYERWISE
    assert slow.decide(30, 480, 10, alone=False) is Decision.ASYNCHRONOUS, "others would wait 3 s for a step of 1 s"
    assert slow.decide(30, 480, 400, alone=False) is Decision.LAYERWISE, "the step lasts 40 s anyway"
    slow.load_begins(30, 100, layerwise=True)
    assert slow.decide(300, 4800, 10, alone=True) is Decision.ASYNCHRONOUS, "a second one would hold up the first"
    slow.step_begins(100, measure=False)
    assert slow.decide(300, 4800, 10, alone=True) is Decision.LAYERWISE


@pytest.mark.parametrize(
    ("load", "may_wait", "expected"),
    [
        ("layerwise", True, Decision.LAYERWISE),
        ("layerwise", False, Decision.ASYNCHRONOUS),
        ("asynchronous", True, Decision.ASYNCHRONOUS),
        ("auto", False, Decision.ASYNCHRONOUS),
    ],
)
def test_how_to_load_can_be_chosen(clock: Clock, load: str, may_wait: bool, expected: Decision) -> None:
    chosen = LoadPolicy(EngineConfig(load=load), LoadCost(), may_wait=may_wait, largest_step=512, clock=clock)
    assert chosen.decide(10, 160, 10, alone=True) is expected


def test_steps_are_measured_also_when_several_are_under_way(clock: Clock) -> None:
    measuring = LoadPolicy(EngineConfig(), LoadCost(), may_wait=False, largest_step=512, clock=clock)
    measuring.step_begins(100, measure=True)
    clock.now += 0.5
    measuring.step_begins(200, measure=True)
    clock.now += 0.5
    measuring.step_ended()
    clock.now += 2.0
    measuring.step_ended()
    step = measuring.cost.step
    assert step.seconds(100) == pytest.approx(1.0) and step.seconds(200) == pytest.approx(2.0)


def test_step_that_waits_for_a_load_says_nothing_about_computing(store: FakeStore, clock: Clock) -> None:
    load_policy = policy("layerwise", clock)
    half = scheduler(store, load_policy, may_load=True, may_store=False)
    one = request("a", 3 * T + 1)
    assert half.match(one, 0) == (3 * T, False)
    half.allocated(one, ([5, 6, 7, 8],), 3 * T)
    (load,) = half.build_metadata(output(new={"a": ([5, 6, 7, 8], 3 * T, 1)})).loads
    assert load.layerwise
    clock.now += 5.0
    half.worker_output(received(store))
    assert half.pins_held == 0 and half.engine_store.counters.hit_tokens == 3 * T
    assert not load_policy.cost.step.known and load_policy.cost.step.seconds(1) == 0.0


def test_blocks_behind_a_failed_layerwise_load_leave_vllms_cache_and_are_stored_anew(store: FakeStore, clock: Clock) -> None:
    evicted: set[int] = set()

    class Pool:
        def evict_blocks(self, block_ids: set[int]) -> None:
            evicted.update(block_ids)

    half = scheduler(store, policy("layerwise", clock), may_load=True, may_store=True)
    half.bind_block_pool(Pool())  # type: ignore[arg-type]
    one = request("a", 5 * T + 1)
    half.allocated(one, ([5, 6, 7, 8, 9, 10],), half.match(one, 0)[0])
    metadata = half.build_metadata(output(new={"a": ([5, 6, 7, 8, 9, 10], 3 * T, 2 * T + 1)}))
    assert [operation.block_ids for operation in store.stores] == [[8, 9]] and len(metadata.stores) == 1
    reports = end(store.retrieves[0], Status.OK, Status.CHECKSUM_ERROR, Status.OK) + end(store.stores[0], *[Status.CANCELLED] * 2)
    half.worker_output(KVConnectorOutput(invalid_block_ids={6}, kv_connector_worker_meta=TuttiWorkerMetadata(reports)))
    assert evicted == {6, 7, 8, 9, 10}
    again = half.build_metadata(output(cached={"a": (None, T, 4 * T + 1)}))
    assert stored(again, store) == [("a", chain("a", 5)[1:], [6, 7, 8, 9], chain("a", 5)[0])]


def test_request_admitted_in_the_same_step_would_wait_too(store: FakeStore, clock: Clock) -> None:
    half = scheduler(store, LoadPolicy(EngineConfig(load_threshold="none"), LoadCost(), may_wait=True, largest_step=512, clock=clock))
    assert half.match(request("a", 3 * T + 1), 0) == (3 * T, False), "alone"
    cold = request("cold", 3 * T)
    half.match(cold, 0)
    half.allocated(cold, ([1, 2, 3],), 0)
    assert half.match(request("b", 3 * T + 1), 0) == (3 * T, True)
    half.build_metadata(output())
    assert half.match(request("b", 3 * T + 1), 0) == (3 * T, False), "nothing runs any more"


def test_request_that_ends_in_the_step_of_its_layerwise_load_is_counted(store: FakeStore, clock: Clock) -> None:
    half = scheduler(store, policy("layerwise", clock), may_load=True, may_store=True)
    one = request("a", 3 * T + 1)
    half.allocated(one, ([5, 6, 7, 8],), half.match(one, 0)[0])
    half.build_metadata(output(new={"a": ([5, 6, 7, 8], 3 * T, 1)}))
    one.num_computed_tokens = 3 * T + 1
    half.finished(one)
    half.worker_output(received(store))
    counters = half.engine_store.counters
    assert (counters.requests, counters.hit_tokens, counters.miss_tokens, half.pins_held) == (1, 3 * T, 1, 0)


def test_model_that_does_not_wait_for_its_layers_is_loaded_asynchronously_from_then_on(store: FakeStore, clock: Clock) -> None:
    half = scheduler(store, policy("layerwise", clock), may_load=True, may_store=True)
    assert half.match(request("a", 3 * T + 1), 0) == (3 * T, False)
    half.worker_output(KVConnectorOutput(kv_connector_worker_meta=TuttiWorkerMetadata([], layers_not_waited=True)))
    assert half.match(request("a", 3 * T + 1), 0) == (3 * T, True)


def test_hits_and_misses_sum_up_to_what_was_requested(store: FakeStore) -> None:
    ours = engine_store(store)
    half = SchedulerHalf(ours, policy(), accounting(ours, T), T, may_load=True, may_store=True)
    for name, local, fate in (("a", T, "loads"), ("b", 3 * T, "local"), ("zz", 0, "cold"), ("c", 0, "aborted"), ("d", 0, "fails")):
        one = request(name, 3 * T + 2)
        tokens, _ = half.match(one, local)
        half.allocated(one, ([1, 2, 3, 4],), tokens)
        half.build_metadata(output())
        if fate == "aborted":
            half.finished(one)
        if tokens:
            half.worker_output(received(store, name, invalid={2} if fate == "fails" else None))
    counters = ours.counters
    assert counters.requests == 5
    assert counters.local_hit_tokens + counters.hit_tokens + counters.miss_tokens == counters.requested_tokens == 5 * (3 * T + 2)
    assert counters.local_hit_blocks + counters.hit_blocks + counters.miss_blocks == counters.requested_blocks == 15
    assert (counters.local_hit_tokens, counters.hit_tokens) == (4 * T, 2 * T + T)


def test_stores_come_back_although_the_tails_of_bypassed_chains_are_tried_in_the_rhythm_of_the_wait(clock: Clock) -> None:
    store = FakeStore()
    half = scheduler(store, policy("asynchronous", clock, breaker_failures=1, breaker_wait_seconds=1.0), may_load=False, may_store=True)

    durable: set[bytes] = set()

    def run(name: str, *device: Status) -> list[Status]:
        """A request whose two blocks are stored in two steps, with what the device says to each: what became of them."""
        one, fates = request(name, 2 * T), []
        half.match(one, 0)
        half.allocated(one, ([1, 2],), 0)
        for step, metadata in enumerate((output(new={name: ([1, 2], 0, T)}), output(cached={name: (None, T, T)}))):
            before = len(store.stores)
            half.build_metadata(metadata)
            for operation in store.stores[before:]:
                fates.append(device[step] if operation.parent is None or operation.parent in durable else Status.REJECTED)
                durable.update(operation.keys if fates[-1] is Status.OK else [])
                half.worker_output(KVConnectorOutput(kv_connector_worker_meta=TuttiWorkerMetadata(end(operation, fates[-1]))))
            clock.now += 0.4 if step == 0 else 0.65  # a request takes a little longer than the wait, the way to its second step doesn't
        half.finished(one)
        return fates

    run("a", Status.OK, Status.DEVICE_ERROR)
    for name in ("b", "c", "d"):
        run(name, Status.OK, Status.OK)
    assert run("e", Status.OK, Status.OK) == [Status.OK, Status.OK]
