"""Starts :mod:`tests.ds_train` and hands back what it saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SEC = 240.0
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "DS_BUILD_OPS": "0",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}
# Set by a launcher around the tests; torchrun must not take them for its own.
INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Run:
    """One training run: a model of :mod:`tests.ds_train`, a ZeRO stage, ``bf16`` or ``fp32``."""

    model: str
    stage: int
    dtype: str

    def __str__(self) -> str:
        """The name of the folder it leaves."""
        return f"{self.model}_z{self.stage}_{self.dtype}"


@dataclass(frozen=True)
class Trained:
    """What a run saved.

    Attributes:
        run: The run.
        folder: Holds ``ckpt``, ``truth.pt`` and the model's ``config.json``.
        truth: ``fp32``, ``ties``, ``frozen`` and ``buffers`` of the live engine; for fp32 GPT-2
            also ``input_ids`` and ``logits``.
    """

    run: Run
    folder: Path
    truth: dict[str, Any]

    @property
    def ckpt(self) -> Path:
        """The run folder that DeepSpeed wrote."""
        return self.folder / "ckpt"

    @property
    def fp32(self) -> dict[str, Tensor]:
        """Every key of the model in fp32 (buffers of other dtypes unchanged)."""
        values: dict[str, Tensor] = self.truth["fp32"]
        return values

    @property
    def ties(self) -> list[tuple[str, ...]]:
        """Groups of names that are one parameter."""
        return [tuple(names) for names in self.truth["ties"]]


def train(
    out: Path, runs: Sequence[Run], *, world: int, timeout_sec: float = TIMEOUT_SEC
) -> dict[str, Trained]:
    """Train under real DeepSpeed on CPU, all runs in one start of the processes.

    Args:
        out: Where each run gets a folder.
        runs: What to train.
        world: Number of processes.
        timeout_sec: After this the processes are ended and the test fails.

    Returns:
        What was saved, by the run's name.

    Raises:
        AssertionError: If training failed or took too long; with the processes' output.
    """
    arguments = [f"{run.model}:{run.stage}:{run.dtype}" for run in runs]
    launch("tests.ds_train", [str(out), *arguments], world=world, timeout_sec=timeout_sec)
    return {str(run): _trained(out / str(run), run) for run in runs}


def launch(
    module: str, arguments: Sequence[str], *, world: int, timeout_sec: float = TIMEOUT_SEC
) -> None:
    """Run a training module under torchrun on CPU.

    Args:
        module: What to run with ``-m``.
        arguments: For the module.
        world: Number of processes.
        timeout_sec: After this the processes are ended and the test fails.

    Raises:
        AssertionError: If it failed or took too long; with the processes' output.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={world}", "-m", module, *arguments]
    _call(command, timeout_sec)


def _call(command: Sequence[str], timeout_sec: float) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in INHERITED} | ENVIRONMENT
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_sec)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        late = process.communicate()[0]
        raise AssertionError(f"no end after {timeout_sec} s:\n{late[-6000:]}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output[-6000:]


def _trained(folder: Path, run: Run) -> Trained:
    truth: dict[str, Any] = torch.load(folder / "truth.pt", map_location="cpu", weights_only=True)
    return Trained(run, folder, truth)
