"""From a folder to a :class:`Checkpoint`: census, states, and the layout that fits them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dist_consolidate.checkpoint import census
from dist_consolidate.checkpoint.assembly import Assembly
from dist_consolidate.checkpoint.experts import Experts, gather, refuse_kinds, with_experts
from dist_consolidate.checkpoint.jobs import Finding, Job, Runner, run_here
from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import Checkpoint
from dist_consolidate.checkpoint.parallel import Grid, find_grid
from dist_consolidate.checkpoint.states import ModelState, OptimState, TensorsState
from dist_consolidate.errors import CheckpointError, Problems, UnsupportedLayoutError


def read_checkpoint(
    folder: TagFolder, run: Runner = run_here, claims: Sequence[tuple[str, str]] = ()
) -> Checkpoint:
    """Read the metadata of a tag.

    Args:
        folder: The shards (see :func:`dist_consolidate.checkpoint.layout.find_tag`).
        run: Reads files: gives the finding of each job, in order.
        claims: Ties the user claims, as pairs of alias and source.

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
    # A layout needs every rank; missing and damaged shards are told first, all together.
    problems.raise_if_any(f"{folder.path}: the checkpoint is incomplete or inconsistent")
    checkpoints = [
        Assembly(part.folder, part.model, part.optims, run, claims, part.experts).checkpoint()
        for part in parts
    ]
    return checkpoints[0]


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """What the ranks of one model-parallel index saved.

    Attributes:
        folder: The tag folder with their shards only.
        model: Model states of the first of them.
        optims: Their optimizer states, in rank order.
        experts: Their experts, if the model has any.
    """

    folder: TagFolder
    model: ModelState
    optims: Sequence[OptimState]
    experts: Experts | None


def _jobs(folder: TagFolder) -> list[Job]:
    """List what is always read; the model states of rank 0 come first."""
    primary = census.primary_model(folder, 0)
    models = [primary, *(s for s in folder.of("model") if not s.dp_rank and s.mp_rank)]
    jobs = [Job("model", s) for s in models] + [Job("optim", s) for s in folder.of("optim")]
    return jobs + [Job("tensors", s) for s in folder.of("expert")]


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
    damaged = {s.dp_rank or 0 for s, error in found.items() if isinstance(error, CheckpointError)}
    ordered = census.order_by_rank(mine, states, problems, damaged) if states else []
    experts = _experts(mine, model, findings, grid, problems)
    return _Part(mine, model if experts is None else with_experts(model, experts), ordered, experts)


def _experts(
    folder: TagFolder,
    model: ModelState,
    findings: Mapping[Job, Finding],
    grid: Grid,
    problems: Problems,
) -> Experts | None:
    """Put the experts of one model-parallel index together, if the model has any."""
    optims = [f for f in findings.values() if isinstance(f, OptimState) and f.experts.has_groups]
    shards = folder.of("expert")
    if not (shards or optims or model.experts.num_experts or model.experts.odd_auto):
        return None
    refuse_kinds(folder, model, optims, grid)
    found = [findings[Job("tensors", shard)] for shard in shards]
    return gather(folder, model, [f for f in found if isinstance(f, TensorsState)], problems)
