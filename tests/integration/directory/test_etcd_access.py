"""A real etcd that lets only some in: TLS with certificates on both sides, users with passwords."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_server import Certificates, EtcdServer
from tutti_mooncake.directory.broker import BrokerError, Change
from tutti_mooncake.directory.etcd_broker import EtcdBroker, EtcdOptions

USER, PASSWORD = "tutti", "open sesame"


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    if not shutil.which("openssl"):
        pytest.skip("there is no openssl to make certificates with")
    return Certificates(tmp_path / "certificates")


@pytest.fixture
def secure_etcd(tmp_path: Path, certificates: Certificates) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd", certificates).start()
    yield server
    server.kill()


@pytest.fixture(params=["plain", "tls"])
def guarded_etcd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EtcdServer]:
    """One user may write below `tutti/`; tokens live for three seconds."""
    certificates = request.getfixturevalue("certificates") if request.param == "tls" else None
    server = EtcdServer(tmp_path / "etcd", certificates, ("--auth-token-ttl", "3")).start()
    server.control("user", "add", f"root:{PASSWORD}")
    server.control("user", "add", f"{USER}:{PASSWORD}")
    server.control("role", "add", "writer")
    server.control("role", "grant-permission", "writer", "readwrite", "tutti/", "--prefix")
    server.control("user", "grant-role", USER, "writer")
    server.control("user", "grant-role", "root", "root")
    server.control("auth", "enable")
    yield server
    server.kill()


def options_of(server: EtcdServer, user: str = "", password: str = "") -> EtcdOptions:
    path = None if server.certificates is None else server.certificates.path
    files = ("", "", "") if path is None else (path("ca.pem"), path("client.pem"), path("client.key"))
    return EtcdOptions([server.endpoint], 3.0, *files, user, password)


def works(broker: EtcdBroker) -> bool:
    before = broker.snapshot("tutti/").revision
    watch = broker.watch("tutti/", before)
    revision = broker.apply([Change("tutti/a", str(before).encode())])
    deadline = time.monotonic() + 20
    while (got := watch.next(0.2)) is None:
        assert time.monotonic() < deadline
    watch.close()
    return got == ([Change("tutti/a", str(before).encode())], revision)


def refused(options: EtcdOptions) -> bool:
    broker = EtcdBroker(options)
    try:
        broker.snapshot("tutti/")
    except BrokerError:
        return True
    finally:
        broker.close()
    return False


def test_certificates_on_both_sides(secure_etcd: EtcdServer, certificates: Certificates) -> None:
    path = certificates.path
    broker = EtcdBroker(options_of(secure_etcd))
    assert works(broker)
    lease = broker.grant(60)
    broker.keep_alive(lease)
    broker.close()
    assert refused(EtcdOptions([secure_etcd.endpoint], 1.0))
    assert refused(EtcdOptions([secure_etcd.endpoint], 1.0, path("ca.pem")))


def test_a_server_of_another_authority_is_refused(tmp_path: Path, secure_etcd: EtcdServer, certificates: Certificates) -> None:
    other = Certificates(tmp_path / "other")
    assert refused(
        EtcdOptions([secure_etcd.endpoint], 1.0, other.path("ca.pem"), certificates.path("client.pem"), certificates.path("client.key"))
    )


def test_a_certificate_that_is_not_there_is_named(secure_etcd: EtcdServer) -> None:
    broker = EtcdBroker(EtcdOptions([secure_etcd.endpoint], 1.0, "/nowhere/ca.pem"))
    with pytest.raises(BrokerError, match="/nowhere/ca.pem"):
        broker.head()


def test_users_with_passwords(guarded_etcd: EtcdServer) -> None:
    broker = EtcdBroker(options_of(guarded_etcd, USER, PASSWORD))
    assert works(broker)
    with pytest.raises(BrokerError, match="permission denied"):
        broker.apply([Change("elsewhere", b"")])
    assert works(broker)
    broker.close()
    assert refused(options_of(guarded_etcd, USER, "wrong"))
    if guarded_etcd.certificates is None:  # a certificate's name is a user's too
        assert refused(options_of(guarded_etcd))


def test_a_token_that_has_run_out_is_renewed(guarded_etcd: EtcdServer) -> None:
    broker = EtcdBroker(options_of(guarded_etcd, USER, PASSWORD))
    assert works(broker)
    deadline = time.monotonic() + 20
    failed = False
    while not failed:
        assert time.monotonic() < deadline
        time.sleep(4.5)  # longer than a token lives when it isn't used
        try:
            broker.snapshot("tutti/")
        except BrokerError:
            failed = True
    assert works(broker)
    broker.close()
