"""From a folder to a :class:`Checkpoint`: census, states, and the layout that fits them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from dist_consolidate.checkpoint import (
    census,
    expert_folding,
    pipeline,
    salvage,
    same_run,
    steps,
    universal,
    witness,
    writers,
)
from dist_consolidate.checkpoint.assembly import Assembly
from dist_consolidate.checkpoint.experts import Experts, gather, refuse_kinds, with_experts
from dist_consolidate.checkpoint.jobs import Finding, Job, Runner, run_here
from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import Checkpoint
from dist_consolidate.checkpoint.moments import with_moments
from dist_consolidate.checkpoint.parallel import Grid, find_grid
from dist_consolidate.checkpoint.pipeline_stages import PipelineStages, is_pipeline
from dist_consolidate.checkpoint.request import Request
from dist_consolidate.checkpoint.rounding import Compared, comparing
from dist_consolidate.checkpoint.search import advice
from dist_consolidate.checkpoint.states import ModelState, OptimState, TensorsState
from dist_consolidate.checkpoint.tensor_parallel import TensorRank, merge_tensor_ranks
from dist_consolidate.errors import CheckpointError, Problems, UnsupportedLayoutError, listing

_PLAIN = Request()


def read_checkpoint(
    folder: TagFolder, run: Runner = run_here, request: Request = _PLAIN
) -> Checkpoint:
    """Read the metadata of a tag.

    Args:
        folder: The shards (see :func:`dist_consolidate.checkpoint.layout.find_tag`).
        run: Reads files: gives the finding of each job, in order.
        request: What the user asks for.

    Returns:
        The metadata, with every weight located.

    Raises:
        CheckpointError: If shards are missing, surplus, damaged or contradict each other; all
            problems found are in one message.
        UnsupportedLayoutError: If the checkpoint is of a kind that is not read.
    """
    if request.salvage:
        salvaged = salvage.read(folder, run, request)
        if salvaged is not None:
            return salvaged
    folder, notes = writers.settle(folder)
    if universal.is_universal(folder):
        return universal.read(folder, run, request)
    jobs = _jobs(folder)
    findings = dict(zip(jobs, run(folder, jobs), strict=True))
    problems = Problems()
    for job, finding in findings.items():
        if isinstance(finding, UnsupportedLayoutError):
            raise finding
        if isinstance(finding, CheckpointError):
            problems.add(f"{finding}{census.beside_others(folder, job.shard)}")
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
            counted = f"; {primary.shard.name} is of {grid.size} model-parallel indices"
            problems.add(f"{error}{counted if index else ''}")
    piped = is_pipeline(folder, primary)
    if piped and len(parts) == grid.size:
        models, optims = [part.model for part in parts], [part.optims for part in parts]
        pipeline.check_stages(folder, grid, models, optims, problems)
    elif not piped:
        census.check_indices(folder, grid.size, problems)
        census.check_optims(folder, [(part.model, part.optims) for part in parts], problems)
    states = [f for f in findings.values() if isinstance(f, ModelState | OptimState)]
    trust = request.trust_masters
    told = same_run.check(folder, states, problems, trust_masters=trust)
    for part in parts:
        told += steps.check(folder, part.model, part.optims, problems, trust_masters=trust)
    # A layout needs every rank; missing and damaged shards are told first, all together.
    problems.raise_if_any(
        f"{folder.path}: the checkpoint is incomplete or inconsistent",
        advice(folder) or _salvage_hint(findings, parts, grid),
    )
    with comparing() as compared:
        try:
            if piped:
                checkpoint = _joined_stages(folder, grid, parts, run, request)
            else:
                # Only global rank 0's model states have recorded ties; they hold for all.
                claims = (*request.claims, *(primary.shared_params or {}).items())
                found = _assembled(parts, run, dataclasses.replace(request, claims=claims))
                checkpoint = _tensor_merged(folder, parts, found, request)
                if expert_folding.is_folded(primary, grid):
                    experts = _folded_experts(folder, primary, findings, grid, run, request)
                    checkpoint = expert_folding.join(checkpoint, experts)
        except CheckpointError as error:
            raise type(error)(f"{error}{_damage_told(folder, run, compared)}") from error
    checkpoint = dataclasses.replace(
        checkpoint,
        notes=(*folder.notes, *notes, *told, *checkpoint.notes),
        pipeline_stages=grid.num_stages,
        tensor_ranks=grid.tensor_degree,
    )
    if request.include_optimizer:
        part = _only_part(folder, parts)
        checkpoint = with_moments(checkpoint, folder, part.model, part.optims, run)
    return checkpoint


def _damage_told(folder: TagFolder, run: Runner, compared: Compared) -> str:
    """Name damaged records among what was compared: then that is why values do not fit."""
    shards = {shard.name: shard for shard in folder.shards}
    jobs = [Job("crc", shards[n], tuple(sorted(r))) for n, r in compared.items() if n in shards]
    lines = []
    for job, finding in zip(jobs, run(folder, jobs) if jobs else [], strict=True):
        rank = "" if job.shard.dp_rank is None else f" (of rank {job.shard.dp_rank})"
        lines += [
            f"{folder.file(job.shard.name)}{rank}: record {record.name} holds other bytes than "
            "were saved (CRC-32)"
            for record in (finding if isinstance(finding, tuple) else ())
        ]
    return f"\n{listing('The cause may be damage', lines)}" if lines else ""


def _salvage_hint(findings: Mapping[Job, Finding], parts: Sequence[_Part], grid: Grid) -> str:
    """Say that there is ``--salvage``, where shards are damaged or gone and it can help."""
    damaged = any(isinstance(finding, CheckpointError) for finding in findings.values())
    few = any(len(p.optims) < p.optims[0].num_ranks for p in parts if p.optims)
    dense = grid.size == 1 and len(parts) == 1 and parts[0].experts is None
    return census.SALVAGE_HINT if dense and (damaged or few) else ""


def _joined_stages(
    folder: TagFolder, grid: Grid, parts: Sequence[_Part], run: Runner, request: Request
) -> Checkpoint:
    """Put a pipeline together: layers named, tensor ranks of each stage merged, stages joined."""
    stages = PipelineStages(folder, grid, pipeline.read_layers(folder, grid, run))
    optims = [part.optims for part in parts]
    models = stages.with_shapes([part.model for part in parts], optims)
    whole = [dataclasses.replace(p, model=m) for p, m in zip(parts, models, strict=True)]
    found = _assembled(whole, run, dataclasses.replace(request, claims=()))
    named = stages.with_layers(models, found, request.pipeline_names)
    degree = grid.tensor_degree
    merged = [
        _tensor_merged(folder, parts[at : at + degree], named[at : at + degree], request)
        for at in range(0, grid.size, degree)
    ]
    checkpoint = pipeline.merge_stages(folder, merged, request.claims)
    if checkpoint.stage not in (1, 2):
        return checkpoint
    layers = {n: key.source for n, key in checkpoint.module.items() if key.source is not None}
    heard = witness.hear(
        folder,
        checkpoint.groups,
        checkpoint.partitions,
        layers,
        trust_masters=request.trust_masters,
    )
    return dataclasses.replace(checkpoint, notes=(*checkpoint.notes, *heard))


def _tensor_merged(
    folder: TagFolder, parts: Sequence[_Part], checkpoints: Sequence[Checkpoint], request: Request
) -> Checkpoint:
    """Make the tensor-parallel ranks of one stage one."""
    if len(parts) == 1:
        unused = request.merging.unused()
        return dataclasses.replace(checkpoints[0], notes=(*checkpoints[0].notes, *unused))
    ranks = [
        TensorRank(part.model.shard.name, checkpoint, _universal_info(part), _optim_step(part))
        for part, checkpoint in zip(parts, checkpoints, strict=True)
    ]
    return merge_tensor_ranks(folder, ranks, request.merging)


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
        experts: Their experts, if the model has any.
    """

    folder: TagFolder
    model: ModelState
    optims: Sequence[OptimState]
    experts: Experts | None


def _only_part(folder: TagFolder, parts: Sequence[_Part]) -> _Part:
    """Refuse optimizer states that are spread over more than data-parallel ranks."""
    part = parts[0]
    kind = "is a model- or expert-parallel checkpoint"
    if part.optims and part.optims[0].rounds:
        kind = "was written by the stage-1 optimizer of before DeepSpeed 0.4"
    elif len(parts) == 1 and part.experts is None and not part.model.experts.shards:
        return part
    raise UnsupportedLayoutError(
        f"{folder.path}: {kind}, whose optimizer states this version does not read; consolidate "
        "without --include optimizer"
    )


def _assembled(parts: Sequence[_Part], run: Runner, request: Request) -> list[Checkpoint]:
    """Locate the weights of each model-parallel index; an error says which one it is."""
    found = []
    for part in parts:
        try:
            assembly = Assembly(part.folder, part.model, part.optims, run, request, part.experts)
            found.append(assembly.checkpoint())
        except CheckpointError as error:
            if len(parts) == 1:
                raise
            name = part.model.shard.name
            raise type(error)(f"{error}\n({name} and the optimizer states of its index)") from error
    return found


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
    ordered = (
        census.order_by_rank(mine, states, problems, damaged, model.dp_world_size) if states else []
    )
    if expert_folding.is_folded(model, grid):
        ordered = [expert_folding.dense_optim(model, optim) for optim in ordered]
        expert_folding.refuse_kinds(folder, model, ordered, grid)
        return _Part(mine, expert_folding.dense_model(model), ordered, None)
    experts = _experts(mine, model, findings, grid, problems)
    return _Part(mine, model if experts is None else with_experts(model, experts), ordered, experts)


def _folded_experts(
    folder: TagFolder,
    model: ModelState,
    findings: Mapping[Job, Finding],
    grid: Grid,
    run: Runner,
    request: Request,
) -> Checkpoint:
    """Locate the experts of a model that has tensor ranks, too: they are spread over all ranks."""
    problems = Problems()
    shards = {shard: findings[Job("optim", shard)] for shard in folder.of("optim")}
    optims = {
        (shard.dp_rank or 0, shard.mp_rank): state
        for shard, state in shards.items()
        if isinstance(state, OptimState)
    }
    ordered = expert_folding.expert_optims(model, optims, grid, problems)
    found = [findings[Job("tensors", shard)] for shard in folder.of("expert")]
    states = [finding for finding in found if isinstance(finding, TensorsState)]
    experts = gather(folder, model, states, problems)
    problems.raise_if_any(f"{folder.path}: the checkpoint is incomplete or inconsistent")
    part = with_experts(expert_folding.expert_model(model), experts)
    return Assembly(folder, part, ordered, run, request, experts).checkpoint()


def _experts(
    folder: TagFolder,
    model: ModelState,
    findings: Mapping[Job, Finding],
    grid: Grid,
    problems: Problems,
) -> Experts | None:
    """Put the experts of one model-parallel index together, if the model has any."""
    optims = [f for f in findings.values() if isinstance(f, OptimState)]
    marked = any(f.experts.has_groups or f.experts.zero_groups is not None for f in optims)
    shards = folder.of("expert")
    if not (shards or marked or model.experts.num_experts or model.experts.odd_auto):
        return None
    refuse_kinds(folder, model, optims, grid)
    if model.experts.shards:
        for shard in shards:
            problems.add(
                f"{folder.file(shard.name)}: is surplus: the experts lie in the ZeRO-3 shards; "
                "move away what another save left there"
            )
        return None
    found = [findings[Job("tensors", shard)] for shard in shards]
    return gather(folder, model, [f for f in found if isinstance(f, TensorsState)], problems)
