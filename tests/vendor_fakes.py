"""Recording stand-ins for NVIDIA's libraries, built from native/tests/fakes by the C++ compiler when a test asks for one."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def build(name: str, directory: Path) -> Path:
    """The library `name`, freshly built; skips the test where there is no compiler."""
    compiler = next((found for found in (os.environ.get("CXX"), "g++", "c++", "clang++") if found and shutil.which(found)), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler, to build a stand-in for a vendor's library")
    library = directory / f"lib{name}.so"
    source = ROOT / "native" / "tests" / "fakes" / f"{name}.cpp"
    subprocess.run(
        [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{ROOT / 'native' / 'include'}", str(source), "-o", str(library)], check=True
    )
    return library


class FakeCuda:
    """Commands of native/tests/fakes/fake_cuda.h."""

    def __init__(self, library: Path) -> None:
        self.path = str(library)
        self._library = ctypes.CDLL(self.path)
        self._library.fake_cuda_log.restype = ctypes.c_char_p

    def reset(self) -> None:
        """As new: one device like an H200."""
        self._library.fake_cuda_reset()

    def device(self, *, devices: int = 1, sms: int = 132, least: int = 8, alignment: int = 8, major: int = 9, version: int = 13000) -> None:
        """What the driver shows."""
        self._library.fake_cuda_device(devices, sms, least, alignment, major, version)

    def fail(self, function: str, call: int, result: int) -> None:
        """Lets one call fail."""
        self._library.fake_cuda_fail(function.encode(), call, result)

    @property
    def calls(self) -> list[str]:
        """Every call so far."""
        return str(self._library.fake_cuda_log().decode()).splitlines()

    @property
    def alive(self) -> int:
        """Streams, contexts and retains that exist."""
        return int(self._library.fake_cuda_alive())
