"""What `tutti doctor` says about GPUDirect Storage. No pool needs it, so nothing here is a failure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tutti_mooncake.cli.finding import Finding
from tutti_mooncake.io.gds import GdsReport, is_relevant, probe_gds
from tutti_mooncake.io.gds_requirement import Requirement

SUBJECT = "GPUDirect Storage"


def findings(paths: Sequence[str]) -> tuple[list[Finding], GdsReport | None]:
    """All findings for I/O under these directories and partitions; one line and no report where there is no GPU and no cuFile."""
    if not is_relevant():
        reason = "looked at only where there is one of them"
        return [Finding(SUBJECT, "GDS", "ok", "no NVIDIA driver and no cuFile library here", reason)], None
    report = probe_gds(paths)
    return findings_of(report), report


def findings_of(report: GdsReport) -> list[Finding]:
    """The summary, then each requirement; what isn't met is a warning where it stands in the way."""
    missing = [] if report.works else report.missing
    if report.works:
        summary = Finding(SUBJECT, "GDS", "ok", "works", "direct transfers between NVMe and GPU memory are possible")
    else:
        names = ", ".join(dict.fromkeys(item.name for item in missing if not item.is_test))
        reason = f"missing: {names}" if names else "nothing known is missing; see what cuFile says"
        summary = Finding(SUBJECT, "GDS", "warn", "doesn't work", f"{reason}; the other executors don't need it")
    return [summary, *(_finding(item, item in missing) for item in report.requirements)]


def _finding(item: Requirement, stands_in_the_way: bool) -> Finding:
    check = f"{item.name} for {item.subject}" if item.subject else item.name
    state: Literal["ok", "warn"] = "warn" if stands_in_the_way else "ok"
    reason = item.advice
    if item.ok is False and not stands_in_the_way:
        reason = "not needed: the other way is open" if item.way != "both" else "not needed here"
    return Finding(SUBJECT, check, state, item.found, reason)
