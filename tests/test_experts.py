"""Checkpoints with experts: what is read, and what damage is told by file, layer and expert."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dist_consolidate import CheckpointError, UnsupportedLayoutError, consolidate
from dist_consolidate.checkpoint.expert_groups import members
from dist_consolidate.checkpoint.experts import ExpertName, parse
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output

EXPERTS = sorted(name for name in CASES if "moe" in name)
BASE = "moe_z2_bf16_w2"
SHARDED = {
    "checkpoint_format": "zero3_partitioned",
    "expert_key_prefix": "block.experts",
    "num_experts": 4,
    "global_expert_start": 0,
    "global_expert_end": 2,
}
EXPERT = "layer_{}_expert_{}_mp_rank_00_model_states.pt"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A tag folder to be damaged: two layers, four and two experts, two ranks."""
    target = tmp_path / "run"
    shutil.copytree(CASES[BASE].ckpt, target)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755)
    return next(path for path in target.iterdir() if path.is_dir())


def refusal(folder: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    out = folder.parent.parent / "out"
    with pytest.raises(CheckpointError) as caught:
        consolidate(folder, out)
    assert type(caught.value) is kind
    assert not out.exists()
    return str(caught.value)


@pytest.mark.parametrize("name", EXPERTS)
def test_the_report_says_what_was_compared(name: str, tmp_path: Path) -> None:
    report = consolidate(CASES[name].ckpt, tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(CASES[name]))
    (note,) = [note for note in report.notes if "elements of each were found to be" in note]
    held = sum(".deepspeed_experts." in key for key in CASES[name].truth["fp32"])
    held -= sum(".deepspeed_experts." in key for key in CASES[name].truth["frozen"])
    held -= sum(".deepspeed_experts." in key for key in CASES[name].truth["buffers"])
    assert note.startswith(f"{held} tensors of experts come from fp32 partitions")


def test_missing_experts_are_named(ckpt: Path) -> None:
    for layer, expert in ((0, 1), (0, 3), (1, 1)):
        (ckpt / EXPERT.format(layer, expert)).unlink()
    message = refusal(ckpt)
    for layer, expert, count in ((0, 1, 4), (0, 3, 4), (1, 1, 2)):
        path = ckpt / EXPERT.format(layer, expert)
        assert f"{path}: is missing (expert {expert} of {count} of MoE layer {layer})" in message
    assert message.count("is missing") == 3


def test_a_missing_layer_is_named(ckpt: Path) -> None:
    for expert in range(2):
        (ckpt / EXPERT.format(1, expert)).unlink()
    message = refusal(ckpt)
    assert message.count("of MoE layer 1)") == message.count("is missing") == 2


def test_a_surplus_expert_is_named(ckpt: Path) -> None:
    shutil.copy(ckpt / EXPERT.format(1, 0), ckpt / EXPERT.format(1, 2))
    message = refusal(ckpt)
    assert f"{ckpt / EXPERT.format(1, 2)}: is surplus: the model has 2 experts" in message


def test_a_truncated_expert_is_named_once(ckpt: Path) -> None:
    path = ckpt / EXPERT.format(0, 2)
    path.write_bytes(path.read_bytes()[:1000])
    message = refusal(ckpt)
    assert str(path) in message
    assert "is missing" not in message


def swap(one: Path, other: Path) -> None:
    states = [torch.load(path, weights_only=False) for path in (one, other)]
    for path, state in zip((other, one), states, strict=True):
        torch.save(state, path)


def test_experts_in_each_others_files(ckpt: Path) -> None:
    swap(ckpt / EXPERT.format(0, 1), ckpt / EXPERT.format(0, 2))
    message = refusal(ckpt)
    assert f"{ckpt / EXPERT.format(0, 1)}: holds " in message
    assert "which is of expert 2, not of expert 1" in message
    assert "which is of expert 1, not of expert 2" in message


def test_experts_of_another_layer(ckpt: Path) -> None:
    swap(ckpt / EXPERT.format(0, 1), ckpt / EXPERT.format(1, 1))
    message = refusal(ckpt)
    assert "the experts of 'moe_1' lie in files layer_0_* and layer_1_*" in message


def test_an_experts_values_under_another_name(ckpt: Path) -> None:
    """Names that fit tell nothing; the values do."""
    one, other = ckpt / EXPERT.format(0, 1), ckpt / EXPERT.format(0, 2)
    states = {1: torch.load(one), 2: torch.load(other)}
    mark = "deepspeed_experts.{}."
    for path, own, theirs in ((one, 1, 2), (other, 2, 1)):
        found = states[theirs].items()
        renamed = {k.replace(mark.format(theirs), mark.format(own)): v for k, v in found}
        torch.save(renamed, path)
    message = refusal(ckpt)
    count = 2 * len(states[1])
    assert f"{count} tensors have other values in `module` and the expert files" in message
    assert "moe_1.deepspeed_moe.experts.deepspeed_experts.1.0.weight" in message


def test_optimizer_states_of_exchanged_ranks(ckpt: Path) -> None:
    swap(ckpt / OPTIM.format(0), ckpt / OPTIM.format(1))
    assert "tensors have other values in `module` and the expert files" in refusal(ckpt)


def test_a_missing_optimizer_rank(ckpt: Path) -> None:
    (ckpt / OPTIM.format(1)).unlink()
    assert f"{ckpt / OPTIM.format(1)}: is missing (rank 1 of 2)" in refusal(ckpt)


def test_every_optimizer_rank_missing(ckpt: Path) -> None:
    for rank in range(2):
        (ckpt / OPTIM.format(rank)).unlink()
    assert "all optimizer states are missing" in refusal(ckpt)


def test_an_expert_that_lacks_a_tensor(ckpt: Path) -> None:
    path = ckpt / EXPERT.format(0, 3)
    state = torch.load(path)
    state.popitem()
    torch.save(state, path)
    assert f"{path}: expert 3 has other tensors than the other experts of 'moe_1'" in refusal(ckpt)


def test_empty_optimizer_states_of_experts_do_not_matter(ckpt: Path, tmp_path: Path) -> None:
    """Under ZeRO releases to 0.19.2 write ``expp`` files that hold nothing."""
    torch.save({"optimizer": None}, ckpt / "expp_rank_0_mp_rank_00_optim_states.pt")
    consolidate(ckpt, tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(CASES[BASE]))


def test_a_file_of_something_else(ckpt: Path) -> None:
    torch.save({"block.experts.w1.0": torch.ones(2, 2)}, ckpt / EXPERT.format(0, 0))
    message = refusal(ckpt)
    assert "the files layer_0_* hold experts of 2 layers, 'block', 'moe_1'" in message
    assert "experts 0 of 'moe_1' are in no file" in message


def edit_model(ckpt: Path, **changes: object) -> None:
    path = ckpt / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=False)
    torch.save(state | changes, path)


def test_a_release_without_any_record_of_the_layout(ckpt: Path) -> None:
    edit_model(ckpt, param_shapes=None)
    for rank in range(2):
        state = torch.load(ckpt / OPTIM.format(rank), weights_only=False)
        del state["optimizer_state_dict"]["param_slice_mappings"]
        torch.save(state, ckpt / OPTIM.format(rank))
    assert "has no param_shapes" in refusal(ckpt)


def test_without_shapes_the_slices_tell_the_layout(ckpt: Path, tmp_path: Path) -> None:
    """Releases 0.7.4 to 0.19.2 record nothing else."""
    edit_model(ckpt, param_shapes=None, shared_params=None, buffer_names=None)
    consolidate(ckpt, tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(CASES[BASE]))


def test_slices_in_a_wrong_order_are_refused(ckpt: Path) -> None:
    """Under ``round_robin_gradients`` the recorded slices name the wrong parameters."""
    edit_model(ckpt, param_shapes=None)
    for rank in range(2):
        state = torch.load(ckpt / OPTIM.format(rank), weights_only=False)
        mappings = state["optimizer_state_dict"]["param_slice_mappings"]
        for group in mappings:
            names, starts = list(group), 0
            for name in [names[-1], *names[:-1]]:
                address = group.pop(name)
                address.start, starts = starts, starts + address.numel
                group[name] = address
        torch.save(state, ckpt / OPTIM.format(rank))
    message = refusal(ckpt)
    assert "param_slice_mappings" in message or "have other values" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda ckpt: edit_model(
                ckpt, ds_autoep_layers=[{"checkpoint_format": "zero3_partitioned"}]
            ),
            "its experts are saved as zero3_partitioned",
        ),
        (
            lambda ckpt: edit_model(
                ckpt,
                ds_autoep_layers=[
                    {
                        "num_experts": 4,
                        "expert_placement": {
                            "ranks": [
                                {"rank": 0, "experts": [0, 1, 2]},
                                {"rank": 1, "experts": [3]},
                            ]
                        },
                    }
                ],
            ),
            "placed unevenly",
        ),
        (
            lambda ckpt: edit_model(
                ckpt, checkpoint_parallel_dimensions={"pp_degree": 1, "tp_degree": 2}
            ),
            "tensor-parallel",
        ),
    ],
)
def test_other_kinds_are_refused_by_name(
    ckpt: Path, change: Callable[[Path], None], words: str
) -> None:
    change(ckpt)
    assert words in refusal(ckpt, UnsupportedLayoutError)


def test_experts_in_zero3_shards_that_are_not_there(ckpt: Path) -> None:
    edit_model(ckpt, ds_autoep_layers=[SHARDED])
    assert "there are no optimizer states of ZeRO-3" in refusal(ckpt)


def test_names_are_taken_apart() -> None:
    text = "a.b.deepspeed_moe.experts.deepspeed_experts.12.up.weight"
    assert parse(text) == ExpertName("a.b.", 12, "up.weight")
    assert str(parse(text)) == text
    at_root = "deepspeed_moe.experts.deepspeed_experts.0.bias"
    assert parse(at_root) == parse("." + at_root) == ExpertName("", 0, "bias")
    assert parse("a.deepspeed_moe.gate.wg.weight") is None
    assert parse("a.experts.deepspeed_experts.0.bias") is None


@pytest.mark.parametrize("data_first", [False, True])
@pytest.mark.parametrize(("size", "world"), [(1, 4), (2, 4), (4, 4), (2, 8), (4, 8), (3, 6)])
def test_the_members_share_out_the_world(size: int, world: int, data_first: bool) -> None:
    """Every rank belongs to one expert-parallel rank, as DeepSpeed's process groups have it."""
    found = [list(members(rank, size, world, data_first)) for rank in range(size)]
    assert sorted(itertools.chain(*found)) == list(range(world))
    for rank in range(world):
        own = rank // (world // size) if data_first else rank % size
        assert rank in found[own]
