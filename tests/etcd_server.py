"""A real etcd on loopback, which tests stop, pause, kill and wipe."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tutti_mooncake.demo.etcd_process import EtcdProcess, etcd_binary

__all__ = ["Certificates", "EtcdServer", "etcd_binary"]


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


class EtcdServer(EtcdProcess):
    """`certificates`: it takes only clients with one of them. `extra`: arguments."""

    def __init__(self, root: Path, certificates: Certificates | None = None, extra: Sequence[str] = ()) -> None:
        self.certificates = certificates
        tls: list[str] = []
        if certificates is not None:
            path = certificates.path
            tls += ["--cert-file", path("server.pem"), "--key-file", path("server.key")]
            tls += ["--client-cert-auth", "--trusted-ca-file", path("ca.pem")]
        super().__init__(root, [*tls, *extra], "http" if certificates is None else "https")

    def control(self, *arguments: str) -> None:
        """Runs etcdctl."""
        tls: list[str] = []
        if self.certificates is not None:
            path = self.certificates.path
            tls = ["--cacert", path("ca.pem"), "--cert", path("client.pem"), "--key", path("client.key")]
        binary = str(Path(etcd_binary()).parent / "etcdctl")
        subprocess.run(
            [binary, "--endpoints", self.url, *tls, *arguments], check=True, capture_output=True, env={**os.environ, "ETCDCTL_API": "3"}
        )

    def pause(self) -> None:
        """It takes connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Ends a pause."""
        self._signal(signal.SIGCONT)

    def wipe(self) -> None:
        """Kills it and forgets its data."""
        self.kill()
        shutil.rmtree(self.root / "data", ignore_errors=True)

    def _signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)


def _new_key(name: str) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key")
