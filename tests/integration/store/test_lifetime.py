"""Closing, forking and ending while operations run: nothing touches a descriptor afterwards, nothing hangs, the lock is given back."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.conftest import Stores
from tests.pattern import chain, geometry
from tutti_mooncake import LocalStore, Status, StoreClosed, TensorError, TuttiError, _native


def filled(stores: Stores, blocks: int = 40, **settings: object):  # type: ignore[no-untyped-def]
    store, tensors = stores.open(**settings)
    keys = chain("filled", blocks)
    tensors.write(keys)
    store.store(keys, range(blocks)).wait(20).raise_for_status()
    return store, tensors, keys


def writing(stores: Stores) -> LocalStore:
    """A store with a write that hangs until its deadline, one second from now."""
    faults = _native.FaultInjector()
    store, tensors = stores.open(faults=faults)
    keys = chain("hangs", 1)
    tensors.write(keys)
    faults.add(True, "hang", limit=1)
    store.store(keys, [0], deadline_seconds=1)
    return store


@contextlib.contextmanager
def alarm(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Calls `handler` in this thread, 0.3 s from now."""
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def test_close_waits_for_verify_and_writes_into_no_other_file(stores: Stores, tmp_path: Path) -> None:
    store, _, keys = filled(stores)
    reading, goes_on = threading.Event(), threading.Event()
    ended: list[str] = []

    def slow(_done: int, _total: int) -> None:
        reading.set()
        goes_on.wait(20)

    def scrub() -> None:
        try:
            store.verify(slow)
        except StoreClosed:
            ended.append("closed")

    scrubber = threading.Thread(target=scrub)
    closer = threading.Thread(target=store.close)
    scrubber.start()
    assert reading.wait(20)
    closer.start()
    while not store._life.closed:  # close() has begun, and must not take the descriptors away
        pass
    with contextlib.ExitStack() as stack:  # they get the lowest free descriptor numbers
        others = [stack.enter_context(open(tmp_path / f"other{index}", "w+b")) for index in range(4)]
        for other in others:
            other.write(bytes(1 << 20))
            other.flush()
        goes_on.set()
        scrubber.join(20)
        closer.join(20)
        assert ended == ["closed"] and not closer.is_alive()
        for other in others:
            other.seek(0)
            assert not any(other.read())
    again, _ = stores.open()
    assert again.lookup(keys) == 40


def test_close_from_inside_verify_is_refused(stores: Stores) -> None:
    store, _, _ = filled(stores)
    with pytest.raises(TuttiError, match="inside verify"):
        store.verify(lambda _done, _total: store.close())


def test_every_call_after_close_says_so(stores: Stores) -> None:
    store, _, keys = filled(stores)
    listing = store.entries()
    store.close()
    calls = [
        lambda: store.lookup(keys),
        lambda: store.store(keys, range(40)),
        lambda: store.retrieve(keys, range(40)),
        lambda: store.pin(keys, 1),
        lambda: store.evict(1),
        lambda: store.drop(keys),
        store.clear,
        store.verify,
        lambda: list(store.entries()),
        lambda: next(listing),
    ]
    for call in calls:
        with pytest.raises(StoreClosed):
            call()


def test_operations_that_race_with_close_all_end(stores: Stores) -> None:
    for turn in range(10):
        store, _ = stores.open(pool=f"race{turn}", blocks=128)
        started: list[object] = []
        go = threading.Barrier(5)

        def work(worker: int, store: LocalStore = store, go: threading.Barrier = go, started: list[object] = started) -> None:
            go.wait()
            try:
                for prompt in range(1000):
                    keys = chain((worker, prompt), 4)
                    started.append(store.store(keys, range(worker * 8, worker * 8 + 4)))
                    started.append(store.retrieve(keys, range(worker * 8 + 4, worker * 8 + 8)))
            except StoreClosed:
                return

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        go.wait()
        store.close()
        for thread in threads:
            thread.join(20)
        for operation in started:
            operation.wait(0.5)  # type: ignore[attr-defined]
        assert store._table.counts()["pinned"] == 0 and store._table.counts()["writing"] == 0


@pytest.mark.parametrize("layer", [-1, 4, 100, 10**6])
def test_layer_that_does_not_exist_is_refused(stores: Stores, layer: int) -> None:
    store, _, keys = filled(stores)
    operation = store.retrieve(keys, range(40))
    with pytest.raises(TensorError, match="outside 0 to 3"):
        operation.wait_layer(layer, 1)
    operation.wait(20).raise_for_status()


def test_children_of_a_failed_block_are_not_called_stored(stores: Stores) -> None:
    faults = _native.FaultInjector()
    store, tensors = stores.open(faults=faults, lanes=1, executor="posix")
    keys = chain("family", 4)
    tensors.write(keys)
    faults.add(True, "error", error=errno.EIO, limit=1)
    result = store.store(keys, range(4)).wait(20)
    assert [Status(status) for status in result.statuses] == [Status.DEVICE_ERROR] + [Status.REJECTED] * 3
    assert result.ok_blocks == 0 and [store.lookup([key]) for key in keys] == [0] * 4
    assert store.stats()["free_blocks"] == store.stats()["slots"]


def test_verify_beside_traffic_calls_nothing_damaged(stores: Stores) -> None:
    store, tensors = stores.open(capacity="5MiB")
    done = threading.Event()

    def churn() -> None:
        turn = 0
        while not done.is_set():
            keys = chain(("churn", turn), 20)
            tensors.write(keys)
            store.store(keys, range(20)).wait(20)
            turn += 1

    churner = threading.Thread(target=churn)
    churner.start()
    reports = []
    deadline = time.monotonic() + 30
    while len(reports) < 30 or not store.stats().get("evicted_blocks"):
        reports.append(store.verify())
        assert time.monotonic() < deadline
    done.set()
    churner.join(20)
    assert [report.reasons for report in reports if report.reasons] == []


def test_failing_close_gives_the_lock_back(stores: Stores) -> None:
    store, _, keys = filled(stores)

    def fail(**_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store._pool.write_state = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        store.close()
    again, _ = stores.open()
    assert again.lookup(keys) == 40 and not again.recovery.clean_shutdown


_AT_EXIT = """
import os, sys
from tests.pattern import PatternTensors, chain, device_of, geometry
from tutti_mooncake import LocalStore, StoreConfig
store = LocalStore.open(StoreConfig(devices=(sys.argv[1],), capacity="32MiB", executor=sys.argv[2]), geometry())
tensors = PatternTensors(store.geometry, 512, device=device_of(sys.argv[2]))
store.register(tensors.tensors)
operations = [store.store(chain(prompt, 64), range(64)) for prompt in range(16)]
if len(sys.argv) > 3:  # a child that lives on with what it inherited, after its parent was killed
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    os.kill(os.getpid(), 9)
"""


def test_interpreter_may_end_while_operations_run(stores: Stores) -> None:
    for _ in range(3):
        command = [sys.executable, "-c", _AT_EXIT, str(stores.root / "exit"), stores.executor]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
        assert done.returncode == 0, done.stderr
    store, _ = stores.open(devices=[str(stores.root / "exit")])
    assert store.recovery.clean_shutdown


def test_forked_child_does_not_keep_a_dead_owners_lock(stores: Stores) -> None:
    command = [sys.executable, "-c", _AT_EXIT, str(stores.root / "fork"), stores.executor, "fork"]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert parent.stdin is not None
    try:
        parent.wait(60)
        LocalStore.open(stores.config(devices=[str(stores.root / "fork")]), geometry()).close()
    finally:
        parent.stdin.close()  # ends the child


def test_ttl_beyond_the_clock_is_refused(stores: Stores) -> None:
    with pytest.raises(TuttiError, match="ttl_seconds"):
        stores.config(ttl_seconds=5e9)


@pytest.mark.parametrize("deadline", ["x", -1, float("nan"), True])
def test_impossible_deadline_is_refused_before_anything_is_reserved(stores: Stores, deadline: object) -> None:
    store, _, keys = filled(stores)
    for call in (store.store, store.retrieve):
        with pytest.raises(TuttiError, match="deadline_seconds"):
            call(chain("new", 4) if call == store.store else keys[:4], range(4), deadline_seconds=deadline)  # type: ignore[operator]
    stats = store.stats()
    assert stats["writing_blocks"] == 0 and stats["pinned_blocks"] == 0 and stats["free_blocks"] == stats["slots"] - 40
    with pytest.raises(TuttiError, match="blocks"):
        store.evict(-1)
    assert store.evict(10**30) == 40


def test_a_second_close_returns_when_the_pool_has_been_given_back(stores: Stores) -> None:
    store = writing(stores)
    first = threading.Thread(target=store.close)
    first.start()
    while not store._life.closed:
        pass
    store.close()
    stores.open()  # the lock is free
    first.join(20)
    assert not first.is_alive()


def test_a_child_forked_while_the_store_is_busy_gets_an_error_and_does_not_hang(stores: Stores) -> None:
    store, _, _ = filled(stores)
    store._lock.acquire()  # as another thread may hold it at that moment
    holder = threading.Event()
    child = os.fork()
    if child == 0:

        def in_child() -> None:
            for method in (store.stats, store.clear, lambda: store.lookup([b"k" * 32])):
                with contextlib.suppress(StoreClosed):
                    method()
                    os._exit(1)
            store.close()
            os._exit(0)

        threading.Thread(target=in_child).start()  # not the thread that holds the lock
        holder.wait(20)
        os._exit(2)
    store._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.stats()["resident_blocks"] == 40


def test_a_close_that_is_interrupted_leaves_the_work_to_the_next(stores: Stores) -> None:
    store, _, _ = filled(stores)
    reading, goes_on = threading.Event(), threading.Event()

    def slow(_done: int, _total: int) -> None:
        reading.set()
        goes_on.wait(20)

    def scrub() -> None:
        with contextlib.suppress(StoreClosed):
            store.verify(slow)

    scrubber = threading.Thread(target=scrub)
    scrubber.start()
    assert reading.wait(20)
    with alarm(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        store.close()
    goes_on.set()
    store.close()
    scrubber.join(20)
    stores.open()  # the lock is free


def test_a_signal_handler_that_closes_does_not_wait_for_the_close_that_it_interrupts(stores: Stores) -> None:
    store = writing(stores)
    called: list[int] = []

    def handler(number: int, _frame: object) -> None:
        store.close()
        called.append(number)

    with alarm(handler):
        store.close()
    assert called == [signal.SIGALRM]
    stores.open()


def test_a_child_forked_during_verify_can_close(stores: Stores) -> None:
    store, _, _ = filled(stores)
    children: list[int] = []

    def fork(_done: int, _total: int) -> None:
        child = os.fork()
        if child == 0:
            try:
                threading.Thread(target=store.close).start()
                store.close()
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)

    store.verify(fork)
    assert children and all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)
