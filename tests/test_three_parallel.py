"""Tensor parallelism inside a pipeline (3D), with files made after what DeepSpeed writes of each.

Two stages of two tensor-parallel ranks: index = stage * 2 + rank. Every index has model states
without a `module`, optimizer states of its own and its ranks' layer files.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_consolidate import CheckpointError, consolidate
from tests.cases import assert_same_bits, load_output
from tests.zygote import fork_together

STEP = "global_step3"
# Layers of each stage: name, shape, and the dimension that tensor ranks share (None: replicated).
STAGES: tuple[tuple[tuple[str, tuple[int, ...], int | None], ...], ...] = (
    (("0.weight", (8, 6), 0), ("1.norm", (6,), None)),
    (("2.weight", (6, 8), 1), ("3.weight", (10, 6), 0), ("3.bias", (10,), 0)),
)
RULES = """
[[tensor_parallel.rule]]
match = "2.weight"
dim = 1

[[tensor_parallel.rule]]
match = "*.norm"
replicated = true

[[tensor_parallel.rule]]
match = "*"
dim = 0
"""


def part(value: Tensor, dim: int | None, rank: int) -> Tensor:
    return value.clone() if dim is None else value.chunk(2, dim)[rank].contiguous()


def write(root: Path, num_ranks: int) -> dict[str, Tensor]:
    """Write a checkpoint of so many data-parallel ranks; give the fp32 masters."""
    folder = root / STEP
    folder.mkdir(parents=True)
    (root / "latest").write_text(STEP)
    (root / "rules.toml").write_text(RULES)
    generator = torch.Generator().manual_seed(0)
    truth = {
        name: torch.randn(shape, generator=generator) for name, shape, _ in itertools.chain(*STAGES)
    }
    for index in range(4):
        stage, rank = divmod(index, 2)
        mine = {name: part(truth[name], dim, rank) for name, _, dim in STAGES[stage]}
        write_index(folder, index, mine, num_ranks)
        layers: dict[int, dict[str, Tensor]] = {}
        for name, value in mine.items():
            number, _, key = name.partition(".")
            layers.setdefault(int(number), {})[key] = value.bfloat16()
        for number, state in layers.items():
            name = f"layer_{number:02d}-model_{rank:02d}-model_states.pt"
            torch.save(state, folder / name)
    return truth


def write_index(folder: Path, index: int, mine: dict[str, Tensor], num_ranks: int) -> None:
    common: dict[str, Any] = {
        "ds_version": "0.19.8",
        "ds_config": {"zero_optimization": {"stage": 1}},
    }
    torch.save(
        {
            **common,
            "module": None,
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": [{name: value.shape for name, value in mine.items()}],
            "frozen_param_shapes": None,
            "frozen_param_fragments": None,
            "shared_params": {},
            "global_steps": 3,
            "dp_world_size": num_ranks,
            "mp_world_size": 4,
            "checkpoint_parallel_dimensions": {"pp_degree": 2, "tp_degree": 2},
        },
        folder / f"mp_rank_{index:02d}_model_states.pt",
    )
    flat = torch.cat([value.flatten() for value in mine.values()])
    size = -(-flat.numel() // num_ranks)
    for rank in range(num_ranks):
        state = {
            "zero_stage": 1,
            "partition_count": [num_ranks],
            "base_optimizer_state": {"state": {0: {"step": 3}}, "param_groups": []},
            "single_partition_of_fp32_groups": [flat[rank * size : (rank + 1) * size].clone()],
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_{index:02d}_optim_states.pt"
        torch.save({**common, "optimizer_state_dict": state}, folder / name)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("transport", ["direct", "allgather"])
def test_exact(tmp_path: Path, num_ranks: int, transport: str) -> None:
    truth = write(tmp_path / "run", num_ranks)
    rules = tmp_path / "run" / "rules.toml"
    consolidate(
        tmp_path / "run", tmp_path / "out", tp_rules=rules, transport=transport, bucket_size="256"
    )
    assert_same_bits(load_output(tmp_path / "out"), truth)


@pytest.mark.dist
@pytest.mark.parametrize("transport", ["gather", "allgather", "direct"])
def test_two_ranks(tmp_path: Path, transport: str) -> None:
    truth = write(tmp_path / "run", 2)
    rules = tmp_path / "run" / "rules.toml"
    arguments = [tmp_path / "run", tmp_path / "out", "--tp-rules", rules, "--bucket-size", "256"]
    fork_together(2, [*arguments, "--transport", transport]).ok()
    assert_same_bits(load_output(tmp_path / "out"), truth)


def test_nothing_is_guessed(tmp_path: Path) -> None:
    write(tmp_path / "run", 2)
    with pytest.raises(CheckpointError) as caught:
        consolidate(tmp_path / "run", tmp_path / "out")
    assert "--tp-rules" in str(caught.value)
    assert "0.weight" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_03_model_states.pt",
        "bf16_zero_pp_rank_1_mp_rank_02_optim_states.pt",
        "layer_02-model_01-model_states.pt",
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path / "run", 2)
    (tmp_path / "run" / STEP / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        consolidate(tmp_path / "run", tmp_path / "out", tp_rules=tmp_path / "run" / "rules.toml")
