"""Removals and request notes: what is remembered, on the device and after damage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tutti_mooncake.keys import as_key_array
from tutti_mooncake.store.history import HISTORY_ENTRIES, HISTORY_OFFSET, History, Removal
from tutti_mooncake.store.request_log import LOG_FRAMES, LOG_OFFSET, RequestLog, RequestNote, read_notes


@pytest.fixture
def device(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "device", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, 1 << 20)
    yield descriptor
    os.close(descriptor)


def keys(first: int, count: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    source = np.random.default_rng(first)
    return as_key_array([source.bytes(32) for _ in range(count)])


def note(number: int) -> RequestNote:
    return RequestNote(f"cmpl-{number}", 1_800_000_000 + number, 1000, 7, 1, 5, 4, 0, "", "0123456789abcdef")


def test_latest_reason_counts_and_survives_a_restart(device: int) -> None:
    now = [1_800_000_000.0]
    history = History(lambda: now[0])
    history.removed(keys(1, 3), Removal.EVICTED)
    now[0] += 10
    history.removed(keys(1, 3)[:1], Removal.FAILED_CHECK)
    expected = [(Removal.FAILED_CHECK, 1_800_000_010), (Removal.EVICTED, 1_800_000_000), (Removal.EVICTED, 1_800_000_000), None]
    asked = np.concatenate([keys(1, 3), keys(2, 1)])
    assert history.reasons(asked) == expected
    history.write(device)
    assert History.read(device, lambda: 0.0).reasons(asked) == expected


def test_oldest_removals_are_forgotten(device: int) -> None:
    now = [1.0]
    history = History(lambda: now[0])
    many = np.random.default_rng(5).integers(0, 256, (HISTORY_ENTRIES + 10, 32), dtype=np.uint8)
    for part in np.array_split(many, 7):
        now[0] += 1
        history.removed(np.ascontiguousarray(part), Removal.EVICTED)
    history.write(device)
    for some in (history, History.read(device, lambda: 0.0)):
        assert some.reasons(many[:10]) == [None] * 10
        assert None not in some.reasons(many[10:40]) and None not in some.reasons(many[-30:])
    again = History.read(device, lambda: 100.0)
    again.removed(keys(9, 4), Removal.CLEARED)
    assert again.reasons(keys(9, 4)) == [(Removal.CLEARED, 100)] * 4
    assert again.reasons(many[-30:]).count(None) == 0


def test_more_removals_than_the_ring_holds_at_once() -> None:
    history = History(lambda: 5.0)
    many = np.random.default_rng(6).integers(0, 256, (2 * HISTORY_ENTRIES + 3, 32), dtype=np.uint8)
    history.removed(many, Removal.CLEARED)
    assert history.total == len(many)
    assert history.reasons(many[-1:]) == [(Removal.CLEARED, 5)] and history.reasons(many[:1]) == [None]


@pytest.mark.parametrize("bit", range(128))
def test_flipped_bit_makes_a_removal_unknown(device: int, bit: int) -> None:
    history = History(lambda: 1_800_000_000.0)
    history.removed(keys(1, 1), Removal.EVICTED)
    history.write(device)
    byte = os.pread(device, 1, HISTORY_OFFSET + bit // 8)[0] ^ (1 << bit % 8)
    os.pwrite(device, bytes([byte]), HISTORY_OFFSET + bit // 8)
    damaged = History.read(device, lambda: 0.0)
    assert damaged.reasons(keys(1, 1)) == [None]


def test_listener_hears_every_key() -> None:
    heard: list[bytes] = []
    history = History(lambda: 1.0)
    history.listen(lambda removed: heard.extend(key.tobytes() for key in removed))
    history.removed(keys(1, 2), Removal.EVICTED)
    history.removed(keys(2, 0), Removal.EVICTED)
    assert heard == [key.tobytes() for key in keys(1, 2)]


def test_request_notes_form_a_ring_that_goes_on_after_a_restart(device: int) -> None:
    log = RequestLog()
    for number in range(5):
        log.add(note(number))
    log.write(device)
    assert read_notes(device) == [note(number) for number in range(5)]
    log = RequestLog.read(device)
    for number in range(5, LOG_FRAMES + 3):
        log.add(note(number))
    log.write(device)
    found = read_notes(device)
    assert len(found) == LOG_FRAMES and found[0] == note(3) and found[-1] == note(LOG_FRAMES + 2)


@pytest.mark.parametrize("name", ["x" * 500, "😀" * 200, "plain", "\udc80odd"])
def test_long_request_names_keep_their_end(device: int, name: str) -> None:
    log = RequestLog()
    log.add(RequestNote(name, 1, 10**9, 10**7, 10**7, 10**7, 10**7, 10**7, "an earlier load of the request failed", "f" * 16))
    log.write(device)
    (found,) = read_notes(device)
    assert found.id and name.replace("\udc80", "?").endswith(found.id) and found.missing == "f" * 16


def test_damaged_request_notes_are_left_out(device: int) -> None:
    log = RequestLog()
    for number in range(3):
        log.add(note(number))
    log.write(device)
    os.pwrite(device, b"\xff", LOG_OFFSET + 256 + 40)
    assert read_notes(device) == [note(0), note(2)]
