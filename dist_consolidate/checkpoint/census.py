"""Who is there: the ranks of a tag, counted by number and named when missing or surplus."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dist_consolidate.checkpoint.layout import ShardFile, TagFolder, missing_numbers
from dist_consolidate.checkpoint.parallel import Grid
from dist_consolidate.checkpoint.search import advice
from dist_consolidate.checkpoint.states import ModelState, OptimState
from dist_consolidate.checkpoint.writers import plain_name
from dist_consolidate.errors import CheckpointError, Problems, UnsupportedLayoutError

_MAX_INDICES = 100_000
# A shard is short beside its likes if it is no more than this part of them.
_SHORT = 0.98
SALVAGE_HINT = "If these files are gone for good, --salvage writes what is intact."


def refuse_model_parallel(folder: TagFolder, model: ModelState, grid: Grid) -> None:
    """Refuse stages of a pipeline that has no layer files.

    Args:
        folder: The shards.
        model: The model states of rank 0.
        grid: How the model is spread.

    Raises:
        UnsupportedLayoutError: If there are any.
        CheckpointError: If the recorded size is none that a cluster has.
    """
    if grid.size > _MAX_INDICES:
        raise CheckpointError(
            f"{folder.path / model.shard.name}: records a model-parallel size of {grid.size}; "
            "this is not what DeepSpeed writes"
        )
    if grid.num_stages > 1 and model.module is not None:
        raise UnsupportedLayoutError(
            f"{folder.path}: records {grid.num_stages} pipeline stages, but {model.shard.name} has "
            "a `module` of its own, which no pipeline engine writes"
        )


def check_indices(folder: TagFolder, size: int, problems: Problems) -> None:
    """Check that no shard belongs to a model-parallel index beyond those there should be.

    Args:
        folder: The shards.
        size: Model-parallel indices; with one only, sequence parallelism may number its ranks so.
        problems: Takes each surplus shard.
    """
    for shard in folder.shards:
        if size > 1 and shard.role != "layer" and shard.mp_rank >= size:
            problems.add(
                f"{folder.path / shard.name}: is surplus: model-parallel index {shard.mp_rank}, "
                f"but the run had {size}; move away what is left over"
            )


def primary_model(folder: TagFolder, mp_rank: int) -> ShardFile:
    """Pick the model states of data-parallel rank 0; index 0's alone hold the recorded ties.

    Args:
        folder: The shards.
        mp_rank: The model-parallel index.

    Returns:
        The file.

    Raises:
        CheckpointError: If it is not there.
    """
    models = [s for s in folder.of("model") if not s.dp_rank and s.mp_rank == mp_rank]
    if len(models) > 1:
        raise CheckpointError(
            f"{folder.path}: holds two model states of rank 0, {models[0].name} and "
            f"{models[1].name}: saves of two ZeRO stages lie on top of each other; move away what "
            "is left over"
        )
    if not models:
        striped = any(shard.dp_rank is not None for shard in folder.of("model"))
        name = f"zero_pp_rank_0_mp_rank_{mp_rank:02d}" if striped else f"mp_rank_{mp_rank:02d}"
        raise CheckpointError(
            f"{folder.path / (name + '_model_states.pt')}: is missing; it names the model's "
            "tensors and nothing can be read without it. Look for it where the run's first "
            f"rank saved{advice(folder, '. ')}{_other_names(folder, mp_rank)}"
        )
    return models[0]


def _other_names(folder: TagFolder, mp_rank: int) -> str:
    """Under ZeRO-3 every rank's model states name the tensors."""
    others = [s for s in folder.of("model") if s.dp_rank and s.mp_rank == mp_rank]
    if not others or mp_rank:
        return ""
    return f". If it is gone for good, --salvage takes the names of {others[0].name}"


def beside_others(folder: TagFolder, shard: ShardFile) -> str:
    """Say that a damaged file is short beside its likes: its save did not finish.

    Args:
        folder: The shards.
        shard: The file.

    Returns:
        What to add to the message; nothing for model states, which differ.
    """
    likes = [s.num_bytes for s in folder.of(shard.role) if s != shard]
    if shard.role != "optim" or not likes or shard.num_bytes > _SHORT * min(likes):
        return ""
    return (
        f". A torn save: {shard.name} of rank {shard.dp_rank or 0} has {shard.num_bytes:,} bytes, "
        f"its likes {min(likes):,}"
    )


def order_by_rank(
    folder: TagFolder,
    states: Sequence[OptimState],
    problems: Problems,
    damaged: Collection[int] = (),
    dp_world_size: int | None = None,
) -> list[OptimState]:
    """Check that there is exactly one optimizer states file for each rank.

    Args:
        folder: The shards.
        states: The optimizer states read.
        problems: Takes each missing, surplus and contradicting rank, with its path.
        damaged: Ranks whose file is there but could not be read.
        dp_world_size: As the model states record it, for optimizer states that do not.

    Returns:
        The states in rank order; complete if no problem was noted.
    """
    by_rank: dict[int, list[OptimState]] = {}
    for state in states:
        by_rank.setdefault(state.shard.dp_rank or 0, []).append(state)
    first = by_rank[min(by_rank)][0]
    ranks = first.num_ranks or (dp_world_size or 0 if first.rounds else 0)
    if ranks < 1:
        problems.add(f"{folder.file(first.shard.name)}: records no partition_count")
        ranks = len(by_rank)
    for rank in missing_numbers(ranks, {*by_rank, *damaged}):
        path = folder.path / name_for(first.shard, rank)
        problems.add(
            f"{path}: is missing (rank {rank} of {ranks}); {first.shard.name} is of so many ranks"
        )
    for rank, found in sorted(by_rank.items()):
        _check_rank(folder, rank, ranks, found, first.shard.name, problems)
    ordered = [by_rank[rank][0] for rank in sorted(by_rank) if rank < ranks]
    _check_agreement(folder, ordered, problems)
    return ordered


def name_for(example: ShardFile, rank: int) -> str:
    """Name another rank's file of the kind of an example."""
    ours, theirs = f"zero_pp_rank_{rank}_", f"zero_pp_rank_{example.dp_rank or 0}_"
    return plain_name(example.name).replace(theirs, ours)


def _check_rank(
    folder: TagFolder,
    rank: int,
    ranks: int,
    found: Sequence[OptimState],
    first: str,
    problems: Problems,
) -> None:
    if len(found) > 1:
        names = " and ".join(state.shard.name for state in found)
        problems.add(f"{folder.path}: rank {rank} is there {len(found)} times: {names}; keep one")
    for state in found:
        count = state.num_ranks or ranks
        path = folder.file(state.shard.name)
        if rank >= ranks:
            problems.add(
                f"{path}: is surplus: rank {rank}, but {first} was saved by a run with {ranks} "
                f"ranks (this file: {count}); move away what is left over"
            )
        elif count != ranks:
            problems.add(
                f"{path}: was saved by a run with {count} ranks, but {first} by one with {ranks}"
            )


def _check_agreement(folder: TagFolder, states: Sequence[OptimState], problems: Problems) -> None:
    # A rank may hold nothing that has taken a step.
    stepped = [state for state in states if state.step is not None]
    for what in ("striped", "zero_stage", "step", "ds_version"):
        having = stepped if what == "step" else states
        for state in having[1:]:
            ours, theirs = getattr(having[0], what), getattr(state, what)
            if ours != theirs:
                problems.add(
                    f"{folder.file(state.shard.name)}: {what} is {theirs}, but {ours} in "
                    f"{having[0].shard.name}; the files are of different saves"
                )
    for state in states[1:]:
        if len(state.parts) != len(states[0].parts):
            problems.add(
                f"{folder.file(state.shard.name)}: holds {len(state.parts)} flat groups, but "
                f"{states[0].shard.name} {len(states[0].parts)}"
            )


def check_optims(
    folder: TagFolder,
    indices: Sequence[tuple[ModelState, Sequence[OptimState]]],
    problems: Problems,
) -> None:
    """Check that no model-parallel index lacks optimizer states which the others have.

    Args:
        folder: The shards.
        indices: Model states and optimizer states of each index; damaged files are among neither.
        problems: Takes each index whose optimizer states are all missing.
    """
    having = [states[0] for _, states in indices if states]
    damaged = {shard.mp_rank for shard in folder.of("optim")}
    for model, states in indices:
        index = model.shard.mp_rank
        if states or index in damaged or not (having or model.is_partitioned):
            continue
        prefix = having[0].shard.prefix if having else "bf16_"
        name = f"{prefix}zero_pp_rank_0_mp_rank_{index:02d}_optim_states.pt"
        problems.add(
            f"{folder.path / name}: is missing, and with it every fp32 master of model-parallel "
            f"index {index}"
        )


def check_tensors(
    folder: TagFolder, first: ModelState, other: ModelState, problems: Problems
) -> None:
    """Check that two ranks' model states of ZeRO-3 are of the same model.

    Args:
        folder: The shards.
        first: Rank 0's.
        other: Another rank's.
        problems: Takes the file that differs.
    """
    path = folder.file(other.shard.name)
    uneven = (first.module or {}).keys() ^ (other.module or {}).keys()
    if uneven:
        problems.add(
            f"{path}: {len(uneven)} keys of `module` are there or in {first.shard.name}, but not "
            f"in both, the first is {min(uneven)!r}; the files are of different runs"
        )
    for what in ("param_shapes", "buffer_names"):
        if getattr(first, what) != getattr(other, what):
            problems.add(
                f"{path}: has another {what} than {first.shard.name}; the files are of different "
                "runs"
            )


def check_steps(
    folder: TagFolder, model: ModelState, steps: Mapping[str, int | None], problems: Problems
) -> None:
    """Check that all model states are of the same step.

    Args:
        folder: The shards.
        model: The model states of rank 0.
        steps: ``global_steps`` of the other ranks' files; ``None`` where not recorded.
        problems: Takes each file of another step.
    """
    for name, step in steps.items():
        if None not in (step, model.global_steps) and step != model.global_steps:
            problems.add(
                f"{folder.file(name)}: is of step {step}, but {model.shard.name} of step "
                f"{model.global_steps}; the files are of different saves"
            )
