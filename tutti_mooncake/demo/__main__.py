"""`python -m tutti_mooncake.demo`: exits with 0 if the answers are equal and blocks came from disk or the other node, with 1 if not."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from tutti_mooncake.demo.cluster_run import ClusterOutcome
from tutti_mooncake.demo.cluster_run import run as run_cluster
from tutti_mooncake.demo.document import load_document
from tutti_mooncake.demo.engine_client import EngineFailed
from tutti_mooncake.demo.model import prepare_model
from tutti_mooncake.demo.report import render
from tutti_mooncake.demo.run import Outcome, run


def main(arguments: list[str] | None = None) -> int:
    """Runs the demonstration and prints it."""
    parser = argparse.ArgumentParser(prog="scripts/demo")
    parser.description = "A real vLLM answers about a long document: cold, from its own cache, and from disk after a kill -9."
    parser.add_argument("--cluster", action="store_true", help="two nodes: one answers with the KV that only the other one has")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    parser.add_argument("--document", type=Path, metavar="FILE", help="a text file to ask about (default: argparse.py)")
    parser.add_argument("--cache", type=Path, metavar="DIR", default=Path(".cache/demo"), help="model, pool and log")
    options = parser.parse_args(arguments)
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"[demo {time.monotonic() - begin:5.1f} s] {text}", flush=True)

    try:
        document = load_document(options.document)
        model = prepare_model(options.cache.resolve(), say)
        outcome: Outcome | ClusterOutcome = (run_cluster if options.cluster else run)(model, document, options.cache.resolve(), say)
    except (EngineFailed, OSError, RuntimeError) as error:
        print(f"[demo] failed: {error}", file=sys.stderr)
        return 1
    print(outcome.render() if isinstance(outcome, ClusterOutcome) else render(outcome), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(outcome.as_dict(), indent=1) + "\n")
    if outcome.fault:
        print(f"[demo] FAILED: {outcome.fault}", file=sys.stderr)
    return 1 if outcome.fault else 0


if __name__ == "__main__":
    sys.exit(main())
