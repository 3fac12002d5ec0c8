"""Any checkpoint DeepSpeed could have written comes out whole and exact."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dist_consolidate import CheckpointError, consolidate, open_checkpoint
from tests.cases import assert_same_bits, load_output
from tests.strategies import specs
from tests.synthetic import Spec, write


def checked(max_examples: int) -> settings:
    """Settings of every test here: the same examples on every run, no deadline."""
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@checked(150)
@given(
    spec=specs(stages=(1, 2, 3)),
    output_format=st.sampled_from(["safetensors", "bin"]),
    bucket_size=st.sampled_from(["auto", 64, 1000, 4097]),
    max_shard_size=st.sampled_from(["5GB", "none", 1, 700]),
)
def test_exact(
    spec: Spec, output_format: str, bucket_size: str | int, max_shard_size: str | int
) -> None:
    """Every key, shape and bit, for any spec, format, bucket and file size."""
    with tempfile.TemporaryDirectory() as folder:
        root, out = Path(folder) / "run", Path(folder) / "out"
        truth = write(root, spec)
        consolidate(
            root,
            out,
            format=output_format,
            bucket_size=bucket_size,
            max_shard_size=max_shard_size,
        )
        assert_same_bits(load_output(out), dict(truth.fp32))


@checked(60)
@given(spec=specs(stages=(0,)))
def test_stage_0_never_guesses(spec: Spec) -> None:
    """Each value is the master's, or the 16-bit one where the report says that it cannot tell."""
    with tempfile.TemporaryDirectory() as folder:
        root, out = Path(folder) / "run", Path(folder) / "out"
        truth = write(root, spec)
        report = consolidate(root, out)
        got, want = load_output(out), dict(truth.fp32)
        told = {name for note in report.notes if "16-bit" in note for name in _listed(note)}
        for name in told:
            assert got[name].shape == want[name].shape
            rounded = want.pop(name).to(spec.model_dtype).to(got[name].dtype)
            assert got.pop(name).equal(rounded), name
        ties = [name for name, holder in report.ties.items() if holder in told]
        for name in ties:
            got.pop(name), want.pop(name)
        assert_same_bits(got, want)


def _listed(note: str) -> list[str]:
    return note.rpartition(": ")[2].split(", ")


@checked(40)
@given(spec=specs(lossless=False, stages=(3,)))
def test_lost_names_are_all_named(spec: Spec) -> None:
    """A checkpoint without some values is refused, naming them; on request the rest is exact."""
    with tempfile.TemporaryDirectory() as folder:
        root, out = Path(folder) / "run", Path(folder) / "out"
        truth = write(root, spec)
        lost = set(truth.lost)
        if lost:
            with pytest.raises(CheckpointError) as refusal:
                consolidate(root, out)
            assert all(f"  - {name}\n" in str(refusal.value) for name in lost)
            assert not out.exists()
        consolidate(root, out, allow_missing=["*"])
        kept = {name: value for name, value in truth.fp32.items() if name not in lost}
        assert_same_bits(load_output(out), kept)


@checked(40)
@given(spec=specs(stages=(1, 2), cloned_aliases=True))
def test_cloned_aliases(spec: Spec) -> None:
    """A tied name that was cloned before saving still gets its holder's fp32 values."""
    with tempfile.TemporaryDirectory() as folder:
        root, out = Path(folder) / "run", Path(folder) / "out"
        truth = write(root, spec)
        consolidate(root, out)
        assert_same_bits(load_output(out), dict(truth.fp32))


@checked(40)
@given(spec=specs(stages=(1, 2, 3)))
def test_lazy_tensors(spec: Spec) -> None:
    """Each lazy tensor loads as the most precise copy, in its own dtype."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        truth = write(root, spec)
        checkpoint = open_checkpoint(root)
        assert set(checkpoint) == set(truth.fp32)
        loaded = {name: tensor.load() for name, tensor in checkpoint.items()}
        assert {name: tensor.dtype for name, tensor in loaded.items()} == dict(truth.native)
        wide = {n: t.float() if t.is_floating_point() else t for n, t in loaded.items()}
        assert_same_bits(wide, dict(truth.fp32))
