"""Starts :mod:`tests.ds_experts` and hands back what it saved."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.real_deepspeed import TIMEOUT_SEC, _call


@dataclass(frozen=True)
class TrainedExperts:
    """What a run saved.

    Attributes:
        run: The run, as :mod:`tests.ds_experts` takes it.
        folder: Holds ``ckpt`` and ``truth.pt``.
        truth: ``fp32``, ``ties``, ``frozen`` and ``buffers``, put together over all ranks.
    """

    run: str
    folder: Path
    truth: dict[str, Any]

    @property
    def ckpt(self) -> Path:
        """The run folder that DeepSpeed wrote."""
        return self.folder / "ckpt"

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return int(self.run.split(":")[1])

    @property
    def fp32(self) -> dict[str, Tensor]:
        """Every key of the model in fp32."""
        values: dict[str, Tensor] = self.truth["fp32"]
        return values


def train_experts(out: Path, runs: Sequence[str], *, world: int) -> dict[str, TrainedExperts]:
    """Train models with experts on CPU, all runs in one start of the processes.

    Args:
        out: Where each run gets a folder.
        runs: What to train.
        world: Number of processes.

    Returns:
        What was saved, by run.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={world}", "-m", "tests.ds_experts", str(out), *runs]
    _call(command, TIMEOUT_SEC)
    trained = {}
    for run in runs:
        folder = out / run.replace(":", "-")
        truth = torch.load(folder / "truth.pt", map_location="cpu", weights_only=True)
        trained[run] = TrainedExperts(run, folder, truth)
    return trained
