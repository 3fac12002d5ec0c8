"""Odd files and values that users and strangers hand over: an error of the tool's own for each."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_consolidate import CheckpointError, UsageError, consolidate
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output
from tests.special import copy_of, edit

DEEP = 20_000
HUGE = {"pp_degree": 1, "tp_degree": 10**9}


@pytest.mark.parametrize(
    "text", ["tensor_parallel = 1", "x = " + "[" * DEEP, "", "[tensor_parallel]", "rule = []"]
)
def test_rules(tmp_path: Path, text: str) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(text)
    with pytest.raises(UsageError, match="--tp-rules"):
        consolidate(CASES["tp2_z1_fp32_w2"].ckpt, tmp_path / "out", tp_rules=rules)


def test_a_deep_config(tmp_path: Path) -> None:
    """Given, it is refused; one that lies in the run folder is none."""
    deep = '{"a":' * DEEP + "1" + "}" * DEEP
    (tmp_path / "config.json").write_text(deep)
    case = CASES["tp2_z1_fp32_w2"]
    with pytest.raises(UsageError, match="--hf-config"):
        consolidate(case.ckpt, tmp_path / "out", hf_config=tmp_path)
    shutil.copytree(case.ckpt, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(deep)
    consolidate(tmp_path / "run", tmp_path / "out")
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))


@pytest.mark.parametrize("search_dir", ["x" * 300, "a\0b", ["y" * 5000]])
def test_names_that_no_file_system_takes(tmp_path: Path, search_dir: Any) -> None:
    with pytest.raises((UsageError, CheckpointError)):
        consolidate(CASES["frozen_half_z1_w2"].ckpt, tmp_path / "out", search_dir=search_dir)


@pytest.mark.parametrize("search_dir", [None, 5, [5]])
def test_what_is_no_path(tmp_path: Path, search_dir: Any) -> None:
    with pytest.raises(UsageError, match="--search-dir"):
        consolidate(CASES["frozen_half_z1_w2"].ckpt, tmp_path / "out", search_dir=search_dir)


@pytest.mark.parametrize(
    ("name", "pattern", "change"),
    [
        ("moe_z2_bf16_w2", "mp_rank_00*", {"mp_world_size": -1}),
        ("tp2_z1_fp32_w2", "mp_rank_00*", {"checkpoint_parallel_dimensions": HUGE}),
        ("moe_z2_bf16_w2", "mp_rank_00*", {"num_experts": [10**9, 10**9]}),
        ("kitchen_z3_bf16_w2", "*rank_0_*model_states.pt", {"dp_world_size": 10**9}),
    ],
)
def test_absurd_numbers(tmp_path: Path, name: str, pattern: str, change: dict[str, Any]) -> None:
    """The result or an error, in no time and no memory."""
    _, tag = copy_of(name, tmp_path)
    (path,) = tag.glob(pattern)
    edit(path, lambda state: state.update(change))
    try:
        consolidate(tag, tmp_path / "out")
    except CheckpointError as error:
        assert str(tag) in str(error)


def test_an_absurd_partition_count(tmp_path: Path) -> None:
    _, tag = copy_of("frozen_half_z1_w2", tmp_path)
    for path in tag.glob("*optim_states.pt"):
        edit(path, lambda state: state["optimizer_state_dict"].update(partition_count=[10**9]))
    with pytest.raises(CheckpointError, match="is missing"):
        consolidate(tag, tmp_path / "out")


def test_a_tensor_parallel_parameter_outside_the_record(tmp_path: Path) -> None:
    """AutoTP's maps name every parameter; a name that is not in them is not split for sure."""
    _, tag = copy_of("tp2_z1_fp32_w2", tmp_path)

    def rename(state: dict[str, Any]) -> None:
        for key in ("module",):
            state[key] = {f"net.{name}": value for name, value in state[key].items()}
        state["param_shapes"] = [
            {f"net.{name}": shape for name, shape in group.items()}
            for group in state["param_shapes"]
        ]

    for path in tag.glob("mp_rank_*"):
        edit(path, rename)
    with pytest.raises(CheckpointError) as caught:
        consolidate(tag, tmp_path / "out")
    assert "--tp-rules" in str(caught.value)
    assert "net.model.norm.weight" in str(caught.value)


@pytest.mark.parametrize("trust", [False, True])
def test_zenflow_of_exchanged_ranks(tmp_path: Path, trust: bool) -> None:
    _, tag = copy_of("zenflow_z2_bf16_w2", tmp_path)
    paths = sorted(tag.glob("*optim_states.pt"))
    states = [torch.load(path, weights_only=False) for path in paths]
    for path, state in zip(paths, reversed(states), strict=True):
        torch.save(state, path)
    if trust:
        consolidate(tag, tmp_path / "out", trust_masters=True)
        return
    with pytest.raises(CheckpointError, match="--trust-masters"):
        consolidate(tag, tmp_path / "out")
