"""Who holds how much of a prefix, as changes come in."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti_mooncake.directory.broker import Change
from tutti_mooncake.directory.records import Keys, NodeRecord, SpanRecord
from tutti_mooncake.directory.view import DirectoryView

KEYS = Keys("test")
NAMESPACE, OTHER = bytes(16), bytes([1]) * 16


def node(name: str, epoch: int = 1) -> Change:
    return Change(KEYS.node(name), NodeRecord(name, epoch).encode())


def span(name: str, number: int, hashes: list[int], epoch: int = 1, namespace: bytes = NAMESPACE) -> Change:
    return Change(KEYS.span(name, epoch, number), SpanRecord(namespace, 0, 0, np.array(hashes, dtype="<u8")).encode())


def gone(change: Change) -> Change:
    return Change(change.key, None)


def held(view: DirectoryView, hashes: list[int], begin: int = 0, namespace: bytes = NAMESPACE) -> dict[str, int]:
    return {record.node: blocks for record, blocks in view.holders(namespace, np.array(hashes, dtype="<u8"), begin)}


def view_of(*changes: Change, own: str = "") -> DirectoryView:
    view = DirectoryView(KEYS, own)
    view.apply(changes)
    return view


def test_the_longest_prefix_of_each_node_from_a_position() -> None:
    view = view_of(node("a"), node("b"), node("c"), span("a", 1, [1, 2, 3]), span("b", 1, [1, 2]), span("b", 2, [4]), span("c", 1, [3, 4]))
    assert held(view, [1, 2, 3, 4]) == {"a": 3, "b": 2}
    assert held(view, [1, 2, 3, 4], 2) == {"c": 2, "a": 1}
    assert [record.node for record, _ in view.holders(NAMESPACE, np.array([1, 2, 3, 4], dtype="<u8"), 2)] == ["c", "a"]
    assert held(view, [9]) == held(view, []) == held(view, [1], 1) == held(view, [1], namespace=OTHER) == {}


def test_only_the_living_epoch_counts_whatever_comes_first() -> None:
    view = view_of(span("a", 1, [1, 2]))
    assert held(view, [1, 2]) == {} and view.dead() == {("a", 1)}
    view.apply([node("a")])
    assert held(view, [1, 2]) == {"a": 2}
    view.apply([node("a", 2)])
    assert held(view, [1, 2]) == {} and view.dead() == {("a", 1)}
    view.apply([span("a", 1, [1], epoch=2)])
    assert held(view, [1, 2]) == {"a": 1}
    view.apply([gone(node("a"))])
    assert held(view, [1, 2]) == {} and view.nodes() == []


def test_a_node_that_goes_and_comes_back_needs_no_new_spans() -> None:
    view = view_of(node("a"), span("a", 1, [1, 2]), gone(node("a")))
    view.apply([node("a")])
    assert held(view, [1, 2]) == {"a": 2}


def test_its_own_node_is_left_out() -> None:
    view = view_of(node("a"), node("b"), span("a", 1, [1]), span("b", 1, [1]), own="a")
    assert held(view, [1]) == {"b": 1}


def test_joined_spans_are_never_missing() -> None:
    view = view_of(node("a"), span("a", 1, [1, 2]), span("a", 2, [3]))
    view.apply([span("a", 1, [1, 2, 3])])
    assert held(view, [1, 2, 3]) == {"a": 3}
    view.apply([gone(span("a", 2, [3]))])
    assert held(view, [1, 2, 3]) == {"a": 3}


def test_what_can_not_be_read_is_refused_and_takes_the_place_of_what_was_there() -> None:
    view = view_of(node("a"), span("a", 1, [1]))
    view.apply([Change(KEYS.span("a", 1, 1), b"nonsense"), Change(f"{KEYS.spans}a/x", b""), Change("elsewhere", b"")])
    assert held(view, [1]) == {} and view.stats().refused == 2 and "span" in view.stats().last_refusal
    view.apply([Change(KEYS.node("a"), b"nonsense")])
    assert view.nodes() == [] and view.stats().refused == 3


def test_a_snapshot_replaces_everything() -> None:
    view = view_of(node("a"), span("a", 1, [1]))
    changes = [node("b"), span("b", 7, [1])]
    view.replace({change.key: change.value or b"" for change in changes})
    assert held(view, [1]) == {"b": 1} and view.stats().spans == 1


NAMES = st.sampled_from(["a", "b", "c"])
HASHES = st.lists(st.integers(0, 9), min_size=1, max_size=6)
CHANGES = st.one_of(
    st.builds(node, NAMES, st.integers(1, 2)),
    st.builds(lambda name: gone(node(name)), NAMES),
    st.builds(span, NAMES, st.integers(0, 3), HASHES, st.integers(1, 2), st.sampled_from([NAMESPACE, OTHER])),
    st.builds(lambda name, number, epoch: gone(span(name, number, [0], epoch)), NAMES, st.integers(0, 3), st.integers(1, 2)),
)


@settings(max_examples=300)
@given(st.lists(CHANGES, max_size=30), st.lists(st.integers(0, 9), max_size=8), st.integers(0, 3), st.integers(0, 30))
def test_any_changes_give_what_the_records_say(changes: list[Change], prompt: list[int], begin: int, cut: int) -> None:
    view = DirectoryView(KEYS)
    items: dict[str, bytes] = {}
    for change in changes:
        items.pop(change.key, None)
        if change.value is not None:
            items[change.key] = change.value
    view.apply(changes[:cut])
    view.apply(changes[cut:])
    nodes = {key.removeprefix(KEYS.nodes): NodeRecord.decode(key.removeprefix(KEYS.nodes), items[key]) for key in items if "nodes/" in key}
    expected = {}
    for name, record in nodes.items():
        has = set()
        for key, value in items.items():
            if key.startswith(KEYS.spans_of(name, record.epoch)) and (one := SpanRecord.decode(key, value)).namespace == NAMESPACE:
                has |= set(one.hashes.tolist())
        run = 0
        while begin + run < len(prompt) and prompt[begin + run] in has:
            run += 1
        if run:
            expected[name] = run
    assert held(view, prompt, begin) == expected
    fresh = DirectoryView(KEYS)
    fresh.replace(items)
    assert held(fresh, prompt, begin) == expected and fresh.stats() == view.stats() and fresh.dead() == view.dead()
