"""Opening a pool: namespaces, locks, versions, missing and damaged devices, full disks."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Stores
from tests.pattern import chain, geometry
from tutti_mooncake import (
    ConfigError,
    DeviceFull,
    DeviceUnavailable,
    FormatVersionError,
    LocalStore,
    NamespaceMismatch,
    PoolCorrupt,
    PoolLocked,
    PoolMissing,
    PoolReadOnly,
    Status,
    _native,
)
from tutti_mooncake.cli.main import main as cli
from tutti_mooncake.io import DeviceFile
from tutti_mooncake.store import format as on_disk
from tutti_mooncake.store import read_geometry
from tutti_mooncake.store.owner import read_owner
from tutti_mooncake.store.pool import Pool, remove_pool


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flips one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


@pytest.mark.parametrize(
    "change",
    [
        {"memory_layout": "split"},
        {"dtype": "bfloat16"},
        {"model": "other"},
        {"hash_seed": "7"},
        {"tp_size": 2},
        {"layers": 5},
    ],
)
def test_pool_of_another_namespace_is_refused_with_both_fingerprints(stores: Stores, change: dict[str, object]) -> None:
    store, tensors = stores.open()
    keys = chain("kept", 3)
    tensors.write(keys)
    store.store(keys, range(3)).wait(20).raise_for_status()
    stores.close_all()
    other = geometry(**change)
    with pytest.raises(NamespaceMismatch) as refused:
        LocalStore.open(stores.config(), other)
    text = str(refused.value)
    assert geometry().fingerprint() in text and other.fingerprint() in text and next(iter(change)) in text
    second = LocalStore.open(stores.config(pool="second"), other)  # several namespaces on one device set
    second.close()
    store, _ = stores.open()
    assert store.lookup(keys) == 3


def test_second_opener_is_refused_with_the_owners_pid(stores: Stores) -> None:
    stores.open()
    with pytest.raises(PoolLocked, match=str(os.getpid())):
        LocalStore.open(stores.config(), geometry())
    reader = LocalStore.open(stores.config(read_only=True), geometry())
    reader.close()


def _open_and_wait(config: object, ready: object, end: object) -> None:
    store = LocalStore.open(config, geometry())  # type: ignore[arg-type]
    ready.set()  # type: ignore[attr-defined]
    end.wait(60)  # type: ignore[attr-defined]
    store.close()


def test_owner_in_another_process_is_named(stores: Stores) -> None:
    context = multiprocessing.get_context("fork")
    ready, end = context.Event(), context.Event()
    owner = context.Process(target=_open_and_wait, args=(stores.config(), ready, end))
    owner.start()
    try:
        assert ready.wait(30)
        with pytest.raises(PoolLocked, match=f"process {owner.pid} "):
            LocalStore.open(stores.config(), geometry())
    finally:
        end.set()
        owner.join(30)
    LocalStore.open(stores.config(), geometry()).close()  # its end gives the pool back


def test_read_only_store_serves_and_changes_nothing(stores: Stores) -> None:
    store, tensors = stores.open()
    keys = chain("served", 5)
    tensors.write(keys)
    store.store(keys, range(5)).wait(20).raise_for_status()
    stores.close_all()
    before = {path: path.read_bytes() for path in stores.root.rglob("*.pool")}
    store, tensors = stores.open(read_only=True)
    assert store.retrieve(keys, range(20, 25)).wait(20).ok_blocks == 5 and tensors.holds(keys[4], 24)
    assert set(store.store(chain("new", 2), [0, 1]).wait(5).statuses) == {Status.REJECTED}
    for change in (store.clear, lambda: store.evict(1), lambda: store.drop(keys)):
        with pytest.raises(PoolReadOnly):
            change()
    stores.close_all()
    assert {path: path.read_bytes() for path in stores.root.rglob("*.pool")} == before


def test_missing_pool_and_missing_capacity(stores: Stores) -> None:
    with pytest.raises(PoolMissing, match="tutti init"):
        LocalStore.open(stores.config(), geometry(), create=False)
    with pytest.raises(PoolMissing):
        read_geometry(stores.config())
    with pytest.raises(ConfigError, match="capacity is missing"):
        LocalStore.open(stores.config(capacity=0), geometry())
    with pytest.raises(ConfigError, match="holds no block"):
        LocalStore.open(stores.config(capacity="1MiB"), geometry())
    assert not list(stores.root.rglob("*.pool"))
    LocalStore.open(stores.config(), geometry()).close()
    assert read_geometry(stores.config()) == geometry()


def test_one_damaged_superblock_is_repaired_and_two_are_refused(stores: Stores) -> None:
    store, tensors = stores.open()
    keys = chain("safe", 3)
    tensors.write(keys)
    store.store(keys, range(3)).wait(20).raise_for_status()
    stores.close_all()
    path = stores.root / "nvme0" / "default.pool"
    for offset in (0, 8, 12, 40, 300, 4090):  # magic, version, length, JSON, padding, checksum
        flip(path, offset, 3)
        store, _ = stores.open()
        assert store.recovery.repaired_superblocks == 1 and store.lookup(keys) == 3
        stores.close_all()
    flip(path, 20)
    flip(path, 4096 + 20)
    with pytest.raises(PoolCorrupt, match="both copies"):
        stores.open()


def test_damaged_state_block_costs_nothing(stores: Stores) -> None:
    stores.open()
    stores.close_all()
    flip(stores.root / "nvme0" / "default.pool", on_disk.STATE_OFFSET + 30)
    store, _ = stores.open()
    assert store.recovery.dropped_blocks == 0


def test_other_format_version_is_refused(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_disk, "FORMAT_VERSION", 99)  # what a later program would write
    stores.open()
    stores.close_all()
    monkeypatch.undo()
    with pytest.raises(FormatVersionError, match="version 99"):
        stores.open()


@pytest.mark.parametrize("device", [0, 1])
def test_truncated_device_is_refused(stores: Stores, device: int) -> None:
    stores.open()
    stores.close_all()
    path = stores.root / f"nvme{device}" / "default.pool"
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(PoolCorrupt, match="truncated"):
        stores.open()


@pytest.mark.parametrize("device", [0, 1])
def test_lost_device_is_reported_and_the_pool_rebuilt_on_request(stores: Stores, device: int) -> None:
    store, tensors = stores.open()
    keys = chain("lost", 3)
    tensors.write(keys)
    store.store(keys, range(3)).wait(20).raise_for_status()
    stores.close_all()
    (stores.root / f"nvme{device}" / "default.pool").unlink()
    with pytest.raises(DeviceUnavailable, match="rebuild_on_loss"):
        stores.open()
    store, tensors = stores.open(rebuild_on_loss=True)
    assert store.lookup(keys) == 0
    tensors.write(keys)
    assert store.store(keys, range(3)).wait(20).ok_blocks == 3


def test_devices_in_another_order_are_refused(stores: Stores) -> None:
    stores.open()
    stores.close_all()
    with pytest.raises(PoolCorrupt, match="first order"):
        stores.open(devices=[str(stores.root / "nvme1"), str(stores.root / "nvme0")])


def test_interrupted_creation_is_made_anew(stores: Stores) -> None:
    stores.open()
    stores.close_all()
    for path in stores.root.rglob("*.pool"):  # as if killed before the superblocks were written
        size = path.stat().st_size
        os.truncate(path, 0)
        os.truncate(path, size)
    store, _ = stores.open()
    assert store.recovery.recovered_blocks == 0


def test_file_in_place_of_a_directory_is_refused(stores: Stores) -> None:
    (stores.root / "plain").write_text("not a directory")
    with pytest.raises(DeviceUnavailable, match="plain"):
        stores.open(devices=[str(stores.root / "plain")])


def test_capacity_beyond_the_free_space_leaves_nothing_behind(stores: Stores) -> None:
    with pytest.raises(DeviceFull, match="lower capacity"):
        stores.open(capacity="900TiB")
    assert not list(stores.root.rglob("*.pool"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """A mounted file system of 10 MiB, where this user may mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10M", "none", str(mount)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting a tmpfs: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_full_disk_during_init_leaves_nothing_behind(stores: Stores, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(small_disk)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 40))  # others fill the disk after the check
    with pytest.raises(DeviceFull, match=os.strerror(errno.ENOSPC)):
        stores.open(devices=[str(small_disk)], capacity="50MiB")
    assert list(small_disk.iterdir()) == []


def test_directory_that_is_read_only_is_refused(stores: Stores, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(DeviceUnavailable, match="can't be written"):
        stores.open(devices=[str(small_disk)])


def _make(config: object, go: object, results: object) -> None:
    go.wait(30)  # type: ignore[attr-defined]
    try:
        store = LocalStore.open(config, geometry())  # type: ignore[arg-type]
    except PoolLocked:
        results.put("locked")  # type: ignore[attr-defined]
        return
    links = [os.fstat(device.buffered_fd).st_nlink for device in store._pool.devices]
    results.put(links)  # type: ignore[attr-defined]
    go.wait(30)  # type: ignore[attr-defined]
    store.close()


def test_of_two_processes_that_make_one_pool_one_is_refused(stores: Stores) -> None:
    context = multiprocessing.get_context("fork")
    for turn in range(5):
        go, results = context.Barrier(2), context.Queue()
        config = stores.config(pool=f"twins{turn}", capacity="64MiB", prewrite=True)
        makers = [context.Process(target=_make, args=(config, go, results)) for _ in range(2)]
        for maker in makers:
            maker.start()
        outcomes = [results.get(timeout=30) for _ in makers]
        go.abort()
        for maker in makers:
            maker.join(30)
        assert sorted(map(str, outcomes)) == ["[1, 1]", "locked"]


@pytest.mark.parametrize("written", [0, 1])
def test_creation_killed_before_its_last_superblock_is_made_anew(stores: Stores, written: int) -> None:
    stores.open()
    stores.close_all()
    for index in range(2 - written):  # device 1 gets its superblock first, device 0 last
        path = stores.root / f"nvme{index}" / "default.pool"
        size = path.stat().st_size
        os.truncate(path, 0)
        os.truncate(path, size)
    store, _ = stores.open()
    assert store.recovery.recovered_blocks == 0


_FEW_FILES = """
import os, resource, sys
from tests.pattern import PatternTensors, geometry
from tutti_mooncake import DeviceUnavailable, LocalStore, StoreConfig
store = LocalStore.open(StoreConfig(devices=(sys.argv[1],), capacity="16MiB", executor="uring", lanes=8), geometry())
tensors = PatternTensors(store.geometry, 8)
held = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        held.append(os.dup(0))
except OSError:
    for _ in range(int(sys.argv[2])):
        os.close(held.pop())
try:
    store.register(tensors.tensors)
    print(store.executor_reason)
except DeviceUnavailable as error:
    print(error)
store.close()
"""


@pytest.mark.parametrize("left", [0, 1, 3])
def test_too_few_open_files_is_an_error_not_an_abort(tmp_path: Path, left: int) -> None:
    """A uring lane opens a file, its ring; a posix lane opens none, so that it does the work where not even one can be opened."""
    if refusal := _native.probe_uring():
        pytest.skip(f"io_uring: {refusal}")
    command = [sys.executable, "-c", _FEW_FILES, str(tmp_path / "few"), str(left)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 0 and "Too many open files" in done.stdout, done.stdout + done.stderr


def test_a_device_below_a_directory_that_is_missing_is_refused(stores: Stores) -> None:
    with pytest.raises(DeviceUnavailable, match="does not exist; mount the drive"):
        stores.open(devices=[str(stores.root / "unmounted" / "tutti")])
    assert not (stores.root / "unmounted").exists()


def test_another_capacity_is_ignored_with_a_warning(stores: Stores, caplog: pytest.LogCaptureFixture) -> None:
    stores.open()
    stores.close_all()
    store, _ = stores.open(capacity="32MiB")
    assert store.stats()["capacity_bytes"] == 16 << 20
    assert "keeps it" in caplog.text and str(32 << 20) in caplog.text


@pytest.mark.parametrize("state", ["whole", "damaged", "truncated", "one device gone"])
def test_a_pool_in_any_state_can_be_removed_and_made_anew(stores: Stores, state: str) -> None:
    store, tensors = stores.open()
    keys = chain("old", 4)
    tensors.write(keys)
    store.store(keys, range(4)).wait(20)
    with pytest.raises(PoolLocked, match="stop it first"):
        remove_pool(stores.config())
    stores.close_all()
    files = [stores.root / f"nvme{index}" / "default.pool" for index in (0, 1)]
    if state == "damaged":
        with files[0].open("r+b") as file:
            file.write(b"x" * 8192)
    elif state == "truncated":
        os.truncate(files[1], 4096)
    elif state == "one device gone":
        files[0].unlink()
    assert len(remove_pool(stores.config())) == (1 if state == "one device gone" else 2)
    store, _ = stores.open()
    assert store.lookup(keys) == 0 and store.recovery.recovered_blocks == 0


def test_owner_and_its_counters_can_be_read_beside_it(stores: Stores) -> None:
    store, tensors = stores.open()
    keys = chain("seen", 4)
    tensors.write(keys)
    store.store(keys, range(4)).wait(20)
    until = time.monotonic() + 20
    owner = read_owner(stores.config())
    while owner.get("counters", {}).get("store_ok_blocks") != 4 and time.monotonic() < until:
        time.sleep(0.1)
        owner = read_owner(stores.config())
    assert owner["pid"] == os.getpid() and owner["running"] is True and owner["clean"] is False
    assert owner["counters"]["store_ok_blocks"] == 4 and owner["counters"]["objects_written"] == 16
    stores.close_all()
    owner = read_owner(stores.config())
    assert owner["running"] is False and owner["clean"] is True and owner["counters"]["store_ok_blocks"] == 4


def test_open_names_arguments_of_the_wrong_kind(stores: Stores) -> None:
    with pytest.raises(ConfigError, match="not Geometry and StoreConfig"):
        LocalStore.open(geometry(), stores.config())  # type: ignore[arg-type]


def test_who_locks_a_file_that_was_replaced_holds_nothing(stores: Stores) -> None:
    stores.open()
    stores.close_all()
    config = stores.config()
    late = [DeviceFile.open(os.path.join(device, "default.pool"), read_only=False) for device in config.devices]
    remove_pool(config)
    LocalStore.open(config, geometry()).close()
    assert all(device.lock() and not device.is_current() for device in late)
    with pytest.raises(PoolLocked, match="made anew"):
        Pool._check(config, geometry(), 0, late, repair=True)
    for device in late:
        device.close()


@pytest.mark.parametrize(("capacity", "error"), [(0, ConfigError), ("1KiB", ConfigError), ("900TiB", DeviceFull)])
def test_a_pool_is_not_removed_for_one_that_cannot_be_made(stores: Stores, capacity: object, error: type[Exception]) -> None:
    stores.open()
    stores.close_all()
    with pytest.raises(error):
        remove_pool(stores.config(capacity=capacity), geometry())
    assert read_geometry(stores.config()) == geometry()


def test_two_devices_on_one_file_system_share_its_room(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    stores.open()
    stores.close_all()
    usage = shutil.disk_usage(stores.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=24 << 20))
    with pytest.raises(DeviceFull):  # either half fits into 24 MiB and the old pool's 15, but not both
        remove_pool(stores.config(capacity="60MiB"), geometry())
    assert read_geometry(stores.config()) == geometry()
    assert len(remove_pool(stores.config(capacity="36MiB"), geometry())) == 2


def test_a_pid_that_was_given_out_again_does_not_count_as_owner(stores: Stores) -> None:
    stores.open()
    stores.close_all()
    with (stores.root / "nvme0" / "default.pool").open("r+b") as file:
        state = {**on_disk.read_state(file.fileno()), "clean": False}
        on_disk.write_state(file.fileno(), {**state, "pid": os.getpid()})
        assert read_owner(stores.config())["running"] is True
        on_disk.write_state(file.fileno(), {**state, "pid": os.getpid(), "time": state["time"] - 10**6})
    assert read_owner(stores.config())["running"] is False


def test_clear_honours_read_only(stores: Stores, capsys: pytest.CaptureFixture[str]) -> None:
    store, tensors = stores.open()
    keys = chain("kept", 2)
    tensors.write(keys)
    store.store(keys, range(2)).wait(20)
    stores.close_all()
    command = ["clear", "--yes", "--json", "--devices", ",".join(stores.config().devices)]
    assert cli([*command, "--set", "read_only=true"]) == 1 and "PoolReadOnly" in capsys.readouterr().out
    assert cli(command) == 0 and '"removed_blocks": 2' in capsys.readouterr().out
