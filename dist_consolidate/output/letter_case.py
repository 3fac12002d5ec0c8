"""File systems to which ``Model.safetensors`` and ``model.safetensors`` are one name.

There, a file of ours would replace one of another name, and two of our own would be one. Of our
names only those of optimizer states come from the checkpoint; all others differ in more than case.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dist_consolidate.errors import UsageError, listing
from dist_consolidate.output.placing import files_below


def check_letter_case(folder: Path, output_dir: Path, file_names: Sequence[str]) -> None:
    """Check that no name of a result is taken for another, where case makes no difference.

    Args:
        folder: A folder on the output's file system, with a lower-case name.
        output_dir: The output folder, which need not be there.
        file_names: All files of the result.

    Raises:
        UsageError: If one is.
    """
    alias = folder.with_name(folder.name.upper())
    if not (alias.exists() and alias.samefile(folder)):
        return
    there = files_below(output_dir) if output_dir.is_dir() else []
    found = clashes(file_names, there)
    if found:
        headline = f"{output_dir} does not tell upper from lower case, and these names differ in"
        advice = "Move the files away, or choose an output folder on another file system."
        raise UsageError(listing(f"{headline} nothing else", found, advice))


def clashes(file_names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Find names that differ in case alone.

    Args:
        file_names: Those of a result.
        others: Those of files that are there.

    Returns:
        Pairs of names, in words.
    """
    ours: dict[str, str] = {}
    found = []
    for name in file_names:
        other = ours.setdefault(name.casefold(), name)
        if other != name:
            found.append(f"{other} and {name}")
    for name in others:
        other = ours.get(name.casefold(), name)
        if other != name:
            found.append(f"{other} and {name}, which is there")
    return found
