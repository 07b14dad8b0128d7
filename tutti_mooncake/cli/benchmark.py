"""The command `tutti bench`: hands over to tutti_mooncake.bench, whose benchmarks verify what they read."""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys
from typing import TYPE_CHECKING

from tutti_mooncake.errors import ConfigError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_commands(commands: Subparsers) -> None:
    """Adds this file's command."""
    bench = commands.add_parser("bench", help="run one benchmark", add_help=False, prefix_chars="\0")  # its options are handed on
    bench.add_argument("rest", nargs=argparse.REMAINDER)
    bench.set_defaults(run=run_bench)


def run_bench(arguments: argparse.Namespace) -> int:
    """Runs the benchmark with the rest of the command line."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("the benchmarks need torch: pip install torch, or the vllm extra")
    before = sys.argv
    sys.argv = ["tutti bench", *arguments.rest]
    try:
        runpy.run_module("tutti_mooncake.bench", run_name="__main__")
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or 0
        print(exit_.code, file=sys.stderr)
        return 1
    finally:
        sys.argv = before
    return 0
