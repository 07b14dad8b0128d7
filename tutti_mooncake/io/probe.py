"""What this machine offers for I/O, and why: printed by `tutti doctor` and logged when a store opens."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tutti_mooncake import _native
from tutti_mooncake.errors import DeviceUnavailable
from tutti_mooncake.io.device import alignment_of_directory, is_partition
from tutti_mooncake.io.executor import choose_executor


@dataclass
class ProbeReport:
    """Findings by name; `devices` maps each device to its own."""

    executor: str
    executor_reason: str
    checksum_variant: str
    kernel: str
    locked_memory_bytes: int
    devices: dict[str, dict[str, Any]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        limit = "unlimited" if self.locked_memory_bytes < 0 else f"{self.locked_memory_bytes} bytes"
        lines = [
            f"executor          {self.executor} ({self.executor_reason})",
            f"checksum          multilinear64, {self.checksum_variant}",
            f"kernel            {self.kernel}",
            f"locked memory     {limit}",
        ]
        for device, found in self.devices.items():
            lines.append(f"device            {device}: " + ", ".join(f"{name} {value}" for name, value in found.items()))
        return lines


def probe(devices: Sequence[str] = (), executor: str = "auto") -> ProbeReport:
    """Tries what the executors need. Writes nothing that stays."""
    kind, reason = choose_executor(executor)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    report = ProbeReport(kind, reason, _native.checksum_variant(), platform.release(), -1 if soft == resource.RLIM_INFINITY else soft)
    for device in devices:
        try:
            if is_partition(device):
                report.devices[device] = {"kind": "partition", "writable": os.access(device, os.W_OK)}
            else:
                report.devices[device] = {
                    "kind": "directory",
                    "direct_io_alignment_bytes": alignment_of_directory(device),
                }
        except DeviceUnavailable as error:
            report.devices[device] = {"error": str(error)}
    return report
