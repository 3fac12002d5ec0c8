"""From a folder to a :class:`Checkpoint`: census, states, and the layout that fits them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dist_consolidate.checkpoint import census
from dist_consolidate.checkpoint.assembly import Assembly
from dist_consolidate.checkpoint.jobs import Finding, Job, Runner, run_here
from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import Checkpoint
from dist_consolidate.checkpoint.parallel import Grid, find_grid
from dist_consolidate.checkpoint.states import ModelState, OptimState
from dist_consolidate.checkpoint.tensor_parallel import TensorRank, merge_tensor_ranks
from dist_consolidate.checkpoint.tensor_settle import Merging
from dist_consolidate.errors import CheckpointError, Problems, UnsupportedLayoutError


def read_checkpoint(
    folder: TagFolder,
    run: Runner = run_here,
    claims: Sequence[tuple[str, str]] = (),
    merging: Merging | None = None,
) -> Checkpoint:
    """Read the metadata of a tag.

    Args:
        folder: The shards (see :func:`dist_consolidate.checkpoint.layout.find_tag`).
        run: Reads files: gives the finding of each job, in order.
        claims: Ties the user claims, as pairs of alias and source.
        merging: What the user says about tensor parallelism.

    Returns:
        The metadata, with every weight located.

    Raises:
        CheckpointError: If shards are missing, surplus, damaged or contradict each other; all
            problems found are in one message.
        UnsupportedLayoutError: If the checkpoint is of a kind that is not read.
    """
    census.refuse_other_kinds(folder)
    jobs = _jobs(folder)
    findings = dict(zip(jobs, run(folder, jobs), strict=True))
    problems = Problems()
    for finding in findings.values():
        if isinstance(finding, UnsupportedLayoutError):
            raise finding
        if isinstance(finding, CheckpointError):
            problems.add(str(finding))
    primary = findings[jobs[0]]
    if not isinstance(primary, ModelState):
        problems.raise_if_any(f"{folder.path}: the checkpoint cannot be read")
        raise AssertionError("a model job gives a model state or an error")
    grid = find_grid(folder, primary)
    census.refuse_model_parallel(folder, primary, grid)
    parts = []
    for index in range(grid.size):
        try:
            parts.append(_part(folder, findings, index, grid, problems))
        except UnsupportedLayoutError:
            raise
        except CheckpointError as error:
            problems.add(str(error))
    census.check_indices(folder, grid.size, problems)
    # A layout needs every rank; missing and damaged shards are told first, all together.
    problems.raise_if_any(f"{folder.path}: the checkpoint is incomplete or inconsistent")
    # Only the model states of global rank 0 have recorded ties; they hold for the others too.
    told = (*claims, *(parts[0].model.shared_params or {}).items())
    checkpoints = [_assembled(part, run, told, grid) for part in parts]
    degree = grid.tensor_degree
    stages = [
        _tensor_merged(folder, parts[at : at + degree], checkpoints[at : at + degree], merging)
        for at in range(0, grid.size, degree)
    ]
    return stages[0]


def _assembled(part: _Part, run: Runner, told: Sequence[tuple[str, str]], grid: Grid) -> Checkpoint:
    """Assemble one index; where there are several, an error says which it is."""
    try:
        return Assembly(part.folder, part.model, part.optims, run, told).checkpoint()
    except CheckpointError as error:
        if grid.size == 1:
            raise
        name = part.model.shard.name
        raise type(error)(f"{error}\n({name} and the optimizer states of its index)") from error


def _tensor_merged(
    folder: TagFolder,
    parts: Sequence[_Part],
    checkpoints: Sequence[Checkpoint],
    merging: Merging | None,
) -> Checkpoint:
    """Make the tensor-parallel ranks of one stage one."""
    if len(parts) == 1:
        unused = () if merging is None else merging.unused()
        return dataclasses.replace(checkpoints[0], notes=(*checkpoints[0].notes, *unused))
    ranks = [
        TensorRank(part.model.shard.name, checkpoint, _universal_info(part), _optim_step(part))
        for part, checkpoint in zip(parts, checkpoints, strict=True)
    ]
    return merge_tensor_ranks(folder, ranks, merging or Merging())


def _optim_step(part: _Part) -> int | None:
    return next((optim.step for optim in part.optims if optim.step is not None), None)


def _universal_info(part: _Part) -> Mapping[str, Any] | None:
    states: tuple[ModelState | OptimState, ...] = (part.model, *part.optims)
    return next((s.universal_info for s in states if s.universal_info is not None), None)


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """What the ranks of one model-parallel index saved.

    Attributes:
        folder: The tag folder with their shards only.
        model: Model states of the first of them.
        optims: Their optimizer states, in rank order.
    """

    folder: TagFolder
    model: ModelState
    optims: Sequence[OptimState]


def _jobs(folder: TagFolder) -> list[Job]:
    """List what is always read; the model states of rank 0 come first."""
    primary = census.primary_model(folder, 0)
    models = [primary, *(s for s in folder.of("model") if not s.dp_rank and s.mp_rank)]
    return [Job("model", s) for s in models] + [Job("optim", s) for s in folder.of("optim")]


def _part(
    folder: TagFolder,
    findings: Mapping[Job, Finding],
    index: int,
    grid: Grid,
    problems: Problems,
) -> _Part:
    """Sort out what one model-parallel index saved; its optimizer states must be complete."""
    mine = folder if grid.size == 1 else folder.only(index)
    model = findings[Job("model", census.primary_model(folder, index))]
    assert isinstance(model, ModelState | CheckpointError)
    if isinstance(model, CheckpointError):
        raise model
    found = {shard: findings[Job("optim", shard)] for shard in mine.of("optim")}
    states = [finding for finding in found.values() if isinstance(finding, OptimState)]
    if any(state.expert_groups for state in states):
        raise UnsupportedLayoutError(
            f"{folder.path}: is an expert-parallel (MoE) checkpoint (a param group belongs to "
            "experts); this version does not read those"
        )
    damaged = {s.dp_rank or 0 for s, error in found.items() if isinstance(error, CheckpointError)}
    ordered = census.order_by_rank(mine, states, problems, damaged) if states else []
    return _Part(mine, model, ordered)
