"""The NVMe driver on emulated controllers, in the guest of scripts/rig: by uio_pci_generic, and by vfio-pci behind an IOMMU.

One guest per driver runs every case of native/tests/rig; each case is a test here, and the first one waits for all of
them. Skipped, with the reason, where the rig isn't set up (scripts/rig setup installs QEMU and unpacks a guest kernel)
or cmake and a compiler are missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "native-tests"

CASES = [
    "binding_refusals",
    "bind",
    "identify",
    "prp",
    "sgl",
    "small_pages",
    "peer_to_peer_prp",
    "peer_to_peer_sgl",
    "stripe_over_two_drives",
    "queues_at_once",
    "queue_full",
    "medium_error",
    "beyond_the_end",
    "fatal_status",
    "one_owner",
    "wrong_driver",
    "orderly_close",
    "dma_switched_off",
    "reset_in_flight",
    "timeout_quarantines",
    "killed_in_flight",
    "ring_bounce_sgl",
    "ring_bounce_prp",
    "ring_direct_sgl",
    "ring_direct_prp",
    "ring_two_drives_bounce_sgl",
    "ring_two_drives_bounce_prp",
    "ring_two_drives_direct_sgl",
    "ring_two_drives_direct_prp",
    "ring_two_drives_sgl_and_prp",
    "ring_peer_to_peer_sgl",
    "ring_peer_to_peer_prp",
    "ring_checksum_mismatch",
    "ring_medium_error",
    "ring_lost_commands",
    "ring_too_slow",
    "ring_reset_in_flight",
    "ring_mute_drive",
    "executor_on_two_drives",
    "executor_deadline",
    "executor_stopped_in_flight",
    "release",
    "seen_by_the_kernel",
]
IOMMU_CASES = ["unmapped_address", "unmapped_after_use"]
ALL = [("uio", name) for name in CASES] + [("vfio", name) for name in CASES + IOMMU_CASES]


# After the cases: the tool that gives drives away, once around.
IN_THE_GUEST = """
$0 $1
status=$?
drive=${0%/*}/nvme_drive
address=$(</sys/class/nvme/nvme0/address)
$drive bind $1 $address && $drive show $address && $drive release $address && echo tool ok
$drive bind $1 0000:00:00.0 || echo tool refused
exit $status
"""


@cache
def what_is_missing() -> str:
    for tool in ("cmake", "ninja", "mkfs.ext2", "mkswap"):
        if shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None:
            return f"{tool} is not installed"
    probe = subprocess.run([ROOT / "scripts" / "rig", "probe"], capture_output=True, text=True, check=False)
    return probe.stdout.strip() if probe.returncode else ""


@cache
def program() -> Path:
    """The cases' program, built where scripts/test builds the native tests."""
    configure = ["cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo"]
    subprocess.run([*configure, "-DTUTTI_TESTS=ON", "-DTUTTI_PYTHON=OFF"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(BUILD), "--target", "nvme_rig", "nvme_drive"], check=True, stdout=subprocess.DEVNULL)
    return BUILD / "nvme_rig"


def run_guest(driver: str) -> tuple[dict[str, str], str]:
    """What the guest reported: each case's outcome, and all of its output."""
    command = [str(ROOT / "scripts" / "rig"), "run", "--nvme-size", "128M", "--nvme-bad", "2048", "--nvme-slow", "20"]
    command += ["--timeout", "200"]
    command += ["--iommu"] if driver == "vfio" else []
    command += ["--", "bash", "-c", IN_THE_GUEST, str(program()), driver]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    return dict(re.findall(r"^case (\w+) (ok|FAILED.*?)(?: [\d.]+)?$", ran.stdout, re.MULTILINE)), ran.stdout + ran.stderr


@cache
def guests() -> dict[str, tuple[dict[str, str], str]]:
    """Both guests, side by side: each is one emulated processor's work, and much of it is waiting."""
    program()
    drivers = ("uio", "vfio")
    with ThreadPoolExecutor(len(drivers)) as pool:
        return dict(zip(drivers, pool.map(run_guest, drivers), strict=True))


def guest(driver: str) -> tuple[dict[str, str], str]:
    return guests()[driver]


@pytest.mark.timeout(300)  # the first test builds the program and runs both guests
@pytest.mark.parametrize(("driver", "name"), ALL, ids=lambda part: part)
def test_case(driver: str, name: str) -> None:
    if missing := what_is_missing():
        pytest.skip(f"QEMU rig: {missing}")
    outcomes, output = guest(driver)
    assert outcomes.get(name) == "ok", output


@pytest.mark.parametrize(("driver", "bound"), [("uio", "uio_pci_generic"), ("vfio", "vfio-pci")])
def test_the_tool_that_gives_drives_away(driver: str, bound: str) -> None:
    if missing := what_is_missing():
        pytest.skip(f"QEMU rig: {missing}")
    output = guest(driver)[1]
    assert f": bound to {bound}\n" in output, output
    assert ": bound to nvme\nnamespace: /dev/nvme" in output, output
    assert "tool ok\n" in output and "tool refused\n" in output, output
    assert f"0000:00:00.0 isn't given to {bound}: it isn't an NVMe controller" in output, output


@pytest.mark.parametrize("driver", ["uio", "vfio"])
def test_the_list_of_cases_is_complete(driver: str) -> None:
    if missing := what_is_missing():
        pytest.skip(f"QEMU rig: {missing}")
    assert set(guest(driver)[0]) == {name for mode, name in ALL if mode == driver}
