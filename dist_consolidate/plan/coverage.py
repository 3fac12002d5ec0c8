"""The coverage check: every element is filled exactly once, and padding goes nowhere."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from dist_consolidate.checkpoint.model import Block, Checkpoint, FlatGroup, Source
from dist_consolidate.errors import Problems
from dist_consolidate.plan.resolve import Resolution


def check_coverage(checkpoint: Checkpoint, resolution: Resolution) -> None:
    """Check the arithmetic of every source against the sizes on disk.

    Args:
        checkpoint: The metadata.
        resolution: Data holders.

    Raises:
        CheckpointError: If elements are missing, filled twice, or the shapes contradict each
            other; all problems are in one message.
    """
    problems = Problems()
    by_group: dict[int, list[tuple[str, Source]]] = {}
    for tensor in resolution.tensors:
        for source in _simple_sources(tensor.source):
            if source.slot is not None:
                by_group.setdefault(source.slot.group, []).append((tensor.name, source))
            elif source.span is None or source.span.shape != source.shape:
                problems.add(f"{tensor.name}: its values are nowhere, or of another shape")
        _check_shape(checkpoint, tensor.name, tensor.source, problems)
        if tensor.source.blocks:
            _check_blocks(tensor.name, tensor.source, problems)
    for index, members in by_group.items():
        _check_group(checkpoint.groups[index], members, problems)
    problems.raise_if_any(f"{checkpoint.tag}: tensors and data do not fit each other")


def _simple_sources(source: Source) -> Iterable[Source]:
    """Give the slots and spans that a source is made of, each once."""
    if not source.blocks:
        return (source,)
    return {id(block.source): block.source for block in source.blocks}.values()


def _check_blocks(name: str, source: Source, problems: Problems) -> None:
    """Check that the blocks fill the tensor, and stay inside their sources."""
    for block in source.blocks:
        if not block.num_runs:
            continue
        last = block.from_numel + (block.num_runs - 1) * block.from_step_numel
        wrong = min(block.from_numel, last) < 0
        if wrong or max(block.from_numel, last) + block.run_numel > block.source.num_numel:
            problems.add(f"{name}: a part of it reaches beyond the values it is taken from")
        if block.source.dtype != source.dtype:
            found = block.source.dtype.name
            problems.add(f"{name}: is {source.dtype.name}, but a part of it {found}")
    end = 0
    for low, high in sorted(_filled(source.blocks)):
        if low != end:
            what = "left empty" if low > end else "filled twice"
            problems.add(f"{name}: elements {min(low, end)} to {max(low, end)} are {what}")
            return
        end = high
    if end != source.num_numel:
        problems.add(f"{name}: its parts fill {end} of {source.num_numel} elements")


def _filled(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    """Give intervals of elements that blocks fill; blocks of one beat are put together first."""
    beats: dict[tuple[int, int], list[Block]] = {}
    for block in blocks:
        if block.num_runs and block.run_numel:
            beats.setdefault((block.num_runs, block.to_step_numel), []).append(block)
    for (num_runs, step_numel), members in beats.items():
        members.sort(key=lambda block: block.to_numel)
        joins = all(
            left.to_numel + left.run_numel == right.to_numel
            for left, right in itertools.pairwise(members)
        )
        first, last = members[0], members[-1]
        end = last.to_numel + last.run_numel
        if joins and end - first.to_numel == step_numel:
            yield first.to_numel, first.to_numel + num_runs * step_numel
            continue
        for block in members:
            for run in range(num_runs):
                low = block.to_numel + run * step_numel
                yield low, low + block.run_numel


def _check_shape(checkpoint: Checkpoint, name: str, source: Source, problems: Problems) -> None:
    key = checkpoint.module.get(name)
    if key is not None and key.source is not None and key.shape != source.shape:
        problems.add(
            f"{name}: `module` holds shape {list(key.shape)}, but the recorded shape is "
            f"{list(source.shape)}"
        )


def _check_group(
    group: FlatGroup, members: Iterable[tuple[str, Source]], problems: Problems
) -> None:
    width = group.dtype.itemsize_bytes
    held = [part.num_bytes // width for part in group.parts]
    limit = min(held) if group.striped else sum(held)
    end = 0
    for name, source in sorted(members, key=lambda member: _offset(member[1])):
        assert source.slot is not None
        numel = math.prod(source.shape)
        if source.slot.offset_numel < end and numel:
            problems.add(f"{name}: overlaps the tensor before it in {group.label}")
        taken = source.slot.part_numel if group.striped else numel
        if group.striped and taken * len(held) < numel:
            problems.add(f"{name}: {len(held)} parts of {taken} do not make {numel} elements")
        end = max(end, source.slot.offset_numel + taken)
        if end > limit and numel:
            problems.add(
                f"{name}: ends at element {end} of {group.label}, but only {limit} are there"
            )


def _offset(source: Source) -> int:
    return source.slot.offset_numel if source.slot else 0
