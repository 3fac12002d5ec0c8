"""Putting the files of a result in place of an older one's, step by step.

Between two steps the folder holds the old result, none that a loader takes for one, or the new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from dist_consolidate.output import work
from dist_consolidate.output.index import (
    MANIFEST_NAME,
    STATES_FOLDER,
    is_entry_point,
    is_weight_file,
)
from dist_consolidate.output.work import ASIDE, sync


def replace(work_dir: Path, output_dir: Path, marker: work.Marker, aside_dir: Path) -> None:
    """Put a result in place of an older one; should that fail, all is as it was before.

    Args:
        work_dir: Where the new files are.
        output_dir: Where they go.
        marker: Their names, in order.
        aside_dir: Holds the older result meanwhile.
    """
    try:
        _set_aside(output_dir, aside_dir)
        move_files(work_dir, output_dir, marker)
    except BaseException:
        _put_back(aside_dir, output_dir)
        raise


def _set_aside(output_dir: Path, aside_dir: Path) -> None:
    """Move an old result out of the way, first of all what loaders look for first."""
    aside_dir.mkdir(exist_ok=True)
    # Without entry points nobody takes a mixture of old and new files for a result.
    for group in reversed(_in_order(_weight_names(output_dir))):
        _move(group[::-1], output_dir, aside_dir)
        for folder in folders_of(group):
            sync(output_dir / folder)
            with contextlib.suppress(OSError):  # where others have put files, it stays
                (output_dir / folder).rmdir()
        sync(output_dir)


def _put_back(aside_dir: Path, output_dir: Path) -> None:
    """Put an old result back, as a whole or so that no loader takes it for one."""
    with contextlib.suppress(OSError):
        for group in _in_order(files_below(aside_dir)):
            if any(os.path.lexists(output_dir / name) for name in group):
                return  # a new file that could not go back
            _move(group, aside_dir, output_dir)
        sync(output_dir)


def _move(names: Iterable[str], source: Path, target: Path) -> None:
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        (source / name).rename(target / name)


def _in_order(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Part files that loaders do not look for first from those that they do, the weights' last."""
    groups: tuple[list[str], list[str]] = [], []
    for name in names:
        groups[is_entry_point(name) or name == MANIFEST_NAME].append(name)
    groups[1].sort(key=lambda name: (name != MANIFEST_NAME, STATES_FOLDER not in name))
    return groups


def mark(
    output_dir: Path, work_dir: Path, first: tuple[str, ...], last: tuple[str, ...]
) -> work.Marker:
    """Note what is about to be put in place of what.

    Args:
        output_dir: The output folder, which need not be there.
        work_dir: Where the new files are.
        first: Those to rename first.
        last: Those to rename after that.
    """
    old = _weight_names(output_dir) if output_dir.is_dir() else []
    return work.Marker(
        first,
        last,
        {name: (output_dir / name).lstat().st_ino for name in old},
        {name: (work_dir / name).lstat().st_ino for name in (*first, *last)},
    )


def move_files(work_dir: Path, output_dir: Path, marker: work.Marker) -> None:
    """Rename files into place; should that fail, back again.

    Args:
        work_dir: Where they are.
        output_dir: Where they go.
        marker: Their names, in order.
    """
    moved: list[str] = []
    try:
        for folder in folders_of((*marker.first, *marker.last)):
            (output_dir / folder).mkdir(exist_ok=True)
        for group in (marker.first, marker.last):
            for name in group:
                # Replaces a symbolic link of that name; does not follow it.
                (work_dir / name).rename(output_dir / name)
                moved.append(name)
            for folder in folders_of(group):
                sync(output_dir / folder)
            sync(output_dir)
    except BaseException:
        for name in reversed(moved):
            with contextlib.suppress(OSError):
                (output_dir / name).rename(work_dir / name)
        raise


def move_folder(work_dir: Path, output_dir: Path) -> None:
    """Rename a result to an output folder that is not there; if it does not last, back again.

    Args:
        work_dir: The result.
        output_dir: Its new name.
    """
    work_dir.rename(output_dir)
    try:
        sync(output_dir.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            output_dir.rename(work_dir)
        raise


def end_publishing(output_dir: Path, home: Path, marker: work.Marker) -> bool:
    """Put in place what a run that was killed meanwhile had left half in place.

    It is left alone where somebody has put weight files there since.

    Args:
        output_dir: The output folder.
        home: The work folder.
        marker: What stands in it.

    Returns:
        Whether the result stands there as a whole.
    """
    names, result = (*marker.first, *marker.last), home / work.RESULT
    left = {name for name in names if (result / name).exists()}
    if _is_touched(output_dir, marker, left):
        work.remove_marker(home)
        return False
    if home.parent != output_dir:
        if left:
            try:
                result.rename(output_dir)
            except OSError:  # somebody has made such a folder meanwhile
                work.remove_marker(home)
                return False
            sync(output_dir.parent)
    else:
        if len(left) == len(names):  # or else this is done
            _set_aside(output_dir, home / ASIDE)
        first, last = (tuple(n for n in part if n in left) for part in (marker.first, marker.last))
        move_files(result, output_dir, dataclasses.replace(marker, first=first, last=last))
    work.remove_work(home)
    return all((output_dir / name).is_file() for name in names)


def _is_touched(output_dir: Path, marker: work.Marker, left: Collection[str]) -> bool:
    """Tell whether an output folder holds weight files that its last run has not seen or made."""
    for name in _weight_names(output_dir) if output_dir.is_dir() else []:
        known = [marker.old.get(name)]
        if name not in left:
            known.append(marker.new.get(name))
        if (output_dir / name).lstat().st_ino not in known:
            return True
    return False


def _weight_names(folder: Path) -> list[str]:
    return sorted(name for name in files_below(folder) if is_weight_file(name))


def files_below(folder: Path) -> list[str]:
    """Name what lies in a folder, and in its folder of optimizer states (no symbolic link)."""
    names = []
    for path in folder.iterdir():
        if path.name == STATES_FOLDER and path.is_dir() and not path.is_symlink():
            names += [f"{STATES_FOLDER}/{inner.name}" for inner in path.iterdir()]
        else:
            names.append(path.name)
    return names


def folders_of(file_names: Iterable[str]) -> set[str]:
    """Give the folders that files of a result lie in, the output folder itself not counted."""
    return {str(PurePosixPath(name).parent) for name in file_names} - {"."}
