"""The command `tutti config`: every setting, its value and where that comes from."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from tutti_mooncake.cli.output import plain, print_json, print_table, value_text
from tutti_mooncake.cli.store_arguments import add_store_arguments, given_settings, setting_sources
from tutti_mooncake.config import read_settings

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_commands(commands: Subparsers) -> None:
    """Adds this file's command."""
    config = commands.add_parser("config", help="print every setting, its value and where it comes from")
    add_store_arguments(config)
    config.set_defaults(run=run_config)


def run_config(arguments: argparse.Namespace) -> int:
    """Prints the whole tree of settings; with --json the values alone can be given back by --config."""
    kinds = read_settings({name: value for name, (value, _) in given_settings(arguments).items()})
    values = plain({name: value for kind in kinds for name, value in kind.as_dict().items()})
    # A salt separates tenants: whoever sees it can find their blocks.
    if values.get("tenant_salt"):
        values["tenant_salt"] = "(set)"
    sources = setting_sources(arguments, os.environ)
    if arguments.json:
        print_json({"config": values, "sources": sources})
    else:
        print_table(
            ["setting", "value", "from"],
            [[name, value_text(name, value), sources[name]] for name, value in values.items()],
        )
    return 0
