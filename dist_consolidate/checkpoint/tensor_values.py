"""Replicas compared by value: copies of one tensor on several tensor ranks must be equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dist_consolidate.checkpoint.fragments import Fragments
from dist_consolidate.checkpoint.layout import is_seen
from dist_consolidate.checkpoint.model import FlatGroup, Source
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.errors import Problems


@dataclasses.dataclass(frozen=True, slots=True)
class Copies:
    """Elements that several ranks hold.

    Attributes:
        name: The tensor.
        said_by: Who says that they are copies.
        average: Whether their mean is meant if they differ.
        by_rank: Where each rank holds them.
    """

    name: str
    said_by: str
    average: bool
    by_rank: Mapping[int, Source]


class Comparing:
    """Compares shards of several ranks bit for bit."""

    def __init__(
        self, folder: Path | Sequence[Path], groups: Sequence[FlatGroup], files: Sequence[str]
    ) -> None:
        """Open nothing yet.

        Args:
            folder: The tag folder.
            groups: All flat groups that sources refer to.
            files: Each rank's model states, to name the ranks in messages.
        """
        self._folder, self._files = folder, files
        self._prints, self._fragments = Fingerprints(folder, groups), Fragments(groups)
        self._seen: dict[str, bool] = {}
        self.unseen: list[str] = []

    def close(self) -> None:
        """Close the shards."""
        self._prints.close()

    def check(self, copies: Copies, problems: Problems) -> None:
        """Compare copies; what differs is a problem, what cannot be read here is remembered."""
        if not all(map(self._is_seen, copies.by_rank.values())):
            self.unseen.append(copies.name)
            return
        (first, source), *others = copies.by_rank.items()
        differing = [rank for rank, other in others if not self.equal(source, other)]
        if not differing:
            return
        named = ", ".join(f"{rank} ({self._files[rank]})" for rank in differing)
        if copies.average:
            fix = "their mean is meant, which is arithmetic and is not done here"
        else:
            fix = "the copies drifted apart in training, or the files are of different saves"
        problems.add(
            f"{copies.name}: every tensor rank should hold the same values by {copies.said_by}, "
            f"but rank {named} differs from rank {first} ({self._files[first]}); {fix}. To take "
            "one rank's copy, give a rule with `take_rank` in --tp-rules FILE"
        )

    def equal(self, one: Source, other: Source) -> bool:
        """Whether two sources hold the same bits."""
        if one.dtype != other.dtype:
            return False
        return self._prints.of(one, one.dtype) == self._prints.of(other, other.dtype)

    def are_equal(self, sources: Iterable[Source]) -> bool:
        """Whether sources can be read here and hold the same bits."""
        first, *others = sources
        seen = all(map(self._is_seen, (first, *others)))
        return seen and all(self.equal(first, other) for other in others)

    def first_copy(self, split: Sequence[Sequence[Source]]) -> tuple[int, int] | None:
        """Find two ranks whose shards of every split tensor are equal.

        Args:
            split: Each split tensor's sources, in rank order; small ones are read first.

        Returns:
            The two ranks, or ``None``.
        """
        if not split:
            return None
        ranks = range(len(split[0]))
        suspects = {(one, other) for one in ranks for other in ranks if one < other}
        for sources in sorted(split, key=lambda found: found[0].num_numel):
            for one, other in sorted(suspects):
                pair = sources[one], sources[other]
                if pair[0].shape != pair[1].shape or not self.are_equal(pair):
                    suspects.discard((one, other))
            if not suspects:
                return None
        return min(suspects)

    def _is_seen(self, source: Source) -> bool:
        files = self._fragments.files(source)
        for file in files - self._seen.keys():
            self._seen[file] = is_seen(self._folder, file)
        return all(self._seen[file] for file in files)
