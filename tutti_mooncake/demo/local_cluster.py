"""`scripts/cluster up N | status | down`: a real etcd and N vLLM servers with pools of their own on one machine, in processes of their own.

What was started is written down at once, with the start time of each process, so that `down` ends these and no others.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

from tutti_mooncake.cli.output import print_json, print_table
from tutti_mooncake.demo.engine_client import CONNECTOR, ENVIRONMENT
from tutti_mooncake.demo.etcd_process import EtcdProcess, free_port
from tutti_mooncake.demo.model import CONTEXT_TOKENS, prepare_model

START_SECONDS = 300.0
STOP_SECONDS = 30.0
STATE = "state.json"


@dataclass(frozen=True)
class Started:
    """A process that leads a session. `born`: its start time, in the kernel's ticks since boot."""

    name: str
    pid: int
    born: int
    address: str
    log: str

    @property
    def alive(self) -> bool:
        """Whether it is there still, and not another process of that number."""
        return _born(self.pid) == self.born


class LocalCluster:
    """`root`: where pools, logs and the list of processes are."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def up(self, nodes: int, model: Path, capacity: str) -> list[Started]:
        """Returns when all answer. Raises RuntimeError; what was started runs on then, for its logs, until `down`."""
        if any(one.alive for one in self.started()):
            raise RuntimeError(f"a cluster of {self.root} is running; scripts/cluster down ends it")
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / STATE).unlink(missing_ok=True)
        etcd = EtcdProcess(self.root / "etcd").start()
        assert etcd.process is not None
        self._note("etcd", etcd.process.pid, etcd.endpoint, self.root / "etcd" / "log")
        for number in range(1, nodes + 1):
            self._start(f"node-{number}", model, capacity, etcd.endpoint)
        for one in self.started():
            if one.name != "etcd":
                _wait_until_it_answers(one)
        return self.started()

    def down(self) -> int:
        """Ends them, engines first; how many were running. Raises RuntimeError when one doesn't end."""
        running = [one for one in self.started() if one.alive]
        for one in sorted(running, key=lambda one: one.name == "etcd"):
            os.killpg(one.pid, signal.SIGINT if one.name != "etcd" else signal.SIGTERM)
            deadline = time.monotonic() + STOP_SECONDS
            while one.alive and time.monotonic() < deadline:
                time.sleep(0.05)
            if one.alive:
                os.killpg(one.pid, signal.SIGKILL)
                time.sleep(0.5)
            if one.alive:
                raise RuntimeError(f"{one.name}, process {one.pid}, doesn't end")
        (self.root / STATE).unlink(missing_ok=True)
        return len(running)

    def started(self) -> list[Started]:
        """What `up` started, alive or not."""
        try:
            return [Started(**one) for one in json.loads((self.root / STATE).read_text())]
        except FileNotFoundError:
            return []

    def _start(self, name: str, model: Path, capacity: str, etcd: str) -> None:
        port, log = free_port(), self.root / f"{name}.log"
        store = {"devices": [str(self.root / name)], "capacity": capacity, "etcd": etcd, "node_name": name, "node_host": "127.0.0.1"}
        transfer = json.dumps({**CONNECTOR, "kv_connector_extra_config": store})
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "demo"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(CONTEXT_TOKENS), "--dtype", "float32"]
        command += ["--enforce-eager", "--shutdown-timeout", "20", "--kv-transfer-config", transfer]
        threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2))}
        environment = {**threads, **os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        self._note(name, process.pid, f"http://127.0.0.1:{port}", log)

    def _note(self, name: str, pid: int, address: str, log: Path) -> None:
        started = [*self.started(), Started(name, pid, _born(pid), address, str(log))]
        (self.root / STATE).write_text(json.dumps([asdict(one) for one in started], indent=1))


def _born(pid: int) -> int:
    """0 when there is no such process, or it has ended and nobody asked how."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


def _wait_until_it_answers(server: Started) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{server.address}/health", timeout=1):
                return
        except OSError:
            if not server.alive or time.monotonic() > deadline:
                end = "\n".join(Path(server.log).read_text(errors="replace").splitlines()[-30:])
                raise RuntimeError(f"{server.name} didn't start; the end of {server.log}:\n{end}") from None
            time.sleep(0.2)


def main(arguments: list[str] | None = None) -> int:
    """1 when something isn't well."""
    parser = argparse.ArgumentParser(prog="scripts/cluster", description="A real etcd and vLLM servers on this machine.")
    parser.add_argument("--root", type=Path, default=Path(".cache/cluster"), metavar="DIR", help="pools and logs (%(default)s)")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    up = commands.add_parser("up", help="starts N nodes and returns when they answer")
    up.add_argument("nodes", type=int, metavar="N")
    up.add_argument("--model", type=Path, metavar="DIR", help="a model's directory (default: a small one, which is downloaded)")
    up.add_argument("--capacity", default="1GiB", help="of each node's pool (%(default)s)")
    status = commands.add_parser("status", help="lists the processes; 1 when one has ended")
    status.add_argument("--json", action="store_true", help="print one JSON value")
    commands.add_parser("down", help="ends them")
    options = parser.parse_args(arguments)
    cluster = LocalCluster(options.root.resolve())
    try:
        if options.command == "down":
            print(f"[cluster] {cluster.down()} processes ended", flush=True)
            return 0
        if options.command == "up":
            if options.nodes < 1:
                parser.error(f"up {options.nodes}: at least one node")
            model = options.model or prepare_model(cluster.root.parent / "demo", lambda text: print(f"[cluster] {text}", flush=True))
            print(f"[cluster] starting etcd and {options.nodes} nodes, which takes a minute or two", flush=True)
            cluster.up(options.nodes, model.resolve(), options.capacity)
    except (RuntimeError, OSError) as error:
        print(f"[cluster] failed: {error}", file=sys.stderr)
        return 1
    rows = [{**asdict(one), "alive": one.alive} for one in cluster.started()]
    if options.command == "status" and options.json:
        print_json(rows)
    else:
        print_table(["node", "process", "alive", "address", "log"], [_cells(row) for row in rows])
        for row in rows:
            if row["name"] == "etcd":
                print(f"look at them: tutti top --etcd {row['address']}")
    return 0 if rows and all(row["alive"] for row in rows) else 1


def _cells(row: dict[str, object]) -> list[str]:
    return [str(row["name"]), str(row["pid"]), "yes" if row["alive"] else "no", str(row["address"]), str(row["log"])]


if __name__ == "__main__":
    sys.exit(main())
