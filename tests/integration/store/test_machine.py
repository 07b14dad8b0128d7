"""Machines that allow less, or give more: no io_uring, little locked memory, raw partitions."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import Stores
from tests.pattern import PatternTensors, chain, device_of, geometry
from tutti_mooncake import LocalStore, NamespaceMismatch, PoolCorrupt, Status, StoreConfig
from tutti_mooncake.store.pool import has_pool, remove_pool


def round_trip(store: LocalStore, name: str) -> None:
    """Stores eight blocks, wipes them and loads them."""
    tensors = PatternTensors(store.geometry, 8, device=device_of(store.config.executor))
    store.register(tensors.tensors)
    keys = chain(name, 8)
    tensors.write(keys)
    assert store.store(keys, range(8)).wait(20).statuses.tolist() == [Status.OK] * 8
    tensors.wipe()
    assert store.retrieve(keys, range(8)).wait(20).statuses.tolist() == [Status.OK] * 8
    assert all(tensors.holds(key, block) for block, key in enumerate(keys))


def in_child(action: Callable[[], str]) -> str:
    """What `action` returns in a process of its own; fails with what it raised."""

    def body(end: multiprocessing.connection.Connection) -> None:
        torch.set_num_threads(1)  # its threads aren't in the child
        try:
            end.send((True, action()))
        except BaseException as error:
            end.send((False, repr(error)))

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=body, args=(theirs,))
    child.start()
    assert ours.poll(60), "the child doesn't answer"
    good, text = ours.recv()
    child.join(20)
    assert good, text
    return str(text)


def refuse_io_uring() -> None:
    """From now on io_uring_setup ends with EPERM in this process, as under a container's seccomp profile."""
    load_number, if_setup, allow, refuse = (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in (load_number, if_setup, refuse, allow)))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.byref(header), 0, 0) == 0, os.strerror(ctypes.get_errno())  # PR_SET_SECCOMP, filter


def test_where_io_uring_is_refused_posix_does_the_work(tmp_path: Path) -> None:
    def action() -> str:
        refuse_io_uring()
        config = StoreConfig(devices=(str(tmp_path / "d"),), capacity="16MiB")
        with LocalStore.open(config, geometry()) as store:
            round_trip(store, "refused")
            return f"{store.executor}: {store.executor_reason}"

    text = in_child(action)
    assert text.startswith("posix: io_uring is refused") and "seccomp" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which needs root")
def test_with_little_locked_memory_buffers_are_not_registered() -> None:
    root = tempfile.mkdtemp()  # where any user may go, unlike pytest's
    os.chmod(root, 0o777)

    def action() -> str:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
        os.setgid(65534)
        os.setuid(65534)
        config = StoreConfig(devices=(f"{root}/d",), capacity="16MiB", executor="uring")
        with LocalStore.open(config, geometry()) as store:
            round_trip(store, "little")
            if store.executor != "uring":
                return store.executor_reason
            return str(store.stats()["executor_note"])

    try:
        text = in_child(action)
    finally:
        shutil.rmtree(root)
    assert "ulimit -l" in text or "io_uring is refused" in text


@pytest.fixture
def partitions(tmp_path: Path) -> Iterator[list[str]]:
    """Two block devices of 32 MiB with bytes of an earlier life on them."""
    made: list[str] = []
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(os.urandom(32 << 20))
        command = ["losetup", "--find", "--show", str(tmp_path / name)]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"loop devices can't be had here: {getattr(error, 'stderr', '') or error}")
        made.append(answer.stdout.strip())
    yield made
    for device in made:
        subprocess.run(["losetup", "--detach", device], check=True)


def test_raw_partitions(stores: Stores, partitions: list[str]) -> None:
    if stores.executor == "nvme-model" and device_of(stores.executor) == "cuda":
        pytest.skip("a partition's page cache can't be pinned for a GPU")
    config = stores.config(devices=partitions, capacity="48MiB")
    with pytest.raises(PoolCorrupt, match="no pool"):
        LocalStore.open(config, geometry())  # it may be somebody's file system
    assert remove_pool(config) == partitions
    with LocalStore.open(config, geometry()) as store:
        round_trip(store, "raw")
    with LocalStore.open(config, geometry(), create=False) as store:
        assert store.recovery.recovered_blocks == 8 and store.recovery.clean_shutdown
        assert store.verify().checked_blocks == 8
    with pytest.raises(NamespaceMismatch):
        LocalStore.open(config, geometry(model="other"))
    assert remove_pool(config) == partitions and not has_pool(config)
    with LocalStore.open(config, geometry(model="other")) as store:
        assert store.recovery.recovered_blocks == 0
        round_trip(store, "anew")
