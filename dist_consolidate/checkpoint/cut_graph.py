"""All ways to cut a flat buffer into tensors, one behind the other, as a graph of offsets.

From an offset, a tensor of each kind that has the values found there leads to the offset behind it.
Only what lies on a way from the start to an end counts. The ways are not listed, as there may be
very many (tensors of nothing but zeros); what all of them have in common is computed instead.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

# More offsets or steps than these, and the values say too little to go on.
_MAX_OFFSETS = 1 << 17
_MAX_STEPS = 1 << 18


class CutGraph:
    """The ways to cut one buffer.

    Attributes:
        start: Where the cut begins.
        ends: Where it may end.
        steps: By offset, the kinds that fit there, each with the offset behind it.
    """

    def __init__(
        self, start: int, follow: Callable[[int], Mapping[int, int]], is_end: Callable[[int], bool]
    ) -> None:
        """Follow all ways.

        Args:
            start: Where the cut begins.
            follow: Gives the kinds that fit at an offset, with the offset behind each.
            is_end: Tells whether nothing need follow.

        Raises:
            ValueError: If there are too many offsets to look at.
        """
        self.start = start
        found: dict[int, Mapping[int, int]] = {}
        waiting = [start]
        while waiting:
            at = waiting.pop()
            if at in found:
                continue
            found[at] = follow(at)
            waiting += found[at].values()
            if len(found) > _MAX_OFFSETS:
                raise ValueError("too many ways to cut a flat buffer")
        self.ends = {at for at in found if is_end(at)}
        self.steps: dict[int, dict[int, int]] = {}
        for at in sorted(found, reverse=True):
            good = {k: to for k, to in found[at].items() if to in self.ends or to in self.steps}
            if good:
                self.steps[at] = good
        options = [len(steps) + (at in self.ends) for at, steps in self.steps.items()]
        self._has_one_way = all(count == 1 for count in options)
        self._uses = collections.Counter(k for steps in self.steps.values() for k in steps)

    def __bool__(self) -> bool:
        """Tell whether there is any way."""
        return self.start in self.ends or self.start in self.steps

    def places(self) -> dict[int, list[int]]:
        """Give, for each kind, the offsets where it may lie."""
        places: dict[int, list[int]] = {}
        for at, steps in sorted(self.steps.items()):
            for kind in steps:
                places.setdefault(kind, []).append(at)
        return places

    def fewest(self, kinds: Collection[int]) -> int:
        """Count how often some kinds are used at least, all together, whichever way is taken."""
        if self._has_one_way:
            return sum(self._uses[kind] for kind in kinds)
        counts: dict[int, int] = {}
        for at in sorted({*self.steps, *self.ends}, reverse=True):
            options = [0] if at in self.ends else []
            options += [counts[to] + (k in kinds) for k, to in self.steps.get(at, {}).items()]
            counts[at] = min(options)
        return counts.get(self.start, 0)


def choose(graphs: Sequence[CutGraph], capacity: Mapping[int, int]) -> list[list[int]] | None:
    """Choose a way to cut each buffer that uses no kind more often than it is there.

    Args:
        graphs: One for each buffer.
        capacity: How many tensors there are of each kind.

    Returns:
        The kinds one behind the other, for each buffer; ``None`` if none was found.
    """
    left = collections.Counter(capacity)
    trail: list[tuple[Iterator[tuple[int, int | None, int]], int | None]] = []
    if not graphs:
        return []
    options = _options(graphs, left, 0, graphs[0].start)
    for _ in range(_MAX_STEPS):
        step = next(options, None)
        if step is None:
            if not trail:
                return None
            options, kind = trail.pop()
            if kind is not None:
                left[kind] += 1
            continue
        index, kind, to = step
        trail.append((options, kind))
        if kind is not None:
            left[kind] -= 1
        if index == len(graphs):
            return _chosen(len(graphs), [kind for _, kind in trail])
        options = _options(graphs, left, index, to)
    return None


def _options(
    graphs: Sequence[CutGraph], left: Mapping[int, int], index: int, at: int
) -> Iterator[tuple[int, int | None, int]]:
    """Give what may come next: a kind in this buffer, or the next buffer."""
    graph = graphs[index]
    for kind, to in sorted(graph.steps.get(at, {}).items()):
        if left[kind] > 0:
            yield index, kind, to
    if at in graph.ends:
        following = graphs[index + 1].start if index + 1 < len(graphs) else 0
        yield index + 1, None, following


def _chosen(count: int, trail: Sequence[int | None]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    index = 0
    for kind in trail:
        if kind is None:
            index += 1
        else:
            found[index].append(kind)
    return found
