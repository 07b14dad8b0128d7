"""Findings of `tutti doctor` about a device, on a made-up /sys."""

import os

import pytest

from tutti_mooncake.cli import device_checks


@pytest.fixture
def sys_tree(tmp_path):
    """A RAID of two NVMe partitions: md0 (9:0) over nvme0n1p1 (259:1) and nvme1n1 (259:2)."""
    (tmp_path / "dev" / "block").mkdir(parents=True)
    for index, number in ((0, "259:0"), (1, "259:2")):
        disk = tmp_path / "devices" / f"pci{index}" / "nvme" / f"nvme{index}n1"
        disk.mkdir(parents=True)
        (tmp_path / "devices" / f"pci{index}" / "numa_node").write_text(f"{index}\n")
        (tmp_path / "dev" / "block" / number).symlink_to(disk)
    part = tmp_path / "devices" / "pci0" / "nvme" / "nvme0n1" / "nvme0n1p1"
    part.mkdir()
    (part / "partition").write_text("1\n")
    (tmp_path / "dev" / "block" / "259:1").symlink_to(part)
    raid = tmp_path / "devices" / "md0"
    (raid / "slaves").mkdir(parents=True)
    (raid / "slaves" / "nvme0n1p1").symlink_to(part)
    (raid / "slaves" / "nvme1n1").symlink_to(tmp_path / "devices" / "pci1" / "nvme" / "nvme1n1")
    (tmp_path / "dev" / "block" / "9:0").symlink_to(raid)
    return tmp_path


def test_a_partition_belongs_to_its_disk(sys_tree):
    assert [path.name for path in device_checks.physical_drives(os.makedev(259, 1), sys_tree)] == ["nvme0n1"]


def test_drives_below_a_raid(sys_tree):
    drives = device_checks.physical_drives(os.makedev(9, 0), sys_tree)
    assert [path.name for path in drives] == ["nvme0n1", "nvme1n1"]
    assert device_checks.numa("md0", drives).found == "0, 1"


def test_a_file_system_without_a_disk(sys_tree):
    assert device_checks.physical_drives(os.makedev(0, 40), sys_tree) == []
    assert device_checks.numa("/dev/shm", []).found == "unknown"
    assert device_checks.wear("/dev/shm", []).found == "unknown"


def test_a_missing_device_is_one_failure(tmp_path):
    (finding,) = device_checks.findings(str(tmp_path / "drive" / "missing"))
    assert finding.state == "FAIL" and "mount the drive" in finding.reason


def test_a_device_that_would_be_made_is_a_warning_with_the_space_there(tmp_path):
    missing, space = device_checks.findings(str(tmp_path / "missing"), 1 << 60)
    assert missing.state == "warn" and space.state == "FAIL" and "lower capacity" in space.reason


def test_a_directory_gives_every_finding(tmp_path):
    checks = [finding.check for finding in device_checks.findings(str(tmp_path))]
    assert checks == ["access", "free space", "NUMA node", "TRIM", "wear"]


def test_the_smart_command_has_the_kernels_size():
    assert device_checks._ADMIN_COMMAND.size == 72
