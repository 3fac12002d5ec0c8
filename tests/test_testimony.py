"""Stages 1 and 2: the views in `module` tell the order where the recorded shapes do not."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dist_consolidate import CheckpointError, consolidate
from dist_consolidate.checkpoint.extents import Extent
from dist_consolidate.checkpoint.model import FlatGroup
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.transposed import column_major
from dist_consolidate.dtypes import FLOAT32
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output
from tests.special import State, copy_of, edit, only
from tests.zygote import fork_together

ZENFLOW = ["zenflow_z2_bf16_w2", "zenflow_z1_fp32_w3"]
MODEL = "mp_rank_00_model_states.pt"


@pytest.mark.parametrize("name", ZENFLOW)
def test_zenflow_is_turned_and_told(name: str, tmp_path: Path) -> None:
    """Bits are compared in test_checkpoints; here: these files do hold transposed matrices."""
    case = CASES[name]
    state = torch.load(only(case.ckpt, f"*/{MODEL}"), weights_only=False)
    assert state["module"]["inp.weight"].stride() == (1, 9)
    report = consolidate(case.ckpt, tmp_path / "out")
    note = "3 matrices lie transposed and were turned; 21 of 21 columns compared round to"
    assert any(note in text for text in report.notes)


@pytest.mark.dist
@pytest.mark.parametrize("transport", ["allgather", "gather", "direct"])
def test_zenflow_by_every_transport(transport: str, tmp_path: Path) -> None:
    """Matrices cut by the borders of three parts, in buckets of a few elements."""
    case = CASES["zenflow_z1_fp32_w3"]
    arguments = [str(case.ckpt), str(tmp_path / "out"), "--transport", transport]
    fork_together(2, [*arguments, "--bucket-size", "96"]).ok()
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))


@pytest.mark.parametrize("shape", [(3, 5), (7, 2), (2, 9), (4, 4)])
def test_any_borders(shape: tuple[int, int], tmp_path: Path) -> None:
    """Whatever borders cut a matrix, turning it gives what torch's own transposition gives."""
    rows, columns = shape
    numel, before = rows * columns, 3
    flat = torch.arange(before + numel + 4, dtype=torch.float32)
    want = flat[before : before + numel].view(columns, rows).t().contiguous()
    (tmp_path / "want").write_bytes(want.numpy().tobytes())
    (tmp_path / "flat").write_bytes(flat.numpy().tobytes())
    prints = Fingerprints(tmp_path)
    one = _whole("want", shape)
    for cuts in itertools.combinations(range(0, len(flat) + 1, 2), 3):
        borders = [0, *cuts, len(flat)]
        parts = tuple(
            Extent("flat", 4 * low, 4 * (high - low)) for low, high in itertools.pairwise(borders)
        )
        groups = (FlatGroup("group", False, FLOAT32, parts),)
        turned = column_major(groups[0], before, shape)
        assert prints.of(turned, FLOAT32) == prints.of(one, FLOAT32), cuts


def _whole(file: str, shape: tuple[int, int]):
    from dist_consolidate.checkpoint.extents import TensorSpan, contiguous_stride
    from dist_consolidate.checkpoint.model import Source

    span = TensorSpan(file, 0, FLOAT32, shape, contiguous_stride(shape))
    return Source("module", shape, FLOAT32, span=span)


def _clone(state: State) -> None:
    state["module"] = OrderedDict(
        (name, tensor.clone(memory_format=torch.contiguous_format))
        for name, tensor in state["module"].items()
    )


def test_zenflow_whose_module_is_cloned_is_refused(tmp_path: Path) -> None:
    _, tag = copy_of("zenflow_z2_bf16_w2", tmp_path)
    edit(tag / MODEL, _clone)
    with pytest.raises(CheckpointError, match="trained with ZenFlow, which lays matrices") as error:
        consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert MODEL in str(error.value) and "'emb.weight'" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_zenflow_whose_configuration_is_a_path(tmp_path: Path) -> None:
    case, tag = copy_of("zenflow_z2_bf16_w2", tmp_path)
    edit(tag / MODEL, lambda state: state.update(ds_config="ds_config.json"))
    consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))


def test_transposed_views_without_zenflow_are_refused(tmp_path: Path) -> None:
    _, tag = copy_of("zenflow_z2_bf16_w2", tmp_path)
    edit(tag / MODEL, lambda state: state["ds_config"]["zero_optimization"].pop("zenflow"))
    with pytest.raises(CheckpointError, match=r"lie otherwise in `module`.*stride \[1, 13\]"):
        consolidate(tmp_path / "ckpt", tmp_path / "out")


@pytest.mark.deepspeed
def test_zenflow_that_the_values_contradict_is_refused(tmp_path: Path) -> None:
    """Vectors are in step with `module`, but no column of any matrix is."""
    _, tag = copy_of("zenflow_z2_bf16_w2", tmp_path)

    def negate(state: State) -> None:
        flat: Tensor = state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
        flat.data.neg_()

    for path in tag.glob("*optim_states.pt"):
        edit(path, negate)
    with pytest.raises(CheckpointError, match="no column compared holds its values"):
        consolidate(tmp_path / "ckpt", tmp_path / "out")


@pytest.mark.deepspeed
def test_zenflow_whose_masters_are_of_another_step_says_so(tmp_path: Path) -> None:
    _, tag = copy_of("zenflow_z2_bf16_w2", tmp_path)

    def step(state: State) -> None:
        for flat in state["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
            flat.data.add_(1.0)

    for path in tag.glob("*optim_states.pt"):
        edit(path, step)
    with pytest.raises(CheckpointError, match="pass --trust-masters"):
        consolidate(tmp_path / "ckpt", tmp_path / "out")
    report = consolidate(tmp_path / "ckpt", tmp_path / "out", trust_masters=True)
    assert any("masters are of another step than `module`" in note for note in report.notes)
    want = {n: t + 1 for n, t in CASES["zenflow_z2_bf16_w2"].truth["fp32"].items()}
    got = load_output(tmp_path / "out")
    assert torch.equal(got["inp.weight"], want["inp.weight"])


def _shuffle(state: State) -> None:
    """Record the shapes in the model's order although the groups were laid round robin."""
    state["param_shapes"] = [
        OrderedDict(sorted(group.items(), reverse=True)) for group in state["param_shapes"]
    ]


@pytest.mark.parametrize("name", ["ds0.6.1_gpt2_z2_w2", "z1_bf16opt_groups_w4"])
def test_offsets_of_module_hold_where_the_recorded_order_does_not(
    name: str, tmp_path: Path
) -> None:
    """As releases 0.4.0 to 0.4.3 record it, which laid groups round robin behind their shapes."""
    case, tag = copy_of(name, tmp_path)
    edit(tag / MODEL, _shuffle)
    report = consolidate(tmp_path / "ckpt", tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))
    assert any("in another order than param_shapes says" in note for note in report.notes)


@pytest.mark.deepspeed
def test_another_order_that_the_values_contradict_is_refused(tmp_path: Path) -> None:
    _, tag = copy_of("z1_bf16opt_groups_w4", tmp_path)
    edit(tag / MODEL, _shuffle)

    def change(state: State) -> None:
        for flat in state["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
            flat.data.add_(1.0)

    for path in tag.glob("*optim_states.pt"):
        edit(path, change)
    with pytest.raises(CheckpointError, match=r"do not hold its values there.*nothing tells"):
        consolidate(tmp_path / "ckpt", tmp_path / "out")


def test_views_with_holes_are_no_order(tmp_path: Path) -> None:
    """Offsets that differ from the record but leave gaps explain nothing."""
    _, tag = copy_of("ds0.6.1_gpt2_z2_w2", tmp_path)

    def shift(state: State) -> None:
        module = state["module"]
        names = [n for group in state["param_shapes"] for n in group]
        flat = torch.cat([module[n].flatten() for n in names])
        flat = torch.cat([flat, flat.new_zeros(8)])
        at = 8
        for name in names:
            old = module[name]
            module[name] = flat[at : at + old.numel()].view(old.shape)
            at += old.numel()

    edit(tag / MODEL, shift)
    with pytest.raises(CheckpointError, match="lie otherwise in `module`"):
        consolidate(tmp_path / "ckpt", tmp_path / "out")
