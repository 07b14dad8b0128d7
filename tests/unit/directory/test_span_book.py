"""A node's own blocks as spans: what is written covers exactly what is held."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti_mooncake.directory.records import ShortHashes, SpanRecord
from tutti_mooncake.directory.span_book import SpanBook

NAMESPACE, OTHER = bytes(16), bytes([1]) * 16


def hashes(*of: int) -> ShortHashes:
    return np.array(of, dtype="<u8")


def content(book: SpanBook) -> dict[int, tuple[int, int, list[int]]]:
    return {number: (span.start, span.parent, span.hashes.tolist()) for number, span in book.all()}


def test_a_chain_that_grows_is_one_span_and_one_change() -> None:
    book = SpanBook()
    book.add(NAMESPACE, 0, 0, hashes(11, 12))
    book.add(NAMESPACE, 2, 12, hashes(13))
    assert content(book) == {1: (0, 0, [11, 12, 13])}
    ((number, span),) = book.take(10)
    assert number == 1 and span is not None and span.hashes.tolist() == [11, 12, 13] and book.take(10) == []


def test_branches_and_full_spans_begin_new_ones() -> None:
    book = SpanBook(most_blocks=3)
    book.add(NAMESPACE, 0, 0, hashes(1, 2, 3, 4))
    book.add(NAMESPACE, 2, 2, hashes(20, 21))
    assert content(book) == {1: (0, 0, [1, 2, 3]), 2: (3, 3, [4]), 3: (2, 2, [20, 21])}


def test_what_is_known_stays_where_it_is() -> None:
    book = SpanBook()
    book.add(NAMESPACE, 0, 0, hashes(1, 2))
    book.take(10)
    book.add(NAMESPACE, 0, 0, hashes(1, 2))
    assert book.waiting == 0
    book.add(NAMESPACE, 0, 0, hashes(1, 2, 3))
    assert content(book) == {1: (0, 0, [1, 2, 3])} and book.blocks == 3


def test_namespaces_do_not_mix() -> None:
    book = SpanBook()
    book.add(NAMESPACE, 0, 0, hashes(1))
    book.add(OTHER, 1, 1, hashes(2))
    assert content(book) == {1: (0, 0, [1]), 2: (1, 1, [2])}
    book.remove(OTHER, hashes(1))
    assert book.blocks == 2


def test_ends_are_cut_and_holes_split() -> None:
    book = SpanBook()
    book.add(NAMESPACE, 5, 4, hashes(5, 6, 7, 8, 9))
    book.remove(NAMESPACE, hashes(9, 77))
    assert content(book) == {1: (5, 4, [5, 6, 7, 8])}
    book.remove(NAMESPACE, hashes(6))
    assert content(book) == {1: (5, 4, [5]), 2: (7, 6, [7, 8])}
    assert len(book.take(10)) == 2
    book.remove(NAMESPACE, hashes(5, 7, 8))
    assert content(book) == {} and book.blocks == 0
    assert sorted(number for number, span in book.take(10) if span is None) == [1, 2]


def test_a_hole_that_is_filled_can_be_joined() -> None:
    book = SpanBook()
    book.add(NAMESPACE, 0, 0, hashes(1, 2, 3))
    book.remove(NAMESPACE, hashes(2))
    book.add(NAMESPACE, 1, 1, hashes(2))
    assert book.join() == 1 and content(book) == {1: (0, 0, [1, 2, 3])}
    assert book.join() == 0


def test_spans_that_nobody_heard_of_end_without_a_change() -> None:
    book = SpanBook()
    for _ in range(100):
        book.add(NAMESPACE, 0, 0, hashes(1, 2, 3))
        book.remove(NAMESPACE, hashes(1, 2, 3))
    assert book.waiting == 0 and book.take(10) == []
    book.add(NAMESPACE, 0, 0, hashes(1))
    book.abandon()
    book.add(NAMESPACE, 0, 0, hashes(2))
    assert book.blocks == 0 and book.waiting == 0


def test_changes_that_could_not_be_written_come_first_again() -> None:
    book = SpanBook(most_blocks=1)
    book.add(NAMESPACE, 0, 0, hashes(1, 2, 3))
    taken = [number for number, _ in book.take(2)]
    book.put_back(taken)
    assert [number for number, _ in book.take(10)] == [1, 2, 3]


def as_chain(parents: list[int]) -> list[tuple[int, int]]:
    """(position, parent) of blocks 1, 2, ..., where block i + 1 follows block parents[i] % (i + 1), 0 being the beginning."""
    positions, chain = [-1], []
    for i, parent in enumerate(parents):
        before = parent % (i + 1)
        positions.append(positions[before] + 1)
        chain.append((positions[-1], before))
    return chain


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=25),
    st.lists(st.tuples(st.booleans(), st.integers(0, 24), st.integers(1, 4)), max_size=40),
    st.integers(1, 5),
)
def test_the_records_written_are_what_is_held(parents: list[int], steps: list[tuple[bool, int, int]], most: int) -> None:
    chain = as_chain(parents)
    book, there = SpanBook(most), {}
    held: set[int] = set()
    for add, block, count in steps:
        block = block % len(chain) + 1
        if add:
            run, at = [], block
            while at and len(run) < count:
                run.append(at)
                at = chain[at - 1][1]
            run.reverse()
            position, parent = chain[run[0] - 1]
            book.add(NAMESPACE, position, parent, hashes(*run))
            held |= set(run)
        else:
            gone = [block, *range(block + 1, min(block + count, len(chain) + 1))]
            book.remove(NAMESPACE, hashes(*gone))
            held -= set(gone)
        if block % 3 == 0:
            book.join()
        taken = book.take(block)
        if block % 2:
            book.put_back([number for number, _ in taken])
        else:
            there |= dict(taken)
    there |= dict(book.take(1000))
    spans = [span for span in there.values() if span is not None]
    assert sorted(short for span in spans for short in span.hashes.tolist()) == sorted(held)
    assert book.blocks == len(held) and sorted(content(book)) == sorted(number for number, span in there.items() if span is not None)
    for span in spans:
        check(span, chain, most)


def check(span: SpanRecord, chain: list[tuple[int, int]], most: int) -> None:
    before = span.parent
    assert len(span.hashes) <= most
    for offset, short in enumerate(span.hashes.tolist()):
        assert chain[short - 1] == (span.start + offset, before)
        before = short


def test_a_span_that_is_empty_is_not_a_record() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        SpanRecord(NAMESPACE, 0, 0, hashes())
