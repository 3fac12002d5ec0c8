"""Optimizer states on invented checkpoints whose moments are copies of the fp32 masters.

So every padding, trimming and order that the masters are tested with tests the moments as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dist_consolidate import consolidate
from dist_consolidate.errors import CheckpointError, UnsupportedLayoutError, UsageError
from dist_consolidate.options import make_options
from tests.cases import assert_same_bits, load_output
from tests.synthetic import Buffer, Param, Spec, Truth, write

pytestmark = pytest.mark.deepspeed  # torch.load builds its classes

PARAMS = (
    Param("first", (3, 5), group=1),
    Param("base", (4, 3), kind="frozen"),
    Param("second", (7,), group=0),
    Param("third", (2, 9), group=1),
    Param("head", (3, 5), group=1, tie_of="first"),
    Param("tiny", (1,), group=2),
)
TRAINED = ("first", "second", "third", "tiny")
BUFFERS = (Buffer("ids", torch.arange(3)),)
SPECS: Mapping[str, dict[str, Any]] = {
    "z1": {"stage": 1, "world": 2},
    "z2 exact": {"stage": 2, "world": 4},
    "z2 last": {"stage": 2, "world": 3, "trimming": "last_rank"},
    "z2 none": {"stage": 2, "world": 3, "trimming": "none"},
    "z2 aligned": {"stage": 2, "world": 3, "alignment_padding": True},
    "z2 round robin": {"stage": 2, "world": 2, "round_robin": True},
    "z2 old": {"stage": 2, "world": 2, "era": "0.5"},
    "bf16": {"stage": 1, "world": 3, "bf16_optimizer": True},
    "z3": {"stage": 3, "world": 3, "sub_group_numel": 10},
    "z3 many": {"stage": 3, "world": 12},
}


def edit(truth: Truth, change: Callable[[dict[str, Any], int], None]) -> None:
    """Change the optimizer states of every rank."""
    paths = sorted(truth.tag_dir.glob("*optim_states.pt"))
    for path in paths:
        payload = torch.load(path, weights_only=False)
        change(payload["optimizer_state_dict"], int(path.name.split("pp_rank_")[1].split("_")[0]))
        torch.save(payload, path)


def states_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The optimizer's states, one for each flat group."""
    inner = state.get("base_optimizer_state", state.get("optimizer_state_dict"))
    if isinstance(inner, list):
        return inner
    order = [n for group in inner["param_groups"] for n in group["params"]]
    return [inner["state"][number] for number in order]


def masters_of(state: dict[str, Any]) -> list[Tensor]:
    found: list[Tensor] = state.get("fp32_flat_groups") or state["single_partition_of_fp32_groups"]
    return found


def make(root: Path, **spec: Any) -> Truth:
    """Write a checkpoint whose ``exp_avg`` is the master and ``exp_avg_sq`` its negative."""
    truth = write(root, Spec(params=PARAMS, buffers=BUFFERS, **spec))

    def copy(state: dict[str, Any], _rank: int) -> None:
        for moments, master in zip(states_of(state), masters_of(state), strict=True):
            # The moments keep their padding, which the master may have lost.
            moments["exp_avg"].fill_(float("nan"))
            moments["exp_avg"][: len(master)] = master
            moments["exp_avg_sq"] = -moments["exp_avg"]

    edit(truth, copy)
    return truth


def refusal(root: Path, kind: type[Exception] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        consolidate(root, root.parent / "out", include=["optimizer"])
    assert not (root.parent / "out").exists()
    return str(caught.value)


@pytest.mark.parametrize("transport", ["direct", "allgather"])
@pytest.mark.parametrize("name", SPECS)
def test_moments_lie_where_the_masters_do(tmp_path: Path, name: str, transport: str) -> None:
    truth = make(tmp_path / "ckpt", **SPECS[name])
    out = tmp_path / "out"
    report = consolidate(tmp_path / "ckpt", out, include=["optimizer"], transport=transport)
    want = {n: truth.fp32[n] for n in TRAINED}
    folder = out / "optimizer_states"
    assert_same_bits(load_file(folder / "exp_avg.safetensors"), want)
    assert_same_bits(load_file(folder / "exp_avg_sq.safetensors"), {n: -t for n, t in want.items()})
    assert_same_bits(load_output(out), truth.fp32)
    facts = json.loads((out / "consolidation.json").read_text())["optimizer"]
    assert facts["without_state"] == {
        "base": "frozen" if SPECS[name]["stage"] > 1 and name != "z2 old"
        else "frozen, outside the optimizer, or not told apart",
        "ids": "a buffer",
    }  # fmt: skip
    assert facts["step"] == 3
    assert any(note.startswith("no optimizer state: ") for note in report.notes)


def test_what_is_kept_otherwise_is_named(tmp_path: Path) -> None:
    """8-bit codes have an element for each weight; their scales and a factored moment do not."""
    truth = make(tmp_path / "ckpt", stage=2, world=2)

    def change(state: dict[str, Any], _rank: int) -> None:
        for moments in states_of(state):
            numel = moments["exp_avg"].numel()
            moments["state1"] = torch.full((numel,), 7, dtype=torch.uint8)
            moments["absmax1"] = torch.rand(2 * numel + 1)
            moments["row"] = torch.rand(2, 2)
            moments["scale"] = 1.5
            moments["../../evil"] = moments["exp_avg"].clone()

    edit(truth, change)
    out = tmp_path / "out"
    report = consolidate(tmp_path / "ckpt", out, include=["optimizer"])
    folder = out / "optimizer_states"
    assert {path.name for path in folder.iterdir()} == {
        f"{key}.safetensors" for key in ("exp_avg", "exp_avg_sq", "state1")
    }
    codes = load_file(folder / "state1.safetensors")
    assert all(t.dtype == torch.uint8 and bool((t == 7).all()) for t in codes.values())
    assert {n: t.shape for n, t in codes.items()} == {n: truth.fp32[n].shape for n in TRAINED}
    facts = json.loads((out / "consolidation.json").read_text())["optimizer"]
    assert set(facts["left_out"]) == {"absmax1", "row", "scale", "../../evil"}
    assert "optimizer state 'scale' was left out: a float" in report.notes


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_whose_moments_are_too_short(tmp_path: Path, stage: Any) -> None:
    truth = make(tmp_path / "ckpt", stage=stage, world=2)

    def change(state: dict[str, Any], rank: int) -> None:
        if rank == 1:
            for moments in states_of(state):
                moments["exp_avg"] = moments["exp_avg"][:-2].clone()

    edit(truth, change)
    message = refusal(tmp_path / "ckpt")
    assert "do not fit the fp32 partitions" in message
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt: exp_avg of flat group " in message


def test_a_rank_without_moments(tmp_path: Path) -> None:
    truth = make(tmp_path / "ckpt", stage=2, world=2)
    edit(truth, lambda state, rank: states_of(state)[1].pop("exp_avg") if rank == 0 else None)
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt: exp_avg of flat group 1" in refusal(
        tmp_path / "ckpt"
    )


def test_a_shift_between_ranks_is_refused(tmp_path: Path) -> None:
    """All elements are there, but the next rank's part begins elsewhere than its master's."""
    truth = make(tmp_path / "ckpt", stage=2, world=2)

    def change(state: dict[str, Any], rank: int) -> None:
        for moments in states_of(state):
            if rank == 0:
                moments["exp_avg"] = torch.cat([moments["exp_avg"], torch.zeros(1)])

    edit(truth, change)
    assert "zero_pp_rank_0_mp_rank_00_optim_states.pt: exp_avg of" in refusal(tmp_path / "ckpt")


def test_no_moments_at_all(tmp_path: Path) -> None:
    write(tmp_path / "ckpt", Spec(stage=2, params=PARAMS, moments="none"))
    message = refusal(tmp_path / "ckpt")
    assert message.endswith("consolidate without --include optimizer")
    assert "\n" not in message


def test_more_states_than_flat_groups(tmp_path: Path) -> None:
    truth = make(tmp_path / "ckpt", stage=3, world=2)

    def change(state: dict[str, Any], _rank: int) -> None:
        state["optimizer_state_dict"]["param_groups"].append({"lr": 1.0, "params": [77]})

    edit(truth, change)
    assert "parameters, expected one for each of" in refusal(tmp_path / "ckpt")


def test_zenflow_is_refused(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}
    write(tmp_path / "ckpt", Spec(stage=2, params=PARAMS, client_state={"ds_config": config}))
    assert "was trained with ZenFlow" in refusal(tmp_path / "ckpt", UnsupportedLayoutError)


def test_stage_0_by_value_by_name_and_not_at_all(tmp_path: Path) -> None:
    params = (Param("a", (3, 5)), Param("b", (5, 3)), Param("c", (4,)), Param("d", (4,)))
    root = tmp_path / "ckpt"
    truth = write(root, Spec(stage=0, params=params, model_dtype=torch.float32))
    message = refusal(root, UnsupportedLayoutError)
    assert [line for line in message.splitlines() if line.startswith("  - ")] == [
        "  - state 2: shape [4]",
        "  - state 3: shape [4]",
    ]
    path = truth.tag_dir / "mp_rank_00_model_states.pt"
    payload = torch.load(path, weights_only=False)
    group = payload["optimizer"]["param_groups"][0]
    # Another order than the model's, as recorded names tell.
    order = ["c", "b", "d", "a"]
    states = payload["optimizer"]["state"]
    for number, name in zip(group["params"], order, strict=True):
        states[number]["exp_avg"] = truth.fp32[name] + 1
        states[number]["exp_avg_sq"] = truth.fp32[name] + 2
    group["param_names"] = order
    torch.save(payload, path)
    consolidate(root, tmp_path / "out", include=["optimizer"])
    found = load_file(tmp_path / "out" / "optimizer_states" / "exp_avg.safetensors")
    assert_same_bits(found, {n: t + 1 for n, t in truth.fp32.items()})


def test_stage_0_fused(tmp_path: Path) -> None:
    """One flat state for each group, cut where the masters are."""
    root = tmp_path / "ckpt"
    params = (Param("a", (3, 5)), Param("b", (5, 3)), Param("c", (4,), group=1))
    truth = write(root, Spec(stage=0, params=params, stage0_fused=True))
    path = truth.tag_dir / "mp_rank_00_model_states.pt"
    payload = torch.load(path, weights_only=False)
    optimizer = payload["optimizer"]
    flats = optimizer["fp32_groups_flat"]
    optimizer["optimizer_state_dict"] = {
        "state": {n: {"step": 5, "exp_avg": flat * 2} for n, flat in enumerate(flats)},
        "param_groups": [{"lr": 0.5, "params": [n]} for n in range(len(flats))],
    }
    torch.save(payload, path)
    consolidate(root, tmp_path / "out", include=["optimizer"])
    found = load_file(tmp_path / "out" / "optimizer_states" / "exp_avg.safetensors")
    assert_same_bits(found, {n: t * 2 for n, t in truth.fp32.items()})
    facts = json.loads((tmp_path / "out" / "consolidation.json").read_text())["optimizer"]
    assert facts["step"] == 5
    assert [sorted(group["tensors"]) for group in facts["param_groups"]] == [["a", "b"], ["c"]]


# In the output folder.


def test_overwriting_leaves_no_old_states(tmp_path: Path) -> None:
    make(tmp_path / "ckpt", stage=2, world=2)
    out = tmp_path / "out"
    consolidate(tmp_path / "ckpt", out, include=["optimizer"], max_shard_size=80)
    assert len(list((out / "optimizer_states").iterdir())) > 4
    with pytest.raises(UsageError, match=r"optimizer_states/exp_avg-00001-of-0000"):
        consolidate(tmp_path / "ckpt", out)
    consolidate(tmp_path / "ckpt", out, include=["optimizer"], overwrite=True)
    names = {"exp_avg.safetensors", "exp_avg_sq.safetensors"}
    assert {path.name for path in (out / "optimizer_states").iterdir()} == names
    (out / "optimizer_states" / "mine.txt").write_text("kept")
    consolidate(tmp_path / "ckpt", out, overwrite=True)
    assert [path.name for path in (out / "optimizer_states").iterdir()] == ["mine.txt"]
    (out / "optimizer_states" / "mine.txt").unlink()
    consolidate(tmp_path / "ckpt", out, include=["optimizer"], overwrite=True)
    consolidate(tmp_path / "ckpt", out, overwrite=True)
    assert not (out / "optimizer_states").exists()


def test_states_do_not_leave_by_a_link(tmp_path: Path) -> None:
    make(tmp_path / "ckpt", stage=2, world=2)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "optimizer_states").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="optimizer_states: is no folder"):
        consolidate(tmp_path / "ckpt", tmp_path / "out", include=["optimizer"], overwrite=True)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    make(tmp_path / "ckpt", stage=3, world=2)
    report = consolidate(tmp_path / "ckpt", tmp_path / "out", include=["optimizer"], dry_run=True)
    assert "optimizer_states/exp_avg.safetensors" in report.files
    assert not (tmp_path / "out").exists()


def test_only_the_optimizer_can_be_included() -> None:
    with pytest.raises(UsageError, match="--include weights: must be one of optimizer"):
        make_options({"include": ["weights"]})
