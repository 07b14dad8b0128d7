"""
Native core of tutti_mooncake: layout, rings, executors, index. Private: the package's modules are the interface.
"""

from collections.abc import Sequence
import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray


class Status(enum.IntEnum):
    OK = 0

    NOT_FOUND = 1

    REJECTED = 2

    EXISTS = 3

    RETRY = 4

    DEVICE_ERROR = 5

    SHORT_IO = 6

    NO_SPACE = 7

    CHECKSUM_ERROR = 8

    STALE = 9

    TIMEOUT = 10

    CANCELLED = 11

    BAD_STATE = 12

CHECKSUM_MULTILINEAR64: int = 1

def checksum_variant() -> str:
    """Vector instructions that the checksum uses on this machine."""

def multilinear64(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """Checksum of a byte array (docs/format.md)."""

def multilinear64_rows(rows: Annotated[NDArray[numpy.uint8], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
    """Checksum of each row of a byte array of two dimensions."""

def multilinear64_scalar(data: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """The same value from plain C++: the reference of the tests."""

def probe_uring() -> str:
    """Empty when io_uring can be used in this process, else why not."""

def direct_io_alignment(fd: int) -> tuple:
    """
    (memory, offset) alignment in bytes that direct I/O on an open file wants; (0, 0) = the kernel doesn't say.
    """

class SlotTable:
    """
    Durable index: a record and the object checksums per slot (docs/format.md).
    """

    def __init__(self, fd: int, records_offset: int, sums_offset: int, slots: int, sums_per_slot: int, pool: int) -> None: ...

    def scan(self, table: BlockTable) -> dict:
        """
        Loads every valid record into `table`; returns counts by kind of record.
        """

    def write_sums(self, plan: Plan, positions: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], first_sum: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        Writes the checksums of blocks of a finished write plan; one status per position.
        """

    def commit(self, table: BlockTable, slots: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], created: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """
        Writes the records of blocks whose bytes and checksums are on the device; one status per slot.
        """

    def write(self, table: BlockTable, slots: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], resident: bool) -> int:
        """
        Rewrites records, as resident or as free; the first status that isn't OK.
        """

    def save_recency(self, table: BlockTable) -> int:
        """
        Brings the records' last use up to date; the first status that isn't OK.
        """

class BlockTable:
    """Index in memory: keys, slots, prefix trees, eviction. Thread-safe."""

    def __init__(self, slots: int, devices: int) -> None: ...

    def find_prefix(self, keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, 32), order='C', device='cpu', writable=False)], now: int, touch: bool) -> int: ...

    def resolve(self, keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, 32), order='C', device='cpu', writable=False)], now: int) -> tuple:
        """(status, slot, generation, rot), an array each."""

    def reserve(self, keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, 32), order='C', device='cpu', writable=False)], parent: Annotated[NDArray[numpy.uint8], dict(shape=(None, 32), order='C', device='cpu', writable=False)] | None, expiry: int, now: int) -> tuple:
        """((status, slot, generation, rot), removed slots)."""

    def publish(self, slots: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]: ...

    def abort(self, slots: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...

    def evict(self, count: int) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...

    def remove(self, keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, 32), order='C', device='cpu', writable=False)], generations: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...

    def sweep_expired(self, count: int, now: int) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...

    def clear(self) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...

    def release(self, slots: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def keys(self, slots: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint8], dict(shape=(None, 32))]:
        """Keys of slots in use, or removed and not yet given out again."""

    def lineage(self, slots: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple[Annotated[NDArray[numpy.uint64], dict(shape=(None,))], Annotated[NDArray[numpy.uint32], dict(shape=(None,))]]:
        """
        Of slots in use: the first 8 bytes of the parent's key (0 at a root), and the position in its chain.
        """

    def pin_prefix(self, keys: Annotated[NDArray[numpy.uint8], dict(shape=(None, 32), order='C', device='cpu', writable=False)], now: int) -> tuple[int, int, int]:
        """(slot, generation, blocks); slot 2**32-1 = nothing resident."""

    def pin(self, slot: int) -> None: ...

    def unpin(self, slot: int, generation: int) -> bool: ...

    def finish_load(self, now: int) -> tuple:
        """(dropped slots, orphans, expired)."""

    def resident_slots(self, first: int, limit: int) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]: ...

    def records(self, slot_table: SlotTable, slots: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> dict:
        """Fields of resident blocks, an array each."""

    def counts(self) -> dict: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def slots(self) -> int: ...

class HolderIndex:
    """
    Which incarnations of nodes hold which blocks, in bounded memory. Not thread-safe.
    """

    def __init__(self, most_bytes: int) -> None: ...

    def set_alive(self, incarnation: int, alive: bool) -> None: ...

    def spans_of(self, incarnation: int) -> int: ...

    def put(self, incarnation: int, number: int, namespace_id: bytes, start: int, parent: int, hashes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """In the place of a span of that name."""

    def remove(self, incarnation: int, number: int) -> bool:
        """Whether it was there."""

    def begin_snapshot(self) -> None: ...

    def sweep(self, first: int, count: int) -> bool:
        """
        Removes what wasn't put since begin_snapshot, of `count` places; whether there are more behind them.
        """

    def holders(self, namespace_id: bytes, hashes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> tuple:
        """
        Incarnations that are alive and hold hashes[0], and how many from there on, an array each.
        """

    def spans(self, first: int, count: int) -> list:
        """
        (incarnation, number, blocks, namespace, start, parent, hashes that are kept) of the spans at `count` places.
        """

    @property
    def places(self) -> int: ...

    def counts(self) -> dict: ...

    @property
    def used_bytes(self) -> int:
        """What the bound is for."""

    @property
    def memory_bytes(self) -> int:
        """What is allocated."""

class Layout:
    """Where every object lies (tensor stripe)."""

    def __init__(self, objects: int, kv_factor: int, world: int, rank: int, payload_bytes: int, object_bytes: int, slots: int, data_offset: Sequence[int]) -> None: ...

    def address(self, slot: int, rot: int, object: int) -> tuple[int, int]:
        """(device, byte offset) of an object."""

    @property
    def objects_per_device(self) -> int: ...

class FaultInjector:
    """Makes chosen operations fail; for tests."""

    def __init__(self) -> None: ...

    def add(self, write: bool, kind: str, every: int = 1, device: int = -1, error: int = 5, limit: int = 18446744073709551615, seed: int = 1) -> None: ...

    def clear(self) -> None: ...

    def release(self) -> None: ...

    @property
    def injected(self) -> int: ...

class Plan:
    """A running or finished store or retrieve."""

    def done(self) -> bool: ...

    def drained(self) -> bool: ...

    def layer_done(self, layer: int) -> bool: ...

    def wait(self, seconds: float) -> bool: ...

    def wait_layer(self, layer: int, seconds: float) -> bool: ...

    def wait_drained(self, seconds: float) -> bool: ...

    def cancel(self) -> None: ...

    def statuses(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]: ...

    def sums(self) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
        """
        Of a drained plan: the checksum of every object, block by block. One entry per block and object.
        """

    @property
    def seconds(self) -> float: ...

    @property
    def blocks(self) -> int: ...

    @property
    def layers(self) -> int: ...

class Executor:
    """Moves bytes between devices and the engine's tensors."""

    def start(self, bases: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], strides: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], blocks: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], groups: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def submit(self, write: bool, slots: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], generations: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], rots: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], blocks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], deadline_seconds: float, stream: int = 18446744073709551615) -> Plan: ...

    def stop(self, grace_seconds: float) -> None: ...

    @property
    def started(self) -> bool: ...

    @property
    def note(self) -> str: ...

    def stats(self) -> dict: ...

class LaneExecutor(Executor):
    """Threads that move bytes of host tensors."""

    def __init__(self, layout: Layout, devices: Sequence[tuple[int, int, int]], kind: str, lanes: int, queue_depth: int, register_buffers: bool, table: SlotTable, faults: FaultInjector | None) -> None: ...

class GioExecutor(Executor):
    """The I/O kernel, on a GPU or on threads."""

    def __init__(self, layout: Layout, devices: Sequence[tuple[int, int, int]], gpu: int, stream: int, model: bool, prp: bool, uring: bool, threads: int, queue_depth: int, pinned_bytes: int, blocks: int, issuers: int, movers: int, lanes: int, iocbs: int, table: SlotTable, faults: FaultInjector | None) -> None:
        """
        gpu: its index, or -1 = threads. stream: CUstream of the I/O domain, 0 = one of its own. blocks: thread blocks of the I/O kernel, each with issuers + movers warps. lanes: commands in flight per issuing warp. iocbs: depth of the ring.
        """

    @property
    def pinned_bytes(self) -> int: ...

def probe_cuda() -> str:
    """Empty when a CUDA device can be used, else why not."""

def raw_transfer(fds: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], addresses: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], bytes: int, write: bool, threads: int, depth: int, memory: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """
    (wall, processor) seconds that plain io_uring takes for these ranges: the benchmarks' baseline.
    """

def find_cufile(library: str) -> tuple[str, str]:
    """
    (why cuFile can't be loaded or an empty text, its version or an empty text).
    """

def try_cufile(library: str, cuda_library: str, fds: Sequence[int]) -> tuple[str, list[str]]:
    """
    Opens cuFile's driver and registers files: (the driver's error, one error per file), empty texts where it worked. For a process of its own.
    """

class SmPartition:
    """Two parts of one GPU's SMs, or the reason why there are none."""

    def __init__(self, device: int, io_sms: int, library: str) -> None: ...

    def close(self) -> str:
        """
        Waits for the streams' work and gives everything back; what went wrong, or an empty text.
        """

    @property
    def kind(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def io_sms(self) -> int: ...

    @property
    def compute_sms(self) -> int: ...

    @property
    def device_sms(self) -> int: ...

    @property
    def io_stream(self) -> int:
        """CUstream as a number; 0 = none."""

    @property
    def compute_stream(self) -> int:
        """CUstream as a number; 0 = none."""
