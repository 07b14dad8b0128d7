"""Prompts from files: what explain and warm have in common."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tutti_mooncake.errors import ConfigError


def read_text(path: str) -> str:
    """A file's text, or standard input's for "-". Raises ConfigError, also for what is no UTF-8."""
    try:
        return (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error.reason} at byte {error.start}; it should be UTF-8") from None


def is_token_ids(value: Any) -> bool:
    """Whether a value from JSON is an array of token ids."""
    return isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value)
