"""Files of a universal checkpoint in each other's places: they hold numbers and no names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from dist_consolidate import CheckpointError, consolidate
from dist_consolidate.checkpoint.universal_values import can_be_merged
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output
from tests.special import State, edit

STAGE_1, TENSOR_PARALLEL = "universal_frozen_half_z1_w2", "universal_tp2_z1_fp32_w2"


def copy(name: str, tmp_path: Path) -> Path:
    shutil.copytree(CASES[name].ckpt, tmp_path / "ckpt")
    return tmp_path / "ckpt" / "universal"


def refusal(tmp_path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("mlp.gate_proj", "mlp.down_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
        ("self_attn.q_proj", "self_attn.o_proj"),
        ("self_attn.q_proj", "self_attn.k_proj"),
        ("input_layernorm", "post_attention_layernorm"),
    ],
)
def test_tensor_parallel_files_exchanged(one: str, other: str, tmp_path: Path) -> None:
    """Of another shape, of the same shape, and of another shape that would fit."""
    tag = copy(TENSOR_PARALLEL, tmp_path)
    names = [f"model.layers.0.{name}.weight" for name in (one, other)]
    files = [tag / "zero" / name / "fp32.pt" for name in names]
    data = [file.read_bytes() for file in files]
    assert data[0] != data[1]
    files[0].write_bytes(data[1])
    files[1].write_bytes(data[0])
    message = refusal(tmp_path)
    # One rank's shard has the shape of the other's full tensor: the other is found first.
    assert names[1] in message and (names[0] in message or other == "self_attn.k_proj")


@pytest.mark.parametrize("name", [STAGE_1, TENSOR_PARALLEL])
def test_every_file_is_looked_at(name: str, tmp_path: Path) -> None:
    """However many there are."""
    case = CASES[name]
    files = sorted(case.ckpt.glob("universal/zero/*/fp32.pt"))
    trained = [f.parent.name for f in files if f.parent.name in case.truth["trainable"]]
    for param in trained:
        tag = copy(name, tmp_path)

        def change(state: State) -> None:
            state["param"].data += 1.0

        edit(tag / "zero" / param / "fp32.pt", change)
        assert param in refusal(tmp_path)
        shutil.rmtree(tmp_path / "ckpt")


def test_copies_that_have_drifted_apart_are_averaged(tmp_path: Path) -> None:
    """Megatron's norms: their mean is no rank's copy."""
    tag = copy(TENSOR_PARALLEL, tmp_path)
    name = "model.norm.weight"

    def drift(state: State) -> None:
        state["param"].data += 0.5

    edit(tag / "zero" / name / "fp32.pt", drift)
    assert name in refusal(tmp_path)
    for rank in range(2):
        edit(
            tag / f"mp_rank_0{rank}_model_states.pt",
            lambda state: state.setdefault("universal_checkpoint_info", {}).update(
                parameter_to_average_patterns=[r"model\.norm\.weight"]
            ),
        )
    consolidate(tmp_path / "ckpt", tmp_path / "out")
    want = dict(expected_fp32(CASES[TENSOR_PARALLEL]))
    want[name] = want[name] + 0.5
    assert_same_bits(load_output(tmp_path / "out"), want)
    assert torch.equal(want[name], load_output(tmp_path / "out")[name])


@pytest.mark.parametrize(
    ("full", "shards", "fits"),
    [
        ((4, 6), [(4, 6), (4, 6)], True),
        ((8, 6), [(4, 6), (4, 6)], True),
        ((4, 12), [(4, 6), (4, 6)], True),
        ((7, 6), [(4, 6), (4, 6)], True),
        ((6, 6), [(4, 6), (4, 6)], False),
        ((9, 6), [(4, 6), (4, 6)], False),
        ((8, 12), [(4, 6), (4, 6)], False),
        ((6, 4), [(4, 6), (4, 6)], False),
        ((48,), [(4, 6), (4, 6)], True),
        ((47,), [(4, 6), (4, 6)], False),
        ((5, 6), [(3, 6), (2, 6)], True),
        ((), [(), ()], True),
        ((1,), [(), ()], False),
    ],
)
def test_shapes(full: tuple[int, ...], shards: list[tuple[int, ...]], fits: bool) -> None:
    assert can_be_merged(full, shards, num_rows=7) is fits
