"""Hand-made tensor-parallel checkpoints: DeepSpeed's files with any shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Shards = Mapping[str, Sequence[Tensor]]
VERSION = "0.19.8"


@dataclass(frozen=True)
class Made:
    """What to write.

    Attributes:
        params: fp32 shards of trained parameters, one for each tensor rank.
        info: ``universal_checkpoint_info``; none by default.
        stage: 0 (no masters: fp32 weights), 1, 2 or 3.
        dp: Data-parallel ranks of each tensor rank.
        buffers: Shards of buffers.
        frozen: Shards of frozen parameters, which only ``module`` holds (stages 0 and 1).
        ties: Alias to name, of the same storage on every rank.
        nest: What to make of ``module`` before it is saved.
        step: ``global_steps``.
        rank_step: Another step for one tensor rank: rank and step.
        optim_steps: Steps each tensor rank's optimizer has taken (stages 1 and 2).
    """

    params: Shards
    info: Mapping[str, Any] | None = None
    stage: int = 1
    dp: int = 1
    buffers: Shards = field(default_factory=dict)
    frozen: Shards = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    nest: Callable[[dict[str, Tensor]], Mapping[str, Any]] = dict
    step: int = 3
    rank_step: tuple[int, int] | None = None
    optim_steps: Sequence[int] = ()

    @property
    def degree(self) -> int:
        """Tensor ranks."""
        return len(next(iter(self.params.values())))


def cut(full: Tensor, dim: int, degree: int = 2) -> list[Tensor]:
    """Slices along a dimension, the first ones larger where it is uneven."""
    return [part.contiguous() for part in full.tensor_split(degree, dim=dim)]


def write(root: Path, made: Made) -> Path:
    """Write a run folder.

    Args:
        root: Where.
        made: What.

    Returns:
        The tag folder.
    """
    folder = root / f"global_step{made.step}"
    folder.mkdir(parents=True)
    (root / "latest").write_text(folder.name)
    for rank in range(made.degree):
        params = {name: shards[rank] for name, shards in made.params.items()}
        for dp_rank in range(made.dp):
            _write_model(folder, made, rank, dp_rank, params)
            if made.stage:
                _write_optim(folder, made, rank, dp_rank, params)
    return folder


def _write_model(
    folder: Path, made: Made, rank: int, dp_rank: int, params: Mapping[str, Tensor]
) -> None:
    if dp_rank and made.stage < 3:
        return
    weights = {name: p.clone() if made.stage < 3 else torch.empty(0) for name, p in params.items()}
    weights |= {name: shards[rank] for name, shards in made.frozen.items()}
    weights |= {name: shards[rank] for name, shards in made.buffers.items()}
    weights |= {alias: weights[name] for alias, name in made.ties.items()}
    step = made.step
    if made.rank_step and made.rank_step[0] == rank:
        step = made.rank_step[1]
    state = {
        "module": made.nest(weights),
        "buffer_names": list(made.buffers),
        "optimizer": None,
        "param_shapes": [{n: p.shape for n, p in params.items() if p.numel()}],
        "frozen_param_shapes": {} if made.stage > 1 else None,
        "frozen_param_fragments": {} if made.stage > 1 else None,
        "shared_params": dict(made.ties) if rank == 0 else {},
        "global_steps": step,
        "dp_world_size": made.dp,
        "mp_world_size": made.degree,
        "ds_config": {"zero_optimization": {"stage": made.stage}},
        "ds_version": VERSION,
    }
    if not made.stage:
        state["param_shapes"] = None
    if made.info is not None:
        state["universal_checkpoint_info"] = made.info
    prefix = f"zero_pp_rank_{dp_rank}_" if made.stage == 3 else ""
    torch.save(state, folder / f"{prefix}mp_rank_{rank:02d}_model_states.pt")


def _write_optim(
    folder: Path, made: Made, rank: int, dp_rank: int, params: Mapping[str, Tensor]
) -> None:
    flat = [param.flatten() for param in params.values() if param.numel()]
    if made.stage == 3:
        part = torch.cat([_slice(tensor, dp_rank, made.dp) for tensor in flat])
        state: dict[str, Any] = {"fp32_flat_groups": [part], "partition_count": made.dp}
    else:
        whole = torch.cat(flat)
        whole = torch.cat([whole, torch.zeros(-whole.numel() % (2 * made.dp))])
        part = whole.chunk(made.dp)[dp_rank].clone()
        state = {"single_partition_of_fp32_groups": [part], "partition_count": [made.dp]}
        if made.optim_steps:
            step = torch.tensor(float(made.optim_steps[rank]))
            state["base_optimizer_state"] = {"state": {0: {"step": step}}, "param_groups": []}
    state |= {"zero_stage": made.stage, "ds_version": VERSION}
    tree = {"optimizer_state_dict": state, "ds_version": VERSION}
    torch.save(tree, folder / f"zero_pp_rank_{dp_rank}_mp_rank_{rank:02d}_optim_states.pt")


def _slice(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    taken = -(-tensor.numel() // ranks)
    padded = torch.cat([tensor, torch.full((taken * ranks - tensor.numel(),), torch.nan)])
    return padded[rank * taken : (rank + 1) * taken]
