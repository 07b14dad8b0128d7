"""`scripts/bench NAME [--json FILE] [options]`, also `tutti bench NAME`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

NAMES = {
    "local": "store and retrieve against raw io_uring on the same files, and against LMCache's local disk",
    "index": "longest-prefix lookup, memory and recovery of an index of 10 M blocks",
    "enqueue": "what one call costs the engine's thread, 80 layers, 64 and 8,192 blocks",
    "gpu": "store and retrieve between files and GPU memory by the I/O kernel, against raw reads and the PCIe copy",
    "remote": "blocks of another process's store, fetched over Mooncake's Transfer Engine, against a raw transfer of the same bytes",
    "ttft": "time to the first token of a long prompt in a real vLLM: cold, from its own memory, from our tier, from peers",
    "itl": "what the connector costs a real vLLM: time per token with nothing to do, and beside stores; against ExampleConnector",
}


def main() -> int:
    """Runs one benchmark."""
    names = "\n".join(f"  {name:9} {what}" for name, what in NAMES.items())
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(f"usage: bench NAME [--json FILE] [options]\n\n{names}")
        return 0 if len(sys.argv) > 1 else 2
    name = sys.argv[1]
    if name not in NAMES:
        print(f"bench: no benchmark {name!r}; there are:\n{names}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"tutti_mooncake.bench.{name}")
    parser = argparse.ArgumentParser(prog=f"bench {name}", description=NAMES[name])
    parser.add_argument("--json", metavar="FILE", help="write the report there too")
    module.add_options(parser)
    arguments = parser.parse_args(sys.argv[2:])
    report = module.run(arguments)
    print(report.text())
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(report.as_dict(), file, indent=1)
            file.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
