"""One store, two ranks that move its bytes: what is published, what a rank's failure does, and who may own the pool meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

from tests.conftest import Stores
from tests.pattern import PatternTensors, chain, device_of, geometry
from tutti_mooncake import LocalStore, PoolLocked, RetrieveOperation, Status, StoreOperation, TensorError, _native
from tutti_mooncake.store.moves import MoveReport, RankedMover, RankedPlan
from tutti_mooncake.store.pool import remove_pool
from tutti_mooncake.store.rank_mover import RankMover

BLOCKS = 32
AnyOperation = TypeVar("AnyOperation", StoreOperation, RetrieveOperation)
SHAPE = replace(geometry(), tp_size=2, kv_heads=geometry().kv_heads * 2)


class Ranks:
    """An owner and its two ranks in one process; each rank has tensors of its own."""

    def __init__(self, stores: Stores) -> None:
        self.faults = [_native.FaultInjector(), _native.FaultInjector()]
        self.tensors = [PatternTensors(SHAPE, BLOCKS, rank=rank, device=device_of(stores.executor)) for rank in range(2)]
        self.mover = RankedMover(2, SHAPE.layers, BLOCKS, reports_by_itself=True)
        config = stores.config()
        self.ranks = [
            RankMover(config, SHAPE, self.tensors[rank].tensors, self._take, rank=rank, user="engine", faults=self.faults[rank])
            for rank in range(2)
        ]
        self.store = LocalStore.open(config, SHAPE, create=False, mover=self.mover, user="engine")

    def _take(self, report: MoveReport) -> None:
        self.mover.take([report])

    def begin(self, operation: AnyOperation, ranks: tuple[int, ...] = (0, 1)) -> AnyOperation:
        """Hands an operation's move to the ranks."""
        assert isinstance(operation.plan, RankedPlan)
        for rank in ranks:
            self.ranks[rank].begin(operation.plan.move)
        return operation

    def close(self) -> None:
        """In the order of an engine's end."""
        for rank in self.ranks:
            rank.close()
        self.store.close()


@pytest.fixture
def ranks(stores: Stores) -> Iterator[Ranks]:
    both = Ranks(stores)
    yield both
    both.close()


def test_each_rank_gets_its_own_bytes_back_after_a_restart(stores: Stores) -> None:
    ranks = Ranks(stores)
    keys = chain(1, 8)
    for tensors in ranks.tensors:
        tensors.write(keys)
    assert set(ranks.begin(ranks.store.store(keys, range(8))).wait(20).statuses) == {Status.OK}
    ranks.close()
    ranks = Ranks(stores)
    assert ranks.store.recovery.recovered_blocks == 8 and ranks.store.lookup(keys) == 8
    result = ranks.begin(ranks.store.retrieve(keys, range(16, 24))).wait(20)
    assert set(result.statuses) == {Status.OK} and result.bytes == 8 * SHAPE.payload_bytes_per_block
    for tensors in ranks.tensors:
        assert all(tensors.holds(key, 16 + i) for i, key in enumerate(keys))
    assert ranks.store.stats()["bytes_read"] == result.bytes
    ranks.close()


def test_a_block_is_published_when_the_last_rank_has_written_it(ranks: Ranks) -> None:
    keys = chain(1, 4)
    for tensors in ranks.tensors:
        tensors.write(keys)
    operation = ranks.begin(ranks.store.store(keys, range(4)), (0,))
    with pytest.raises(TimeoutError):
        operation.wait(0.2)
    assert ranks.store.lookup(keys) == 0
    ranks.begin(operation, (1,))
    assert set(operation.wait(20).statuses) == {Status.OK} and ranks.store.lookup(keys) == 4


@pytest.mark.parametrize("failing", [0, 1])
def test_one_ranks_failed_write_is_never_found(ranks: Ranks, failing: int) -> None:
    keys = chain(1, 4)
    for tensors in ranks.tensors:
        tensors.write(keys)
    ranks.faults[failing].add(True, "error", limit=1)
    statuses = ranks.begin(ranks.store.store(keys, range(4))).wait(20).statuses
    assert Status.DEVICE_ERROR in statuses
    assert ranks.store.lookup(keys) == list(statuses).index(Status.DEVICE_ERROR)
    stats = ranks.store.stats()
    assert stats["writing_blocks"] == 0 and stats["free_blocks"] + stats["resident_blocks"] == stats["slots"]


@pytest.mark.parametrize("failing", [0, 1])
def test_one_ranks_damaged_read_fails_and_drops_the_block(ranks: Ranks, failing: int) -> None:
    keys = chain(1, 4)
    for tensors in ranks.tensors:
        tensors.write(keys)
    ranks.begin(ranks.store.store(keys, range(4))).wait(20)
    ranks.faults[failing].add(False, "corrupt", limit=1)
    statuses = ranks.begin(ranks.store.retrieve(keys, range(16, 20))).wait(20).statuses
    bad = np.flatnonzero(statuses == Status.CHECKSUM_ERROR)
    assert len(bad) == 1
    assert ranks.store.lookup(keys) == bad[0]


def test_nobody_else_owns_the_pool_while_ranks_have_it_open(stores: Stores, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti_mooncake.store.pool._RANKS_WAIT_SECONDS", 0.1)
    ranks.store.close()
    with pytest.raises(PoolLocked, match="worker processes of another engine"):
        LocalStore.open(stores.config(), SHAPE)
    LocalStore.open(stores.config(), SHAPE, user="engine").close()
    for rank in ranks.ranks:
        rank.close()
    LocalStore.open(stores.config(), SHAPE).close()


def test_a_store_whose_bytes_others_move_takes_no_tensors(ranks: Ranks) -> None:
    with pytest.raises(TensorError, match="each registers its own"):
        ranks.store.register(ranks.tensors[0].tensors)


def test_what_ranks_do_not_report_ends_with_the_store(stores: Stores) -> None:
    ranks = Ranks(stores)
    ranks.mover.reports_by_itself = False
    operation = ranks.store.store(chain(1, 4), range(4))
    ranks.store.close()
    assert set(operation.wait(1).statuses) == {Status.CANCELLED}
    ranks.close()


def test_closed_rank_reports_what_it_cannot_begin(ranks: Ranks) -> None:
    ranks.ranks[1].close()
    statuses = ranks.begin(ranks.store.store(chain(1, 2), range(2))).wait(20).statuses
    assert set(statuses) == {Status.BAD_STATE}


def test_close_takes_in_what_ranks_report_meanwhile(stores: Stores) -> None:
    ranks = Ranks(stores)
    keys = chain(1, 4)
    for tensors in ranks.tensors:
        tensors.write(keys)
    operation = ranks.store.store(keys, range(4))
    closing = threading.Thread(target=ranks.store.close)
    closing.start()
    while not ranks.store._life.closed:  # the ranks begin only now
        closing.join(0.001)
    begin = time.monotonic()
    ranks.begin(operation)
    closing.join(20)
    assert not closing.is_alive() and time.monotonic() - begin < 5
    assert set(operation.wait(1).statuses) == {Status.OK}
    ranks.close()
    ranks = Ranks(stores)
    assert ranks.store.recovery.recovered_blocks == 4
    ranks.close()


def test_a_second_or_foreign_report_changes_nothing(ranks: Ranks) -> None:
    operation = ranks.store.store(chain(1, 2), range(2))
    assert isinstance(operation.plan, RankedPlan)
    bad, good = (np.full(2, status, dtype=np.uint8) for status in (Status.DEVICE_ERROR, Status.OK))
    move = operation.plan.move.id
    ranks.mover.take([MoveReport(move, 0, bad, 0.1, {}), MoveReport(move, 0, good, 0.1, {})])
    ranks.mover.take(
        [MoveReport(move, 7, good, 0.1, {"bytes_read": 5}), MoveReport(move, 1, good[:1], 0.1, {}), MoveReport(99, 1, good, 0.1, {})]
    )
    assert not operation.done()
    ranks.mover.take([MoveReport(move, 1, good, 0.1, {})])
    assert set(operation.wait(20).statuses) == {Status.DEVICE_ERROR}


def test_pool_is_not_removed_under_ranks(stores: Stores, ranks: Ranks) -> None:
    ranks.store.close()
    with pytest.raises(PoolLocked, match="worker processes"):
        remove_pool(stores.config())
