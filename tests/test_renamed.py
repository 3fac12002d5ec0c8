"""Models whose state_dict renames or splits parameters: `module` and the optimizer disagree."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from dist_consolidate import CheckpointError, consolidate
from tests.cases import CASES, load_output

REFUSED = Path(__file__).parent / "data" / "refused" / "renamed_split_z3_w2"


@pytest.mark.parametrize(
    ("name", "count", "first"),
    [
        ("renamed_split_z2_w2", 6, "a.weight as new_a.weight"),
        ("renamed_copies_z1_w2", 9, "a.weight as x.a.weight"),
    ],
)
def test_the_names_of_the_model_are_told(name: str, count: int, first: str, tmp_path: Path) -> None:
    """The report says which names were followed, and nothing about missing masters."""
    notes = consolidate(CASES[name].ckpt, tmp_path / "out").notes
    assert notes == (
        f"{count} parameters have other names in `module` than in the optimizer and are written "
        f"under those of `module`, the first is {first}",
    )


def test_moments_follow(tmp_path: Path) -> None:
    """The optimizer's states have the names and shapes of the weights beside them."""
    case = CASES["renamed_split_z2_w2"]
    consolidate(case.ckpt, tmp_path / "out", include=["optimizer"])
    moments = load_file(tmp_path / "out" / "optimizer_states" / "exp_avg.safetensors")
    want = case.truth["fp32"]
    still = {"ids", "b.weight", *(name for name in want if name.startswith("new_fr."))}
    assert {n: t.shape for n, t in moments.items()} == {
        name: tensor.shape for name, tensor in want.items() if name not in still
    }


def test_placeholders_cannot_tell(tmp_path: Path) -> None:
    """ZeRO-3: the refusal says that names may differ; a tie settles one, the rest keeps its own."""
    with pytest.raises(CheckpointError) as refusal:
        consolidate(REFUSED / "ckpt", tmp_path / "out")
    assert "6 parameters are stored under names that `module` has not" in str(refusal.value)
    consolidate(REFUSED / "ckpt", tmp_path / "out", tie=["new_a.bias=a.bias"], allow_missing=["*"])
    written = load_output(tmp_path / "out")
    assert written["new_a.bias"].equal(written["a.bias"])
    assert written["qkv.weight"].shape == (30, 10)
    assert "attn.q.weight" not in written
