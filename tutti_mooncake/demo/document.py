"""The long document of the demonstration, cut to what the model can read, and the question about it."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DOCUMENT_TOKENS = 6000
"""Leaves room in the model's context for the question and the answer."""


@dataclass(frozen=True)
class Document:
    """`name`: for people. `question`: what is asked about the text."""

    name: str
    text: str
    question: str


def load_document(path: Path | None) -> Document:
    """The file at `path`, or else the source of `argparse`, which every Python installation has."""
    if path is None:
        source = Path(inspect.getsourcefile(argparse) or "")
        question = "What is this Python module for? Answer in one sentence."
        return Document(f"{source.name} of Python's standard library", source.read_text(), question)
    question = "What is this text about? Answer in one sentence."
    return Document(path.name, path.read_text(errors="replace"), question)


def leading_lines(text: str, fits: Callable[[str], bool]) -> str:
    """The longest beginning of `text`, in whole lines, that `fits` accepts; `fits` must accept all shorter ones."""
    lines = text.splitlines(keepends=True)
    low, high = 0, len(lines)
    while low < high:
        middle = (low + high + 1) // 2
        if fits("".join(lines[:middle])):
            low = middle
        else:
            high = middle - 1
    return "".join(lines[:low])
