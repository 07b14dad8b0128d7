"""What the store tells about itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class RecoveryReport:
    """What came back when the pool was opened."""

    recovered_blocks: int
    dropped_blocks: int
    dropped_reasons: dict[str, int]
    seconds: float
    clean_shutdown: bool
    repaired_superblocks: int = 0

    def __str__(self) -> str:
        why = ", ".join(f"{count} {reason}" for reason, count in self.dropped_reasons.items())
        after = "a clean stop" if self.clean_shutdown else "an unclean stop"
        dropped = f"{self.dropped_blocks} dropped" + (f" ({why})" if why else "")
        return f"{self.recovered_blocks} blocks recovered, {dropped}, after {after}, in {self.seconds:.3f} s"

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


@dataclass(frozen=True)
class VerifyReport:
    """Result of reading every block: `reasons` counts the dropped ones by status name."""

    checked_blocks: int
    dropped_blocks: int
    bytes: int
    seconds: float
    reasons: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


@dataclass(frozen=True)
class BlockInfo:
    """One resident block; times are seconds since 1970, expiry 0 = never, `parent` None = the first block of a prompt."""

    key: bytes
    parent: bytes | None
    slot: int
    generation: int
    tokens: int
    bytes: int
    created: int
    last_use: int
    expiry: int


@dataclass(frozen=True)
class Pin:
    """Protection of the first `blocks` blocks of a chain until unpin() or `expires` (the store's clock, seconds)."""

    slot: int
    generation: int
    blocks: int
    expires: float
