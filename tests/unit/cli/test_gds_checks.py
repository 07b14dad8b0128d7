"""Findings of `tutti doctor` about GPUDirect Storage."""

from __future__ import annotations

from tutti_mooncake.cli.gds_checks import findings, findings_of
from tutti_mooncake.io.gds import GdsReport
from tutti_mooncake.io.gds_requirement import Requirement

KERNEL = Requirement("kernel with PCI P2PDMA", False, "5.15.0", "a kernel of 6.2 or later", "p2pdma")
MODULE = Requirement("nvidia-fs module", False, "not loaded", "modprobe nvidia-fs", "nvidia-fs")
DRIVER = Requirement("cuFile driver opens", True, "yes", "", is_test=True)
FILE = Requirement("cuFile registers a file", False, "CU_FILE_HANDLE_NOT_REGISTERED (5027)", "", subject="/mnt/nvme0", is_test=True)


def test_what_is_missing_is_warned_of_and_named_at_once():
    summary, *rows = findings_of(GdsReport((KERNEL, MODULE, DRIVER, FILE)))
    assert (summary.state, summary.found) == ("warn", "doesn't work")
    assert summary.reason == "missing: kernel with PCI P2PDMA, nvidia-fs module; the other executors don't need it"
    assert [row.state for row in rows] == ["warn", "warn", "ok", "warn"]
    assert rows[3].check == "cuFile registers a file for /mnt/nvme0"


def test_a_way_that_is_not_needed_is_no_warning():
    loaded = Requirement("nvidia-fs module", True, "2.27", "", "nvidia-fs")
    summary, kernel, *_ = findings_of(GdsReport((KERNEL, loaded, DRIVER, FILE)))
    assert summary.reason.startswith("nothing known is missing; see what cuFile says")
    assert kernel.state == "ok" and kernel.reason.startswith("not needed: the other way is open")


def test_the_test_has_the_last_word():
    registered = Requirement("cuFile registers a file", True, "yes", "", subject="/mnt/nvme0", is_test=True)
    rows = findings_of(GdsReport((KERNEL, MODULE, DRIVER, registered)))
    assert rows[0].found == "works" and {row.state for row in rows} == {"ok"}


def test_nothing_here_fails_a_machine(tmp_path):
    rows, report = findings([str(tmp_path)])
    assert {row.state for row in rows} <= {"ok", "warn"}
    if report is None:
        assert len(rows) == 1 and "no NVIDIA driver and no cuFile library" in rows[0].found
