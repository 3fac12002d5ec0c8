"""On a GPU: NCCL with one rank, and several ranks that share the device over gloo.

Deselected unless asked for with ``-m gpu``; two ranks cannot share a GPU under NCCL, so several
ranks take the same path with their rows carried through host memory.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dist_consolidate import consolidate
from dist_consolidate.errors import ResourceError
from dist_consolidate.runtime import device_memory
from dist_consolidate.runtime.nvml import bus_id_of, find_card, open_nvml
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


def test_little_device_memory_is_enough_and_the_report_says_whose(tmp_path: Path) -> None:
    """A small part of the device gives the same weights; the report names device and limit."""
    case = CASES["kitchen_z3_bf16_w2"]
    cores = os.sched_getaffinity(0)
    report = consolidate(case.ckpt, tmp_path / "out", device="cuda", device_memory="60MB")
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))
    device, host = report.ranks[0].memory_limits
    assert device == "60 MB of device memory (--device-memory 60MB)"
    assert "of host memory (" in host
    assert any(note.startswith("memory is short: buckets of ") for note in report.notes)
    assert os.sched_getaffinity(0) == cores
    told = consolidate(case.ckpt, tmp_path / "no", device="cuda", dry_run=True)
    assert torch.cuda.get_device_name() in told.ranks[0].memory_limits[0]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("1MB", "can have 1 MB of device memory (--device-memory 1MB)"),
        ("100TB", "needs 100 TB for --device-memory 100TB, but can have "),
    ],
)
def test_device_memory_that_cannot_be(asked: str, words: str, tmp_path: Path) -> None:
    """Too little for a bucket, and more than there is: refused before anything is written."""
    case = CASES["kitchen_z3_bf16_w2"]
    with pytest.raises(ResourceError, match=re.escape(words)):
        consolidate(case.ckpt, tmp_path / "out", device="cuda", device_memory=asked)
    assert not (tmp_path / "out").exists()


def test_ranks_that_share_a_gpu_share_its_memory(tmp_path: Path) -> None:
    """Two ranks, each with its own list of visible devices, count as sharers of one card."""
    case = CASES["kitchen_z3_bf16_w2"]
    arguments = [str(case.ckpt), str(tmp_path / "out"), "--device", "cuda", "--dry-run"]
    one = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    told = run_ranks(2, arguments, env={"CUDA_VISIBLE_DEVICES": one}).ok()
    assert "ranks 0 to 1: each can have " in told.stdout, told
    assert told.stdout.count(", shared by 2 ranks: ") == 2, told


def test_nvml_finds_the_card_that_torch_uses() -> None:
    """By UUID; its place on the bus is one that the kernel knows."""
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    device = torch.device("cuda", 0)
    torch.cuda.mem_get_info(device)
    sought = device_memory._sought(device)
    with open_nvml() as nvml:
        assert find_card(nvml.cards(), sought) is not None
        bus_id = bus_id_of(nvml, sought).lower()
    assert bus_id.endswith(".0")
    # Nobody else, somebody by number, or that it is not known: a text in any case.
    assert isinstance(device_memory.device_users(device, {os.getpid()}), str)
