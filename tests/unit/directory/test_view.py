"""Who holds how much of a prefix, as changes come in."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.directory.view_model import ViewModel
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


def test_of_what_does_not_fit_the_deepest_is_left_out_and_comes_back_with_a_snapshot() -> None:
    view = DirectoryView(KEYS, most_bytes=3000)
    chains = {number: [number << 32 | i for i in range(1, 61)] for number in range(1, 11)}
    spans = {number: span("a", number, chain) for number, chain in chains.items()}
    view.apply([node("a"), *spans.values()])
    stats = view.stats()
    assert stats.spans == 10 and stats.blocks + stats.left_out_blocks == 600 and 0 < stats.bytes <= 3000
    lengths = [held(view, chain)["a"] for chain in chains.values()]
    assert max(lengths) - min(lengths) <= 1 and sum(lengths) == stats.blocks
    assert [len(kept.hashes) for _, _, kept in view.spans()] == lengths
    view.apply([gone(spans[number]) for number in range(2, 11)])
    assert held(view, chains[1])["a"] == lengths[0] and view.stats().blocks == lengths[0]
    view.replace({change.key: change.value or b"" for change in (node("a"), spans[1])})
    assert held(view, chains[1]) == {"a": 60} and view.stats().left_out_blocks == 0


def test_others_ask_while_a_snapshot_comes_in() -> None:
    """What is in both is there all the time; a node that is gone is gone before its spans are."""
    kept = [span("a", number, [number << 8 | 1, number << 8 | 2]) for number in range(600)]
    view = view_of(node("a"), node("b"), *kept, span("b", 1, [1 << 8 | 1]))
    items = {change.key: change.value or b"" for change in (node("a"), *kept, span("a", 1000, [5]))}
    seen = []

    class Watched(dict[str, bytes]):
        def items(self):  # type: ignore[no-untyped-def,override]
            for one in super().items():
                seen.append((held(view, [1 << 8 | 1, 1 << 8 | 2]), held(view, [599 << 8 | 1])))
                yield one

    view.replace(Watched(items))
    assert all(first.get("a") == 2 and last == {"a": 1} for first, last in seen)
    assert "b" not in held(view, [1 << 8 | 1]) and view.stats().spans == 601 and held(view, [5]) == {"a": 1}


def some_changes(random: np.random.Generator) -> list[Change]:
    """Of 4 nodes in 3 epochs, with spans of 4 chains of which pairs begin alike."""
    changes = []
    for _ in range(int(random.integers(1, 8))):
        name, epoch = "abcd"[random.integers(4)], int(random.integers(1, 4))
        kind = random.random()
        if kind < 0.1:
            changes.append(node(name, epoch))
        elif kind < 0.15:
            changes.append(gone(node(name)))
        elif kind < 0.17:
            changes.append(Change(KEYS.span(name, epoch, int(random.integers(6))), b"nonsense"))
        elif kind < 0.4:
            changes.append(gone(span(name, int(random.integers(6)), [0], epoch)))
        else:
            hashes, start = some_chain(random)
            record = SpanRecord([NAMESPACE, OTHER][random.integers(2)], start, 0, np.array(hashes, dtype="<u8"))
            changes.append(Change(KEYS.span(name, epoch, int(random.integers(6))), record.encode()))
    return changes


def some_chain(random: np.random.Generator) -> tuple[list[int], int]:
    """Hashes and where they begin."""
    chain, start = int(random.integers(4)), int(random.integers(20))
    end = start + int(random.integers(1, 12))
    return [(chain // 2 if depth < 10 else chain) << 8 | depth + 1 for depth in range(start, end)], start


@pytest.mark.parametrize("most_bytes", [1 << 30, 6000])
@pytest.mark.parametrize("seed", range(4))
def test_random_changes_give_what_a_plain_model_says(seed: int, most_bytes: int) -> None:
    random = np.random.default_rng((seed, most_bytes))
    view, model = DirectoryView(KEYS, most_bytes=most_bytes), ViewModel(KEYS)
    items: dict[str, bytes] = {}
    for _ in range(1000):
        changes = some_changes(random)
        for change in changes:
            items.pop(change.key, None)
            if change.value is not None:
                items[change.key] = change.value
        model.apply(changes)
        if random.random() < 0.05:
            view.replace(items)
        else:
            view.apply(changes)
        prompt, _ = some_chain(random)
        begin, namespace = int(random.integers(3)), [NAMESPACE, OTHER][random.integers(2)]
        right = model.holders(namespace, prompt, begin)
        found = [(record.node, blocks) for record, blocks in view.holders(namespace, np.array(prompt, dtype="<u8"), begin)]
        stats = view.stats()
        assert view.dead() == model.dead() and stats.spans == len(model.spans) and stats.nodes == len(model.nodes)
        if most_bytes == 1 << 30:
            assert found == right and stats.blocks == model.blocks and stats.left_out_blocks == 0
        else:
            assert stats.bytes <= most_bytes and all(blocks <= dict(right).get(name, 0) for name, blocks in found)
            assert sum(len(kept.hashes) for _, _, kept in view.spans()) + stats.left_out_blocks == model.span_blocks


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
    model = ViewModel(KEYS)
    model.apply(changes)
    expected = dict(model.holders(NAMESPACE, prompt, begin))
    assert held(view, prompt, begin) == expected
    fresh = DirectoryView(KEYS)
    fresh.replace(items)
    assert held(fresh, prompt, begin) == expected and fresh.stats() == view.stats() and fresh.dead() == view.dead()
