"""The pool: fixed space on every device, allocated once, cut into slots.

Invariants: the pool's physical bytes never exceed its capacity; a pool holds one namespace; one process owns it (read-only openers
beside it own nothing); superblocks are written last, so that an interrupted creation leaves a file without one, which is made anew.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tutti_mooncake import _native
from tutti_mooncake.config import StoreConfig
from tutti_mooncake.errors import (
    ConfigError,
    DeviceFull,
    DeviceUnavailable,
    NamespaceMismatch,
    PoolCorrupt,
    PoolLocked,
    PoolMissing,
    Status,
)
from tutti_mooncake.geometry import Geometry
from tutti_mooncake.io.device import DeviceFile, alignment_of_directory, allocate, is_partition, make_directory, pool_path, try_lock
from tutti_mooncake.store import format as on_disk

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
_MEBIBYTE = 1 << 20
_RECORD_BYTES = 128
_CREATION_WAIT_SECONDS = 5.0
_RANKS_WAIT_SECONDS = 5.0
_PREWRITE_CHUNK = 4 * _MEBIBYTE


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to


@dataclass(frozen=True)
class PoolPlan:
    """Sizes and offsets of a pool that would fit a capacity; all in bytes."""

    slots: int
    object_bytes: int
    slot_bytes: int
    records_offset: int
    sums_offset: int
    data_offsets: tuple[int, ...]
    device_bytes: tuple[int, ...]

    @classmethod
    def make(cls, geometry: Geometry, capacity: int, devices: int, alignment: int) -> PoolPlan:
        """The largest pool within `capacity`. Raises ConfigError when not even one block fits."""
        object_bytes = _round_up(geometry.object_bytes, max(alignment, 512))
        per_device = -(-geometry.objects_per_block // devices) * object_bytes * geometry.tp_size
        sums = geometry.objects_per_block * geometry.tp_size * 8
        fixed = devices * on_disk.HEADER_BYTES + 2 * _MEBIBYTE
        slots = min((capacity - fixed) // (per_device * devices + _RECORD_BYTES + sums), 2**32 - 2)
        if slots < 1:
            need = fixed + per_device * devices + _RECORD_BYTES + sums
            raise ConfigError(
                f"capacity {capacity} holds no block: one block of this model needs {need} bytes on {devices} "
                f"device(s), of which {fixed} are the pool's own headers"
            )
        records = on_disk.HEADER_BYTES
        sums_offset = _round_up(records + slots * _RECORD_BYTES, 4096)
        first_data = _round_up(sums_offset + slots * sums, _MEBIBYTE)
        offsets = (first_data, *[on_disk.HEADER_BYTES] * (devices - 1))
        sizes = tuple(offset + slots * per_device for offset in offsets)
        return cls(slots, object_bytes, per_device * devices, records, sums_offset, offsets, sizes)


def remove_pool(config: StoreConfig, successor: Geometry | None = None) -> list[str]:
    """Removes a pool's files, and the superblocks of its partitions, whatever state they are in. Returns which there were.

    Nothing is removed when a pool of the geometry `successor` wouldn't fit in its place (ConfigError, DeviceFull), while a process owns the
    pool (PoolLocked), or where a part can't be opened (DeviceUnavailable).
    """
    with _creation_lock(config.devices[0]):
        return _remove_pool(config, successor)


def _remove_pool(config: StoreConfig, successor: Geometry | None) -> list[str]:
    devices: list[DeviceFile] = []
    for name in config.devices:
        with contextlib.suppress(FileNotFoundError):
            devices.append(DeviceFile.open(pool_path(name, config.pool), read_only=False))
    try:
        for device in devices:
            if not device.lock():
                owner = on_disk.read_state(devices[0].buffered_fd)
                raise PoolLocked(f"{device.path} is owned by process {owner.get('pid', 'unknown')}; stop it first")
            if device.used_by_others(""):
                raise PoolLocked(f"{device.path} is still used by worker processes of an engine; stop them first")
        _check_current(devices)
        if successor is not None:
            _check_fits(config, successor, {device.path: device.size() for device in devices})
        for device in devices:
            if is_partition(device.path):
                _write_zeros(device, 0, min(on_disk.HEADER_BYTES, device.size()))
                os.fsync(device.buffered_fd)
            else:
                os.unlink(device.path)
    finally:
        for device in devices:
            device.close()
    return [device.path for device in devices]


class Pool:
    """An open pool. Not thread-safe by itself except where the native parts are; LocalStore serialises what must be."""

    def __init__(self, devices: list[DeviceFile], superblock: dict[str, Any], geometry: Geometry, rank: int, repaired: int) -> None:
        self.devices = devices
        self.superblock = superblock
        self.geometry = geometry
        self.repaired_superblocks = repaired
        self.slots = int(superblock["slots"])
        self.object_bytes = int(superblock["object_bytes"])
        self.layout = _native.Layout(
            geometry.objects_per_block,
            geometry.kv_factor,
            geometry.tp_size,
            rank,
            geometry.object_bytes,
            self.object_bytes,
            self.slots,
            [int(offset) for offset in superblock["data_offsets"]],
        )
        self.first_sum = rank * geometry.objects_per_block
        self.slot_table = _native.SlotTable(
            devices[0].buffered_fd,
            int(superblock["records_offset"]),
            int(superblock["sums_offset"]),
            self.slots,
            geometry.objects_per_block * geometry.tp_size,
            int(superblock["pool_id"][:16], 16),
        )

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        geometry: Geometry,
        *,
        rank: int = 0,
        create: bool = True,
        progress: Progress | None = None,
        owner: bool = True,
        user: str = "",
    ) -> Pool:
        """Opens the pool, or makes it. Raises the errors named in LocalStore.open.

        `owner`: the one who decides what lies where; others (ranks) move bytes for him. `user`: a name that an owner and his ranks share;
        nobody becomes owner while ranks of another name have the pool open.
        """
        if not 0 <= rank < geometry.tp_size:
            raise ConfigError(f"rank {rank} is outside tp_size {geometry.tp_size}")
        paths = [pool_path(device, config.pool) for device in config.devices]
        try:
            return cls._open_checked(paths, config, geometry, rank, None, owner, user)
        except PoolMissing:
            if not create or config.read_only:
                raise
        with _creation_lock(config.devices[0]):  # held until the pool's own lock is
            return cls._open_checked(paths, config, geometry, rank, progress, owner, user, create=True)

    @classmethod
    def _open_checked(
        cls,
        paths: list[str],
        config: StoreConfig,
        geometry: Geometry,
        rank: int,
        progress: Progress | None,
        owner: bool,
        user: str,
        *,
        create: bool = False,
    ) -> Pool:
        devices = _open_all(paths, config, geometry, create=create, progress=progress)
        try:
            if not config.read_only:
                _own(devices[0], user) if owner else devices[0].use(user)
            return cls._check(config, geometry, rank, devices, repair=owner and not config.read_only)
        except BaseException:
            for device in devices:
                device.close()
            raise

    @classmethod
    def _check(cls, config: StoreConfig, geometry: Geometry, rank: int, devices: list[DeviceFile], *, repair: bool) -> Pool:
        _check_current(devices)
        superblocks = [on_disk.read_superblock(device.buffered_fd, device.path) for device in devices]
        first = superblocks[0]
        if first is None:
            raise PoolCorrupt(f"{devices[0].path} has no superblock; make the pool anew with `tutti init --force`")
        _check_namespace(first, geometry, devices[0].path)
        for index, (values, device) in enumerate(zip(superblocks, devices, strict=True)):
            if values is None or values["pool_id"] != first["pool_id"] or values["device_index"] != index:
                raise PoolCorrupt(f"{device.path} is not device {index} of pool {first['pool_id']}; name the devices in their first order")
            if device.size() < int(first["device_bytes"][index]):
                raise PoolCorrupt(
                    f"{device.path} has {device.size()} bytes and the pool needs {first['device_bytes'][index]}: it was truncated; "
                    "make the pool anew with `tutti init --force`"
                )
        if config.capacity_bytes not in (0, int(first["capacity"])):
            logger.warning(
                "%s was made with a capacity of %d bytes and keeps it; %d bytes are set: `tutti init --force` makes the pool anew",
                devices[0].path,
                int(first["capacity"]),
                config.capacity_bytes,
            )
        if int(first["device_count"]) != len(devices):
            raise PoolCorrupt(f"pool {first['pool_id']} has {first['device_count']} devices, {len(devices)} were named")
        repaired = 0
        if repair:
            repaired = sum(
                on_disk.repair_superblock(d.buffered_fd, values) for d, values in zip(devices, superblocks, strict=True) if values
            )
        return cls(devices, first, geometry, rank, repaired)

    def physical_bytes(self) -> int:
        """Bytes that the pool takes on its devices, metadata included."""
        return sum(int(size) for size in self.superblock["device_bytes"])

    def flush_data(self) -> Status:
        """Makes written objects survive a power loss."""
        return _flush([device.direct_fd for device in self.devices])

    def flush_records(self) -> Status:
        """Makes written records survive a power loss."""
        return _flush([self.devices[0].buffered_fd])

    def read_state(self) -> dict[str, Any]:
        """What the last owner left: clean, pid, host, budget."""
        return on_disk.read_state(self.devices[0].buffered_fd)

    def write_state(self, *, clean: bool, **values: Any) -> None:
        """Says who owns the pool and whether it was closed properly."""
        on_disk.write_state(
            self.devices[0].buffered_fd,
            {"clean": clean, "pid": os.getpid(), "host": socket.gethostname(), "time": time.time(), **values},
        )
        self.flush_records()

    def write_counters(self, values: dict[str, Any]) -> None:
        """Leaves counters for others to read while this process owns the pool; they needn't survive anything."""
        on_disk.write_counters(self.devices[0].buffered_fd, {"pid": os.getpid(), "time": time.time(), **values})

    def close(self) -> None:
        """Closes the devices and gives the lock back."""
        for device in self.devices:
            device.close()


def _flush(descriptors: list[int]) -> Status:
    try:
        for descriptor in descriptors:
            os.fdatasync(descriptor)
    except OSError as error:
        return Status.NO_SPACE if error.errno in (errno.ENOSPC, errno.EDQUOT) else Status.DEVICE_ERROR
    return Status.OK


def has_pool(config: StoreConfig) -> bool:
    """Whether there is a whole pool of this name. Raises PoolCorrupt, FormatVersionError, DeviceUnavailable."""
    try:
        read_geometry(config)
    except PoolMissing:
        return False
    return True


def open_first_device(config: StoreConfig) -> DeviceFile:
    """The device with a pool's records and states, to be read. Raises PoolMissing, DeviceUnavailable."""
    path = pool_path(config.devices[0], config.pool)
    try:
        return DeviceFile.open(path, read_only=True)
    except FileNotFoundError:
        raise PoolMissing(f"{path} does not exist; `tutti init` makes a pool") from None


def read_geometry(config: StoreConfig) -> Geometry:
    """The geometry of an existing pool. Raises PoolMissing, PoolCorrupt, FormatVersionError, DeviceUnavailable."""
    device = open_first_device(config)
    try:
        values = on_disk.read_superblock(device.buffered_fd, device.path)
    finally:
        device.close()
    if values is None:
        raise PoolMissing(f"{device.path} has no superblock; `tutti init` makes a pool")
    return Geometry.from_dict(values["geometry"])


def _own(device: DeviceFile, user: str) -> None:
    """Takes the owner's lock. Raises PoolLocked when somebody else has it, or when ranks of another user stay for some seconds."""
    if not device.lock():
        owner = on_disk.read_state(device.buffered_fd)
        raise PoolLocked(
            f"{device.path} is owned by process {owner.get('pid', 'unknown')} on {owner.get('host', 'unknown host')}; "
            "stop it, or open the pool read-only"
        )
    end = time.monotonic() + _RANKS_WAIT_SECONDS
    while device.used_by_others(user):
        if time.monotonic() > end:
            raise PoolLocked(f"{device.path} is still used by worker processes of another engine; stop them, or open the pool read-only")
        time.sleep(0.02)


def _check_current(devices: list[DeviceFile]) -> None:
    for device in devices:
        if not device.is_current():
            raise PoolLocked(f"{device.path} is being made anew by another process; try again")


def _check_fits(config: StoreConfig, geometry: Geometry, present: dict[str, int]) -> None:
    """Raises ConfigError or DeviceFull unless a new pool fits beside everything but the files `present` (path: bytes)."""
    plan = _plan(config, geometry)
    room: dict[str | int, int] = {}
    for name in config.devices:  # several may lie on one file system
        path = pool_path(name, config.pool)
        place = path if is_partition(path) else os.stat(name).st_dev
        room.setdefault(place, 0 if is_partition(path) else shutil.disk_usage(name).free)
        room[place] += present.get(path, 0)
    for name, size in zip(config.devices, plan.device_bytes, strict=True):
        place = name if is_partition(name) else os.stat(name).st_dev
        if room[place] < size:
            raise DeviceFull(f"{name} would have {room[place]} bytes free and the pool needs {size} there; lower capacity or free space")
        room[place] -= size


def _check_namespace(superblock: dict[str, Any], geometry: Geometry, path: str) -> None:
    stored = Geometry.from_dict(superblock["geometry"])
    if superblock["fingerprint"] != geometry.fingerprint():
        raise NamespaceMismatch(
            f"{path} holds namespace {superblock['fingerprint']}, this engine has {geometry.fingerprint()}; "
            f"pool != engine in {'; '.join(stored.differences(geometry)) or 'format'}. "
            "Set another `pool` name to keep both on these devices"
        )
    if superblock["checksum_algorithm"] != _native.CHECKSUM_MULTILINEAR64:
        raise PoolCorrupt(f"{path} uses checksum algorithm {superblock['checksum_algorithm']}, which this program doesn't know")


def _open_all(paths: list[str], config: StoreConfig, geometry: Geometry, *, create: bool, progress: Progress | None) -> list[DeviceFile]:
    """Existing devices opened, or new ones made."""
    opened: list[DeviceFile | None] = []
    for path in paths:
        try:
            opened.append(DeviceFile.open(path, read_only=config.read_only))
        except FileNotFoundError:
            opened.append(None)
    present = [device for device in opened if device is not None]
    blank = [d for d in present if _has_no_superblock(d)]
    missing = [path for path, device in zip(paths, opened, strict=True) if device is None]
    if len(present) == len(paths) and not blank:
        return present
    nothing = len(blank) == len(present)
    # Superblocks are written last, device 0's last of all: a file without one there was never a pool.
    interrupted = not missing and opened[0] in blank and not is_partition(paths[0])
    if not nothing and not interrupted and not config.rebuild_on_loss:
        for device in present:
            device.close()
        gone = missing or [device.path for device in blank]
        raise DeviceUnavailable(
            f"pool {config.pool!r}: {', '.join(gone)} is gone, and every block has a part there; bring the device back, "
            "or set rebuild_on_loss to make the pool anew on these devices (its blocks are lost)"
        )
    if not create or config.read_only:
        for device in present:
            device.close()
        raise PoolMissing(f"there is no pool {config.pool!r} on {', '.join(config.devices)}; `tutti init` makes one")
    if not all(device.lock() for device in present):
        for device in present:
            device.close()
        raise PoolLocked(f"a device of pool {config.pool!r} is in use by another process")
    for device in present:
        device.close()
        if not is_partition(device.path):
            os.unlink(device.path)
    return _create(paths, config, geometry, progress)


@contextlib.contextmanager
def _creation_lock(device: str) -> Iterator[None]:
    """One process at a time makes pools on a device. Raises PoolLocked when another one goes on doing so for some seconds."""
    place = os.path.dirname(device) if is_partition(device) else device
    make_directory(place)
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise DeviceUnavailable(f"{place} can't be opened as a directory: {error.strerror}; check its owner, mode and mount") from error
    try:
        end = time.monotonic() + _CREATION_WAIT_SECONDS
        while not try_lock(descriptor):
            if time.monotonic() > end:
                raise PoolLocked(f"another process is making a pool in {place}; try again when it has ended")
            time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def _has_no_superblock(device: DeviceFile) -> bool:
    try:
        return on_disk.read_superblock(device.buffered_fd, device.path) is None
    except PoolCorrupt:
        return False


def _plan(config: StoreConfig, geometry: Geometry) -> PoolPlan:
    if config.capacity_bytes == 0:
        raise ConfigError("capacity is missing: say how many bytes the pool may take, for example 200GiB")
    alignment = max(4096 if is_partition(device) else alignment_of_directory(device) for device in config.devices)
    return PoolPlan.make(geometry, config.capacity_bytes, len(config.devices), alignment)


def _create(paths: list[str], config: StoreConfig, geometry: Geometry, progress: Progress | None) -> list[DeviceFile]:
    plan = _plan(config, geometry)
    made: list[str] = []
    try:
        for path, size in zip(paths, plan.device_bytes, strict=True):
            if not is_partition(path):
                allocate(path, size)
                made.append(path)
        devices = [DeviceFile.open(path, read_only=False) for path in paths]
        try:
            _format(devices, config, geometry, plan, progress)
        except BaseException:
            for device in devices:
                device.close()
            raise
    except BaseException:
        for path in made:
            os.unlink(path)
        raise
    return devices


def _format(devices: list[DeviceFile], config: StoreConfig, geometry: Geometry, plan: PoolPlan, progress: Progress | None) -> None:
    for device, size in zip(devices, plan.device_bytes, strict=True):
        if device.size() < size:
            raise DeviceFull(f"{device.path} has {device.size()} bytes and the pool needs {size} there; lower capacity")
        if is_partition(device.path):  # a file is zeros already
            _write_zeros(device, 0, plan.data_offsets[devices.index(device)])
    if config.prewrite:
        total = sum(plan.device_bytes)
        done = 0
        for device, offset, size in zip(devices, plan.data_offsets, plan.device_bytes, strict=True):
            for at in range(offset, size, _PREWRITE_CHUNK):
                _write_zeros(device, at, min(_PREWRITE_CHUNK, size - at))
                done += min(_PREWRITE_CHUNK, size - at)
                if progress is not None:
                    progress(done, total)
            os.fdatasync(device.buffered_fd)
    common = {
        "pool_id": uuid.uuid4().hex,
        "pool": config.pool,
        "created": time.time(),
        "checksum_algorithm": _native.CHECKSUM_MULTILINEAR64,
        "device_count": len(devices),
        "geometry": geometry.as_dict(),
        "fingerprint": geometry.fingerprint(),
        "slots": plan.slots,
        "object_bytes": plan.object_bytes,
        "records_offset": plan.records_offset,
        "sums_offset": plan.sums_offset,
        "data_offsets": list(plan.data_offsets),
        "device_bytes": list(plan.device_bytes),
        "capacity": config.capacity_bytes,
    }
    for index in reversed(range(len(devices))):  # device 0 last: it makes the pool exist
        on_disk.write_superblock(devices[index].buffered_fd, {**common, "device_index": index})
        os.fsync(devices[index].buffered_fd)


def _write_zeros(device: DeviceFile, offset: int, size: int) -> None:
    zeros = bytes(min(size, _PREWRITE_CHUNK))
    for at in range(offset, offset + size, len(zeros) or 1):
        os.pwrite(device.buffered_fd, zeros[: min(len(zeros), offset + size - at)], at)
