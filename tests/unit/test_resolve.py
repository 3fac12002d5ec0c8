"""The completeness contract: every key has data, or is told by name; and the result's order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from dist_consolidate.checkpoint.layout import find_tag
from dist_consolidate.checkpoint.reader import read_checkpoint
from dist_consolidate.errors import CheckpointError, UsageError
from dist_consolidate.plan.resolve import Resolution, resolve
from tests.cases import CASES, PLAIN_CASES, expected_fp32, lost_keys
from tests.synthetic import Buffer, Param, Spec, Truth, write

Stage = Literal[0, 1, 2, 3]
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
PARAMS = (
    Param("first", (3, 5), group=1),
    Param("base", (4, 3), kind="frozen"),
    Param("second", (7,), group=0),
    Param("head", (3, 5), group=1, tie_of="first"),
    Param("base_again", (4, 3), kind="frozen", tie_of="base"),
)
LOOSE = (*PARAMS, Param("loose", (2, 2), kind="unoptimized"))
BUFFERS = (
    Buffer("ids", torch.arange(3)),
    Buffer("mean", torch.tensor([1.5, 2.5])),
    Buffer("mean_again", torch.tensor([1.5, 2.5]), tie_of="mean"),
)


def make(root: Path, stage: Stage, params: Sequence[Param] = PARAMS, **more: Any) -> Truth:
    return write(root, Spec(stage=stage, params=params, buffers=BUFFERS, **more))


def resolved(root: Path, **request: Any) -> Resolution:
    return resolve(read_checkpoint(find_tag(root)), **request)


def names(resolution: Resolution) -> list[str]:
    return [tensor.name for tensor in resolution.tensors]


def origins(resolution: Resolution) -> dict[str, str]:
    return {tensor.name: tensor.source.origin for tensor in resolution.tensors}


def refusal(
    root: Path, kind: type[Exception] = CheckpointError, **request: Any
) -> tuple[str, list[str]]:
    """The headline of a refusal, and the names it lists."""
    with pytest.raises(kind) as caught:
        resolved(root, **request)
    assert type(caught.value) is kind
    lines = str(caught.value).splitlines()
    return lines[0], [x.removeprefix("  - ").split(":")[0] for x in lines if x.startswith("  - ")]


@pytest.mark.parametrize("stage", STAGES)
def test_every_key_is_there_once(tmp_path, stage):
    truth = make(tmp_path, stage)
    found = resolved(tmp_path)
    keys = [*names(found), *found.ties]
    assert sorted(keys) == sorted(truth.fp32)
    assert found.left_out == {}
    aliases = {t.name: t.aliases for t in found.tensors if t.aliases}
    assert aliases == {"first": ("head",), "base": ("base_again",), "mean": ("mean_again",)}
    assert {alias: tie.holder for alias, tie in found.ties.items()} == {
        "head": "first",
        "base_again": "base",
        "mean_again": "mean",
    }
    for tensor in found.tensors:
        assert tensor.source.shape == tuple(truth.fp32[tensor.name].shape)
        assert tensor.source.dtype.name == str(truth.native[tensor.name]).removeprefix("torch.")


@pytest.mark.parametrize("stage", STAGES)
def test_the_most_precise_copy_is_taken(tmp_path, stage):
    make(tmp_path, stage)
    frozen = "frozen" if stage in (2, 3) else "module"
    assert origins(resolved(tmp_path)) == {
        "first": "fp32 partition",
        "second": "fp32 partition",
        "base": frozen,
        "ids": "module",
        "mean": "module",
    }


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_order_is_that_of_the_flat_groups(tmp_path, stage):
    # Group 0 comes first in the optimizer, whatever the order in the model; the rest follows.
    make(tmp_path, stage, buffers_after=1)
    assert names(resolved(tmp_path)) == (
        ["second", "first", "base", "ids", "mean"]
        if stage > 1
        else ["second", "first", "ids", "mean", "base"]
    )


def test_the_order_of_a_shuffled_group(tmp_path):
    params = [Param(f"p{number}", (number + 1,)) for number in range(7)]
    write(tmp_path, Spec(stage=2, params=params, world=3, round_robin=True))
    order = [0, 3, 6, 1, 4, 2, 5]
    assert names(resolved(tmp_path)) == [f"p{number}" for number in order]


@pytest.mark.parametrize("stage", STAGES)
def test_a_note_tells_of_what_has_no_master(tmp_path, stage):
    make(tmp_path, stage, LOOSE if stage < 3 else PARAMS)
    told = [note for note in resolved(tmp_path).notes if "no fp32 master" in note]
    expected = {0: [], 1: ["2"], 2: ["1"], 3: []}[stage]
    assert [note.split()[0] for note in told] == expected


# What is missing.


def test_every_missing_key_is_named(tmp_path):
    params = [*LOOSE, Param("loose.again", (2, 2), kind="unoptimized", tie_of="loose")]
    make(tmp_path, 3, [*params, Param("loose2", (5,), kind="unoptimized")])
    headline, found = refusal(tmp_path)
    assert found == ["loose", "loose.again", "loose2"]
    assert headline == ("global_step3: 3 of 11 keys of the model have no data in this checkpoint:")


@pytest.mark.parametrize("name", [n for n in PLAIN_CASES if lost_keys(PLAIN_CASES[n])])
def test_missing_keys_of_real_checkpoints(name):
    case = CASES[name]
    _, found = refusal(case.ckpt)
    assert sorted(found) == sorted(lost_keys(case))
    kept = resolved(case.ckpt, allow_missing=["*"])
    assert sorted(kept.left_out) == sorted(lost_keys(case))
    assert sorted([*names(kept), *kept.ties]) == sorted(
        set(expected_fp32(case)) - set(lost_keys(case))
    )


@pytest.mark.parametrize("name", [n for n in PLAIN_CASES if not lost_keys(PLAIN_CASES[n])])
def test_keys_of_real_checkpoints(name):
    case = CASES[name]
    found = resolve(read_checkpoint(find_tag(case.ckpt, case.tag)))
    assert sorted([*names(found), *found.ties]) == sorted(expected_fp32(case))


@pytest.mark.parametrize(
    ("globs", "refused"),
    [
        (["*"], []),
        (["a.loose", "b.loose", "b.loose2"], []),
        (["b.*"], ["a.loose"]),
        (["*.loose"], ["b.loose2"]),
        (["b.loose?"], ["a.loose", "b.loose"]),
        (["[a]*"], ["b.loose", "b.loose2"]),
        (["LOOSE", "loose", "A.*"], ["a.loose", "b.loose", "b.loose2"]),
        (["first", "ids"], ["a.loose", "b.loose", "b.loose2"]),
    ],
)
def test_globs_of_what_may_be_missing(tmp_path, globs, refused):
    loose = [Param(f"{name}", (2,), kind="unoptimized") for name in ("a.loose", "b.loose")]
    make(tmp_path, 3, [*PARAMS, *loose, Param("b.loose2", (2,), kind="unoptimized")])
    if refused:
        assert refusal(tmp_path, allow_missing=globs)[1] == refused
    else:
        found = resolved(tmp_path, allow_missing=globs)
        assert sorted(found.left_out) == ["a.loose", "b.loose", "b.loose2"]
        assert names(found) == ["second", "first", "base", "ids", "mean"]


def test_what_has_data_is_never_left_out_by_a_glob(tmp_path):
    make(tmp_path, 3)
    assert resolved(tmp_path, allow_missing=["*"]) == resolved(tmp_path)


def test_a_tie_to_nothing_is_missing(tmp_path):
    params = [Param("emb", (8, 4)), Param("head", (8, 4), tie_of="emb", storage_tie=False)]
    write(tmp_path, Spec(stage=3, params=params, era="0.6"))
    assert refusal(tmp_path)[1] == ["head"]
    found = resolved(tmp_path, user_ties=[("head", "emb")])
    assert [(t.name, t.aliases) for t in found.tensors] == [("emb", ("head",))]
    assert found.ties["head"].found == "--tie"


def test_impossible_ties_are_a_usage_error(tmp_path):
    make(tmp_path, 3)
    pairs = [("none", "first"), ("second", "first"), ("head", "nowhere")]
    assert refusal(tmp_path, UsageError, user_ties=pairs)[1] == ["none", "second", "head"]


def test_contradicting_records_are_a_checkpoint_error(tmp_path):
    cloned = [Param(name, (8, 4), tie_of="a", storage_tie=False) for name in "cd"]
    params = [Param("a", (8, 4)), Param("b", (8, 4)), *cloned]
    write(tmp_path, Spec(stage=3, params=params, extra_shared={"d": "b"}))
    apart = read_checkpoint(find_tag(tmp_path))
    one_tensor = {**apart.module, "d": apart.module["c"]}
    checkpoint = dataclasses.replace(apart, module=one_tensor)
    with pytest.raises(CheckpointError, match="ties contradict each other") as caught:
        resolve(checkpoint)
    assert [line[:5] for line in str(caught.value).splitlines()[1:3]] == ["  - c", "  - d"]
    settled = resolve(checkpoint, user_ties=[("c", "a"), ("d", "a")])
    assert [(t.name, t.aliases) for t in settled.tensors] == [("a", ("c", "d")), ("b", ())]


def test_a_record_that_the_storage_contradicts(tmp_path):
    params = [Param("a", (8, 4)), Param("b", (8, 4)), Param("d", (8, 4), tie_of="a")]
    write(tmp_path, Spec(stage=3, params=params, extra_shared={"d": "b"}))
    found = resolved(tmp_path)
    assert [(t.name, t.aliases) for t in found.tensors] == [("a", ("d",)), ("b", ())]
    assert [note for note in found.notes if "d -> b was not followed" in note]


# Frozen parameters left out.


@pytest.mark.parametrize("stage", [2, 3])
def test_exclude_frozen_where_the_file_tells(tmp_path, stage):
    make(tmp_path, stage, LOOSE if stage == 2 else PARAMS)
    found = resolved(tmp_path, exclude_frozen=True)
    loose = ["loose"] if stage == 2 else []
    assert sorted(names(found)) == sorted(["second", "first", "ids", "mean", *loose])
    assert found.left_out == dict.fromkeys(["base", "base_again"], "frozen (--exclude-frozen)")
    assert sorted(found.ties) == ["head", "mean_again"]


def test_exclude_frozen_in_stage_1(tmp_path):
    make(tmp_path, 1, LOOSE)
    found = resolved(tmp_path, exclude_frozen=True)
    assert names(found) == ["second", "first", "ids", "mean"]
    assert sorted(found.left_out) == ["base", "base_again", "loose"]
    told = [note for note in found.notes if note.startswith("2 parameters outside the optimizer")]
    assert len(told) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exclude_frozen_in_stage_0(tmp_path, dtype):
    make(tmp_path, 0, model_dtype=dtype)
    found = resolved(tmp_path, exclude_frozen=True)
    if dtype == torch.float32:
        # Without masters nothing tells which parameters were trained.
        assert sorted(names(found)) == ["base", "first", "ids", "mean", "second"]
        assert any("nothing tells frozen parameters" in note for note in found.notes)
    else:
        assert sorted(names(found)) == ["first", "ids", "mean", "second"]
        assert sorted(found.left_out) == ["base", "base_again"]


@pytest.mark.parametrize("stage", STAGES)
def test_exclude_frozen_without_frozen_parameters(tmp_path, stage):
    make(tmp_path, stage, [p for p in PARAMS if p.kind == "trained"], era="now")
    found = resolved(tmp_path, exclude_frozen=True)
    assert sorted([*names(found), *found.ties]) == sorted(
        ["first", "second", "head", "ids", "mean", "mean_again"]
    )
    assert found.left_out == {}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("exclude", [False, True])
def test_saved_without_frozen_parameters(tmp_path, stage, exclude):
    make(tmp_path, stage, exclude_frozen=True)
    found = resolved(tmp_path, exclude_frozen=exclude)
    assert sorted(names(found)) == ["first", "ids", "mean", "second"]
    assert list(found.left_out) == ([] if "base_again" not in found.left_out else ["base_again"])
    assert "base" not in [*names(found), *found.ties]


@pytest.mark.parametrize("stage", STAGES)
def test_the_same_input_gives_the_same_resolution(tmp_path, stage):
    make(tmp_path, stage)
    one, other = resolved(tmp_path), resolved(tmp_path)
    assert (one, list(one.ties)) == (other, list(other.ties))
