"""Holding fp32 partitions against 16-bit copies of them, at the ends of each tensor or whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.layout import is_seen
from dist_consolidate.checkpoint.model import FlatGroup, Source
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModelState, ModuleEntry
from dist_consolidate.dtypes import DType

# Elements at each end of a tensor that are compared.
END_NUMEL = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Where the tensors lie if the ranks are ordered in one way.

    Attributes:
        data_first: The order: whether neighbouring ranks hold the same experts.
        groups: The flat groups.
        sources: The source of each tensor, in flat order.
    """

    data_first: bool
    groups: tuple[FlatGroup, ...]
    sources: dict[str, Source]


class Comparison:
    """Compares partitions with ``module`` and the expert files; closes its files at the end."""

    def __init__(self, folder: Path | Sequence[Path], model: ModelState) -> None:
        """Open nothing yet.

        Args:
            folder: The tag folder.
            model: The model states of rank 0, with the experts put in.
        """
        self._folder, self._model = folder, model
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
        """Find tensors without an fp32 master whose values are another's, rounded, at the ends.

        Args:
            layout: Where the fp32 values lie.

        Returns:
            The name with the master, by the name without one; where there is exactly one.
        """
        module, found = self._model.module or {}, {}
        left_out = {*layout.sources, *(self._model.frozen or ())}
        by_shape: dict[tuple[int, ...], list[str]] = {}
        for name, source in layout.sources.items():
            by_shape.setdefault(source.shape, []).append(name)
        prints = Fingerprints(self._folder, layout.groups)
        for name, entry in module.items():
            if name in left_out or len(entry.span.shape) < 2 or not entry.span.is_contiguous:
                continue
            same = [
                other
                for other in by_shape.get(entry.span.shape, ())
                if self._is_seen(other, layout)
                and self._equal(layout.sources[other], entry, prints, whole=False)
            ]
            if len(same) == 1:
                found[name] = same[0]
        prints.close()
        return found

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
        copy = Source("module", entry.span.shape, dtype, span=entry.span)
        pairs = [(source, copy)] if whole else zip(_ends(source), _ends(copy), strict=True)
        return all(prints.of(one, dtype) == self._copies.of(other, dtype) for one, other in pairs)

    def _is_seen(self, name: str, layout: Layout) -> bool:
        slot, entry = layout.sources[name].slot, (self._model.module or {}).get(name)
        files = {part.file for part in layout.groups[slot.group].parts} if slot else set()
        files |= {entry.span.file} if entry is not None else set()
        for file in files - self._seen.keys():
            self._seen[file] = is_seen(self._folder, file)
        return all(self._seen[file] for file in files)


def _ends(source: Source) -> list[Source]:
    """Give the first and last elements of a tensor as tensors of their own."""
    total = source.num_numel
    if total <= 2 * END_NUMEL:
        return [source]
    return [_piece(source, 0), _piece(source, total - END_NUMEL)]


def _piece(source: Source, start_numel: int) -> Source:
    shape, slot, span = (END_NUMEL,), source.slot, source.span
    if slot is not None:
        slot = dataclasses.replace(slot, offset_numel=slot.offset_numel + start_numel)
    if span is not None:
        span = _part(span, start_numel, source.dtype)
    return Source(source.origin, shape, source.dtype, slot, span)


def _part(span: TensorSpan, start_numel: int, dtype: DType) -> TensorSpan:
    offset = span.offset_bytes + start_numel * dtype.itemsize_bytes
    return TensorSpan(span.file, offset, dtype, (END_NUMEL,), (1,))
