"""The local store: one pool, its index and its mover, as one object inside the engine's process.

Order of a store: room is made (records of evicted blocks are freed on the device first) -> slots are reserved -> bytes and checksums
go out -> [fdatasync] -> record -> [fdatasync] -> the block can be found. Order of a removal: it can't be found any more -> its record is
free on the device -> no running retrieve is older than the removal -> the slot may be reused.
Invariants: a retrieve pins its deepest block, so eviction never takes what is being read; bytes are checked against the checksums of the
slot's own record of the same generation; operations never raise for I/O errors, they end with statuses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tutti_mooncake import _native
from tutti_mooncake.config import StoreConfig, check_seconds
from tutti_mooncake.errors import ConfigError, PoolReadOnly, Status, TensorError
from tutti_mooncake.geometry import Geometry
from tutti_mooncake.io.executor import Mover
from tutti_mooncake.keys import BlockIds, KeyArray, Keys, as_block_ids, as_key_array, check_distinct, salt_mask
from tutti_mooncake.store.admission import WriteBudget, make_admission
from tutti_mooncake.store.announcements import Announcements, StoredBlocks
from tutti_mooncake.store.committer import Committer
from tutti_mooncake.store.counters import Counters, Publisher
from tutti_mooncake.store.endings import Endings
from tutti_mooncake.store.history import History, Removal
from tutti_mooncake.store.leases import Leases
from tutti_mooncake.store.lifetime import Lifetime, track
from tutti_mooncake.store.listing import list_blocks
from tutti_mooncake.store.moves import MoverLike
from tutti_mooncake.store.operations import RetrieveOperation, StoreOperation
from tutti_mooncake.store.pool import Pool, Progress
from tutti_mooncake.store.rank_mover import mover_of
from tutti_mooncake.store.reader import StoreReader
from tutti_mooncake.store.recovery import recover
from tutti_mooncake.store.reports import BlockInfo, Pin, RecoveryReport, VerifyReport
from tutti_mooncake.store.request_log import RequestLog
from tutti_mooncake.store.retire import Retirement
from tutti_mooncake.store.room import SWEEP_SLOTS, Room
from tutti_mooncake.store.verify import verify_blocks

if TYPE_CHECKING:
    import torch

Slots = npt.NDArray[np.uint32]
_STOP_GRACE_SECONDS = 10.0


class LocalStore:
    """See docs/api.md. All methods are thread-safe; those that wait release the GIL."""

    def __init__(
        self,
        pool: Pool,
        table: _native.BlockTable,
        config: StoreConfig,
        recovery: RecoveryReport,
        *,
        faults: _native.FaultInjector | None,
        clock: Callable[[], float],
        mover: MoverLike | None,
    ) -> None:
        self.config = config
        self.geometry = pool.geometry
        self.recovery = recovery
        self._pool = pool
        self._table = table
        self._clock = clock
        self._mask = salt_mask(config.tenant_salt)
        self._faults = faults
        self._mover: MoverLike = mover or mover_of(pool, config, faults)
        self._readers: list[MoverLike] = []
        self._admission = make_admission(config.admission)
        state = pool.read_state()
        self.memory: dict[str, Any] = dict(state.get("memory", {}))
        """Small facts (JSON, 2 KiB in all) that outlive the process: written when the store is closed."""
        self._budget = WriteBudget(config.write_budget, clock(), state.get("budget_level"), state.get("budget_time"))
        self.history = History.read(pool.devices[0].buffered_fd, clock)
        self.requests = RequestLog.read(pool.devices[0].buffered_fd)
        self._retirement = Retirement(table, self._free_records, self.history)
        self._announcements = Announcements(table, self.history)
        self._counters = Counters()
        self._room = Room(table, self._retirement, self._counters, config.ttl_seconds)
        self._leases = Leases(table, clock)
        self._lock = threading.RLock()  # order of reservations, evictions and removals
        self._life = Lifetime(self._lock)
        self._publisher = Publisher(self._published, self._leave_on_pool)
        self._committer = Committer(None if config.read_only else self._tick)
        if not config.read_only:
            self._write_state(clean=False)
        self._endings = Endings(
            table,
            pool,
            self._mover,
            self._committer,
            self._retirement,
            self._announcements,
            self._counters,
            self._lock,
            self._now,
            flush=config.durability == "flush",
        )
        self._committer.start()
        track(self)

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        geometry: Geometry,
        *,
        rank: int = 0,
        create: bool = True,
        progress: Progress | None = None,
        faults: _native.FaultInjector | None = None,
        clock: Callable[[], float] = time.time,
        mover: MoverLike | None = None,
        user: str = "",
    ) -> LocalStore:
        """Opens the pool, or allocates it when it isn't there and `create`; recovers what is on it.

        `progress(done_bytes, total_bytes)` follows a prewrite. `faults` and `clock` are the seams that tests use. `mover`: who moves the
        bytes in place of this process (`RankedMover`), whose ranks have opened the pool as `user`; nothing is registered here then.
        Raises ConfigError, NamespaceMismatch, PoolLocked, PoolCorrupt, PoolMissing, FormatVersionError, DeviceFull, DeviceUnavailable.
        """
        if not isinstance(config, StoreConfig) or not isinstance(geometry, Geometry):
            raise ConfigError(f"open takes a StoreConfig and a Geometry, not {type(config).__name__} and {type(geometry).__name__}")
        pool = Pool.open(config, geometry, rank=rank, create=create, progress=progress, user=user)
        try:
            table, report = recover(pool, int(clock()), read_only=config.read_only)
            return cls(pool, table, config, report, faults=faults, clock=clock, mover=mover)
        except BaseException:
            pool.close()
            raise

    # --- tensors ---

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Takes the engine's KV tensors, one per object index; keeps a reference until close(). Raises TensorError."""
        self._life.check_open()
        if not isinstance(self._mover, Mover):
            raise TensorError("other processes move this store's bytes; each registers its own tensors")
        self._mover.register(tensors, self.geometry)

    @property
    def executor(self) -> str:
        """What moves the bytes: "uring", "posix", "uring-gpu"; as configured before register()."""
        return self._mover.executor

    @property
    def executor_reason(self) -> str:
        """Why it was chosen, for people."""
        return self._mover.executor_reason

    # --- lookups ---

    def lookup(self, keys: Keys) -> int:
        """Number of leading keys that are resident; makes them recently used."""
        self._life.check_open()
        array = as_key_array(keys, self._mask)
        hits = int(self._table.find_prefix(array, self._now(), True))
        self._counters.add(lookups=1, lookup_blocks=len(array), lookup_hit_blocks=hits)
        return hits

    def pin(self, keys: Keys, lease_seconds: float) -> Pin:
        """Protects the leading resident blocks from eviction for at most `lease_seconds`. `Pin.blocks` may be 0."""
        self._life.check_open()
        check_seconds("lease_seconds", lease_seconds, positive=True)
        array = as_key_array(keys, self._mask)
        with self._lock:
            self._leases.expire()
            return self._leases.pin(array, self._now(), lease_seconds)

    def unpin(self, pin: Pin) -> None:
        """Ends a pin; one that has expired or was ended before is ignored."""
        with self._lock:
            self._leases.end(pin)

    # --- moving blocks ---

    def store(
        self,
        keys: Keys,
        block_ids: BlockIds,
        *,
        parent: bytes | None = None,
        deadline_seconds: float | None = None,
        admit: bool = False,
    ) -> StoreOperation:
        """Starts to store consecutive blocks of one chain below `parent` (None = root).

        `block_ids`: one per key; where layers follow several block tables (groups), a row of them per group. `admit`: past the admission
        policy, not past the write budget.
        The blocks' memory must not change until the operation is done and drained. Raises KeyFormatError, TensorError, StoreClosed;
        everything else is a status.
        """
        self._life.check_open()
        array = as_key_array(keys, self._mask)
        blocks = as_block_ids(block_ids, len(array), self._blocks(self._mover), self._mover.groups)
        deadline = self.config.write_deadline_seconds if deadline_seconds is None else deadline_seconds
        check_seconds("deadline_seconds", deadline)
        parent_key = None if parent is None else as_key_array([parent], self._mask)
        statuses = np.full(len(array), Status.REJECTED, dtype=np.uint8)
        self._counters.add(store_offered_blocks=len(array))
        if self.config.read_only or len(array) == 0:
            return self._without_io(statuses)
        with self._lock:
            self._life.check_open()
            admitted = self._admitted(array, admit)
            chain = array[:admitted]
            if not admitted:
                return self._without_io(statuses)
            reserved, slots, generations, rots = self._room.reserve(chain, parent_key, self._now())
            statuses[:admitted] = reserved
            positions = np.flatnonzero(reserved == Status.OK).astype(np.uint32)
            self._budget.give_back((admitted - len(positions)) * self._slot_payload())
            if not len(positions):
                return self._without_io(statuses)
            plan = self._mover.submit(
                write=True,
                slots=slots[positions],
                generations=generations[positions],
                rots=rots[positions],
                blocks=blocks[:, positions],
                deadline_seconds=deadline,
            )
            operation = StoreOperation(statuses, positions, plan, self._slot_payload(), self._endings.store_ended)
            operation.keys, operation.slots = chain[positions], slots[positions]
            above = chain[positions[0] - 1] if positions[0] else None if parent_key is None else parent_key[0]
            operation.parent = None if above is None else self._committer.writer_of(above)
            operation.deadline = time.monotonic() + deadline
            self._committer.add_store(operation)  # under the lock: close() ends what was put before it, and nothing comes after
        return operation

    def retrieve(self, keys: Keys, block_ids: BlockIds, *, deadline_seconds: float | None = None) -> RetrieveOperation:
        """Starts to load consecutive blocks of one chain into engine blocks `block_ids`, in which NO_BLOCK leaves a group's layers out.

        The blocks' memory belongs to the store until the operation is done and drained. Errors as in store().
        """
        return self._retrieve(self._mover, keys, block_ids, deadline_seconds)

    def reader(self, tensors: Sequence[torch.Tensor]) -> StoreReader:
        """Retrieves into other tensors than the registered ones, of the same geometry, until the store is closed. Raises StoreClosed, and
        what register() raises; ConfigError for a store of several ranks.
        """
        if self.geometry.tp_size > 1:
            raise ConfigError("a reader of a store of several ranks would read one rank's part of each block")
        mover = mover_of(self._pool, self.config, self._faults)
        mover.register(tensors, self.geometry)
        with self._lock:
            self._life.check_open()
            self._readers.append(mover)

        def close() -> None:
            mover.stop(_STOP_GRACE_SECONDS)
            with self._lock:
                if mover in self._readers:
                    self._readers.remove(mover)

        return StoreReader(lambda keys, block_ids, deadline: self._retrieve(mover, keys, block_ids, deadline), close)

    def _retrieve(self, mover: MoverLike, keys: Keys, block_ids: BlockIds, deadline_seconds: float | None) -> RetrieveOperation:
        self._life.check_open()
        array = as_key_array(keys, self._mask)
        blocks = as_block_ids(block_ids, len(array), self._blocks(mover), mover.groups, holes=True)
        deadline = self.config.read_deadline_seconds if deadline_seconds is None else deadline_seconds
        check_seconds("deadline_seconds", deadline)
        check_distinct(blocks, mover.blocks)
        with self._lock:
            self._life.check_open()
            statuses, slots, generations, rots = self._table.resolve(array, self._now())
            positions = np.flatnonzero(statuses == Status.OK).astype(np.uint32)
            if not len(positions):
                self._counters.add_statuses("retrieve", statuses)
                return RetrieveOperation(statuses, positions, None, 0, self._endings.retrieve_ended)
            if len(positions) != len(array):  # else spare the copies
                array, blocks = array[positions], blocks[:, positions]
                slots, generations, rots = slots[positions], generations[positions], rots[positions]
            self._table.pin(int(slots[-1]))
            ticket = self._retirement.reader_begins()
            plan = mover.submit(
                write=False,
                slots=slots,
                generations=generations,
                rots=rots,
                blocks=blocks,
                deadline_seconds=deadline,
            )
            operation = RetrieveOperation(statuses, positions, plan, self._slot_payload(), self._endings.retrieve_ended)
            operation.keys, operation.slots, operation.generations = array, slots, generations
            operation.ticket = ticket
            self._committer.add_retrieve(operation)
        return operation

    # --- removing blocks ---

    def evict(self, blocks: int) -> int:
        """Removes up to `blocks` unpinned blocks, oldest leaves first. Returns how many."""
        if not isinstance(blocks, int) or blocks < 0:
            raise ConfigError(f"blocks must be a number of blocks, not {blocks!r}")
        with self._lock:
            self._check_writable()
            return self._room.evict(min(blocks, self._table.slots))

    def drop(self, keys: Keys) -> int:
        """Removes these blocks with all their descendants. Returns how many went."""
        array = as_key_array(keys, self._mask)
        with self._lock:
            self._check_writable()
            removed = self._table.remove(array, np.zeros(len(array), dtype=np.uint32))
            self._retirement.retire(removed, Removal.DROPPED)
        self._counters.add(dropped_blocks=len(removed))
        return len(removed)

    def clear(self) -> int:
        """Removes every block. Returns how many went."""
        with self._lock:
            self._check_writable()
            removed = self._table.clear()
            self._retirement.retire(removed, Removal.CLEARED)
        self._counters.add(cleared_blocks=len(removed))
        return len(removed)

    def verify(self, progress: Progress | None = None) -> VerifyReport:
        """Reads every resident block, checks it, and drops what fails. `progress(done_blocks, total_blocks)`.

        close() waits for it to leave; it then raises StoreClosed after the blocks at hand.
        """
        with self._life.using():
            return verify_blocks(self._pool, self._table, progress, self._endings.drop_failed, self._life.check_open)

    # --- views ---

    def entries(self, limit: int | None = None) -> Iterator[BlockInfo]:
        """Resident blocks in slot order; a view that may be out of date as soon as it is given out. Keys are salted ones."""
        return list_blocks(self._pool, self._table, limit, self._life.using)

    def listen(self, stored: Callable[[StoredBlocks], None], removed: Callable[[KeyArray], None]) -> Callable[[], None]:
        """Tells of the blocks there are and of those that come, and of the salted keys of those that go, under the store's lock: neither
        may wait, or call the store. Raises StoreClosed. The result ends it.
        """
        with self._lock:
            self._life.check_open()
            if not self.config.read_only:
                self._room.sweep(self._table.slots, self._now())
            self._announcements.listen(stored, removed)

        def end() -> None:
            with self._lock:
                self._announcements.unlisten(stored, removed)

        return end

    def stats(self) -> dict[str, Any]:
        """Counters and gauges; sizes in bytes."""
        if self._life.abandoned:
            self._life.check_open()
        with self._lock:
            self._leases.expire()
            counts = self._table.counts()
        return {
            **{f"{name}_blocks": value for name, value in counts.items()},
            "slots": self._table.slots,
            "block_bytes": self._slot_payload(),
            "pool_bytes": self._pool.physical_bytes(),
            "capacity_bytes": int(self._pool.superblock["capacity"]),
            "index_memory_bytes": self._table.memory_bytes,
            "pins": len(self._leases),
            "executor": self.executor,
            **self._counters.values(),
            **self._mover.stats(),
        }

    def close(self) -> None:
        """Lets running operations end (at most 10 s), writes recency and the clean mark, and gives the pool back. Any number of times."""
        with self._life.closing() as mine:
            if mine:
                self._give_back()

    def abandon(self) -> None:
        """For a forked child: gives up the inherited descriptors, and with them the hold on the parent's lock."""
        self._lock = threading.RLock()
        self._life.abandon(self._lock)
        self._endings.lock = self._lock
        self._pool.close()

    def __enter__(self) -> LocalStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def salted(self, keys: Keys) -> KeyArray:
        """The keys under which the blocks of these hashes are stored; and the hashes behind stored keys: it is its own inverse."""
        return as_key_array(keys, self._mask)

    # --- inner parts ---

    def _now(self) -> int:
        return int(self._clock())

    def _slot_payload(self) -> int:
        return self.geometry.payload_bytes_per_block

    def _give_back(self) -> None:
        try:
            for mover in (self._mover, *self._readers):
                mover.stop(_STOP_GRACE_SECONDS)
            self._committer.stop()
            if not self.config.read_only:
                self._pool.slot_table.save_recency(self._table)
                if self.config.durability == "flush":
                    self._pool.flush_records()
                self._publisher.tick(now=True)
                self._write_state(clean=True)
        finally:
            self._pool.close()

    def _check_writable(self) -> None:
        self._life.check_open()
        if self.config.read_only:
            raise PoolReadOnly("the store was opened read-only")

    def _blocks(self, mover: MoverLike) -> int:
        if not mover.registered:
            self._life.check_open()
            raise TensorError("no KV tensors are registered; call register() first")
        return mover.blocks

    def _without_io(self, statuses: npt.NDArray[np.uint8]) -> StoreOperation:
        """A store whose blocks are all decided."""
        self._counters.add_statuses("store", statuses)
        return StoreOperation(statuses, np.empty(0, dtype=np.uint32), None, 0, self._endings.store_ended)

    def _tick(self) -> None:
        self._publisher.tick()
        if self.config.ttl_seconds and self._announcements.heard:  # others are told of what expires also while nothing is stored
            with self._lock:
                self._room.sweep(SWEEP_SLOTS, self._now())

    def _published(self) -> dict[str, int]:
        """Everything that was counted, for other processes."""
        return {
            **self._counters.values(),
            **self._mover.counters(),
            "removed_blocks": self.history.total,
            "noted_requests": self.requests.total,
        }

    def _leave_on_pool(self, counters: dict[str, int]) -> None:
        descriptor = self._pool.devices[0].buffered_fd
        self._pool.write_counters(counters)
        self.history.write(descriptor)
        self.requests.write(descriptor)

    def _write_state(self, *, clean: bool) -> None:
        self._pool.write_state(clean=clean, budget_level=self._budget.level, budget_time=self._clock(), memory=self.memory)

    def _admitted(self, keys: npt.NDArray[np.uint8], whatever: bool) -> int:
        """How many leading keys may be stored; by the budget alone, if `whatever`."""
        flags = self._admission.admit(keys)
        resident, _, _, _ = self._table.resolve(keys, self._now())
        refused = np.flatnonzero((resident != Status.OK) & ~flags & (not whatever))
        admitted = int(refused[0]) if len(refused) else len(keys)
        granted = self._budget.take(self._slot_payload(), admitted, self._clock())
        self._counters.add(store_over_budget_blocks=admitted - granted)
        return granted

    def _free_records(self, slots: Slots) -> bool:
        """Marks slots as free on the device. False: the device refused, and the slots must not be used again before a restart."""
        if self.config.read_only:
            return True
        status = Status(self._pool.slot_table.write(self._table, slots, False))
        if status == Status.OK and self.config.durability == "flush":
            status = self._pool.flush_records()
        if status != Status.OK:
            self._counters.add(record_errors=1, lost_slots=len(slots))
        return status == Status.OK
