"""Values that testify where a pipeline's names do not: whether two tensors are the same.

A few thousand elements are compared first, so that tensors which differ cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dist_consolidate.checkpoint.model import Block, FlatGroup, Source
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.dtypes import DType
from dist_consolidate.errors import CheckpointError

_HEAD_NUMEL = 4096


class Values:
    """Compares tensors of several pipeline stages, each with flat groups of its own."""

    def __init__(
        self, folder: Path | Sequence[Path], groups: Sequence[Sequence[FlatGroup]]
    ) -> None:
        """Open nothing yet.

        Args:
            folder: The tag folder.
            groups: Every stage's flat groups.
        """
        self._prints = [Fingerprints(folder, mine) for mine in groups]
        self._known: dict[tuple[int, Source, str], bytes] = {}

    def close(self) -> None:
        """Close the shards."""
        for prints in self._prints:
            prints.close()

    def of(self, stage: int, source: Source, dtype: DType) -> bytes:
        """Digest a tensor of a stage, rounded (see :meth:`Fingerprints.of`)."""
        key = (stage, source, dtype.name)
        if key not in self._known:
            try:
                self._known[key] = self._prints[stage].of(source, dtype)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{error}; it is needed to compare what several pipeline stages or layers "
                    "hold, so put the checkpoint where one rank sees all of it"
                ) from error
        return self._known[key]

    def agree(self, stage: int, source: Source, other_stage: int, other: Source) -> bool:
        """Tell whether a tensor, rounded to another's element type, is that other one.

        Args:
            stage: The stage whose flat groups ``source`` refers to.
            source: The more precise one.
            other_stage: The stage of ``other``.
            other: The other one, of the same shape.

        Returns:
            Whether all elements are the same, bit for bit.

        Raises:
            CheckpointError: If a shard cannot be read.
        """
        if source.num_numel > _HEAD_NUMEL:
            head, other_head = (_run(s, 0, _HEAD_NUMEL) for s in (source, other))
            ours = self.of(stage, head, other.dtype)
            if ours != self.of(other_stage, other_head, other.dtype):
                return False
        return self.of(stage, source, other.dtype) == self.of(other_stage, other, other.dtype)

    def glance(self, source: Source) -> bytes | None:
        """Digest a tensor's first elements; ``None`` where they are all alike and say nothing."""
        if not self.is_telling(0, source):
            return None
        numel = min(source.num_numel, _HEAD_NUMEL)
        return self.of(0, _run(source, 0, numel), source.dtype)

    def is_telling(self, stage: int, source: Source) -> bool:
        """Tell whether a tensor's first elements differ, so that agreeing with it says much."""
        numel = min(source.num_numel, _HEAD_NUMEL) - 1
        if numel < 1:
            return False
        head, behind = _run(source, 0, numel), _run(source, 1, numel)
        return self.of(stage, head, source.dtype) != self.of(stage, behind, source.dtype)


def _run(source: Source, start_numel: int, num_numel: int) -> Source:
    """Give a stretch of a tensor as a flat one."""
    block = Block(source, 1, num_numel, start_numel, 0, 0, 0)
    return Source(source.origin, (num_numel,), source.dtype, blocks=(block,))
