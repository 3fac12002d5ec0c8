"""On a GPU: NCCL with one rank, and several ranks that share the device over gloo.

Deselected unless asked for with ``-m gpu``; two ranks cannot share a GPU under NCCL, so several
ranks take the same path with their rows carried through host memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dist_consolidate import consolidate
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output
from tests.torchrun import run_ranks

pytestmark = pytest.mark.gpu

NAMES = ["ds0.6.1_gpt2_z2_w2", "ds0.6.1_t5real_z3_w2", "kitchen_z2_groups_w4", "noncontig_z2_w2"]


@pytest.mark.parametrize("transport", ["allgather", "direct"])
@pytest.mark.parametrize("name", NAMES)
def test_nccl_with_one_rank(name: str, transport: str, tmp_path: Path) -> None:
    """An initialized NCCL group of one rank gives the exact result and is left usable."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", rank=0, world_size=1, store=store)
    try:
        case = CASES[name]
        for bucket_size in ("auto", 1000):
            out = tmp_path / f"out-{bucket_size}"
            report = consolidate(
                case.ckpt, out, transport=transport, bucket_size=bucket_size, device="cuda"
            )
            assert report.transport == transport
            assert_same_bits(load_output(out), expected_fp32(case))
        tensor = torch.ones(3, device="cuda")
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0, 1.0]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "keep"])
def test_casts_on_the_device_equal_those_on_the_host(dtype: str, tmp_path: Path) -> None:
    """The cast happens on the device, and gives the same bytes as on the CPU."""
    case = CASES["kitchen_z3_bf16_w2"]
    for device in ("cpu", "cuda"):
        consolidate(case.ckpt, tmp_path / device, dtype=dtype, device=device)
    ours, theirs = (tmp_path / device / "model.safetensors" for device in ("cuda", "cpu"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("transport", ["allgather", "gather", "direct"])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_share_a_gpu(name: str, transport: str, tmp_path: Path) -> None:
    """Three ranks on however many GPUs there are give the exact result."""
    case = CASES[name]
    arguments = [str(case.ckpt), str(tmp_path / "out"), "--device", "cuda"]
    visible = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    arguments += ["--transport", transport, "--bucket-size", "5000"]
    run_ranks(3, arguments, env=visible).ok()
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))
