"""The tied modules of a pipeline: their masters on each stage, and the layer files that hold them.

Nothing in a layer file tells that it is a tied module's. It is the one whose values the file holds,
rounded; values that are all alike testify to nothing.

Source: DeepSpeed's ``runtime/pipe/module.py`` (``TiedLayerSpec``, ``_index_tied_modules``).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

from dist_consolidate.checkpoint.model import Checkpoint, Source, own_source
from dist_consolidate.checkpoint.pipeline_names import tie_of
from dist_consolidate.checkpoint.pipeline_values import Values
from dist_consolidate.checkpoint.states import ModuleEntry, TensorsState
from dist_consolidate.errors import Problems


@dataclasses.dataclass(slots=True)
class TiedModule:
    """A tied module.

    Attributes:
        masters: Its fp32 partitions on each stage that it lives on.
        buffers: Its recorded buffers.
        files: The layer files that hold it, each with the stages whose masters it fits.
    """

    masters: dict[int, dict[str, Source]]
    buffers: set[str]
    files: list[tuple[TensorsState, frozenset[int]]]

    def own_copies(self, file: TensorsState, first: TensorsState, values: Values) -> list[str]:
        """List what a further file holds otherwise than the first, other than masters' copies."""
        masters = {key for keys in self.masters.values() for key in keys}
        return [
            key
            for key, entry in file.entries.items()
            if key not in masters and not _same(entry, first.entries.get(key), values)
        ]

    def files_by_stage(
        self, owners: Mapping[int, int], num_stages: int, values: Values
    ) -> dict[int, list[TensorsState]]:
        """Give the files of each stage's copy; stages whose masters are equal share theirs.

        Where masters differ by less than the rounding, a file fits several of them; the layers
        around it tell whose it can be.

        Args:
            owners: The stage of each ordinary layer, in the layers' order.
            num_stages: Number of stages.
            values: Compares.

        Returns:
            Files by stage; a stage whose copy is in no file has none.
        """
        alike: dict[int, int] = {}
        for stage in self.masters:
            alike[stage] = next(
                (s for s in alike if alike[s] == s and self._are_equal(s, stage, values)), stage
            )
        files: dict[int, list[TensorsState]] = {}
        for file, stages in self.files:
            layer = file.shard.layer or 0
            low = max((s for number, s in owners.items() if number < layer), default=0)
            high = min((s for n, s in owners.items() if n > layer), default=num_stages - 1)
            fitting = [s for s in sorted(stages) if low <= s <= high] or sorted(stages)
            for stage in self.masters:
                if alike[stage] == alike[fitting[0]]:
                    files.setdefault(stage, []).append(file)
        return files

    def _are_equal(self, stage: int, other: int, values: Values) -> bool:
        ours, theirs = self.masters[stage], self.masters[other]
        return ours.keys() == theirs.keys() and all(
            (source.shape, source.dtype) == (theirs[key].shape, theirs[key].dtype)
            and values.agree(stage, source, other, theirs[key])
            for key, source in ours.items()
        )


def find_ties(
    stages: Sequence[Checkpoint],
    buffers: Sequence[frozenset[str]],
    files: Sequence[TensorsState],
    values: Values,
    problems: Problems,
) -> dict[str, TiedModule]:
    """Collect the tied modules, and find their files.

    Args:
        stages: The checkpoint of each stage.
        buffers: The buffer names that each stage records.
        files: The layer files that are no ordinary layer's for certain.
        values: Compares.
        problems: Takes files that fit several modules.

    Returns:
        The tied modules by name.
    """
    tied: dict[str, TiedModule] = {}
    for stage, checkpoint in enumerate(stages):
        for name, source in checkpoint.partitions.items():
            if (parts := tie_of(name)) is not None:
                module = tied.setdefault(parts[0], TiedModule({}, set(), []))
                module.masters.setdefault(stage, {})[parts[1]] = source
    for name in itertools.chain(*buffers):
        if (parts := tie_of(name)) is not None and parts[0] in tied:
            tied[parts[0]].buffers.add(parts[1])
    for file in files:
        found = {tie: _stages_of(module, file, values) for tie, module in tied.items()}
        fitting = [tie for tie, fits in found.items() if fits]
        if len(fitting) > 1:
            problems.add(
                f"{file.shard.name}: holds the values of the tied modules "
                f"{' and '.join(fitting)} alike; which of them it is cannot be told"
            )
        elif fitting:
            tied[fitting[0]].files.append((file, found[fitting[0]]))
    return tied


def _stages_of(module: TiedModule, file: TensorsState, values: Values) -> frozenset[int]:
    """Give the stages whose copy of a tied module a file holds, rounded."""
    if not module.buffers <= file.entries.keys():
        return frozenset()
    return frozenset(s for s, masters in module.masters.items() if _holds(file, s, masters, values))


def _holds(file: TensorsState, stage: int, masters: Mapping[str, Source], values: Values) -> bool:
    for key, source in masters.items():
        entry = file.entries.get(key)
        if entry is None or entry.span.shape != source.shape:
            return False
    agree = all(
        values.agree(stage, source, stage, own_source(file.entries[key].span))
        for key, source in masters.items()
    )
    # All ones, say, may as well be a frozen layer's: that is then written as a layer of its own.
    return agree and any(values.is_telling(stage, source) for source in masters.values())


def _same(entry: ModuleEntry, other: ModuleEntry | None, values: Values) -> bool:
    kind = (entry.span.shape, entry.span.dtype)
    if other is None or kind != (other.span.shape, other.span.dtype):
        return False
    return values.agree(0, own_source(entry.span), 0, own_source(other.span))
