"""One finding of `tutti doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """What was looked at, what was found, and why it matters or what to do; `subject` is the machine or a device."""

    subject: str
    check: str
    state: Literal["ok", "warn", "FAIL"]
    found: str
    reason: str

    def as_dict(self) -> dict[str, str]:
        """Fields by name."""
        return asdict(self)

    def line(self) -> str:
        """`[state] check: found (reason)`."""
        reason = f" ({self.reason})" if self.reason else ""
        return f"[{self.state}]".ljust(7) + f"{self.check}: {self.found}{reason}"
