"""Arguments that name a pool, and what they become: a StoreConfig, a Geometry, an open store."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tutti_mooncake.config import ENVIRONMENT_PREFIX, KINDS, StoreConfig, read_settings
from tutti_mooncake.errors import ConfigError

if TYPE_CHECKING:
    from tutti_mooncake.store import LocalStore


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """`--json`, the same for every command."""
    parser.add_argument("--json", action="store_true", help="print one JSON value in place of text")


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """`--devices`, `--pool`, `--capacity`, `--config`, `--set` and `--json`."""
    group = parser.add_argument_group("pool")
    group.add_argument("--devices", metavar="A,B", help="directories or partitions, separated by commas")
    group.add_argument("--pool", metavar="NAME", help="name of the pool on these devices (default: default)")
    group.add_argument("--capacity", metavar="SIZE", help="for example 200GiB: all bytes of the pool, never exceeded")
    group.add_argument("--config", metavar="FILE", help="settings by name, a .json or .toml file")
    group.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="any other setting; repeatable")
    add_json_argument(parser)


def given_settings(arguments: argparse.Namespace) -> dict[str, tuple[Any, str]]:
    """`{name: (value, source)}` of what the file and the arguments set; the environment and defaults are not in it."""
    found: dict[str, tuple[Any, str]] = {}
    if arguments.config:
        found.update({name: (value, arguments.config) for name, value in read_settings_file(arguments.config).items()})
    for name in ("devices", "pool", "capacity"):
        value = getattr(arguments, name)
        if value is not None:
            found[name] = (value, f"--{name}")
    for text in arguments.set:
        name, separator, value = text.partition("=")
        if not separator:
            raise ConfigError(f"--set {text}: write NAME=VALUE")
        found[name] = (value, "--set")
    return found


def read_settings_file(path: str) -> Mapping[str, Any]:
    """The mapping in a JSON or TOML file. Raises ConfigError with the place of a syntax error."""
    try:
        content = Path(path).read_text(encoding="utf-8")
        if not path.endswith((".toml", ".json")):
            raise ConfigError(f"--config {path}: the name should end in .json or .toml")
        values = tomllib.loads(content) if path.endswith(".toml") else json.loads(content)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: should hold settings by name, not a {type(values).__name__}")
    return values


def store_config(arguments: argparse.Namespace, **overrides: Any) -> StoreConfig:
    """The settings that the arguments, their file and the environment add up to."""
    values = {name: value for name, (value, _) in given_settings(arguments).items()}
    return read_settings({**values, **overrides})[0]


def setting_sources(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """Where each setting's value comes from."""
    sources = {
        field.name: f"${ENVIRONMENT_PREFIX}{field.name.upper()}" if ENVIRONMENT_PREFIX + field.name.upper() in environment else "default"
        for kind in KINDS
        for field in fields(kind)
    }
    sources.update({name: source for name, (_, source) in given_settings(arguments).items()})
    return sources


def open_existing(arguments: argparse.Namespace, *, read_only: bool) -> LocalStore:
    """Opens the pool that the arguments name, with its own geometry. Raises PoolMissing if it isn't there."""
    from tutti_mooncake.store import LocalStore, read_geometry

    config = store_config(arguments, **({"read_only": True} if read_only else {}))
    return LocalStore.open(config, read_geometry(config), create=False)
