"""What this machine offers for I/O, and why: printed by `tutti doctor` and logged when a store opens."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tutti_mooncake import _native
from tutti_mooncake.errors import DeviceUnavailable, TensorError
from tutti_mooncake.io.device import IN_MEMORY_ALIGNMENT, alignment_of_directory, is_partition
from tutti_mooncake.io.executor import choose_executor


@dataclass
class ProbeReport:
    """Findings by name; `devices` maps each device to its own."""

    executor: str
    executor_reason: str
    gpu: str
    checksum_variant: str
    kernel: str
    locked_memory_bytes: int
    devices: dict[str, dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        limit = "unlimited" if self.locked_memory_bytes < 0 else f"{self.locked_memory_bytes} bytes"
        lines = [
            f"executor          {self.executor} ({self.executor_reason})",
            f"gpu               {self.gpu}",
            f"checksum          multilinear64, {self.checksum_variant}",
            f"kernel            {self.kernel}",
            f"locked memory     {limit}",
        ]
        for device, found in self.devices.items():
            lines.append(f"device            {device}: " + ", ".join(f"{name} {value}" for name, value in found.items()))
        return lines


def probe(devices: Sequence[str] = (), executor: str = "auto") -> ProbeReport:
    """Tries what the executors need. Writes nothing that stays."""
    found: dict[str, dict[str, Any]] = {}
    alignments = []
    for device in devices:
        try:
            if is_partition(device):
                found[device] = {"kind": "partition", "writable": os.access(device, os.W_OK)}
                alignments.append(0)
            else:
                alignments.append(alignment_of_directory(device))
                found[device] = {"kind": "directory", "direct_io_alignment_bytes": alignments[-1]}
        except DeviceUnavailable as error:
            found[device] = {"error": str(error)}
    try:
        in_memory = bool(alignments) and set(alignments) == {IN_MEMORY_ALIGNMENT}
        kind, reason = choose_executor(executor, in_memory=in_memory, on_gpu=executor == "uring-gpu")
    except TensorError as error:
        kind, reason = "none", str(error)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = -1 if soft == resource.RLIM_INFINITY else soft
    gpu = _native.probe_cuda() or "can be used: the executor uring-gpu moves KV tensors that are there"
    return ProbeReport(kind, reason, gpu, _native.checksum_variant(), platform.release(), limit, found)
