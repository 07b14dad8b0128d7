"""One device of a pool: a file inside a directory, or a raw partition.

Data moves by direct I/O through one descriptor, the slot table through the page cache by another; their ranges never overlap.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tutti_mooncake import _native
from tutti_mooncake.errors import DeviceFull, DeviceUnavailable

CONSERVATIVE_ALIGNMENT = 4096
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length (0 = to the end), pid
IN_MEMORY_ALIGNMENT = 1  # of files that the processor copies, as on tmpfs


@dataclass
class DeviceFile:
    """Open descriptors of one device and the alignment that its direct I/O wants. `path` names the file or partition."""

    path: str
    direct_fd: int
    buffered_fd: int
    memory_align: int
    offset_align: int
    is_direct: bool

    @classmethod
    def open(cls, path: str, *, read_only: bool) -> DeviceFile:
        """Opens an existing file or partition. Raises DeviceUnavailable, or FileNotFoundError where there is none."""
        flags = (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC
        try:
            buffered = os.open(path, flags)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise DeviceUnavailable(f"{path} can't be opened: {error.strerror}; check its owner, mode and mount options") from error
        is_direct = True
        try:
            direct = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                os.close(buffered)
                raise DeviceUnavailable(f"{path} can't be opened for direct I/O: {error.strerror}") from error
            direct, is_direct = os.open(path, flags), False
        memory, offset = _native.direct_io_alignment(direct) if is_direct else (1, 1)
        if offset == 0:
            memory = offset = CONSERVATIVE_ALIGNMENT
        return cls(path, direct, buffered, memory, offset, is_direct)

    def size(self) -> int:
        """Bytes that the file or partition has."""
        return os.lseek(self.buffered_fd, 0, os.SEEK_END)

    def lock(self) -> bool:
        """Takes the single-owner lock; False when another open descriptor holds it."""
        return try_lock(self.buffered_fd)

    def use(self, user: str) -> None:
        """Marks the device as used by somebody named `user`, besides its owner, until the descriptors are closed."""
        fcntl.fcntl(self.buffered_fd, fcntl.F_OFD_SETLK, _range_lock(fcntl.F_RDLCK, _byte_of(user), 1))

    def used_by_others(self, user: str) -> bool:
        """Whether somebody with another name than `user` uses the device."""
        mine = _byte_of(user)
        return any(
            struct.unpack(_FLOCK, fcntl.fcntl(self.buffered_fd, fcntl.F_OFD_GETLK, _range_lock(fcntl.F_WRLCK, first, length)))[0]
            != fcntl.F_UNLCK
            for first, length in ((0, mine), (mine + 1, 0))
        )

    def is_current(self) -> bool:
        """False when `path` names another file by now, or none: whoever locked this one then holds nothing."""
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            return False
        here = os.fstat(self.buffered_fd)
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def close(self) -> None:
        """Closes both descriptors, and so gives the lock back. Once only: their numbers may belong to others afterwards."""
        for descriptor in (self.direct_fd, self.buffered_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.direct_fd = self.buffered_fd = -1


def _byte_of(user: str) -> int:
    """The byte whose lock stands for a user; files have no bytes there, which locks don't need."""
    return 1 + int.from_bytes(hashlib.sha256(user.encode()).digest()[:7], "little")


def _range_lock(kind: int, first: int, length: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, first, length, 0)


def all_in_memory(devices: Sequence[DeviceFile]) -> bool:
    """True where the processor copies whatever is read and written."""
    return all(device.is_direct and device.memory_align == IN_MEMORY_ALIGNMENT for device in devices)


def try_lock(descriptor: int) -> bool:
    """Takes the exclusive lock of an open file or directory, until its descriptors are closed; False when somebody else holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def pool_path(device: str, pool: str) -> str:
    """Where a pool's part lies on a device: the partition itself, or `<directory>/<pool>.pool`."""
    return device if is_partition(device) else os.path.join(device, f"{pool}.pool")


def is_partition(device: str) -> bool:
    """True for a block device."""
    try:
        return stat.S_ISBLK(os.stat(device).st_mode)
    except OSError:
        return False


def make_directory(directory: str) -> None:
    """Makes a directory where its parent exists; a missing parent is taken for a drive that isn't mounted. Raises DeviceUnavailable."""
    try:
        os.mkdir(directory, 0o755)
    except FileExistsError:
        pass
    except FileNotFoundError:
        parent = os.path.dirname(os.path.abspath(directory))
        raise DeviceUnavailable(f"{directory} can't be made: {parent} does not exist; mount the drive, or make that directory") from None
    except OSError as error:
        raise DeviceUnavailable(f"{directory} can't be made: {error.strerror}; check its owner, mode and mount options") from error


def alignment_of_directory(directory: str) -> int:
    """Alignment of offsets and lengths that direct I/O on new files of a directory wants, in bytes."""
    make_directory(directory)
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        raise DeviceUnavailable(f"{directory} can't be written: {error.strerror}; check its owner, mode and mount options") from error
    try:
        offset = int(_native.direct_io_alignment(descriptor)[1])
    finally:
        os.close(descriptor)
    return offset or CONSERVATIVE_ALIGNMENT


def allocate(path: str, size: int) -> None:
    """Creates a file whose `size` bytes are allocated. Raises DeviceFull (nothing is left behind) or DeviceUnavailable."""
    directory = os.path.dirname(path)
    make_directory(directory)
    try:
        free = shutil.disk_usage(directory).free
        if free < size:
            raise DeviceFull(f"{directory} has {free} bytes free and the pool needs {size} there; lower capacity or free space")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DeviceUnavailable(f"{path} can't be made: {error.strerror}; check the directory's owner, mode and mount options") from error
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.unlink(path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DeviceFull(f"{path}: allocating {size} bytes failed: {error.strerror}; lower capacity or free space") from error
        raise DeviceUnavailable(f"{path}: allocating {size} bytes failed: {error.strerror}") from error
    finally:
        os.close(descriptor)
