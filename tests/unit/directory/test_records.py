"""What is written into the control plane: round trips, and what is refused."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutti_mooncake.directory.records import MOST_SPAN_BLOCKS, MOST_VALUE_BYTES, Keys, NodeRecord, RecordError, SpanRecord, short_hashes

NAMESPACE = bytes(range(16))
KEYS = Keys("test/v1")


def span(hashes: list[int], start: int = 0, parent: int = 0) -> SpanRecord:
    return SpanRecord(NAMESPACE, start, parent, np.array(hashes, dtype="<u8"))


def fields(**changes: object) -> bytes:
    whole = {"v": 1, "ns": NAMESPACE, "start": 3, "parent": 7, "hashes": bytes(16), **changes}
    return bytes(msgpack.packb({name: value for name, value in whole.items() if value is not None}))


def test_a_node_survives_the_trip() -> None:
    record = NodeRecord("node-1.rack2", 1 << 62, "10.0.0.1:7400", "rack2")
    assert NodeRecord.decode("node-1.rack2", record.encode()) == record


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40), st.integers(0, 2**31 - 1), st.integers(0, 2**64 - 1))
def test_a_span_survives_the_trip(hashes: list[int], start: int, parent: int) -> None:
    record = span(hashes, start, parent)
    again = SpanRecord.decode("span", record.encode())
    assert (again.namespace, again.start, again.parent, again.hashes.tolist()) == (NAMESPACE, start, parent, hashes)
    assert again.end == start + len(hashes)


def test_the_largest_span_fits() -> None:
    assert len(span([2**64 - 1] * MOST_SPAN_BLOCKS, 2**31 - 1, 2**64 - 1).encode()) < MOST_VALUE_BYTES


def test_keys_survive_the_trip() -> None:
    assert KEYS.parse_node(KEYS.node("a-b")) == "a-b"
    assert KEYS.parse_span(KEYS.span("a-b", 255, 4096)) == ("a-b", 255, 4096)
    assert KEYS.span("a", 1, 2).startswith(KEYS.spans_of("a", 1)) and KEYS.spans_of("a", 1).startswith(KEYS.spans_of("a"))


def test_short_hashes_are_the_first_eight_bytes() -> None:
    keys = np.arange(96, dtype=np.uint8).reshape(3, 32)
    assert short_hashes(keys).tolist() == [int.from_bytes(bytes(key[:8]), "little") for key in keys]


@pytest.mark.parametrize("name", ["", "-a", "a/b", "a b", "ä", "a" * 129, "a\n"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(RecordError, match="node name"):
        NodeRecord(name, 1)


@pytest.mark.parametrize("epoch", [0, -1, 1 << 63])
def test_epochs_that_are_refused(epoch: int) -> None:
    with pytest.raises(RecordError, match="63-bit"):
        NodeRecord("a", epoch)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"", "not a record"),
        (b"\xc1", "not a record"),
        (fields() + b"\0", "not a record"),
        (msgpack.packb([1]), "version None"),
        (msgpack.packb(7), "version None"),
        (fields(v=2), "version 2"),
        (fields(v=None), "version None"),
        (fields(start="3"), "start is str"),
        (fields(start=True), "start is bool"),
        (fields(parent=None), "parent is NoneType"),
        (fields(hashes=bytes(15)), "15 bytes"),
        (fields(hashes=b""), "span of 0 blocks"),
        (fields(hashes=bytes(8 * (MOST_SPAN_BLOCKS + 1))), "span of 1025 blocks"),
        (fields(ns=bytes(15)), "namespace has 15"),
        (fields(start=-1), "starts at -1"),
        (fields(hashes=bytes(MOST_VALUE_BYTES)), "more than"),
    ],
)
def test_spans_that_are_refused(value: bytes, text: str) -> None:
    with pytest.raises(RecordError, match=f"where.*{text}|{text}"):
        SpanRecord.decode("where", value)


@given(st.binary(max_size=200))
def test_whatever_is_there_is_a_record_or_refused(value: bytes) -> None:
    for decode in (NodeRecord.decode, SpanRecord.decode):
        try:
            decode("a", value)
        except RecordError as error:
            assert str(error)


@pytest.mark.parametrize("key", ["test/v1/spans/a/1/2", "test/v1/spans/a/" + "0" * 16, "other/spans/a/" + "0" * 16 + "/" + "0" * 16, ""])
def test_keys_that_are_refused(key: str) -> None:
    with pytest.raises(RecordError, match="span"):
        KEYS.parse_span(key)
    with pytest.raises(RecordError, match="node"):
        KEYS.parse_node(key)
