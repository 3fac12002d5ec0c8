"""Folders above the output folder, which a run that fails takes away again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path


def missing_parents(output_dir: Path) -> list[Path]:
    """Give the folders above an output folder that are not there yet, the deepest first.

    Args:
        output_dir: The output folder.

    Returns:
        Those that publishing will have to make.
    """
    parents = output_dir.resolve().parents
    return [parent for parent in parents if not parent.exists()]


def remove_parents(parents: Sequence[Path]) -> None:
    """Remove folders that were made for a result which did not come about; others' files stay.

    Args:
        parents: What :func:`missing_parents` gave before they were made.
    """
    with contextlib.suppress(OSError):
        for parent in parents:
            parent.rmdir()
