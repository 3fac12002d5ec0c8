"""Checkpoints that DeepSpeed releases from 0.5 on have written come out whole and exact."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_consolidate import (
    CheckpointError,
    consolidate,
    open_checkpoint,
)
from tests.cases import CASES, PLAIN_CASES, assert_same_bits, expected_fp32, load_output, lost_keys

EXACT = sorted(name for name, case in PLAIN_CASES.items() if not lost_keys(case))
LOSING = sorted(name for name, case in PLAIN_CASES.items() if lost_keys(case))
OTHER = sorted(n for n in set(CASES) - set(PLAIN_CASES) if CASES[n].layout != "pipeline")


@pytest.mark.parametrize("output_format", ["safetensors", "bin"])
@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str, output_format: str, tmp_path: Path) -> None:
    """Every key of the model, bit for bit, and every tie of the live model found."""
    case = CASES[name]
    report = consolidate(case.ckpt, tmp_path / "out", tag=case.tag, format=output_format)
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))
    groups: dict[str, set[str]] = {}
    for alias, holder in report.ties.items():
        groups.setdefault(holder, {holder}).add(alias)
    present = set(expected_fp32(case))
    wanted = [set(tie) & present for tie in case.ties]
    assert sorted(map(sorted, groups.values())) == sorted(sorted(t) for t in wanted if len(t) > 1)


@pytest.mark.parametrize("name", LOSING)
def test_lost_values_are_refused(name: str, tmp_path: Path) -> None:
    """Values that are in no file: a refusal names each of them; on request the rest is exact."""
    case = CASES[name]
    lost = lost_keys(case)
    with pytest.raises(CheckpointError) as refusal:
        consolidate(case.ckpt, tmp_path / "out", tag=case.tag)
    assert all(f"  - {key}\n" in str(refusal.value) for key in lost)
    assert list(tmp_path.iterdir()) == []
    report = consolidate(case.ckpt, tmp_path / "out", tag=case.tag, allow_missing=["*"])
    want = {key: value for key, value in expected_fp32(case).items() if key not in lost}
    assert_same_bits(load_output(tmp_path / "out"), want)
    assert set(lost) <= set(report.left_out)


def test_second_tag(tmp_path: Path) -> None:
    """A tag that `latest` does not name is read when asked for."""
    case = CASES["two_tags_z2_w2"]
    consolidate(case.ckpt, tmp_path / "out", tag="global_step1")
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case, "global_step1"))


@pytest.mark.parametrize("name", ["ds0.6.1_t5real_z3_w2", "kitchen_z2_groups_w4"])
def test_lazy(name: str) -> None:
    """The lazy mapping lists the model's keys, and each tensor loads exactly."""
    case = CASES[name]
    checkpoint = open_checkpoint(case.ckpt, case.tag)
    want = expected_fp32(case)
    assert (checkpoint.stage, checkpoint.world_size) == (case.stage, case.world)
    assert {n: t.shape for n, t in checkpoint.items()} == {
        n: tuple(t.shape) for n, t in want.items()
    }
    loaded = {n: t.load() for n, t in checkpoint.items()}
    wide = {n: t.float() if t.is_floating_point() else t for n, t in loaded.items()}
    assert_same_bits(wide, want)
    assert all(checkpoint[alias].tied_to == holder for alias, holder in checkpoint.ties.items())
