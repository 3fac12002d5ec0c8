"""Small helpers to change a real checkpoint's files as special engines would have written them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.cases import CASES, Case

State = dict[str, Any]
Main = Callable[..., tuple[int, str, str]]


def copy_of(name: str, tmp_path: Path) -> tuple[Case, Path]:
    """Copy a checkpoint; gives the case and the tag folder of the copy."""
    case = CASES[name]
    root = tmp_path / "ckpt"
    shutil.copytree(case.ckpt, root)
    return case, root / (root / "latest").read_text().strip()


def edit(path: Path, change: Callable[[State], object], **options: Any) -> None:
    """Load a file with torch, change what it holds, and save it."""
    state = torch.load(path, map_location="cpu", weights_only=False)
    change(state)
    torch.save(state, path, **options)


def save_as(source: Path, target: Path) -> None:
    """Save what a file holds as another one; a renamed file would tell its own name."""
    state = torch.load(source, map_location="cpu", weights_only=False)
    torch.save(state, target)


def only(folder: Path, pattern: str) -> Path:
    """Give the one file of a pattern."""
    (path,) = folder.glob(pattern)
    return path
