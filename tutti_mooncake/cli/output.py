"""How results are shown: text tables, sizes, one JSON value, and progress on standard error."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np


def plain(value: Any) -> Any:
    """`value` as JSON knows it: records as maps, bytes as hex digits, numpy numbers as numbers."""
    if hasattr(value, "as_dict"):
        return plain(value.as_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def print_json(value: Any) -> None:
    """Prints one JSON value."""
    json.dump(plain(value), sys.stdout, indent=2)
    sys.stdout.write("\n")


def size_text(size_bytes: float) -> str:
    """A size with a binary unit: 1536 -> 1.5 KiB."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration_text(seconds: float) -> str:
    """A duration in one or two units: 3725 -> 1 h 02 min."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds // 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    return f"{seconds // 86_400:.0f} days"


def value_text(name: str, value: Any) -> str:
    """A value for people; the unit is in its name."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and (name in ("bytes", "capacity") or name.endswith("_bytes")):
        return size_text(value)
    if isinstance(value, float) and name == "since":
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "-"
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items()) or "-"
    return "-" if value is None or value == "" else str(value)


def print_section(title: str, values: Mapping[str, Any]) -> None:
    """A title, then one aligned line per value."""
    print(title)
    width = max((len(name) for name in values), default=0)
    for name, value in values.items():
        print(f"  {name:<{width}}  {value_text(name, plain(value))}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Left-aligned columns below their titles, two spaces apart."""
    lines = [list(columns), *(list(row) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


class Progress:
    """A progress bar on a terminal, a line every ten seconds elsewhere; a context manager, called with (done, total).

    May be called from any one thread at a time; draws at most ten times a second, so callers needn't hold back.
    """

    def __init__(self, label: str, *, unit: str = "blocks", stream: TextIO | None = None) -> None:
        self._label = label
        self._unit = unit
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._start = self._drawn = time.monotonic()
        self._visible = False

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._drawn < (0.1 if self._terminal else 10) and not (self._terminal and done >= total):
            return
        self._drawn = now
        share = done / total if total else 1.0
        left = (now - self._start) / share - (now - self._start) if share > 0 else 0.0
        amount = f"{size_text(done)} of {size_text(total)}" if self._unit == "bytes" else f"{done} of {total} {self._unit}"
        text = f"{self._label}  {share:4.0%}  {amount}  {duration_text(left)} left"
        if self._terminal:
            filled = int(share * 30)
            self._stream.write(f"\r\033[K[{'#' * filled}{'.' * (30 - filled)}]  {text}")
            self._visible = True
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._visible:
            self._stream.write("\n")
            self._stream.flush()
