"""Checkpoints written by real DeepSpeed releases, kept under ``tests/data/checkpoints``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"
MAX_DIFFERENCES_SHOWN = 8

Layout = Literal["plain", "pipeline"]

_LAYOUTS: Mapping[str, Layout] = {
    "pipeline": "pipeline",
}


@dataclass(frozen=True)
class Case:
    """One checkpoint with the truth taken from the live engine that wrote it.

    Attributes:
        name: Name of its folder.
        folder: Holds ``ckpt`` (the run folder), ``truth.pt`` and ``meta.json``.
    """

    name: str
    folder: Path

    @property
    def ckpt(self) -> Path:
        """The run folder."""
        return self.folder / "ckpt"

    @cached_property
    def meta(self) -> dict[str, Any]:
        """How the checkpoint was made."""
        meta: dict[str, Any] = json.loads((self.folder / "meta.json").read_text())
        return meta

    @cached_property
    def truth(self) -> dict[str, Any]:
        """Values and names in the live engine when the checkpoint was saved."""
        return _load(self.folder / "truth.pt")

    def truth_of_tag(self, tag: str) -> dict[str, Any]:
        """The truth of a tag other than the one that ``latest`` names."""
        return _load(self.folder / f"truth_{tag}.pt")

    @property
    def tag(self) -> str | None:
        """The tag to ask for, where there is no ``latest`` to name it."""
        has_latest = self.save_options.get("save_latest", True)
        return None if has_latest else self.meta["tag"]

    @property
    def save_options(self) -> dict[str, Any]:
        """What was passed to ``save_checkpoint``."""
        options: dict[str, Any] = self.meta.get("save_kw", {})
        return options

    @property
    def stage(self) -> int:
        """ZeRO stage."""
        return int(self.meta["config"]["zero_optimization"]["stage"])

    @property
    def world(self) -> int:
        """Number of ranks that wrote it."""
        return int(self.meta["world"])

    @property
    def release(self) -> tuple[int, ...]:
        """The DeepSpeed release as numbers."""
        return tuple(int(part) for part in self.meta["deepspeed"].split("."))

    @property
    def layout(self) -> Layout:
        """Whether the model is spread in a way that is not read."""
        return _LAYOUTS.get(self.meta.get("kind", ""), "plain")

    @property
    def ties(self) -> list[tuple[str, ...]]:
        """Groups of names that are one parameter or one buffer."""
        return [tuple(names) for names in self.truth["ties"]]


def discover() -> dict[str, Case]:
    """Find every checkpoint, by name."""
    folders = sorted(path.parent for path in CHECKPOINTS.glob("*/meta.json"))
    return {folder.name: Case(folder.name, folder) for folder in folders}


CASES = discover()
PLAIN_CASES = {name: case for name, case in CASES.items() if case.layout == "plain"}


def expected_fp32(case: Case, tag: str | None = None) -> dict[str, Tensor]:
    """The tensors a complete fp32 consolidation must give.

    Args:
        case: The checkpoint.
        tag: A tag other than the one that ``latest`` names.

    Returns:
        Every key the checkpoint is to give: what was saved without frozen parameters lacks these.
    """
    truth = case.truth if tag is None else case.truth_of_tag(tag)
    left_out = case.save_options.get("exclude_frozen_parameters", False)
    frozen = set(truth["frozen"]) if left_out else set()
    return {name: tensor for name, tensor in truth["fp32"].items() if name not in frozen}


def lost_keys(case: Case) -> list[str]:
    """The names whose values are in no file, for which the right answer is a refusal.

    In stage 3 only the optimizer's partitions and the frozen sections hold parameters, so what is
    in neither is gone; the frozen sections exist since DeepSpeed 0.9.1.
    """
    if case.stage < 3:
        return []
    lost = [n for n in case.truth.get("unoptimized", ()) if case.truth["fp32"][n].numel()]
    if case.release < (0, 9, 1):
        lost += case.truth["frozen"]
    return lost


def load_output(folder: Path) -> dict[str, Tensor]:
    """Load every tensor of a result, whichever format and number of files it has.

    Args:
        folder: What a consolidation wrote.

    Returns:
        All tensors by name.

    Raises:
        AssertionError: If two files hold the same name.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            loaded = load_file(path)
        elif path.suffix == ".bin":
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        else:
            continue
        twice = sorted(tensors.keys() & loaded.keys())
        assert not twice, f"{path.name} repeats {twice}"
        tensors |= loaded
    return tensors


def assert_same_bits(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Compare names, shapes, dtypes and every bit.

    Args:
        got: A result.
        want: What it must be.

    Raises:
        AssertionError: With the number of differences and the first of them.
    """
    found = [f"missing {name}" for name in want if name not in got]
    found += [f"surplus {name}" for name in got if name not in want]
    for name in want:
        if name in got:
            found += _differences(name, got[name], want[name])
    shown = "\n".join(f"  {line}" for line in found[:MAX_DIFFERENCES_SHOWN])
    assert not found, f"{len(found)} differences:\n{shown}"


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in row-major order, as 1-D uint8."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _differences(name: str, got: Tensor, want: Tensor) -> list[str]:
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        have = f"{tuple(got.shape)} {got.dtype}"
        return [f"{name} is {have}, not {tuple(want.shape)} {want.dtype}"]
    wrong = (bits(got) != bits(want)).view(-1, want.itemsize).any(1).nonzero().flatten()
    if not len(wrong):
        return []
    first = int(wrong[0])
    values = f"{got.reshape(-1)[first].item()} for {want.reshape(-1)[first].item()}"
    where = f"{len(wrong)} of {want.numel()} elements, first at {first}"
    return [f"{name} differs in {where}: {values}"]


def _load(path: Path) -> dict[str, Any]:
    truth: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return truth
