"""The worker half over a mover whose moves end when the test says so."""

from __future__ import annotations

import pytest

from tests.e2e.vllm.fake_store import FakeMover, FakePlan, move
from tutti_mooncake import Status
from tutti_mooncake.connectors.vllm.metadata import LoadWork, StoreWork, TuttiConnectorMetadata
from tutti_mooncake.connectors.vllm.worker import Outbox, WorkerHalf

LAYERS = {f"model.layers.{i}.attn": i for i in range(4)}


def load(request_id: str = "a", *, layerwise: bool = False) -> LoadWork:
    """Three blocks, 100 to 102."""
    return LoadWork(request_id, [100, 101, 102], move([100, 101, 102]), layerwise)


def store(request_id: str, move_id: int = 2, begin: int = 100, end: int = 103) -> StoreWork:
    return StoreWork(request_id, move(range(begin, end), move_id, write=True))


@pytest.fixture
def mover() -> FakeMover:
    return FakeMover()


@pytest.fixture
def worker(mover: FakeMover) -> WorkerHalf:
    return WorkerHalf(mover, LAYERS, Outbox())  # type: ignore[arg-type]


def step(worker: WorkerHalf, metadata: TuttiConnectorMetadata | None = None, layers: int = 4) -> tuple[set[str], set[str]]:
    """One step's hooks, in vLLM's order, of a model that waits for `layers` of its layers."""
    metadata = metadata or TuttiConnectorMetadata()
    worker.end_stores_of(metadata.preempted)
    worker.start_loads(metadata)
    for name in list(LAYERS)[:layers]:
        worker.wait_for_layer(metadata, name)
    worker.start_stores(metadata)
    return worker.finished(metadata)


def test_load_is_reported_once_when_it_has_ended(worker: WorkerHalf, mover: FakeMover) -> None:
    assert step(worker, TuttiConnectorMetadata(loads=[load()])) == (set(), set())
    mover.plans[0].end()
    assert step(worker) == (set(), {"a"})
    assert worker.take_load_errors() == set()
    assert step(worker) == (set(), set())


def test_load_past_its_deadline_is_not_reported_before_it_is_drained(worker: WorkerHalf, mover: FakeMover) -> None:
    step(worker, TuttiConnectorMetadata(loads=[load()]))
    mover.plans[0].end(Status.OK, Status.TIMEOUT, Status.TIMEOUT, drained=False)
    assert step(worker) == (set(), set())
    assert worker.take_load_errors() == set()
    mover.plans[0].is_drained = True
    assert step(worker) == (set(), {"a"})
    assert worker.take_load_errors() == {101, 102}


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_failed_block_is_reported_with_its_load(worker: WorkerHalf, mover: FakeMover, failed: int) -> None:
    step(worker, TuttiConnectorMetadata(loads=[load()]))
    statuses = [Status.OK] * 3
    statuses[failed] = Status.CHECKSUM_ERROR
    mover.plans[0].end(*statuses)
    assert step(worker) == (set(), {"a"})
    assert worker.take_load_errors() == {100 + failed}
    assert worker.take_load_errors() == set()


def test_rejected_block_of_a_load_has_no_content_either(worker: WorkerHalf, mover: FakeMover) -> None:
    step(worker, TuttiConnectorMetadata(loads=[load()]))
    mover.plans[0].end(Status.OK, Status.REJECTED, Status.OK)
    step(worker)
    assert worker.take_load_errors() == {101}


def test_block_that_the_store_did_not_find_any_more_has_no_content(worker: WorkerHalf, mover: FakeMover) -> None:
    step(worker, TuttiConnectorMetadata(loads=[LoadWork("a", [100, 101, 102], move([100, 101]))]))
    mover.plans[0].end()
    step(worker)
    assert worker.take_load_errors() == {102}


@pytest.mark.parametrize("work", [load(), LoadWork("a", [100, 101, 102], None)], ids=["mover", "store"])
def test_load_that_cannot_begin_fails_as_a_whole(worker: WorkerHalf, mover: FakeMover, work: LoadWork) -> None:
    mover.broken = True
    assert step(worker, TuttiConnectorMetadata(loads=[work])) == (set(), {"a"})
    assert worker.take_load_errors() == {100, 101, 102}


def test_load_of_an_ended_request_is_cancelled_and_still_reported(worker: WorkerHalf, mover: FakeMover) -> None:
    step(worker, TuttiConnectorMetadata(loads=[load()]))
    assert step(worker, TuttiConnectorMetadata(cancelled_loads=["a"])) == (set(), set())
    assert mover.plans[0].cancelled
    mover.plans[0].end(Status.CANCELLED, Status.CANCELLED, Status.CANCELLED)
    assert step(worker) == (set(), {"a"})
    assert worker.take_load_errors() == set()


def test_each_layer_waits_for_its_own_part_of_a_layerwise_load(worker: WorkerHalf, mover: FakeMover) -> None:
    metadata = TuttiConnectorMetadata(loads=[load(layerwise=True)])
    worker.start_loads(metadata)
    for i, name in enumerate(LAYERS):
        worker.wait_for_layer(metadata, name)
        assert mover.plans[0].layers_waited == list(range(i + 1))
    mover.plans[0].end()
    worker.start_stores(metadata)
    assert worker.finished(metadata) == (set(), set()), "vLLM is told nothing of a load that its step has waited for"
    assert worker.take_load_errors() == set() and worker.take_metadata() is None


def test_layerwise_load_begins_at_the_first_layer_where_vllm_has_not_begun_it(worker: WorkerHalf, mover: FakeMover) -> None:
    metadata = TuttiConnectorMetadata(loads=[load(layerwise=True)])
    worker.wait_for_layer(metadata, next(iter(LAYERS)))
    assert mover.plans[0].layers_waited == [0] and metadata.loads == []


def test_nothing_is_stored_in_the_step_of_a_failed_layerwise_load(worker: WorkerHalf, mover: FakeMover) -> None:
    metadata = TuttiConnectorMetadata(loads=[load(layerwise=True)], stores=[store("a", 2, 103, 105), store("b", 3, 200, 202)])
    worker.start_loads(metadata)
    mover.plans[0].end(Status.OK, Status.CHECKSUM_ERROR, Status.OK)
    for name in LAYERS:
        worker.wait_for_layer(metadata, name)
    worker.start_stores(metadata)
    worker.finished(metadata)
    assert worker.take_load_errors() == {101}
    assert mover.refused == [(2, Status.CANCELLED), (3, Status.CANCELLED)]
    assert worker.stores_running == 0


def test_layerwise_load_whose_layers_the_model_did_not_wait_for_is_void(worker: WorkerHalf, mover: FakeMover) -> None:
    metadata = TuttiConnectorMetadata(loads=[load(layerwise=True)])
    worker.start_loads(metadata)
    mover.plans[0].end()
    for name in list(LAYERS)[:3]:
        worker.wait_for_layer(metadata, name)
    worker.start_stores(metadata)
    worker.finished(metadata)
    assert worker.take_load_errors() == {100, 101, 102}
    told = worker.take_metadata()
    assert told is not None and told.layers_not_waited
    assert worker.take_metadata() is None


def test_step_without_tokens_is_answered_although_there_is_nothing_to_say(worker: WorkerHalf) -> None:
    step(worker, TuttiConnectorMetadata(idle=True))
    assert worker.take_metadata() is not None, "vLLM would drop an empty answer, and the next one would end the wrong step"
    step(worker, TuttiConnectorMetadata())
    assert worker.take_metadata() is None


def test_ended_request_keeps_its_blocks_until_its_stores_are_done(worker: WorkerHalf, mover: FakeMover) -> None:
    step(worker, TuttiConnectorMetadata(stores=[store("a", 1)]))
    step(worker, TuttiConnectorMetadata(stores=[store("a", 2, 103, 105)]))
    mover.plans[0].end()
    assert step(worker, TuttiConnectorMetadata(finishing=["a"])) == (set(), set())
    mover.plans[1].end(drained=False)
    assert step(worker) == (set(), set())
    mover.plans[1].is_drained = True
    assert step(worker) == ({"a"}, set())
    assert step(worker) == (set(), set())


def test_last_stores_count_although_vllm_submits_them_after_asking_for_results(worker: WorkerHalf, mover: FakeMover) -> None:
    metadata = TuttiConnectorMetadata(stores=[store("a")], finishing=["a"])
    assert worker.finished(metadata) == (set(), set())
    worker.start_stores(metadata)
    assert step(worker) == (set(), set())
    mover.plans[0].end()
    assert step(worker) == ({"a"}, set())


def test_idle_step_submits_stores_though_vllm_does_not_ask(worker: WorkerHalf, mover: FakeMover) -> None:
    metadata = TuttiConnectorMetadata(stores=[store("a")], finishing=["a"], idle=True)
    assert worker.finished(metadata) == (set(), set())
    assert len(mover.plans) == 1


def test_preempted_requests_stores_end_before_their_blocks_are_used_again(worker: WorkerHalf, mover: FakeMover) -> None:
    step(worker, TuttiConnectorMetadata(stores=[store("a", 1)]))
    step(worker, TuttiConnectorMetadata(stores=[store("b", 2, 103, 105)]))
    worker.end_stores_of(["a"])
    assert mover.plans[0].cancelled and mover.plans[0].drained()
    assert not mover.plans[1].cancelled
    assert worker.stores_running == 1


def test_store_that_cannot_begin_keeps_nothing_back(worker: WorkerHalf, mover: FakeMover) -> None:
    mover.broken = True
    assert step(worker, TuttiConnectorMetadata(stores=[store("a")], finishing=["a"])) == ({"a"}, set())


def test_shutdown_returns_when_no_operation_touches_memory(worker: WorkerHalf, mover: FakeMover) -> None:
    step(worker, TuttiConnectorMetadata(loads=[load()], stores=[store("b", 2, 103, 105)]))
    stores: list[FakePlan] = [plan for plan in mover.plans if plan.move.write]
    stores[0].end()
    worker.shutdown()
    assert all(plan.drained() for plan in mover.plans) and mover.closed
    assert worker.stores_running == 0
