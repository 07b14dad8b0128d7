"""Prompts from arguments and files: what explain, replicas and warm have in common."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti_mooncake.block_hashes import block_hashes
from tutti_mooncake.errors import ConfigError

if TYPE_CHECKING:
    from tutti_mooncake.geometry import Geometry


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    """`PROMPT`, `--tokenizer`, `--tokens` and `--cache-salt`."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text of a prompt; - = from standard input")
    parser.add_argument("--tokenizer", metavar="MODEL", help="directory or name of the model whose tokenizer makes tokens of PROMPT")
    parser.add_argument("--tokens", metavar="FILE", help="token ids as a JSON array, in place of PROMPT; - = from standard input")
    parser.add_argument("--cache-salt", default="", metavar="SALT", help="the request's cache_salt")


def prompt_tokens(arguments: argparse.Namespace) -> list[int]:
    """Token ids of the prompt that the arguments name. Raises ConfigError."""
    if arguments.tokens is not None:
        try:
            tokens = json.loads(read_text(arguments.tokens))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--tokens {arguments.tokens}: {error}; give a JSON array of token ids") from None
        if not is_token_ids(tokens):
            raise ConfigError(f"--tokens {arguments.tokens}: give a JSON array of token ids")
        return list(tokens)
    if arguments.tokenizer is None:
        raise ConfigError(f"{arguments.command} PROMPT needs --tokenizer MODEL, the directory or name of the engine's model")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError("a text needs the library transformers (pip install transformers); or give the ids by --tokens") from None
    text = read_text("-") if arguments.prompt == "-" else arguments.prompt
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    return [int(token) for token in tokenizer(text)["input_ids"]]


def prompt_keys(geometry: Geometry, tokens: list[int], cache_salt: str, *, tagged_salt: bool = True) -> list[bytes]:
    """What the prompt's full blocks are called. Raises ConfigError."""
    if not cache_salt.isprintable():
        raise ConfigError("--cache-salt: give printable text")
    return block_hashes(tokens, geometry.block_tokens, geometry.hash_algorithm, geometry.hash_seed, cache_salt, tagged_salt=tagged_salt)


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
