"""Folders above the output folder: they must let it be looked at, and go where a run fails."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from dist_consolidate.doing import Doing
from dist_consolidate.errors import UsageError


def check_reachable(output_dir: Path) -> None:
    """Check that nothing above an output folder keeps this user from looking at it.

    Args:
        output_dir: The output folder; need not exist yet.

    Raises:
        UsageError: If a folder may not be entered.
    """
    with Doing("looking at", output_dir):
        try:
            output_dir.resolve().exists()
        except OSError as error:
            raise UsageError(
                f"cannot write {output_dir}: {error.strerror} ({error.filename}); check its access "
                "rights or choose another folder"
            ) from error


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
