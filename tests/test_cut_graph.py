"""What all ways to cut a buffer have in common, against a list of every way."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_consolidate.checkpoint import cut_graph
from dist_consolidate.checkpoint.cut_graph import CutGraph, choose

# A buffer is a text, and a kind is a word that may stand in it.
TEXTS = st.text("ab", max_size=9)
WORDS = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=5, unique=True)


def graph_of(text: str, words: list[str], start: int = 0) -> CutGraph:
    def follow(at: int) -> dict[int, int]:
        return {n: at + len(w) for n, w in enumerate(words) if text.startswith(w, at)}

    return CutGraph(start, follow, lambda at: at == len(text))


def every_way(text: str, words: list[str]) -> Iterator[list[int]]:
    if not text:
        yield []
    for number, word in enumerate(words):
        if text.startswith(word):
            yield from ([number, *rest] for rest in every_way(text.removeprefix(word), words))


@given(TEXTS, WORDS)
def test_places_and_counts_are_those_of_all_ways(text: str, words: list[str]) -> None:
    graph, ways = graph_of(text, words), list(every_way(text, words))
    assert bool(graph) == bool(ways)
    places: dict[int, set[int]] = collections.defaultdict(set)
    for way in ways:
        at = 0
        for kind in way:
            places[kind].add(at)
            at += len(words[kind])
    assert graph.places() == {kind: sorted(at) for kind, at in places.items()}
    for kinds in ({0}, {1}, {0, 1}, {1, 2}, set(range(len(words)))):
        counts = (sum(kind in kinds for kind in way) for way in ways)
        assert graph.fewest(kinds) == min(counts, default=0)


@given(st.lists(TEXTS, min_size=1, max_size=3), WORDS, st.data())
def test_a_choice_uses_nothing_twice(
    texts: list[str], words: list[str], data: st.DataObject
) -> None:
    capacity = {n: data.draw(st.integers(0, 4)) for n in range(len(words))}
    chosen = choose([graph_of(text, words) for text in texts], capacity)
    found = [list(every_way(text, words)) for text in texts]
    if chosen is None:
        combined: list[collections.Counter[int]] = [collections.Counter()]
        for ways in found:
            combined = [one + collections.Counter(way) for one in combined for way in ways]
        assert all(any(one[k] > capacity[k] for k in one) for one in combined)
    else:
        assert all(way in ways for way, ways in zip(chosen, found, strict=True))
        used = collections.Counter(kind for way in chosen for kind in way)
        assert all(used[kind] <= capacity[kind] for kind in used)


def test_very_many_ways_are_counted_without_a_list() -> None:
    graph = graph_of("a" * 400, ["a", "aa", "aaa"])
    assert graph.fewest({0}) == 0
    assert len(graph.places()[0]) == 400
    assert choose([graph], {0: 400, 1: 0, 2: 0}) == [[0] * 400]


def test_too_many_offsets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_graph, "_MAX_OFFSETS", 100)
    with pytest.raises(ValueError, match="too many ways"):
        graph_of("a" * 400, ["a"])


def test_the_cut_begins_where_it_is_told() -> None:
    graph = graph_of("abab", ["ab", "b"], start=2)
    assert graph.places() == {0: [2]}
