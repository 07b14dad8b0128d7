"""The GDS probe on made-up system trees and a recording cuFile library."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from tests.vendor_fakes import build
from tutti_mooncake import _native
from tutti_mooncake.io import gds
from tutti_mooncake.io.gds import GdsReport, probe_gds
from tutti_mooncake.io.gds_requirement import Requirement

OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@host)\nGCC version: 13\n"
CLOSED_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025\n"
PATH = "/mnt/nvme0/tutti"


class System:
    """A tree of /proc, /sys, /boot and /etc; by default one in which P2PDMA works for two NVMe drives."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/sys/kernel/osrelease", "6.8.0-60-generic\n")
        self.write("boot/config-6.8.0-60-generic", "# CONFIG_X is not set\nCONFIG_PCI_P2PDMA=y\n")
        self.write("proc/driver/nvidia/version", OPEN_DRIVER)
        self.write("proc/driver/nvidia/params", 'Mobile: 0\nRegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1;"\n')
        self.write("sys/module/nvme_core/parameters/multipath", "N\n")
        self.write("etc/cufile.json", '{\n  // a comment\n  "properties": {\n    "use_pci_p2pdma": true, // on\n  }\n}\n')
        self.disk("nvme0n1", "259:0")
        self.disk("nvme1n1", "259:2")
        self.disk("vda", "254:0")
        self.partition("nvme0n1", "nvme0n1p1", "259:1")
        self.mounts(f"259:1 / {Path(PATH).parent} rw - ext4 /dev/nvme0n1p1 rw")

    def write(self, name: str, text: str | bytes) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)

    def remove(self, name: str) -> None:
        (self.root / name).unlink()

    def mounts(self, *lines: str) -> None:
        """Lines from the device number on: `major:minor root point options - kind source super-options`."""
        first = "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw"
        self.write("proc/self/mountinfo", "\n".join([first, *(f"{30 + i} 22 {line}" for i, line in enumerate(lines))]) + "\n")

    def disk(self, name: str, number: str) -> Path:
        directory = self.root / "sys/devices" / name
        directory.mkdir(parents=True)
        self._node(directory, name, number)
        return directory

    def partition(self, disk: str, name: str, number: str) -> None:
        directory = self.root / "sys/devices" / disk / name
        directory.mkdir()
        (directory / "partition").write_text("1\n")
        self._node(directory, name, number)

    def raid(self, name: str, number: str, level: str, parts: list[str]) -> None:
        directory = self.disk(name, number)
        (directory / "md").mkdir()
        (directory / "md/level").write_text(level + "\n")
        self._slaves(directory, parts)

    def mapper(self, name: str, number: str, parts: list[str]) -> None:
        self._slaves(self.disk(name, number), parts)

    def _slaves(self, directory: Path, parts: list[str]) -> None:
        (directory / "slaves").mkdir()
        for part in parts:
            (directory / "slaves" / part).symlink_to((self.root / "sys/class/block" / part).resolve())

    def _node(self, directory: Path, name: str, number: str) -> None:
        (directory / "dev").write_text(number + "\n")
        for link in (self.root / "sys/class/block" / name, self.root / "sys/dev/block" / number):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(directory)

    def probe(self, *paths: str, **given: Any) -> GdsReport:
        settings: dict[str, Any] = {"library": "/nonexistent/libcufile.so.0", "machine": "x86_64", "environment": {}}
        return probe_gds(paths, root=self.root, **{**settings, **given})


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path / "root")


def row(report: GdsReport, name: str, subject: str = "") -> Requirement:
    (found,) = [item for item in report.requirements if item.name == name and item.subject == subject]
    return found


def test_where_everything_is_there_only_the_library_is_missing(system: System) -> None:
    report = system.probe(PATH)
    assert report.way == "p2pdma" and not report.works
    (missing,) = report.missing
    assert missing.name == "cuFile library" and "/nonexistent/libcufile.so.0" in missing.found and "install libcufile" in missing.advice
    assert row(report, "kernel with PCI P2PDMA").found == "6.8.0-60-generic"
    assert row(report, "open NVIDIA driver").found == "580.95.05, open kernel module"
    assert row(report, "file system", PATH).found == "ext4, data=ordered at /mnt/nvme0"
    assert row(report, "NVMe drives", PATH).found == "nvme0n1"


@pytest.mark.parametrize(
    ("release", "config", "packed", "symbol", "ok", "found"),
    [
        ("6.8.0-60-generic", "CONFIG_PCI_P2PDMA=y", False, False, True, "6.8.0-60-generic"),
        ("6.8.0-60-generic", "CONFIG_PCI_P2PDMA=y", True, False, True, "6.8.0-60-generic"),
        ("6.8.0-60-generic", "# CONFIG_PCI_P2PDMA is not set", False, False, False, "without CONFIG_PCI_P2PDMA"),
        ("6.8.0-60-generic", None, False, False, None, "its configuration isn't readable"),
        ("6.8.0-60-generic", None, False, True, True, "6.8.0-60-generic"),
        ("5.15.0-100-generic", "CONFIG_PCI_P2PDMA=y", False, False, False, "5.15.0-100-generic"),
        ("5.14.0-427.el9.x86_64", "CONFIG_PCI_P2PDMA=y", False, True, True, "5.14.0-427.el9.x86_64"),
        ("6.2.0", "CONFIG_PCI_P2PDMA=y", False, False, True, "6.2.0"),
        ("10.0.1", "CONFIG_PCI_P2PDMA=y", False, False, True, "10.0.1"),
    ],
)
def test_kernel(system: System, release: str, config: str | None, packed: bool, symbol: bool, ok: bool | None, found: str) -> None:
    system.remove("boot/config-6.8.0-60-generic")
    system.write("proc/sys/kernel/osrelease", release + "\n")
    if config and packed:
        system.write("proc/config.gz", gzip.compress(f"A=y\n{config}\n".encode()))
    elif config:
        system.write(f"boot/config-{release}", f"A=y\n{config}\n")
    if symbol:
        system.write("proc/kallsyms", "0 T _stext\n0 d p2pdma_pgmap_ops\n")
    requirement = row(system.probe(), "kernel with PCI P2PDMA")
    assert requirement.ok is ok and found in requirement.found
    assert bool(requirement.advice) is (ok is not True)


@pytest.mark.parametrize(
    ("text", "ok", "found"),
    [
        (OPEN_DRIVER, True, "580.95.05, open kernel module"),
        (OPEN_DRIVER.replace("580.95.05", "560.35.03"), False, "560.35.03, open kernel module"),
        (CLOSED_DRIVER, False, "580.95.05, proprietary kernel module"),
        ("", False, "no NVIDIA driver is loaded"),
    ],
)
def test_driver(system: System, text: str, ok: bool, found: str) -> None:
    system.write("proc/driver/nvidia/version", text)
    requirement = row(system.probe(), "open NVIDIA driver")
    assert (requirement.ok, requirement.found) == (ok, found)


@pytest.mark.parametrize(
    ("params", "machine", "ok"),
    [
        ('RegistryDwords: "RMForceStaticBar1=1;"', "x86_64", True),
        ('RegistryDwords: "rmforcestaticbar1=0x1"', "x86_64", True),
        ('RegistryDwords: "RMForceStaticBar1=0"', "x86_64", False),
        ('RegistryDwords: ""', "x86_64", None),
        ('RegistryDwords: ""', "aarch64", True),
    ],
)
def test_static_bar(system: System, params: str, machine: str, ok: bool | None) -> None:
    system.write("proc/driver/nvidia/params", params + "\n")
    assert row(system.probe(machine=machine), "static BAR1").ok is ok


def test_multipath_on_is_missing_and_absent_is_fine(system: System) -> None:
    system.write("sys/module/nvme_core/parameters/multipath", "Y\n")
    report = system.probe()
    assert report.way is None and "nvme_core multipath=N" in row(report, "NVMe multipath off").advice
    assert row(report, "NVMe multipath off") in report.missing
    system.remove("sys/module/nvme_core/parameters/multipath")
    assert row(system.probe(), "NVMe multipath off").ok


@pytest.mark.parametrize(
    ("text", "environment", "ok", "found"),
    [
        ('"use_pci_p2pdma": false', {}, False, "false (/etc/cufile.json)"),
        ('// "use_pci_p2pdma": true', {}, False, "not set (/etc/cufile.json)"),
        ("", {}, False, "not set (/etc/cufile.json)"),
        ('"use_pci_p2pdma": false', {"CUFILE_USE_PCIP2PDMA": "true"}, True, "true (CUFILE_USE_PCIP2PDMA)"),
        ('"use_pci_p2pdma" : true', {}, True, "true (/etc/cufile.json)"),
        ('"use_pci_p2pdma" : true', {"CUFILE_ENV_PATH_JSON": "/nonexistent.json"}, False, "not set (/nonexistent.json)"),
    ],
)
def test_configuration(system: System, text: str, environment: dict[str, str], ok: bool, found: str) -> None:
    system.write("etc/cufile.json", text)
    requirement = row(system.probe(environment=environment), "cuFile set to use P2PDMA")
    assert (requirement.ok, requirement.found) == (ok, found)


def test_with_nvidia_fs_the_other_way_is_not_needed(system: System) -> None:
    system.write("proc/driver/nvidia/version", CLOSED_DRIVER)
    assert {item.name for item in system.probe(PATH).missing} == {"cuFile library", "open NVIDIA driver", "nvidia-fs module"}
    system.write("proc/driver/nvidia-fs/version", "version: 2.27.3\n")
    report = system.probe(PATH)
    assert report.way == "nvidia-fs" and [item.name for item in report.missing] == ["cuFile library"]
    assert row(report, "open NVIDIA driver").ok is False
    system.remove("proc/driver/nvidia-fs/version")
    system.write("sys/module/nvidia_fs/refcnt", "0\n")
    assert row(system.probe(), "nvidia-fs module").found == "loaded"


@pytest.mark.parametrize(
    ("mount", "ok", "found"),
    [
        ("259:1 / /mnt/nvme0 rw - ext4 /dev/nvme0n1p1 rw,data=ordered", True, "ext4, data=ordered at /mnt/nvme0"),
        ("259:1 / /mnt/nvme0 rw - ext4 /dev/nvme0n1p1 rw,data=journal", False, "ext4, data=journal at /mnt/nvme0"),
        ("259:1 / /mnt/nvme0 rw shared:1 master:2 - xfs /dev/nvme0n1p1 rw", True, "xfs at /mnt/nvme0"),
        ("259:1 / /mnt/nvme0 rw - btrfs /dev/nvme0n1p1 rw", False, "btrfs at /mnt/nvme0"),
        ("0:40 / /mnt/nvme0/tutti rw - tmpfs tmpfs rw", False, "tmpfs at /mnt/nvme0/tutti"),
        ("259:1 / /mnt/nvme rw - xfs /dev/nvme0n1p1 rw", True, "ext4, data=ordered at /"),
    ],
)
def test_file_system(system: System, mount: str, ok: bool, found: str) -> None:
    system.mounts(mount)
    requirement = row(system.probe(PATH), "file system", PATH)
    assert (requirement.ok, requirement.found) == (ok, found)


def test_a_mount_point_with_a_space_and_one_mounted_over_another(system: System) -> None:
    system.mounts(
        "259:1 / /mnt/my\\040drive rw - xfs /dev/nvme0n1p1 rw",
        "259:1 / /mnt/twice rw - ext4 /dev/nvme0n1p1 rw",
        "0:41 / /mnt/twice rw - tmpfs tmpfs rw",
    )
    report = system.probe("/mnt/my drive/pool", "/mnt/twice/pool")
    assert row(report, "file system", "/mnt/my drive/pool").found == "xfs at /mnt/my drive"
    assert row(report, "file system", "/mnt/twice/pool").found == "tmpfs at /mnt/twice"


def test_raid_and_drives_that_are_not_nvme(system: System) -> None:
    system.raid("md0", "9:0", "raid0", ["nvme0n1p1", "nvme1n1"])
    system.mapper("dm-0", "253:0", ["md0"])
    system.mounts("253:0 / /mnt/raid rw - xfs /dev/mapper/raid rw", "0:40 / /mnt/memory rw - tmpfs tmpfs rw")
    report = system.probe("/mnt/raid", "/mnt/memory", "/srv")
    assert row(report, "no RAID", "/mnt/raid").found == "md0 (raid0)" and row(report, "no RAID", "/mnt/raid").ok is False
    assert row(report, "NVMe drives", "/mnt/raid").found == "nvme0n1, nvme1n1"
    assert report.way is None
    assert row(report, "NVMe drives", "/mnt/memory").found == "no block device is behind it"
    assert (row(report, "NVMe drives", "/srv").ok, row(report, "NVMe drives", "/srv").found) == (False, "vda")


def test_a_partition(system: System) -> None:
    report = system.probe("/dev/nvme0n1p1")
    assert row(report, "file system", "/dev/nvme0n1p1").found == "none, a raw partition"
    assert row(report, "NVMe drives", "/dev/nvme0n1p1").found == "nvme0n1"


def test_an_empty_system_gives_every_row_and_no_exception(tmp_path: Path) -> None:
    report = probe_gds([PATH], root=tmp_path, library="/nonexistent.so", environment={})
    assert report.way is None and not report.works
    assert [item.name for item in report.requirements] == [
        "cuFile library",
        "kernel with PCI P2PDMA",
        "open NVIDIA driver",
        "static BAR1",
        "NVMe multipath off",
        "cuFile set to use P2PDMA",
        "nvidia-fs module",
        "file system",
    ]
    assert set(report.as_dict()) == {"works", "way", "requirements"}


def test_relevant_where_there_is_a_driver_or_the_library(system: System, tmp_path: Path, cufile: str) -> None:
    assert gds.is_relevant(root=system.root, library="/nonexistent.so")
    assert not gds.is_relevant(root=tmp_path, library="/nonexistent.so")
    assert gds.is_relevant(root=tmp_path, library=cufile)


def test_the_library_of_the_cuda_packages_is_found_where_the_system_has_none(tmp_path: Path, cufile: str) -> None:
    if not _native.find_cufile(gds.CUFILE)[0]:
        pytest.skip("needs a system without libcufile")
    assert gds.locate_cufile([str(tmp_path)]) == gds.CUFILE
    place = tmp_path / "cu13/lib"
    place.mkdir(parents=True)
    (place / gds.CUFILE).symlink_to(cufile)
    assert gds.locate_cufile([str(tmp_path)]) == str(place / gds.CUFILE)


# --- the real test, in a child process --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build("fake_cufile", tmp_path_factory.mktemp("fake_cufile")))


@pytest.fixture
def cufile(built: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("FAKE_CUFILE_FAIL", raising=False)
    return built


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A directory whose file system takes direct I/O, and the working directory."""
    directory = tmp_path / "place"
    directory.mkdir()
    monkeypatch.chdir(directory)
    try:
        os.close(os.open(directory / "try", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"needs direct I/O in the temporary directory: {error.strerror}")
    os.unlink(directory / "try")
    return str(directory)


def test_a_file_that_registers(system: System, cufile: str, place: str) -> None:
    report = system.probe(place, library=cufile, cuda_library="/nonexistent.so")
    assert row(report, "cuFile library").found == "version 1.15.0"
    assert row(report, "cuFile driver opens").ok and row(report, "cuFile registers a file", place).ok
    assert report.works
    assert os.listdir(place) == []  # neither the file nor cuFile's log


@pytest.mark.parametrize(
    ("failure", "driver", "file", "advice"),
    [
        (
            "cuFileHandleRegister=5027",
            "yes",
            "cuFileHandleRegister failed: CU_FILE_HANDLE_NOT_REGISTERED (5027)",
            "cuFile can't use this file directly: see what else is missing",
        ),
        ("cuFileHandleRegister=5099", "yes", "cuFileHandleRegister failed: unknown cuFile error (5099)", ""),
        (
            "cuFileDriverOpen=5033",
            "cuFileDriverOpen failed: CU_FILE_NVFS_SETUP_ERROR (5033)",
            "not tried: the driver didn't open",
            "",
        ),
    ],
)
def test_cufiles_errors_have_their_names(
    system: System, cufile: str, place: str, monkeypatch: pytest.MonkeyPatch, failure: str, driver: str, file: str, advice: str
) -> None:
    monkeypatch.setenv("FAKE_CUFILE_FAIL", failure)
    report = system.probe(place, library=cufile, cuda_library="/nonexistent.so")
    assert not report.works
    assert row(report, "cuFile driver opens").found == driver
    assert row(report, "cuFile registers a file", place).found == file
    assert row(report, "cuFile registers a file", place).advice == advice
    assert os.listdir(place) == []


def test_a_file_system_without_direct_io_is_told(system: System, cufile: str, place: str, tmp_path: Path) -> None:
    directory = next((d for d in ("/proc/self/fdinfo", "/sys/kernel") if os.path.isdir(d)), None)
    assert directory
    report = system.probe(place, directory, str(tmp_path / "gone"), library=cufile, cuda_library="/nonexistent.so")
    assert row(report, "cuFile registers a file", place).ok
    assert "no file can be made there" in row(report, "cuFile registers a file", directory).found
    assert row(report, "cuFile registers a file", str(tmp_path / "gone")).found.endswith("isn't there")
    assert not report.works


@pytest.mark.parametrize(
    ("failure", "found"),
    [
        ("cuFileDriverOpen=-1", "the trial ended with status -6: "),
        ("cuFileHandleRegister=-2", "cuFile gave no answer in 0.5 s"),
    ],
)
def test_a_library_that_ends_or_stops_its_process_is_a_finding(
    system: System, cufile: str, place: str, monkeypatch: pytest.MonkeyPatch, failure: str, found: str
) -> None:
    monkeypatch.setenv("FAKE_CUFILE_FAIL", failure)
    report = system.probe(place, library=cufile, cuda_library="/nonexistent.so", trial_seconds=30 if "-1" in failure else 0.5)
    assert row(report, "cuFile driver opens").found.startswith(found)
    assert not report.works and os.listdir(place) == []
