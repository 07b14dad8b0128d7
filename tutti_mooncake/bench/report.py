"""One report form for all benchmarks."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Row:
    """One figure: the median of `n` values, their least and greatest in `spread`, and the goal as text."""

    metric: str
    value: float
    unit: str
    goal: str
    n: int
    spread: tuple[float, float]


@dataclass
class Report:
    """All rows of one run."""

    bench: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, metric: str, values: Sequence[float], unit: str, goal: str = "") -> None:
        """Adds the median of `values`."""
        self.rows.append(Row(metric, statistics.median(values), unit, goal, len(values), (min(values), max(values))))

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "bench": self.bench,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "command": " ".join(["scripts/bench", self.bench, *sys.argv[2:]]),
            "rows": [asdict(row) for row in self.rows],
            "notes": self.notes,
        }

    def text(self) -> str:
        """For people."""
        lines = [f"{self.bench} on {machine()}"]
        for row in self.rows:
            spread = f"{row.spread[0]:.4g} to {row.spread[1]:.4g}"
            goal = f"   goal {row.goal}" if row.goal else ""
            lines.append(f"  {row.metric:32} {row.value:10.4g} {row.unit:8} n={row.n:<4} {spread}{goal}")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def machine() -> str:
    """Processor, cores and kernel."""
    model = platform.machine()
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release().split('-')[0]}"


def positive(text: str) -> int:
    """The type of arguments that count something: at least 1."""
    value = int(text)
    if value < 1:
        raise ValueError(f"{value} is not positive")
    return value
