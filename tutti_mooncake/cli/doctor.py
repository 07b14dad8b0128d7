"""The command `tutti doctor`: what this machine and these devices can do, what is in the way and why."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from tutti_mooncake.cli import cluster_checks, device_checks, gds_checks, machine_checks
from tutti_mooncake.cli.output import print_json
from tutti_mooncake.cli.store_arguments import add_store_arguments, given_settings
from tutti_mooncake.config import ENVIRONMENT_PREFIX, StoreConfig, parse_bytes, read_settings
from tutti_mooncake.io.device import pool_path

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_DOCTOR = """\
Prints findings as [ok], [warn] or [FAIL], each with its reason, then what the I/O layer found it can use. The status
is 1 when something fails. Without --devices (or TUTTI_DEVICES) only the machine is looked at; with --capacity it is
checked that a new pool would fit. With etcd set (--set etcd=HOST:PORT, or TUTTI_ETCD) the way to other nodes is looked at.
"""


def add_commands(commands: Subparsers) -> None:
    """Adds this file's command."""
    doctor = commands.add_parser("doctor", help="check this machine and these devices", description=_DOCTOR)
    add_store_arguments(doctor)
    doctor.set_defaults(run=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Runs every check; a device that is missing is a finding, not an error."""
    from tutti_mooncake.io.probe import probe

    devices = _devices(arguments)
    capacity = parse_bytes(_setting(arguments, "capacity") or 0, "capacity")
    pool = str(_setting(arguments, "pool") or StoreConfig.pool)
    findings = machine_checks.findings()
    for device in devices:
        there = os.path.exists(pool_path(device, pool))  # with its space
        findings += device_checks.findings(device, 0 if there else capacity // len(devices))
    present = [device for device in devices if os.path.exists(device)]
    gds_findings, gds_report = gds_checks.findings(present)
    findings += gds_findings
    # The store's settings aren't needed here, and devices may be missing.
    settings = {name: value for name, (value, _) in given_settings(arguments).items()}
    findings += cluster_checks.findings(read_settings({"devices": ["-"], **settings})[2])
    report = probe(present)
    failed = any(finding.state == "FAIL" for finding in findings)
    if arguments.json:
        rows = [finding.as_dict() for finding in findings]
        print_json({"ok": not failed, "findings": rows, "gds": gds_report, "io": report.as_dict()})
        return int(failed)
    subject = None
    for finding in findings:
        if finding.subject != subject:
            subject = finding.subject
            print(subject)
        print(f"  {finding.line()}")
    print("I/O layer")
    for line in report.lines():
        print(f"  {line}")
    return int(failed)


def _devices(arguments: argparse.Namespace) -> list[str]:
    value = _setting(arguments, "devices") or ""
    names = value.split(",") if isinstance(value, str) else list(value)
    return [name for name in names if name]


def _setting(arguments: argparse.Namespace, name: str) -> Any:
    """The value given by arguments, file or environment; None without one."""
    return given_settings(arguments).get(name, (os.environ.get(ENVIRONMENT_PREFIX + name.upper()), ""))[0]
