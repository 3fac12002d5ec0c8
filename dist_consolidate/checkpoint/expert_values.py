"""Holding fp32 partitions against 16-bit copies of them, at the ends of each tensor or whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from dist_consolidate.checkpoint.experts import parse
from dist_consolidate.checkpoint.extents import TensorSpan
from dist_consolidate.checkpoint.model import FlatGroup, Source
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModelState
from dist_consolidate.dtypes import DType

_END_NUMEL = 512


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

    def __init__(self, folder: Path, model: ModelState) -> None:
        """Open nothing yet.

        Args:
            folder: The tag folder.
            model: The model states of rank 0, with the experts put in.
        """
        self._folder, self._model = folder, model
        self._copies = Fingerprints(folder)
        self._every = _needs_all(model)
        self.end_numel = _END_NUMEL

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

    def differing(
        self, groups: Sequence[FlatGroup], sources: Mapping[str, Source], *, whole: bool = False
    ) -> list[str]:
        """Name the tensors whose copy has other values.

        Experts are compared, and all other tensors too where no shapes were recorded.

        Args:
            groups: The flat groups.
            sources: Where each tensor's fp32 values lie.
            whole: Compare every element rather than the ends.

        Returns:
            Names in flat order.
        """
        prints = Fingerprints(self._folder, groups)
        try:
            return [
                name
                for name, source in sources.items()
                if (self._every or parse(name)) and not self._agrees(name, source, prints, whole)
            ]
        finally:
            prints.close()

    def same(self, layouts: Sequence[Layout]) -> bool:
        """Tell whether layouts give the same bits for every expert.

        Args:
            layouts: At least one.

        Returns:
            True if it makes no difference which is taken.
        """
        found = []
        for layout in layouts:
            prints = Fingerprints(self._folder, layout.groups)
            try:
                found.append(
                    {n: prints.of(s, s.dtype) for n, s in layout.sources.items() if parse(n)}
                )
            finally:
                prints.close()
        return all(item == found[0] for item in found)

    def _agrees(self, name: str, source: Source, prints: Fingerprints, whole: bool) -> bool:
        entry = (self._model.module or {}).get(name)
        if entry is None or entry.span.shape != source.shape:
            return True  # a missing copy or another shape is told elsewhere
        dtype = entry.span.dtype
        copy = Source("module", entry.span.shape, dtype, span=entry.span)
        pairs = [(source, copy)] if whole else zip(_ends(source), _ends(copy), strict=True)
        return all(prints.of(one, dtype) == self._copies.of(other, dtype) for one, other in pairs)


def _needs_all(model: ModelState) -> bool:
    return model.param_shapes is None


def _ends(source: Source) -> list[Source]:
    """Give the first and last elements of a tensor as tensors of their own."""
    total = source.num_numel
    if total <= 2 * _END_NUMEL:
        return [source]
    return [_piece(source, 0), _piece(source, total - _END_NUMEL)]


def _piece(source: Source, start_numel: int) -> Source:
    shape, slot, span = (_END_NUMEL,), source.slot, source.span
    if slot is not None:
        slot = dataclasses.replace(slot, offset_numel=slot.offset_numel + start_numel)
    if span is not None:
        span = _part(span, start_numel, source.dtype)
    return Source(source.origin, shape, source.dtype, slot, span)


def _part(span: TensorSpan, start_numel: int, dtype: DType) -> TensorSpan:
    offset = span.offset_bytes + start_numel * dtype.itemsize_bytes
    return TensorSpan(span.file, offset, dtype, (_END_NUMEL,), (1,))
