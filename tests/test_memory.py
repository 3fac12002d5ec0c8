"""Memory stays flat and the moments are never read, on models of hundreds of megabytes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.cases import assert_same_bits
from tests.synthetic import Truth, gpt_params, write_large
from tests.torchrun import ROOT, run_python, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.dist]

PEAK = ROOT / "tests" / "bench" / "peak.py"
MAX_GROWTH_BYTES = 150_000_000
MAX_SPREAD_BYTES = 16_000_000
MAX_READ_RATIO = 1.02
FORMATS = ("safetensors", "bin")
# Layers and width: 355 million parameters, and an eighth of that.
SIZES: Mapping[str, tuple[int, int]] = {"large": (24, 1024), "small": (6, 512)}
LOOKED_AT = ("transformer.wte.weight", "transformer.h.5.mlp.c_proj.bias", "lm_head.weight")


@dataclasses.dataclass(frozen=True)
class Large:
    """A checkpoint on disk.

    Attributes:
        stage: ZeRO stage.
        truth: What must come out.
        fp32_bytes: Size of the fp32 partitions, padding not counted.
    """

    stage: int
    truth: Truth
    fp32_bytes: int

    @property
    def ckpt(self) -> Path:
        """The run folder."""
        return self.truth.tag_dir.parent


def make(folder: Path, stage: Literal[2, 3], size: str) -> Large:
    layers, width = SIZES[size]
    truth = write_large(folder, stage, 2, layers=layers, width=width)
    params = gpt_params(layers, width, 50257, 1024)
    return Large(stage, truth, 4 * sum(p.numel for p in params if p.tie_of is None))


@pytest.fixture(scope="module", params=[2, 3])
def large(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Large]:
    folder = tmp_path_factory.mktemp(f"large{request.param}")
    yield make(folder, request.param, "large")
    shutil.rmtree(folder)


def measure(
    ckpt: Path, out: Path, num_ranks: int, options: Sequence[str | Path]
) -> list[dict[str, Any]]:
    """Consolidate and give what each rank says it took.

    Args:
        ckpt: The run folder.
        out: Where the result goes.
        num_ranks: Number of processes; 1 is a plain one.
        options: Further arguments.

    Returns:
        The lines of ``peak.py``, by rank.
    """
    arguments = [ckpt, out, *options]
    if num_ranks == 1:
        ended = run_python([PEAK, *arguments], timeout_sec=120).ok()
    else:
        ended = run_ranks(num_ranks, arguments, script=PEAK, timeout_sec=120).ok()
    lines = [json.loads(x) for x in ended.stdout.splitlines() if x.startswith('{"rank":')]
    assert len(lines) == num_ranks, ended
    return sorted(lines, key=lambda line: int(line["rank"]))


def check_limits(lines: Sequence[Mapping[str, Any]], fp32_bytes: int) -> None:
    """Fail if a rank took too much memory, or all together read more than the weights."""
    for line in lines:
        assert line["peak_growth_bytes"] < MAX_GROWTH_BYTES, lines
    assert fp32_bytes <= lines[0]["shard_read_bytes"] <= MAX_READ_RATIO * fp32_bytes, lines


def check_some_tensors(out: Path, truth: Truth) -> None:
    """Compare a few tensors bit for bit."""
    got = {name: load_one(out, name) for name in LOOKED_AT}
    assert_same_bits(got, {name: truth.fp32[name] for name in LOOKED_AT})


def load_one(out: Path, name: str) -> Tensor:
    """Load one tensor of a result that is a single file."""
    torch_file = out / "pytorch_model.bin"
    if torch_file.exists():
        loaded: Tensor = torch.load(torch_file, mmap=True, weights_only=True)[name].clone()
        return loaded
    with safe_open(out / "model.safetensors", framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


@pytest.mark.parametrize("format", FORMATS)
def test_one_process_needs_a_few_buckets_and_reads_the_weights_once(
    large: Large, format: str, tmp_path: Path
) -> None:
    options = ["--format", format, "--max-shard-size", "none"]
    lines = measure(large.ckpt, tmp_path / "out", 1, options)
    check_limits(lines, large.fp32_bytes)
    # Whatever this process read, its own modules' source and all metadata included. What the kernel
    # has copied (in a zip file nothing, for its CRC's sake) is read again, from the page cache, to
    # be checked and digested.
    times = 2 if format == "safetensors" else 1
    assert lines[0]["own_read_bytes"] <= times * MAX_READ_RATIO * large.fp32_bytes, lines
    check_some_tensors(tmp_path / "out", large.truth)
    shutil.rmtree(tmp_path / "out")


def test_two_ranks_need_a_few_buckets_each(large: Large, tmp_path: Path) -> None:
    transport, format = ("allgather", "safetensors") if large.stage == 3 else ("gather", "bin")
    options = ["--transport", transport, "--format", format, "--max-shard-size", "none"]
    lines = measure(large.ckpt, tmp_path / "out", 2, options)
    check_limits(lines, large.fp32_bytes)
    check_some_tensors(tmp_path / "out", large.truth)
    shutil.rmtree(tmp_path / "out")


def test_a_model_eight_times_as_large_needs_no_more(large: Large, tmp_path: Path) -> None:
    small = make(tmp_path / "small", 2 if large.stage == 2 else 3, "small")
    assert large.fp32_bytes > 7.5 * small.fp32_bytes
    growth = []
    for number, one in enumerate((small, large)):
        out = tmp_path / f"out{number}"
        (line,) = measure(one.ckpt, out, 1, [])
        growth.append(line["peak_growth_bytes"])
        shutil.rmtree(out)
    assert abs(growth[1] - growth[0]) < MAX_SPREAD_BYTES, growth
