"""Holding fp32 partitions against 16-bit copies of them, at the ends of each tensor or whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from dist_consolidate.checkpoint.experts import may_be_tied
from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.layout import is_seen
from dist_consolidate.checkpoint.model import FlatGroup, Source, own_source
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModelState, ModuleEntry

# Elements at each end of a tensor that are compared.
END_NUMEL = 512
# Fewer elements than these may be equal by chance.
MIN_TELLING = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where the tensors lie if the ranks are ordered in one way.

    Attributes:
        data_first: The order: whether neighbouring ranks hold the same experts.
        groups: The flat groups.
        sources: The source of each tensor, in flat order.
        alike: Tensors that nothing but their values tells to be another's second name.
    """

    data_first: bool
    groups: tuple[FlatGroup, ...]
    sources: dict[str, Source]
    alike: dict[str, str] = dataclasses.field(default_factory=dict)


class Comparison:
    """Compares partitions with ``module`` and the expert files; closes its files at the end."""

    def __init__(self, folder: Path | Sequence[Path], model: ModelState) -> None:
        """Open nothing yet.

        Args:
            folder: The tag folder.
            model: The model states of rank 0, with the experts put in.
        """
        self._folder, self._model = folder, model
        self.module = model.module or {}
        self._copies = Fingerprints(folder)
        self._seen: dict[str, bool] = {}

    def __enter__(self) -> Comparison:
        """Enter the block."""
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Close the files."""
        self._copies.close()

    def differing(self, layout: Layout, names: Iterable[str], *, whole: bool = False) -> list[str]:
        """Name the tensors whose copy has other values.

        What lies in a shard that is not seen here is not compared.

        Args:
            layout: Where each tensor's fp32 values lie.
            names: The tensors to compare.
            whole: Compare every element rather than the ends.

        Returns:
            Those of the names.
        """
        prints = Fingerprints(self._folder, layout.groups)
        try:
            return [n for n in names if not self._agrees(n, layout, prints, whole)]
        finally:
            prints.close()

    def unseen(self, layout: Layout, names: Iterable[str]) -> list[str]:
        """Name the tensors that cannot be compared, because a shard is not seen here.

        Args:
            layout: Where each tensor's fp32 values lie.
            names: The tensors to look for.

        Returns:
            Those of the names.
        """
        return [name for name in names if not self._is_seen(name, layout)]

    def alike(self, layout: Layout) -> dict[str, str]:
        """Find tensors without an fp32 master, every element of which is another's, rounded.

        Small ones and constants are left out (see :func:`is_telling`), and those that lose nothing
        by rounding, for which it makes no difference.

        Args:
            layout: Where the fp32 values lie.

        Returns:
            The name with the master, by the name without one; where there is exactly one.
        """
        found: dict[str, str] = {}
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name, source in layout.sources.items():
            by_shape.setdefault(source.shape, []).append(name)
        prints = Fingerprints(self._folder, layout.groups)
        for name, entry in self._without_master(layout):
            same = [
                other
                for other in by_shape.get(entry.span.shape, ())
                if may_be_tied(name, other)
                and self._is_seen(other, layout)
                and self._equal(layout.sources[other], entry, prints, whole=False)
                and self._equal(layout.sources[other], entry, prints, whole=True)
            ]
            if len(same) == 1 and self._loses(entry, layout.sources[same[0]], prints):
                found[name] = same[0]
        prints.close()
        return found

    def _without_master(self, layout: Layout) -> Iterator[tuple[str, ModuleEntry]]:
        held = {*layout.sources, *(self._model.frozen or ()), *(self._model.buffer_names or ())}
        held |= {*(self._model.shared_params or ())}
        for name, entry in (self._model.module or {}).items():
            span = entry.span
            seen = is_seen(self._folder, span.file)
            if name in held or not (span.is_contiguous and span.dtype.is_floating and seen):
                continue
            if is_telling(self._copies, own_source(span)):
                yield name, entry

    def same(self, layouts: Sequence[Layout], names: Sequence[str]) -> bool:
        """Tell whether layouts give the same bits.

        Args:
            layouts: At least one.
            names: The tensors to compare.

        Returns:
            True if it makes no difference which is taken.
        """
        found = []
        for layout in layouts:
            prints = Fingerprints(self._folder, layout.groups)
            try:
                sources = {name: layout.sources[name] for name in names}
                found.append({n: prints.of(s, s.dtype) for n, s in sources.items()})
            finally:
                prints.close()
        return all(item == found[0] for item in found)

    def _agrees(self, name: str, layout: Layout, prints: Fingerprints, whole: bool) -> bool:
        entry, source = (self._model.module or {}).get(name), layout.sources[name]
        if entry is None or entry.span.shape != source.shape or not self._is_seen(name, layout):
            return True  # a missing copy or another shape is told elsewhere
        return self._equal(source, entry, prints, whole)

    def _equal(self, source: Source, entry: ModuleEntry, prints: Fingerprints, whole: bool) -> bool:
        dtype = entry.span.dtype
        copy = own_source(entry.span)
        pairs = [(source, copy)] if whole else zip(ends(source), ends(copy), strict=True)
        return all(prints.of(one, dtype) == self._copies.of(other, dtype) for one, other in pairs)

    def _loses(self, entry: ModuleEntry, source: Source, prints: Fingerprints) -> bool:
        copy = own_source(entry.span)
        return prints.of(source, source.dtype) != self._copies.of(copy, source.dtype)

    def _is_seen(self, name: str, layout: Layout) -> bool:
        slot, entry = layout.sources[name].slot, (self._model.module or {}).get(name)
        files = {part.file for part in layout.groups[slot.group].parts} if slot else set()
        files |= {entry.span.file} if entry is not None else set()
        for file in files - self._seen.keys():
            self._seen[file] = is_seen(self._folder, file)
        return all(self._seen[file] for file in files)


def is_telling(prints: Fingerprints, source: Source) -> bool:
    """Tell whether no two parameters have a tensor's values by chance.

    Args:
        prints: Reads them.
        source: A slot, or a contiguous span.

    Returns:
        Whether there are more than a few, and the first and last of them differ: those of a
        constant say nothing.
    """
    if source.num_numel < MIN_TELLING:
        return False
    num_numel = min(END_NUMEL, source.num_numel // 2)
    first = _piece(source, 0, num_numel)
    last = _piece(source, source.num_numel - num_numel, num_numel)
    return prints.of(first, source.dtype) != prints.of(last, source.dtype)


def ends(source: Source) -> list[Source]:
    """Give the first and last elements of a tensor as tensors of their own.

    Args:
        source: A slot, or a contiguous span.

    Returns:
        Both, or the tensor itself if they are all there is.
    """
    total = source.num_numel
    if total <= 2 * END_NUMEL:
        return [source]
    return [_piece(source, 0, END_NUMEL), _piece(source, total - END_NUMEL, END_NUMEL)]


def _piece(source: Source, start_numel: int, num_numel: int) -> Source:
    slot, span = source.slot, source.span
    if slot is not None:
        slot = dataclasses.replace(slot, offset_numel=slot.offset_numel + start_numel)
    if span is not None:
        offset = span.offset_bytes + start_numel * span.dtype.itemsize_bytes
        span = TensorSpan(span.file, offset, span.dtype, (num_numel,), (1,))
    return Source(source.origin, (num_numel,), source.dtype, slot, span)
