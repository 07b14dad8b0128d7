"""One requirement of GPUDirect Storage and what was found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["both", "p2pdma", "nvidia-fs"]


@dataclass(frozen=True)
class Requirement:
    """`ok`: None where it can't be known. `advice`: what to do, or what must hold. `way`: which way to GDS needs it."""

    name: str
    ok: bool | None
    found: str
    advice: str
    way: Way = "both"
    subject: str = ""  # the directory or partition, empty for the machine
    is_test: bool = False  # found by doing it
