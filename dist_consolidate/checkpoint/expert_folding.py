"""AutoEP beside AutoTP: experts are spread over all ranks, whatever tensor they share otherwise.

The dense weights are a tensor-parallel checkpoint like any other, once the param groups of experts
are left out. Experts are whole: neighbouring ranks, tensor ranks first, hold different ones. Each
rank's optimizer states record where it stands (``folding``), which is held against the names of the
files.

Sources: DeepSpeed's ``module_inject/auto_ep_folding.py`` (``expected_folding_group_tables``) and
``checkpoint/autoep_universal.py`` (``make_folding_metadata``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from dist_consolidate.checkpoint.expert_fused import is_fused, router_aliases
from dist_consolidate.checkpoint.expert_states import ExpertFacts
from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import Checkpoint
from dist_consolidate.checkpoint.parallel import Grid
from dist_consolidate.checkpoint.states import ModelState, OptimState
from dist_consolidate.checkpoint.tensor_join import Places
from dist_consolidate.errors import Problems, UnsupportedLayoutError

_T = TypeVar("_T")


def is_folded(model: ModelState, grid: Grid) -> bool:
    """Tell whether experts are spread over tensor ranks, too.

    Args:
        model: The model states of rank 0.
        grid: Pipeline stages and tensor-parallel ranks.

    Returns:
        Whether they are.
    """
    return grid.size > 1 and model.experts.folding is not None


def refuse_kinds(
    folder: TagFolder, model: ModelState, optims: Sequence[OptimState], grid: Grid
) -> None:
    """Refuse what is not read of such checkpoints.

    Args:
        folder: The shards.
        model: The model states of rank 0.
        optims: The optimizer states that could be read.
        grid: Pipeline stages and tensor-parallel ranks.

    Raises:
        UnsupportedLayoutError: For stages 0 and 3, pipelines, and odd placements.
    """
    what = None
    if model.experts.odd_auto:
        what = model.experts.odd_auto
    elif grid.num_stages > 1:
        what = f"is a pipeline of {grid.num_stages} stages"
    elif not optims:
        what = "was trained without ZeRO"
    elif any(optim.striped for optim in optims):
        what = "was trained under ZeRO-3"
    if what:
        raise UnsupportedLayoutError(
            f"{folder.path}: has experts beside {grid.tensor_degree} tensor-parallel ranks (AutoEP "
            f"and AutoTP), and {what}; this version reads those of stages 1 and 2 only, where "
            "every rank holds the next so many experts"
        )


def dense_model(model: ModelState) -> ModelState:
    """Leave the experts out of one tensor rank's model states.

    Args:
        model: The model states.

    Returns:
        What any tensor-parallel checkpoint has.
    """
    dense = [index for index, names in enumerate(model.param_shapes or ()) if not _is_of(names)]
    fused = [name for names in model.param_shapes or () for name in names if is_fused(name)]
    ties = dict(model.shared_params or {})
    for layer in dict.fromkeys(name.rpartition("experts.")[0] for name in fused):
        ties |= router_aliases(model.module or {}, layer)
    return dataclasses.replace(
        model,
        shared_params=ties,
        param_shapes=_pick(model.param_shapes, dense),
        frozen_shapes=_without_experts(model.frozen_shapes),
        frozen=_without_experts(model.frozen),
        universal_info=_without_layers(model.universal_info),
        experts=ExpertFacts(),
    )


def dense_optim(model: ModelState, optim: OptimState) -> OptimState:
    """Leave the experts out of one rank's optimizer states.

    Args:
        model: The model states of its tensor rank.
        optim: The optimizer states.

    Returns:
        The states with the dense param groups only.
    """
    dense = [index for index, names in enumerate(model.param_shapes or ()) if not _is_of(names)]
    found = _with_groups(optim, dense)
    info = _without_layers(optim.universal_info)
    return dataclasses.replace(found, universal_info=info, experts=ExpertFacts())


def expert_model(model: ModelState) -> ModelState:
    """Leave all but the experts out of rank 0's model states.

    Args:
        model: The model states.

    Returns:
        The states, still without the experts' own tensors.
    """
    mine = [index for index, names in enumerate(model.param_shapes or ()) if _is_of(names)]
    return dataclasses.replace(
        model,
        module={},
        odd_entries={},
        buffer_names=frozenset(),
        param_shapes=_pick(model.param_shapes, mine),
        frozen_shapes=_only_experts(model.frozen_shapes),
        frozen=_only_experts(model.frozen),
        shared_params={},
    )


def expert_optims(
    model: ModelState,
    optims: Mapping[tuple[int, int], OptimState],
    grid: Grid,
    problems: Problems,
) -> list[OptimState]:
    """Put every rank's param groups of experts in the order of the ranks.

    Args:
        model: The model states of rank 0.
        optims: Optimizer states by data-parallel and tensor rank.
        grid: Tensor-parallel ranks.
        problems: Takes ranks that say they stand elsewhere.

    Returns:
        The states with the experts' param groups only.
    """
    mine = [index for index, names in enumerate(model.param_shapes or ()) if _is_of(names)]
    found = []
    for (data, tensor), optim in sorted(optims.items()):
        said = optim.experts.folding
        rank, size = data * grid.tensor_degree + tensor, said.ep_size if said else 1
        if said is None or (said.tp_size, said.tp_rank, said.ep_rank) != (
            grid.tensor_degree, tensor, rank % size
        ):  # fmt: skip
            stands = "nothing" if said is None else f"{said}"
            problems.add(
                f"{optim.shard.name}: its folding says {stands}, expected tensor rank {tensor} of "
                f"{grid.tensor_degree} and expert-parallel rank {rank % size}; the file was "
                "renamed, or ranks are in another order"
            )
        found.append(_with_groups(optim, mine))
    return found


def join(dense: Checkpoint, experts: Checkpoint) -> Checkpoint:
    """Put the dense weights and the experts together.

    Args:
        dense: All tensor ranks' dense weights, merged.
        experts: The experts.

    Returns:
        The whole.
    """
    places = Places(len(dense.groups))
    return dataclasses.replace(
        dense,
        groups=(*dense.groups, *experts.groups),
        partitions={**dense.partitions, **places.all(experts.partitions)},
        frozen={**dense.frozen, **places.all(experts.frozen)},
        module={**dense.module, **{n: places.key(k) for n, k in experts.module.items()}},
        odd_entries={**dense.odd_entries, **experts.odd_entries},
        file_bytes={**dense.file_bytes, **experts.file_bytes},
        notes=(*dense.notes, *experts.notes),
        value_ties={**dense.value_ties, **experts.value_ties},
    )


def _without_layers(info: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Leave out what each rank says about its own experts."""
    return None if info is None else {k: v for k, v in info.items() if k != "ds_autoep_layers"}


def _is_of(names: Collection[str]) -> bool:
    """Whether a param group is one of experts."""
    return any(map(is_fused, names))


def _with_groups(optim: OptimState, which: Sequence[int]) -> OptimState:
    facts = optim.experts
    return dataclasses.replace(
        optim,
        parts=_pick(optim.parts, which) or (),
        partition_counts=_pick(optim.partition_counts, which) or (),
        alignment_paddings=_pick(optim.alignment_paddings, which),
        param_shapes=_pick(optim.param_shapes, which),
        slices=_pick(optim.slices, which),
        experts=dataclasses.replace(
            facts, sizes=_pick(facts.sizes, which), slices=_pick(facts.slices, which)
        ),
    )


def _pick(items: tuple[_T, ...] | None, which: Sequence[int]) -> tuple[_T, ...] | None:
    return None if items is None else tuple(items[i] for i in which if i < len(items))


def _without_experts(named: dict[str, _T] | None) -> dict[str, _T] | None:
    return None if named is None else {n: v for n, v in named.items() if not is_fused(n)}


def _only_experts(named: dict[str, _T] | None) -> dict[str, _T] | None:
    return None if named is None else {n: v for n, v in named.items() if is_fused(n)}
