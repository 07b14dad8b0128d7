"""Whether GPUDirect Storage (NVIDIA's cuFile) works for a directory or partition, and what is missing where it doesn't.

Two ways lead there: "p2pdma", the kernel's own PCI peer-to-peer DMA with NVIDIA's open driver, and "nvidia-fs", NVIDIA's kernel module.
What each needs is read from the facts that the system shows; then a file is registered there with cuFile's compatibility mode off, which
is the real test. It runs in a process of its own, since NVIDIA's libraries print, write log files and can end the process.

Sources: GDS Installation and Troubleshooting Guide, "NVMe P2PDMA Troubleshooting"; "GDS Support for NVMe Drives Using Linux PCI P2PDMA".
"""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tutti_mooncake import _native
from tutti_mooncake.io.gds_device import device_requirements, text_of
from tutti_mooncake.io.gds_requirement import Requirement
from tutti_mooncake.io.partition import CUDA_DRIVER

CUFILE = "libcufile.so.0"
OLDEST_KERNEL = (6, 2)
OLDEST_DRIVER = 565
TRIAL_SECONDS = 60
_ANSWER = "tutti-gds-trial "

# What to do about cuFile's errors, by number.
_ADVICE = {
    5001: "load nvidia-fs, or set up PCI P2PDMA",
    5008: "the file system or drive isn't one that GDS can use in this setup",
    5009: "this GPU isn't one that GDS supports",
    5011: "look at the NVIDIA driver: nvidia-smi",
    5020: "the file must be open for direct I/O",
    5025: "/dev/nvidia-fs* must be accessible; in a container, pass these devices",
    5027: "cuFile can't use this file directly: see what else is missing",
    5030: "see cuFile's log (CUFILE_LOGFILE_PATH)",
    5033: "cuFile found no working CUDA driver, or no way to the GPU's memory",
    5034: "cuFile's configuration forbids direct I/O there",
}


@dataclass(frozen=True)
class GdsReport:
    """Every requirement with what was found; those of a path carry it as `subject`."""

    requirements: tuple[Requirement, ...]

    @property
    def way(self) -> Literal["p2pdma", "nvidia-fs"] | None:
        """The way that the system's facts leave open; None where neither is complete. The file test has the last word."""
        for way in ("nvidia-fs", "p2pdma"):
            if all(item.ok is not False for item in self.requirements if item.way == way):
                return "nvidia-fs" if way == "nvidia-fs" else "p2pdma"
        return None

    @property
    def works(self) -> bool:
        """True when the driver opened, and a file could be registered under every path."""
        tests = [item for item in self.requirements if item.is_test]
        return bool(tests) and all(item.ok for item in tests)

    @property
    def missing(self) -> list[Requirement]:
        """What stands in the way: not met, and not of a way that isn't needed since the other is open."""
        way = self.way
        return [item for item in self.requirements if item.ok is False and (item.way == "both" or way is None)]

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {"works": self.works, "way": self.way, "requirements": [asdict(item) for item in self.requirements]}


def is_relevant(*, root: Path = Path("/"), library: str = CUFILE) -> bool:
    """Whether there is an NVIDIA driver or a cuFile library, so that GDS could be meant to work."""
    return (root / "proc/driver/nvidia/version").is_file() or not _native.find_cufile(library)[0]


def locate_cufile(packages: Sequence[str] = ()) -> str:
    """The system's cuFile by its name, or where there is none, the path of that which came with PyTorch's CUDA packages.

    `packages`: folders that hold NVIDIA's packages; by default those of this environment.
    """
    if _native.find_cufile(CUFILE)[0]:
        spec = importlib.util.find_spec("nvidia") if not packages else None
        folders = packages or (list(spec.submodule_search_locations or ()) if spec else [])
        for folder in folders:
            for file in sorted(Path(folder).glob(f"*/lib/{CUFILE}")):
                return str(file)
    return CUFILE


def probe_gds(
    paths: Sequence[str] = (),
    *,
    root: Path = Path("/"),
    library: str | None = None,
    cuda_library: str = CUDA_DRIVER,
    machine: str = platform.machine(),
    environment: Mapping[str, str] = os.environ,
    trial_seconds: float = TRIAL_SECONDS,
) -> GdsReport:
    """Looks at everything that GDS needs, for I/O under each of `paths` (directories or partitions). Leaves nothing behind.

    `root` holds proc, sys, boot and etc.; `library` is cuFile's (default: the one that locate_cufile() finds).
    """
    library = library or locate_cufile()
    found = [_library(library)]
    found += [_kernel(root), _driver(root), _static_bar(root, machine), _multipath(root), _configuration(root, environment)]
    found.append(_nvidia_fs(root))
    for path in paths:
        found += device_requirements(path, root)
    if found[0].ok:
        found += _trial(paths, [library, cuda_library], trial_seconds)
    return GdsReport(tuple(found))


def _library(library: str) -> Requirement:
    why, version = _native.find_cufile(library)
    if why:
        return Requirement("cuFile library", False, why, "install libcufile: CUDA's package nvidia-gds, or the nvidia-cufile wheel")
    return Requirement("cuFile library", True, f"version {version or 'unknown'}", "")


def _kernel(root: Path) -> Requirement:
    name = "kernel with PCI P2PDMA"
    release = text_of(root / "proc/sys/kernel/osrelease").strip() or "unknown"
    option = _kernel_option(root, release)
    recent = _numbers(release)[:2] >= OLDEST_KERNEL
    if (recent and option) or _has_symbol(root / "proc/kallsyms", "p2pdma_pgmap_ops"):
        return Requirement(name, True, release, "", "p2pdma")
    needed = ".".join(map(str, OLDEST_KERNEL))
    if not recent:
        return Requirement(name, False, release, f"a kernel of {needed} or later with CONFIG_PCI_P2PDMA=y", "p2pdma")
    if option is None:
        return Requirement(name, None, f"{release}, its configuration isn't readable", "it must have CONFIG_PCI_P2PDMA=y", "p2pdma")
    return Requirement(name, False, f"{release} without CONFIG_PCI_P2PDMA", "a kernel that has CONFIG_PCI_P2PDMA=y", "p2pdma")


def _kernel_option(root: Path, release: str) -> bool | None:
    """Whether CONFIG_PCI_P2PDMA is set; None where the kernel's configuration can't be read."""
    text = text_of(root / "boot" / f"config-{release}")
    if not text:
        with contextlib.suppress(OSError, EOFError):
            text = gzip.decompress((root / "proc/config.gz").read_bytes()).decode()
    return "CONFIG_PCI_P2PDMA=y" in text.splitlines() if text else None


def _has_symbol(symbols: Path, name: str) -> bool:
    """Whether the running kernel has a symbol; distributions bring P2PDMA to older kernels too."""
    with contextlib.suppress(OSError), symbols.open() as lines:
        return any(name in line for line in lines)
    return False


def _driver(root: Path) -> Requirement:
    name = "open NVIDIA driver"
    line = text_of(root / "proc/driver/nvidia/version").partition("\n")[0]
    match = re.search(r"\b(\d{3,})\.\d+(?:\.\d+)*\b", line)
    advice = f"the open kernel modules of driver {OLDEST_DRIVER} or later (package nvidia-open)"
    if match is None:
        return Requirement(name, False, "no NVIDIA driver is loaded", advice, "p2pdma")
    is_open = "Open Kernel Module" in line
    found = f"{match[0]}, {'open' if is_open else 'proprietary'} kernel module"
    ok = is_open and int(match[1]) >= OLDEST_DRIVER
    return Requirement(name, ok, found, "" if ok else advice, "p2pdma")


def _static_bar(root: Path, machine: str) -> Requirement:
    name = "static BAR1"
    if machine not in ("x86_64", "AMD64"):
        return Requirement(name, True, f"not needed on {machine}", "", "p2pdma")
    values = re.findall(r"RMForceStaticBar1\s*=\s*(\w+)", text_of(root / "proc/driver/nvidia/params"), re.IGNORECASE)
    advice = 'driver option NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;" in /etc/modprobe.d'
    if not values:
        return Requirement(name, None, "unknown: not set by a driver option, though some drivers turn it on themselves", advice, "p2pdma")
    ok = values[-1] not in ("0", "0x0")
    return Requirement(name, ok, f"RMForceStaticBar1={values[-1]}", "" if ok else advice, "p2pdma")


def _multipath(root: Path) -> Requirement:
    name = "NVMe multipath off"
    value = text_of(root / "sys/module/nvme_core/parameters/multipath").strip()
    if not value:
        return Requirement(name, True, "this kernel has no NVMe multipath, or no NVMe driver is loaded", "", "p2pdma")
    ok = value in ("N", "0")
    advice = "" if ok else "`options nvme_core multipath=N` in /etc/modprobe.d, a new initramfs, a reboot"
    return Requirement(name, ok, f"multipath={value}", advice, "p2pdma")


def _configuration(root: Path, environment: Mapping[str, str]) -> Requirement:
    """cuFile takes the way of P2PDMA only where it is told to; its default is false."""
    name = "cuFile set to use P2PDMA"
    if value := environment.get("CUFILE_USE_PCIP2PDMA"):
        source = "CUFILE_USE_PCIP2PDMA"
    else:
        file = environment.get("CUFILE_ENV_PATH_JSON")
        source = file or "/etc/cufile.json"
        lines = text_of(Path(file) if file else root / "etc/cufile.json").splitlines()
        code = "\n".join(line.partition("//")[0] for line in lines)  # the file is JSON with comments
        match = re.search(r'"use_pci_p2pdma"\s*:\s*(\w+)', code)
        value = match[1] if match else "not set"
    ok = value.lower() in ("true", "1")
    advice = "" if ok else '"use_pci_p2pdma": true among the properties of cufile.json, or CUFILE_USE_PCIP2PDMA=true'
    return Requirement(name, ok, f"{value} ({source})", advice, "p2pdma")


def _nvidia_fs(root: Path) -> Requirement:
    name = "nvidia-fs module"
    version = text_of(root / "proc/driver/nvidia-fs/version").strip() or text_of(root / "sys/module/nvidia_fs/version").strip()
    if version or (root / "sys/module/nvidia_fs").is_dir():
        return Requirement(name, True, version.replace("\n", ", ") or "loaded", "", "nvidia-fs")
    return Requirement(name, False, "not loaded", "package nvidia-fs, then `modprobe nvidia-fs`", "nvidia-fs")


def _trial(paths: Sequence[str], libraries: Sequence[str], seconds: float) -> list[Requirement]:
    """Opens cuFile's driver and registers a file under each path, in a child process."""
    with contextlib.ExitStack() as left_over:
        files = [left_over.enter_context(_trial_file(path)) for path in paths]
        usable = [file for file in files if os.path.exists(file)]
        scratch = left_over.enter_context(tempfile.TemporaryDirectory(prefix="tutti-gds-"))
        answer = _child_answer([*libraries, *usable], scratch, seconds)
    driver_error = str(answer["driver"])
    result = [_test("cuFile driver opens", "", driver_error)]
    errors = dict(zip(usable, answer["files"], strict=False))
    for path, file in zip(paths, files, strict=True):
        why = errors.get(file, "not tried: the driver didn't open" if file in usable else file)
        result.append(_test("cuFile registers a file", path, why))
    return result


def _test(name: str, subject: str, why: str) -> Requirement:
    number = re.search(r"\((\d{4})\)", why)
    advice = _ADVICE.get(int(number[1]), "") if number else ""
    return Requirement(name, not why, why or "yes", advice, "both", subject, is_test=True)


@contextlib.contextmanager
def _trial_file(path: str) -> Iterator[str]:
    """A file to register: the partition itself, or a new one in the directory, removed at the end; where neither is possible, why not."""
    if not os.path.isdir(path):
        yield path if os.path.exists(path) else f"{path} isn't there"
        return
    try:
        descriptor, file = tempfile.mkstemp(prefix=".tutti-gds-", dir=path)
    except OSError as error:
        yield f"no file can be made there: {error.strerror}"
        return
    try:
        with open(descriptor, "wb") as made:
            made.write(bytes(1 << 16))
            made.flush()
            os.fsync(made.fileno())
        yield file
    finally:
        os.unlink(file)


def _child_answer(arguments: Sequence[str], scratch: str, seconds: float) -> dict[str, Any]:
    """What the child said, or that it ended otherwise. With compatibility mode, cuFile would take files that it can't reach directly."""
    environment = {
        **os.environ,
        "CUFILE_LOGFILE_PATH": os.path.join(scratch, "cufile.log"),
        "CUFILE_ALLOW_COMPAT_MODE": "false",
        "CUFILE_FORCE_COMPAT_MODE": "false",
    }
    code = "from tutti_mooncake.io.gds import answer_trial; answer_trial()"
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"driver": f"cuFile gave no answer in {seconds:g} s", "files": []}
    for line in ended.stdout.splitlines():
        if line.startswith(_ANSWER):
            return dict(json.loads(line.removeprefix(_ANSWER)))
    said = ended.stderr.strip().splitlines()
    return {"driver": f"the trial ended with status {ended.returncode}: {said[-1] if said else 'nothing said'}", "files": []}


def answer_trial() -> None:
    """The child's part: registers the files that its arguments name and prints one line of JSON."""
    library, cuda_library, *files = sys.argv[1:]
    errors: dict[str, str] = {}
    descriptors: dict[str, int] = {}
    for file in files:
        try:
            access = os.O_RDWR if os.path.isfile(file) else os.O_RDONLY  # closing a disk that was open for writing has it scanned anew
            descriptors[file] = os.open(file, access | os.O_DIRECT)
        except OSError as error:
            errors[file] = f"it can't be opened for direct I/O: {error.strerror}"
    driver, found = _native.try_cufile(library, cuda_library, list(descriptors.values()))
    if not driver:
        errors.update(zip(descriptors, found, strict=True))
    answer = {"driver": driver, "files": [] if driver else [errors[file] for file in files]}
    print("\n" + _ANSWER + json.dumps(answer), flush=True)
    os._exit(0)  # past the exit handlers of libraries that may be broken


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release))
