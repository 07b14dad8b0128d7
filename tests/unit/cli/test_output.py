"""Results for people and for programs."""

import dataclasses
import io

import numpy as np
import pytest

from tutti_mooncake.cli.output import Progress, duration_text, plain, print_table, size_text, value_text


@dataclasses.dataclass
class Record:
    key: bytes
    slot: np.uint32
    reasons: dict


def test_plain_turns_records_into_what_json_knows():
    record = Record(key=b"\x01\xff", slot=np.uint32(7), reasons={"torn": np.int64(1)})
    assert plain([record]) == [{"key": "01ff", "slot": 7, "reasons": {"torn": 1}}]
    assert plain(np.arange(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 40, "1.0 TiB"), (1 << 51, "2048.0 TiB")],
)
def test_sizes(size_bytes, text):
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (119, "119 s"), (3600, "60 min"), (7500, "2 h 05 min"), (259_200, "3 days")])
def test_durations(seconds, text):
    assert duration_text(seconds) == text


def test_values_take_their_unit_from_their_name():
    assert value_text("capacity", 2048) == "2.0 KiB"
    assert value_text("slots", 2048) == "2048"
    assert value_text("seconds", 0.5) == "0.5"
    assert value_text("clean_shutdown", True) == "yes"
    assert value_text("dropped_reasons", {}) == "-"


def test_tables_align(capsys):
    print_table(["a", "long"], [["wide cell", "x"], ["y", "z"]])
    assert capsys.readouterr().out == "a          long\nwide cell  x\ny          z\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_ends_full_on_a_terminal():
    stream = Terminal()
    with Progress("verify", stream=stream) as progress:
        for done in range(1, 1001):
            progress(done, 1000)
    assert "[" + "#" * 30 + "]  verify  100%  1000 of 1000 blocks" in stream.getvalue()
    assert stream.getvalue().endswith("\n")
    assert stream.getvalue().count("\r") < 20


def test_progress_is_silent_on_short_work_in_a_log():
    stream = io.StringIO()
    with Progress("verify", stream=stream) as progress:
        progress(1, 1)
    assert stream.getvalue() == ""
