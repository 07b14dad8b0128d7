"""What GPUDirect Storage needs of the place where the files lie: file system, kind of drive, no RAID. Read from /proc and /sys."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from tutti_mooncake.io.gds_requirement import Requirement

_OCTAL = ("040", "011", "012", "134")  # space, tab, newline, backslash, as mountinfo writes them


@dataclass(frozen=True)
class _Mount:
    point: str
    number: str  # major:minor
    kind: str
    options: frozenset[str]


def device_requirements(path: str, root: Path) -> list[Requirement]:
    """All requirements about `path`, a directory or a partition; `root` holds proc and sys."""
    real = os.path.realpath(path)
    number = text_of(root / "sys/class/block" / os.path.basename(real) / "dev") if real.startswith("/dev/") else ""
    if number:
        system = Requirement("file system", True, "none, a raw partition", "", subject=path)
    else:
        mount = _mount_of(real, root)
        if mount is None:
            return [Requirement("file system", None, "unknown: no mount is listed for it", "ext4 or xfs on NVMe", subject=path)]
        system, number = _file_system(path, mount), mount.number
    disks, raids = _below(root, number)
    return [system, _drives(path, disks), _raid(path, raids)]


def _file_system(path: str, mount: _Mount) -> Requirement:
    advice = "ext4 with ordered data (its default), xfs, or a raw NVMe partition"
    journal = next((option for option in mount.options if option.startswith("data=")), "data=ordered")
    ok = mount.kind == "xfs" or (mount.kind == "ext4" and journal == "data=ordered")
    found = f"{mount.kind}{f', {journal}' if mount.kind == 'ext4' else ''} at {mount.point}"
    return Requirement("file system", ok, found, "" if ok else advice, subject=path)


def _drives(path: str, disks: list[str]) -> Requirement:
    advice = "local NVMe drives"
    if not disks:
        return Requirement("NVMe drives", False, "no block device is behind it", advice, subject=path)
    ok = all(disk.startswith("nvme") for disk in disks)
    return Requirement("NVMe drives", ok, ", ".join(disks), "" if ok else advice, subject=path)


def _raid(path: str, raids: list[str]) -> Requirement:
    if not raids:
        return Requirement("no RAID", True, "none", "", "p2pdma", path)
    return Requirement("no RAID", False, ", ".join(raids), "give each drive as a device of its own in place of the RAID", "p2pdma", path)


def _mount_of(real: str, root: Path) -> _Mount | None:
    """The mount that holds a path: the longest mount point above it, of equal ones the last."""
    best: _Mount | None = None
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) < 5 or len(rest) < 3:
            continue
        point = _plain(fields[4])
        if (real == point or real.startswith(point.rstrip("/") + "/")) and (best is None or len(point) >= len(best.point)):
            best = _Mount(point, fields[2], rest[0], frozenset(rest[2].split(",")))
    return best


def _plain(name: str) -> str:
    for octal in _OCTAL:
        name = name.replace(f"\\{octal}", chr(int(octal, 8)))
    return name


def _below(root: Path, number: str) -> tuple[list[str], list[str]]:
    """Names of the whole disks under a device number, and `name (level)` of the RAIDs between."""
    link = root / "sys/dev/block" / number.strip()
    if not link.exists():
        return [], []
    disks: list[str] = []
    raids: list[str] = []
    waiting = [link.resolve()]
    while waiting:
        directory = waiting.pop(0)
        if (directory / "partition").exists():
            directory = directory.parent
        if level := text_of(directory / "md/level").strip():
            raids.append(f"{directory.name} ({level})")
        lower = [path.resolve() for path in sorted((directory / "slaves").glob("*"))]
        if lower:
            waiting += lower
        elif directory.name not in disks:
            disks.append(directory.name)
    return disks, raids


def text_of(path: Path) -> str:
    """A file's text; empty where it can't be read."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""
