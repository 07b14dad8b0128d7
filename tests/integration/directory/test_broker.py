"""The control plane in this process and a real etcd keep the same contract."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import etcd3
import pytest

from tests.clock import Clock
from tests.etcd_server import EtcdServer
from tutti_mooncake.directory.broker import MOST_BATCH, Broker, BrokerError, Change, LeaseLost, Watch, WatchLost
from tutti_mooncake.directory.etcd_broker import PAGE_KEYS, EtcdBroker, EtcdOptions
from tutti_mooncake.directory.memory_broker import MemoryBroker
from tutti_mooncake.errors import ConfigError

DEADLINE_SECONDS = 20.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd")).start()
    yield server
    server.kill()


class Plane:
    """A broker, and how its history is compacted and its time passes."""

    def __init__(self, broker: Broker, compact: Callable[[], None], wait: Callable[[float], None]) -> None:
        self.broker = broker
        self.compact = compact
        self.wait = wait


@pytest.fixture(params=["memory", "etcd"])
def plane(request: pytest.FixtureRequest) -> Iterator[Plane]:
    if request.param == "memory":
        clock = Clock()
        memory = MemoryBroker(clock)

        def pass_time(seconds: float) -> None:
            clock.now += seconds

        yield Plane(memory, memory.compact, pass_time)
        return
    server = request.getfixturevalue("etcd")
    broker = EtcdBroker(EtcdOptions([server.endpoint]))
    broker.delete_prefix("t/")

    def compact() -> None:
        host, port = server.endpoint.split(":")
        with etcd3.client(host, int(port)) as client:
            client.compact(broker.head()[1])

    yield Plane(broker, compact, lambda seconds: time.sleep(seconds + 1.5))  # etcd ends leases about once a second
    broker.close()


def put(key: str, value: bytes = b"") -> Change:
    return Change(key, value)


def changes_until(watch: Watch, revision: int) -> list[Change]:
    found: list[Change] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        got = watch.next(0.2)
        if got is not None:
            found += got[0]
            if got[1] >= revision:
                return found
    raise AssertionError(f"the watch gave only {found}")


def test_what_is_applied_is_there_and_is_seen_in_order(plane: Plane) -> None:
    broker = plane.broker
    first = broker.apply([put("t/a", b"1"), put("t/b", b"\0\xff")])
    snapshot = broker.snapshot("t/")
    assert snapshot.items == {"t/a": b"1", "t/b": b"\0\xff"} and snapshot.revision == first
    watch = broker.watch("t/", snapshot.revision)
    assert watch.next(0.05) is None
    broker.apply([put("t/a", b"2"), Change("t/b", None)])
    broker.apply([put("other/x", b"")])
    last = broker.apply([put("t/c", b"3")])
    assert changes_until(watch, last) == [put("t/a", b"2"), Change("t/b", None), put("t/c", b"3")]
    assert broker.head() == (snapshot.cluster, last) and last > first
    watch.close()
    broker.delete_prefix("other/")


def test_a_watch_begins_in_the_past(plane: Plane) -> None:
    broker = plane.broker
    before = broker.head()[1]
    last = broker.apply([put("t/a", b"1")])
    last = broker.apply([put("t/a", b"2")])
    watch = broker.watch("t/", before)
    assert changes_until(watch, last) == [put("t/a", b"1"), put("t/a", b"2")]
    watch.close()


def test_a_watch_over_compacted_history_is_lost(plane: Plane) -> None:
    broker = plane.broker
    before = broker.head()[1]
    broker.apply([put("t/a", b"1")])
    broker.apply([put("t/a", b"2")])
    plane.compact()
    with pytest.raises(WatchLost):
        changes_until(broker.watch("t/", before), before + 2)
    assert broker.snapshot("t/").items == {"t/a": b"2"}


def test_large_snapshots_are_of_one_moment(plane: Plane) -> None:
    broker, number = plane.broker, 3 * PAGE_KEYS + 1
    keys = [f"t/{i:05d}" for i in range(number)]
    for begin in range(0, number, MOST_BATCH):
        broker.apply([put(key, key.encode()) for key in keys[begin : begin + MOST_BATCH]])
    assert broker.snapshot("t/").items == {key: key.encode() for key in keys}
    assert broker.delete_prefix("t/") == number and broker.delete_prefix("t/") == 0 and not broker.snapshot("t/").items


def test_batches_are_whole_or_refused(plane: Plane) -> None:
    with pytest.raises(BrokerError, match="128"):
        plane.broker.apply([put(f"t/{i}") for i in range(MOST_BATCH + 1)])
    with pytest.raises(BrokerError):
        plane.broker.apply([put("t/a"), put("t/a")])
    with pytest.raises(BrokerError):
        plane.broker.apply([put("t/a"), put("t/b")], lease=12345)
    assert not plane.broker.snapshot("t/").items


def test_what_is_under_a_lease_ends_with_it(plane: Plane) -> None:
    broker = plane.broker
    lease = broker.grant(4)
    broker.apply([put("t/a", b"1")], lease)
    broker.apply([put("t/b", b"1")])
    plane.wait(1)
    broker.keep_alive(lease)
    plane.wait(0.5)
    assert set(broker.snapshot("t/").items) == {"t/a", "t/b"}
    plane.wait(4)
    assert set(broker.snapshot("t/").items) == {"t/b"}
    with pytest.raises(LeaseLost):
        broker.keep_alive(lease)
    broker.revoke(lease)


def test_a_key_taken_over_by_another_lease_stays(plane: Plane) -> None:
    broker = plane.broker
    old, new = broker.grant(60), broker.grant(60)
    broker.apply([put("t/a", b"1")], old)
    broker.apply([put("t/a", b"2")], new)
    broker.revoke(old)
    assert broker.snapshot("t/").items == {"t/a": b"2"}
    broker.revoke(new)
    assert not broker.snapshot("t/").items


def test_keys_of_others_that_are_no_text(etcd: EtcdServer) -> None:
    broker = EtcdBroker(EtcdOptions([etcd.endpoint]))
    watch = broker.watch("t/", broker.head()[1])
    host, port = etcd.endpoint.split(":")
    with etcd3.client(host, int(port)) as client:
        client.put(b"t/\xff", b"\xff")
    assert changes_until(watch, broker.head()[1]) == [put("t/\ufffd", b"\xff")]
    assert broker.snapshot("t/").items == {"t/\ufffd": b"\xff"}
    assert broker.delete_prefix("t/") == 1
    broker.close()


def test_a_watch_that_is_closed_late_ends_no_other(etcd: EtcdServer) -> None:
    broker = EtcdBroker(EtcdOptions([etcd.endpoint]))
    old = broker.watch("t/", broker.head()[1])
    broker.close()  # as after an error
    new = broker.watch("t/", broker.head()[1])
    old.close()
    assert changes_until(new, broker.apply([put("t/a")])) == [put("t/a")]
    broker.delete_prefix("t/")
    broker.close()


def test_nobody_at_the_endpoint_is_an_error_that_names_it() -> None:
    broker = EtcdBroker(EtcdOptions(["127.0.0.1:1"], timeout_seconds=0.5))
    with pytest.raises(BrokerError, match=r"etcd at 127\.0\.0\.1:1"):
        broker.head()
    broker.close()


def test_another_endpoint_takes_over(etcd: EtcdServer) -> None:
    broker = EtcdBroker(EtcdOptions(["127.0.0.1:1", etcd.endpoint], timeout_seconds=0.5))
    answers = 0
    for _ in range(20):
        try:
            broker.head()
            answers += 1
        except BrokerError:
            time.sleep(0.05)
    assert answers >= 5
    broker.close()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"endpoints": []}, "no endpoints"),
        ({"endpoints": ["localhost"]}, "host:port"),
        ({"user": "me"}, "together"),
        ({"certificate": "a", "key": "b"}, "needs ca"),
    ],
)
def test_options_that_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EtcdOptions(**options)  # type: ignore[arg-type]


def test_passwords_are_not_printed(tmp_path: Path) -> None:
    assert "secret" not in repr(EtcdOptions(user="me", password="secret"))
