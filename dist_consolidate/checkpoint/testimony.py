"""What ``module`` testifies about the flat groups of stages 1 and 2.

Outside of experts, ``module`` holds views of each group's 16-bit twin. Where all of a group's
parameters look into one storage, the views' offsets are the offsets in the fp32 group, and their
strides tell whether a matrix lies transposed. That is an authority where the recorded shapes are
none: under ZenFlow of 0.17.5 to 0.19.6, which flattens matrices column by column, and under the
round robin of 0.4.0 to 0.4.3, whose order ``param_shapes`` did not follow (source:
``stage_1_and_2.py`` and ``stage2.py`` of these releases). What rests on it alone is confirmed by
comparing values with their 16-bit copies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from dist_consolidate.checkpoint.model import FlatGroup, FlatSlot, Source, own_source
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModelState, ModuleEntry, Shapes
from dist_consolidate.errors import Problems

_T = TypeVar("_T")

# Values are compared for so many tensors, spread over what is testified, and of a transposed
# matrix for so many columns, spread over it.
_MAX_COMPARED, _MAX_COLUMNS = 16, 16


@dataclasses.dataclass(frozen=True, slots=True)
class Witness:
    """What is known of one group once ``module`` was heard.

    Attributes:
        slots: Every tensor's place, in flat order.
        transposed: Matrices that lie column by column.
        moved: Tensors that lie elsewhere than the recorded shapes say.
    """

    slots: dict[str, FlatSlot]
    transposed: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()

    @property
    def alone(self) -> dict[str, FlatSlot]:
        """Places that rest on the testimony alone."""
        names = self.transposed | self.moved
        return {name: slot for name, slot in self.slots.items() if name in names}


def hear(
    model: ModelState,
    label: str,
    shapes: Shapes,
    slots: dict[str, FlatSlot],
    problems: Problems,
) -> Witness:
    """Compare the recorded layout of a group with the views in ``module``.

    Args:
        model: The model states of rank 0.
        label: What to call the group in a message.
        shapes: Recorded shapes, in flat order.
        slots: The places that follow from them.
        problems: Takes what neither the record nor the testimony explains.

    Returns:
        The places that hold.
    """
    module = model.module or {}
    views = {n: module[n] for n in slots if n in module and module[n].span.num_numel}
    whole = len({view.ref.storage.key for view in views.values()}) == 1
    # A configuration given as a path is pickled as one, and then tells neither.
    may_turn = whole and (model.zenflow or model.zero_stage is None)
    transposed = {n for n, view in views.items() if may_turn and _is_column_major(view, shapes[n])}
    odd = {n for n, v in views.items() if n not in transposed and not v.span.is_contiguous}
    # A single tensor begins its storage wherever it was cloned from.
    by_offset = whole and len(views) > 1
    moved = {
        n for n, v in views.items() if by_offset and v.ref.offset_numel != slots[n].offset_numel
    }
    if model.zenflow:
        _check_zenflow(model, label, shapes, views if whole else {}, problems)
    if not odd and not moved:
        return Witness(slots, frozenset(transposed))
    numels = {name: math.prod(shape) for name, shape in shapes.items()}
    if not odd and _tiles(views, numels):
        return Witness(_by_offset(slots, views), frozenset(transposed), frozenset(moved))
    _contradict(label, views, slots, sorted(odd | moved, key=list(views).index), problems)
    return Witness(slots)


def _is_column_major(view: ModuleEntry, shape: tuple[int, ...]) -> bool:
    columns_first = len(shape) == 2 and view.ref.stride == (1, shape[0])
    return view.ref.shape == shape and columns_first and not view.span.is_contiguous


def _is_matrix(shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and min(shape) > 1


def _check_zenflow(
    model: ModelState,
    label: str,
    shapes: Shapes,
    views: Mapping[str, ModuleEntry],
    problems: Problems,
) -> None:
    """Refuse ZenFlow's matrices whose order nothing tells: releases differ in it."""
    silent = [name for name, shape in shapes.items() if _is_matrix(shape) and name not in views]
    if silent:
        problems.add(
            f"{model.shard.name}: {label} was trained with ZenFlow, which lays matrices transposed "
            f"in some releases, and `module` does not show the order of {len(silent)} of them "
            f"(its tensors are no views of one buffer), the first is {silent[0]!r}; save again "
            "without ZenFlow, or with DeepSpeed's own torch checkpoint engine"
        )


def _tiles(views: Mapping[str, ModuleEntry], numels: Mapping[str, int]) -> bool:
    """Whether the views of all tensors lie one behind the other, without a gap."""
    at = 0
    for name, view in sorted(views.items(), key=lambda item: item[1].ref.offset_numel):
        if view.ref.offset_numel != at or view.span.num_numel != numels[name]:
            return False
        at += numels[name]
    return at == sum(numels.values())


def _by_offset(
    slots: Mapping[str, FlatSlot], views: Mapping[str, ModuleEntry]
) -> dict[str, FlatSlot]:
    placed = {
        name: dataclasses.replace(slot, offset_numel=views[name].ref.offset_numel)
        for name, slot in slots.items()
        if name in views
    }
    empty = {name: slot for name, slot in slots.items() if name not in views}
    ordered = sorted(placed.items(), key=lambda item: item[1].offset_numel)
    return {
        **{n: dataclasses.replace(s, offset_numel=0) for n, s in empty.items()},
        **dict(ordered),
    }


def _contradict(
    label: str,
    views: Mapping[str, ModuleEntry],
    slots: Mapping[str, FlatSlot],
    wrong: Sequence[str],
    problems: Problems,
) -> None:
    first = wrong[0]
    ref = views[first].ref
    problems.add(
        f"{label}: {len(wrong)} of {len(views)} parameters lie otherwise in `module` than the "
        f"recorded layout says; the first is {first!r}: offset {ref.offset_numel}, stride "
        f"{list(ref.stride)}, expected offset {slots[first].offset_numel}, contiguous. ZenFlow "
        "(0.17.5 to 0.19.6) and round-robin of before 0.4.4 write such files, but here the views "
        "do not lie one behind the other in one buffer, so that nothing tells the order"
    )


def confirm(
    folder: Path | Sequence[Path],
    model: ModelState,
    groups: Sequence[FlatGroup],
    sources: Mapping[str, Source],
    testified: Mapping[str, FlatSlot],
    problems: Problems,
    notes: list[str],
    *,
    trust_masters: bool,
) -> None:
    """Confirm by value what rests on the testimony of ``module``.

    Args:
        folder: The tag folder; a few weights are read from it.
        model: The model states of rank 0.
        groups: The flat groups.
        sources: Where each tensor lies.
        testified: Places that are known by ``module`` alone.
        problems: Takes places that the values contradict.
        notes: Takes what was found.
        trust_masters: Take masters that are of another step than ``module``.
    """
    if not testified:
        return
    check = _Check(folder, model, groups, sources, testified, trust_masters=trust_masters)
    try:
        moved = [name for name in testified if sources[name].slot is not None]
        columns = [name for name in testified if sources[name].slot is None]
        if moved:
            check.moved(moved, problems, notes)
        if columns:
            check.transposed(columns, problems, notes)
    finally:
        check.prints.close()


class _Check:
    """Compares masters with the 16-bit copies in ``module``."""

    def __init__(
        self,
        folder: Path | Sequence[Path],
        model: ModelState,
        groups: Sequence[FlatGroup],
        sources: Mapping[str, Source],
        testified: Mapping[str, FlatSlot],
        *,
        trust_masters: bool,
    ) -> None:
        self.module, self.sources, self.testified = model.module or {}, sources, testified
        self.shard, self.trust_masters = model.shard.name, trust_masters
        self.prints = Fingerprints(folder, groups)

    def moved(self, names: Sequence[str], problems: Problems, notes: list[str]) -> None:
        """Every value of tensors that lie elsewhere than recorded must round to its copy."""
        chosen = spread(names, _MAX_COMPARED)
        wrong = [name for name in chosen if not self._agrees(name)]
        if wrong:
            problems.add(
                f"{self.shard}: `module` says that {len(names)} parameters lie elsewhere in their "
                f"flat groups than param_shapes says, but {len(wrong)} of {len(chosen)} compared "
                f"do not hold its values there, the first is {wrong[0]!r}; nothing tells the order"
            )
        notes.append(
            f"{len(names)} parameters lie in another order than param_shapes says; the offsets of "
            f"`module` were followed ({len(chosen)} of them compared by value)"
        )

    def transposed(self, names: Sequence[str], problems: Problems, notes: list[str]) -> None:
        """Columns must round to their copies, but for those that ZenFlow has updated ahead."""
        chosen = spread(names, _MAX_COMPARED)
        columns = [pair for name in chosen for pair in self._columns(name)]
        equal = sum(ours == theirs for ours, theirs in columns)
        plain = [n for n, s in self.sources.items() if len(s.shape) == 1 and s.slot is not None]
        plain = [n for n in plain if n in self.module and self.module[n].span.is_contiguous]
        in_step = [self._agrees(name) for name in spread(plain, _MAX_COMPARED)]
        if not equal and (any(in_step) or not self.trust_masters):
            problems.add(
                f"{self.shard}: the strides of `module` say that {len(names)} matrices lie "
                "transposed (ZenFlow of 0.17.5 to 0.19.6), but no column compared holds its "
                f"values, the first matrix is {names[0]!r}; nothing tells the order, or the files "
                "are of different saves. Where the masters are of another step than `module` and "
                "you know that they are right, pass --trust-masters"
            )
        found = (
            f"{equal} of {len(columns)} columns compared round to the values in `module`"
            if equal
            else "the masters are of another step than `module`, so that values cannot confirm it"
        )
        notes.append(
            f"ZenFlow: {len(names)} matrices lie transposed and were turned; {found}. The fp32 "
            "masters of channels that ZenFlow selects may lag the 16-bit weights; the masters "
            "were written"
        )

    def _agrees(self, name: str) -> bool:
        view = self.module[name].span
        theirs = own_source(view)
        ours = self.sources[name]
        return self.prints.of(ours, view.dtype) == self.prints.of(theirs, view.dtype)

    def _columns(self, name: str) -> Iterable[tuple[bytes, bytes]]:
        """Digest columns of a matrix: the master's, and those of its copy."""
        source, view = self.sources[name], self.module[name].span
        rows, columns = source.shape
        for column in spread(range(columns), _MAX_COLUMNS):
            width = view.dtype.itemsize_bytes
            place = view.offset_bytes + column * view.stride[1] * width
            span = dataclasses.replace(
                view, offset_bytes=place, shape=(rows,), stride=(view.stride[0],)
            )
            theirs = own_source(span)
            slot = self.testified[name]
            slot = dataclasses.replace(slot, offset_numel=slot.offset_numel + column * rows)
            ours = Source(source.origin, (rows,), source.dtype, slot)
            yield self.prints.of(ours, view.dtype), self.prints.of(theirs, view.dtype)


def spread(items: Sequence[_T], count: int) -> list[_T]:
    """Pick items to look at.

    Args:
        items: All of them.
        count: The most to pick, at least two.

    Returns:
        Items spread over all of them, the first and the last included.
    """
    if len(items) <= count:
        return list(items)
    return [items[index * (len(items) - 1) // (count - 1)] for index in range(count)]
