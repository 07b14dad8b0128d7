"""The worker half over a store whose operations end when the test says so."""

from __future__ import annotations

import pytest

from tests.e2e.vllm.fake_store import FakeStore, engine_store
from tutti_mooncake import Status
from tutti_mooncake.connectors.vllm.metadata import BlockTransfer, TuttiConnectorMetadata
from tutti_mooncake.connectors.vllm.worker import WorkerHalf

KEYS = [bytes([i]) * 32 for i in range(8)]


def transfer(request_id: str, begin: int = 0, end: int = 3) -> BlockTransfer:
    """Blocks `[begin, end)` of the one chain, in engine blocks 100 and on."""
    return BlockTransfer(request_id, KEYS[begin:end], list(range(100 + begin, 100 + end)), KEYS[begin - 1] if begin else None)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def worker(store: FakeStore) -> WorkerHalf:
    return WorkerHalf(engine_store(store))


def step(worker: WorkerHalf, metadata: TuttiConnectorMetadata | None = None) -> tuple[set[str], set[str]]:
    """One step's hooks, in vLLM's order."""
    metadata = metadata or TuttiConnectorMetadata()
    worker.end_stores_of(metadata.preempted)
    worker.start_loads(metadata)
    worker.start_stores(metadata)
    return worker.finished(metadata)


def test_load_is_reported_once_when_it_has_ended(worker: WorkerHalf, store: FakeStore) -> None:
    assert step(worker, TuttiConnectorMetadata(loads=[transfer("a")])) == (set(), set())
    store.retrieves[0].end()
    assert step(worker) == (set(), {"a"})
    assert worker.take_load_errors() == set()
    assert step(worker) == (set(), set())


def test_load_past_its_deadline_is_not_reported_before_it_is_drained(worker: WorkerHalf, store: FakeStore) -> None:
    step(worker, TuttiConnectorMetadata(loads=[transfer("a")]))
    store.retrieves[0].end(Status.OK, Status.TIMEOUT, Status.TIMEOUT, drained=False)
    assert step(worker) == (set(), set())
    assert worker.take_load_errors() == set()
    store.retrieves[0].is_drained = True
    assert step(worker) == (set(), {"a"})
    assert worker.take_load_errors() == {101, 102}
    assert worker.engine_store.counters.loads_failed == 1


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_failed_block_is_reported_with_its_load(worker: WorkerHalf, store: FakeStore, failed: int) -> None:
    step(worker, TuttiConnectorMetadata(loads=[transfer("a")]))
    statuses = [Status.OK] * 3
    statuses[failed] = Status.CHECKSUM_ERROR
    store.retrieves[0].end(*statuses)
    assert step(worker) == (set(), {"a"})
    assert worker.take_load_errors() == {100 + failed}
    assert worker.take_load_errors() == set()


def test_rejected_block_of_a_load_has_no_content_either(worker: WorkerHalf, store: FakeStore) -> None:
    step(worker, TuttiConnectorMetadata(loads=[transfer("a")]))
    store.retrieves[0].end(Status.OK, Status.REJECTED, Status.OK)
    step(worker)
    assert worker.take_load_errors() == {101}


def test_load_that_the_store_refuses_fails_as_a_whole(worker: WorkerHalf, store: FakeStore) -> None:
    store.broken = True
    assert step(worker, TuttiConnectorMetadata(loads=[transfer("a")])) == (set(), {"a"})
    assert worker.take_load_errors() == {100, 101, 102}
    assert worker.engine_store.counters.store_errors == 1


def test_load_of_an_ended_request_is_cancelled_and_still_reported(worker: WorkerHalf, store: FakeStore) -> None:
    step(worker, TuttiConnectorMetadata(loads=[transfer("a")]))
    assert step(worker, TuttiConnectorMetadata(cancelled_loads=["a"])) == (set(), set())
    assert store.retrieves[0].cancelled
    store.retrieves[0].end(Status.CANCELLED, Status.CANCELLED, Status.CANCELLED)
    assert step(worker) == (set(), {"a"})
    assert worker.take_load_errors() == set()
    assert worker.engine_store.counters.loads_failed == 0


def test_ended_request_keeps_its_blocks_until_its_stores_are_done(worker: WorkerHalf, store: FakeStore) -> None:
    step(worker, TuttiConnectorMetadata(stores=[transfer("a", 0, 3)]))
    step(worker, TuttiConnectorMetadata(stores=[transfer("a", 3, 5)]))
    store.stores[0].end()
    assert step(worker, TuttiConnectorMetadata(finishing=["a"])) == (set(), set())
    store.stores[1].end(drained=False)
    assert step(worker) == (set(), set())
    store.stores[1].is_drained = True
    assert step(worker) == ({"a"}, set())
    assert step(worker) == (set(), set())
    assert worker.engine_store.counters.blocks_stored == 5


def test_last_stores_count_although_vllm_submits_them_after_asking_for_results(worker: WorkerHalf, store: FakeStore) -> None:
    metadata = TuttiConnectorMetadata(stores=[transfer("a")], finishing=["a"])
    assert worker.finished(metadata) == (set(), set())
    worker.start_stores(metadata)
    assert step(worker) == (set(), set())
    store.stores[0].end()
    assert step(worker) == ({"a"}, set())


def test_idle_step_submits_stores_though_vllm_does_not_ask(worker: WorkerHalf, store: FakeStore) -> None:
    metadata = TuttiConnectorMetadata(stores=[transfer("a")], finishing=["a"], idle=True)
    assert worker.finished(metadata) == (set(), set())
    assert len(store.stores) == 1


def test_preempted_requests_stores_end_before_their_blocks_are_used_again(worker: WorkerHalf, store: FakeStore) -> None:
    step(worker, TuttiConnectorMetadata(stores=[transfer("a")]))
    step(worker, TuttiConnectorMetadata(stores=[transfer("b", 3, 5)]))
    worker.end_stores_of(["a"])
    assert store.stores[0].cancelled and store.stores[0].drained()
    assert not store.stores[1].cancelled
    assert worker.stores_running == 1
    assert worker.engine_store.counters.blocks_store_failed == 3


def test_blocks_that_another_request_is_storing_are_left_out(worker: WorkerHalf, store: FakeStore) -> None:
    step(worker, TuttiConnectorMetadata(stores=[transfer("a", 0, 3), transfer("b", 0, 5), transfer("c", 1, 3)]))
    assert [(operation.keys, operation.parent) for operation in store.stores] == [
        (KEYS[0:3], None),
        (KEYS[3:5], KEYS[2]),
    ]
    store.stores[0].end()
    step(worker, TuttiConnectorMetadata(stores=[transfer("d", 0, 3)]))
    assert store.stores[-1].keys == KEYS[0:3]


def test_store_that_raises_is_counted_and_keeps_nothing_back(worker: WorkerHalf, store: FakeStore) -> None:
    store.broken = True
    assert step(worker, TuttiConnectorMetadata(stores=[transfer("a")], finishing=["a"])) == ({"a"}, set())
    assert worker.engine_store.counters.blocks_store_failed == 3


def test_shutdown_returns_when_no_operation_touches_memory(worker: WorkerHalf, store: FakeStore) -> None:
    step(worker, TuttiConnectorMetadata(loads=[transfer("a")], stores=[transfer("b", 3, 5)]))
    store.stores[0].end()
    worker.shutdown()
    assert store.retrieves[0].cancelled and store.retrieves[0].drained()
    assert worker.stores_running == 0
