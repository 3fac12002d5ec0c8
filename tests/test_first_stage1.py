"""The first stage-1 optimizer (before 0.4.0, and `legacy_stage1` up to 0.5.8), made of a real run.

Its releases do not run here any more. What it writes is a real stage-1 checkpoint of 0.5.4 with the
flat buffer cut otherwise: into rounds ("communication intervals"), each shared by all ranks.
Source: DeepSpeed 0.5.8's ``stage1.py``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_consolidate import CheckpointError, consolidate
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output

CASE = CASES["ds0.5.4_half_z1_w2"]
ROUNDS = (1, 2, 3, 7)


def rewrite(root: Path, num_rounds: int, *, elastic: bool) -> list[Path]:
    """Cut the flat buffer into so many rounds; give the optimizer states' paths in rank order."""
    shutil.copytree(CASE.ckpt, root)
    paths = [next(root.glob(f"*/zero_pp_rank_{rank}_*optim_states.pt")) for rank in range(2)]
    states = [torch.load(path, map_location="cpu", weights_only=False) for path in paths]
    zeros = [state["optimizer_state_dict"] for state in states]
    flat = torch.cat([zero.pop("single_partition_of_fp32_groups")[0] for zero in zeros])
    size = -(-flat.numel() // (2 * num_rounds))
    padded = torch.cat([flat, torch.zeros(2 * size * num_rounds - flat.numel())])
    lean = flat if elastic else padded
    for rank, (path, state, zero) in enumerate(zip(paths, states, zeros, strict=True)):
        places = [(2 * index + rank) * size for index in range(num_rounds)]
        key = "local_sub_partitions_of_fp32_groups"
        zero[key] = [[lean[min(at, len(lean)) : at + size].clone() for at in places]]
        if elastic:
            zero["num_comm_intervals_per_group"] = [num_rounds]
        else:
            del zero["zero_stage"], zero["partition_count"]
        torch.save(state, path)
    return paths


def refusal(root: Path, out: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        consolidate(root, out)
    assert not out.exists()
    return str(caught.value)


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("num_rounds", ROUNDS)
@pytest.mark.parametrize("transport", ["direct", "allgather"])
def test_rounds(tmp_path: Path, num_rounds: int, elastic: bool, transport: str) -> None:
    rewrite(tmp_path / "run", num_rounds, elastic=elastic)
    options: dict[str, Any] = {"transport": transport, "bucket_size": "1KB"}
    consolidate(tmp_path / "run", tmp_path / "out", **options)
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(CASE))


def change(path: Path, action: Any) -> None:
    state = torch.load(path, map_location="cpu", weights_only=False)
    action(state["optimizer_state_dict"])
    torch.save(state, path)


def test_ranks_of_different_rounds(tmp_path: Path) -> None:
    paths = rewrite(tmp_path / "run", 3, elastic=True)
    change(paths[1], lambda zero: zero["local_sub_partitions_of_fp32_groups"][0].pop())
    message = refusal(tmp_path / "run", tmp_path / "out")
    assert f"{paths[1].name}: param group 0 has another number of communication" in message


def test_a_missing_rank(tmp_path: Path) -> None:
    paths = rewrite(tmp_path / "run", 2, elastic=False)
    paths[1].unlink()
    assert f"{paths[1]}: is missing (rank 1 of 2)" in refusal(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("value", [7, [], [[]], [[3]], ["ab"]])
def test_what_is_no_list_of_parts(tmp_path: Path, value: object) -> None:
    paths = rewrite(tmp_path / "run", 2, elastic=True)
    key = "local_sub_partitions_of_fp32_groups"
    change(paths[0], lambda zero: zero.__setitem__(key, value))
    assert paths[0].name in refusal(tmp_path / "run", tmp_path / "out")


def test_rounds_in_another_order(tmp_path: Path) -> None:
    """The values of `module` tell."""
    paths = rewrite(tmp_path / "run", 3, elastic=True)
    for path in paths:
        change(path, lambda zero: zero["local_sub_partitions_of_fp32_groups"][0].reverse())
    assert "hold other values than `module`" in refusal(tmp_path / "run", tmp_path / "out")


def test_its_optimizer_states_are_not_read(tmp_path: Path) -> None:
    rewrite(tmp_path / "run", 2, elastic=True)
    with pytest.raises(CheckpointError, match=r"before DeepSpeed 0\.4, whose optimizer states"):
        consolidate(tmp_path / "run", tmp_path / "out", include=["optimizer"])
