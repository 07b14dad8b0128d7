"""Builds the argument parser from the groups of commands and turns exceptions into messages and exit statuses.

Exit status: 0 = done and well; 1 = failed, or something found wrong; 2 = wrong usage; 130 = interrupted.
Standard output carries the result only (with --json exactly one JSON value); progress and errors go to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from tutti_mooncake.cli import benchmark, calibrate, cluster_commands, doctor, explain, pool_commands, report_commands, settings, top, warm
from tutti_mooncake.errors import TuttiError

DESCRIPTION = """\
Manages NVMe pools of KV cache blocks.

A pool is named by its devices (directories or partitions) and its name. The settings come, in this order, from the
arguments, the file given by --config, TUTTI_<NAME> in the environment, and the defaults; `tutti config` prints them.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `tutti`; each subcommand sets `run`, a function from the parsed arguments to an exit status."""
    parser = argparse.ArgumentParser(prog="tutti", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"tutti {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for group in (pool_commands, report_commands, explain, calibrate, warm, cluster_commands, top, doctor, settings, benchmark):
        group.add_commands(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parsed = build_parser().parse_args(arguments)
    as_json = bool(getattr(parsed, "json", False))
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
        return status
    except TuttiError as error:
        return _fail(str(error), type(error).__name__, as_json)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            # The reader of our output, such as `head`, has had enough; the interpreter must not flush to it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return _fail(str(error), type(error).__name__, as_json)
    except KeyboardInterrupt:
        print("tutti: interrupted", file=sys.stderr)
        return 130


def _fail(message: str, kind: str, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": kind, "message": message}))
    print(f"tutti: {message}", file=sys.stderr)
    return 1


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("tutti-mooncake")
    except metadata.PackageNotFoundError:
        return "not installed"
