"""Starts :mod:`tests.pipe_train` and hands back what it saved."""

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
class Pipeline:
    """What a training run saved.

    Attributes:
        run: The run, as :mod:`tests.pipe_train` takes it.
        folder: Holds ``ckpt`` and each stage's truth.
        stages: The truth of every pipeline stage's live engine.
    """

    run: str
    folder: Path
    stages: list[dict[str, Any]]

    @property
    def ckpt(self) -> Path:
        """The run folder that DeepSpeed wrote."""
        return self.folder / "ckpt"

    @property
    def tag_dir(self) -> Path:
        """The tag folder."""
        return self.ckpt / (self.ckpt / "latest").read_text()

    @property
    def named(self) -> dict[str, Tensor]:
        """Every tensor under the name that ``PipelineModule`` has for it, lowest stage first."""
        return self._merged("named")

    @property
    def by_layer(self) -> dict[str, Tensor]:
        """Every tensor of a layer that has a file, under the layer's number."""
        return self._merged("by_layer")

    @property
    def trained(self) -> set[str]:
        """Names of the parameters that are trained."""
        return {name for stage in self.stages for name in stage["trained"]}

    def _merged(self, what: str) -> dict[str, Tensor]:
        merged: dict[str, Tensor] = {}
        for stage in self.stages:
            for name, tensor in stage[what].items():
                merged.setdefault(name, tensor)
        return merged


def train_pipelines(out: Path, runs: Sequence[str], *, world: int) -> dict[str, Pipeline]:
    """Train pipelines under real DeepSpeed on CPU, all runs in one start of the processes.

    Args:
        out: Where each run gets a folder.
        runs: ``MODEL:ZERO_STAGE:DTYPE:NUM_STAGES[:OPTION...]`` each.
        world: Number of processes.

    Returns:
        What was saved, by run.
    """
    _torchrun(world, "tests.pipe_train", str(out), *runs)
    found = {}
    for run in runs:
        folder = out / run.replace(":", "_")
        paths = sorted(folder.glob("truth_*.pt"), key=lambda path: int(path.stem.split("_")[1]))
        found[run] = Pipeline(run, folder, [torch.load(p, weights_only=True) for p in paths])
    return found


def load_strictly(model: str, output_dir: Path) -> None:
    """Load a result into the whole pipeline as one stage, with no key missing or left over.

    Args:
        model: A model of :mod:`tests.pipe_train`.
        output_dir: What a consolidation wrote, as safetensors.
    """
    _torchrun(1, "tests.pipe_load", model, str(output_dir))


def _torchrun(world: int, module: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    _call([*command, f"--nproc_per_node={world}", "-m", module, *arguments], TIMEOUT_SEC)
