"""Checkpoint engines that keep no weights in torch files are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dist_consolidate import CheckpointError, UnsupportedLayoutError, consolidate
from tests.cases import assert_same_bits, expected_fp32, load_output
from tests.special import copy_of, edit


def refusal(tmp_path: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(kind) as error:
        consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    return str(error.value)


@pytest.mark.parametrize("pattern", ["*", "*optim_states.pt"])
def test_nebula(pattern: str, tmp_path: Path) -> None:
    """Its engine saves an empty text under each name."""
    _, tag = copy_of("kitchen_z2_groups_w4", tmp_path)
    for path in tag.glob(pattern):
        torch.save("", path)
    message = refusal(tmp_path, UnsupportedLayoutError)
    assert "stub of the Nebula checkpoint engine" in message
    assert str(tag) in message and "save it without" in message


def test_datastates(tmp_path: Path) -> None:
    """Its files are no torch files; every one of them is named."""
    _, tag = copy_of("kitchen_z2_groups_w4", tmp_path)
    paths = sorted(tag.glob("*_states.pt"))
    for path in paths:
        path.write_bytes(b"\x10\x02\x00\x00\x00\x00\x00\x00{'key'" + bytes(600))
    message = refusal(tmp_path)
    assert all(f"{path}: not a torch file" in message for path in paths)
    assert "DataStates" in message


def test_mics(tmp_path: Path) -> None:
    """MiCS saves its first shard group only: fewer files than ranks, as many as partitions.

    Made here from a plain ZeRO-3 checkpoint by recording a larger world: MiCS cannot be run
    without GPUs.
    """
    case, tag = copy_of("kitchen_z3_bf16_w2", tmp_path)
    for path in tag.glob("*model_states.pt"):
        edit(path, lambda state: state.update(dp_world_size=4))
    consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))
