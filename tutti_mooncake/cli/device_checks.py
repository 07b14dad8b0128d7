"""What `tutti doctor` looks at in one device: free space, NUMA node, TRIM, wear.

Everything is read from the file system and /sys, but for wear, which NVMe drives tell only by a command to the drive.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import stat
import struct
from pathlib import Path

from tutti_mooncake.cli.finding import Finding
from tutti_mooncake.cli.machine_checks import numa_nodes_of
from tutti_mooncake.cli.output import size_text

SYS = Path("/sys")
LOW_SPACE_SHARE = 0.05
WORN_PERCENT = 90

# NVMe Base Specification 2.0c: Get Log Page (opcode 02h), log 02h = SMART / Health Information, 512 bytes.
_ADMIN_COMMAND_IOCTL = 0xC0484E41  # NVME_IOCTL_ADMIN_CMD of <linux/nvme_ioctl.h>
_ADMIN_COMMAND = struct.Struct("=BBHIIIQQIIIIIIIIII")
_LOG_BYTES = 512


def findings(device: str, needed_bytes: int = 0) -> list[Finding]:
    """All findings about one device, where a new pool would take `needed_bytes`; a missing device is a single finding."""
    try:
        status = os.stat(device)
    except OSError as error:
        parent = os.path.dirname(os.path.abspath(device))
        if isinstance(error, FileNotFoundError) and os.path.isdir(parent):
            return [
                Finding(device, "device", "warn", "missing", f"it will be made in {parent}: is that the drive?"),
                free_space(parent, needed_bytes),
            ]
        return [Finding(device, "device", "FAIL", str(error.strerror), f"mount the drive, or make {parent}")]
    is_partition = stat.S_ISBLK(status.st_mode)
    number = status.st_rdev if is_partition else status.st_dev
    drives = physical_drives(number)
    return [
        access(device),
        *([] if is_partition else [free_space(device, needed_bytes)]),
        numa(device, drives),
        trim(device, number),
        wear(device, drives),
    ]


def access(device: str) -> Finding:
    """Whether this user may read and write there."""
    if os.access(device, os.R_OK | os.W_OK):
        return Finding(device, "access", "ok", "readable and writable", "")
    return Finding(device, "access", "FAIL", "not readable and writable", f"by user {os.geteuid()}: change its owner")


def free_space(device: str, needed_bytes: int = 0) -> Finding:
    """How much room the file system has for a pool of `needed_bytes` there."""
    room = os.statvfs(device)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    found = f"{size_text(free)} of {size_text(total)}"
    if needed_bytes > free:
        return Finding(device, "free space", "FAIL", found, f"a new pool needs {size_text(needed_bytes)} here: lower capacity")
    if total and free / total < LOW_SPACE_SHARE:
        return Finding(device, "free space", "warn", found, "nearly full; an existing pool has its space already")
    return Finding(device, "free space", "ok", found, "")


def block_directory(number: int, sys: Path = SYS) -> Path | None:
    """The /sys directory of the whole disk that device number `number` is or is a part of; None for tmpfs and such."""
    link = sys / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    if not link.exists():
        return None
    directory = link.resolve()
    return directory.parent if (directory / "partition").exists() else directory


def physical_drives(number: int, sys: Path = SYS) -> list[Path]:
    """The /sys directories of the disks below a device number, through RAID and device mapper."""
    directory = block_directory(number, sys)
    if directory is None:
        return []
    lower = [path.resolve() for path in sorted((directory / "slaves").glob("*"))]
    if not lower:
        return [directory]
    disks = [path.parent if (path / "partition").exists() else path for path in lower]
    return [drive for disk in disks for drive in _below(disk)]


def _below(disk: Path) -> list[Path]:
    lower = [path.resolve() for path in sorted((disk / "slaves").glob("*"))]
    if not lower:
        return [disk]
    return [drive for path in lower for drive in _below(path.parent if (path / "partition").exists() else path)]


def numa(device: str, drives: list[Path]) -> Finding:
    """The node that the drive hangs on, against where this process runs."""
    nodes = sorted({node for drive in drives if (node := _numa_node(drive)) is not None})
    if not nodes:
        return Finding(device, "NUMA node", "ok", "unknown", "the kernel names none for this device")
    here = numa_nodes_of(os.sched_getaffinity(0))
    found = ", ".join(map(str, nodes))
    if here and not set(nodes) & set(here):
        return Finding(device, "NUMA node", "warn", found, f"this process runs on {here}: reads cross sockets")
    return Finding(device, "NUMA node", "ok", found, "")


def _numa_node(drive: Path) -> int | None:
    for directory in (drive, *drive.parents):
        file = directory / "numa_node"
        if file.is_file():
            node = int(file.read_text())
            return node if node >= 0 else None
    return None


def trim(device: str, number: int) -> Finding:
    """Whether the drive can be told that blocks are unused."""
    directory = block_directory(number)
    file = directory / "queue" / "discard_max_bytes" if directory else None
    if file is None or not file.is_file():
        return Finding(device, "TRIM", "ok", "unknown", "no block device is visible behind this directory")
    if int(file.read_text()) > 0:
        return Finding(device, "TRIM", "ok", "supported", "")
    return Finding(device, "TRIM", "warn", "not supported", "the drive can't learn of free blocks: writes wear it more")


def wear(device: str, drives: list[Path]) -> Finding:
    """The drive's own estimate of its used life."""
    used: list[int] = []
    reasons: list[str] = []
    for drive in drives:
        try:
            used.append(percentage_used(drive))
        except OSError as error:
            reasons.append(f"{drive.name}: {error.strerror or error}")
    if not used:
        return Finding(device, "wear", "ok", "unknown", "; ".join(reasons) or "no drive is visible behind this directory")
    found = f"{max(used)} % of rated life used"
    if max(used) >= WORN_PERCENT:
        return Finding(device, "wear", "warn", found, "plan its replacement, or set write_budget_bytes_per_day")
    return Finding(device, "wear", "ok", found, "; ".join(reasons))


def percentage_used(drive: Path) -> int:
    """Percentage Used of an NVMe drive's SMART log; may exceed 100. Raises OSError where it can't be read."""
    if not drive.name.startswith("nvme"):
        raise OSError("not an NVMe drive")
    node = os.open(f"/dev/{drive.name}", os.O_RDONLY)
    try:
        log = ctypes.create_string_buffer(_LOG_BYTES)
        dword_count = _LOG_BYTES // 4 - 1
        command = bytearray(
            _ADMIN_COMMAND.pack(
                0x02,
                0,
                0,
                0xFFFFFFFF,
                0,
                0,
                0,
                ctypes.addressof(log),
                0,
                _LOG_BYTES,
                0x02 | dword_count << 16,
                *[0] * 7,
            )
        )
        if fcntl.ioctl(node, _ADMIN_COMMAND_IOCTL, command) != 0:
            raise OSError("the drive refused to give its SMART log")
        return log.raw[5]
    finally:
        os.close(node)
