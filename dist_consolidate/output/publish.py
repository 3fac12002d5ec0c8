"""A result that appears whole or not at all.

Files grow in a work folder on the output's file system, under names no loader looks for. When they
are complete they are synced and renamed: a new output folder in one step, files of an existing one
with the index last, because loaders start from the index. A run that dies leaves a work folder,
which the next run for the same output removes.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from dist_consolidate.doing import PUBLISHING, Doing
from dist_consolidate.errors import ConsolidateError, ResourceError, UsageError, listing
from dist_consolidate.filesystems import is_in_memory
from dist_consolidate.output.index import (
    MANIFEST_NAME,
    STATES_FOLDER,
    is_index_file,
    is_weight_file,
)
from dist_consolidate.units import format_bytes

_TOKEN = r"[A-Za-z0-9_-]+"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Descriptors that hold this process's work folders, so that no other run takes them for left over.
_locks: dict[Path, int] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Publication:
    """A result under way: plain data, so that one rank prepares it and sends it to the others.

    Attributes:
        output_dir: Where the result will stand, symbolic links resolved.
        work_dir: Where its files are written until then.
        file_names: All files of the result, index and manifest included.
    """

    output_dir: Path
    work_dir: Path
    file_names: tuple[str, ...]

    @property
    def is_new_folder(self) -> bool:
        """Whether the work folder becomes the output folder, rather than its files moving there."""
        return self.work_dir.parent != self.output_dir

    def create_file(self, name: str, num_bytes: int) -> Path:
        """Create a file of the result at its full size, its space reserved where that is possible.

        Args:
            name: One of ``file_names``.
            num_bytes: Size of the finished file.

        Returns:
            The file's path in the work folder, for any process to write to.

        Raises:
            ResourceError: If the file system has no room for it.
            UsageError: If it cannot be written for another reason.
        """
        assert name in self.file_names, f"{name} was not announced"
        path = self.work_dir / name
        with _explained(path):
            path.parent.mkdir(exist_ok=True)
        with _explained(path), Doing("reserving", path), path.open("xb") as file:
            if not is_in_memory(path):
                _reserve(file.fileno(), num_bytes)
            file.truncate(num_bytes)
        return path

    def write_file(self, name: str, data: bytes) -> None:
        """Create a small file of the result whole, such as the index.

        Args:
            name: One of ``file_names``.
            data: Its content.

        Raises:
            ResourceError: If the file system has no room for it.
            UsageError: If it cannot be written for another reason.
        """
        assert name in self.file_names, f"{name} was not announced"
        path = self.work_dir / name
        with _explained(path), Doing("writing", path):
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)

    def publish(self, last: Sequence[str] = ()) -> None:
        """Put the finished result in place.

        In an existing folder, first the old index and manifest go, then old weight files that the
        result does not replace, then the new files come. Should that fail half-way, the new files
        move back to the work folder. On file systems shared by hosts, each writer must have synced
        what it wrote.

        Args:
            last: Names to rename after all others, in this order: manifest, then index.

        Raises:
            ConsolidateError: If the work folder does not hold exactly ``file_names``.
            UsageError: If a file cannot be synced, removed or renamed.
        """
        self._check_complete()
        with _explained(self.output_dir):
            for name in self.file_names:
                _sync(self.work_dir / name)
            for folder in _folders(self.file_names):
                _sync(self.work_dir / folder)
            _sync(self.work_dir)
            with Doing(PUBLISHING, self.output_dir):
                if self.is_new_folder:
                    self.work_dir.rename(self.output_dir)
                    _sync(self.output_dir.parent)
                    self._unlock()
                else:
                    self._remove_stale()
                    self._move_files([n for n in self.file_names if n not in last], last)

    def abandon(self) -> None:
        """Remove the work folder as far as possible; nothing of it was published."""
        shutil.rmtree(self.work_dir, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        descriptor = _locks.pop(self.work_dir, None)
        if descriptor is not None:
            os.close(descriptor)

    def _check_complete(self) -> None:
        found = set(_files_below(self.work_dir))
        wrong = sorted(found.symmetric_difference(self.file_names))
        if wrong:
            raise ConsolidateError(
                listing(f"{self.work_dir} lacks files of the result or holds others", wrong)
            )

    def _remove_stale(self) -> None:
        old_names = _weight_names(self.output_dir)
        # Without index or manifest nobody takes a mixture of old and new files for a result.
        entry_points = [n for n in old_names if is_index_file(n) or n == MANIFEST_NAME]
        stale = [n for n in old_names if n not in (*self.file_names, *entry_points)]
        for group in (entry_points, stale):
            for name in group:
                (self.output_dir / name).unlink()
            for folder in _folders(group):
                _sync(self.output_dir / folder)
                with contextlib.suppress(OSError):  # where others have put files, it stays
                    (self.output_dir / folder).rmdir()
            _sync(self.output_dir)

    def _move_files(self, first: Sequence[str], last: Sequence[str]) -> None:
        moved: list[str] = []
        try:
            for folder in _folders(self.file_names):
                (self.output_dir / folder).mkdir(exist_ok=True)
            for group in (first, last):
                for name in group:
                    # Replaces a symbolic link of that name; does not follow it.
                    (self.work_dir / name).rename(self.output_dir / name)
                    moved.append(name)
                for folder in _folders(group):
                    _sync(self.output_dir / folder)
                _sync(self.output_dir)
        except BaseException:
            for name in reversed(moved):
                with contextlib.suppress(OSError):
                    (self.output_dir / name).rename(self.work_dir / name)
            raise
        self.abandon()


def prepare(
    output_dir: Path, file_names: Sequence[str], token: str, *, overwrite: bool = False
) -> Publication:
    """Check that a result may be written, and make its work folder.

    Work folders that earlier runs for the same output left behind are removed. A folder that
    exists already, even an empty one, is kept rather than replaced: it may be a mount point, a
    shell's current folder, or carry access rights or striping that its user chose.

    Args:
        output_dir: Where the result shall stand; a symbolic link to a folder is resolved.
        file_names: All files of the result, index and manifest included.
        token: Tells this run's work folder from others; letters, digits, ``_`` and ``-``.
        overwrite: Whether weight files that are there already may be replaced and removed.

    Returns:
        The publication, its work folder made and empty.

    Raises:
        UsageError: If the output is no folder, cannot be written to, holds weight files without
            ``overwrite``, or holds a folder under the name of a file.
    """
    assert re.fullmatch(_TOKEN, token), f"{token!r} is no token"
    assert _folders(file_names) <= {STATES_FOLDER}, "a file name holds a folder"
    output_dir = check_output(output_dir, file_names, overwrite=overwrite)
    with _explained(output_dir), Doing("making a folder at", output_dir):
        parent = output_dir if output_dir.is_dir() else output_dir.parent
        parent.mkdir(parents=True, exist_ok=True)
        _remove_old_work(output_dir)
        work_dir = parent / f"{_work_prefix(output_dir)}{token}"
        publication = Publication(output_dir, work_dir, tuple(file_names))
        try:
            work_dir.mkdir()
            _locks[work_dir] = _lock(work_dir)
        except BaseException:  # a signal's, too
            publication.abandon()
            raise
    return publication


def check_output(output_dir: Path, file_names: Sequence[str], *, overwrite: bool = False) -> Path:
    """Check that a result may be written to a folder; nothing is changed.

    Args:
        output_dir: As :func:`prepare`.
        file_names: As :func:`prepare`.
        overwrite: As :func:`prepare`.

    Returns:
        The folder, symbolic links resolved.

    Raises:
        UsageError: As :func:`prepare`, except for what only writing can tell.
    """
    with Doing("looking at", output_dir):
        return _check_output(output_dir, file_names, overwrite)


def _check_output(output_dir: Path, file_names: Sequence[str], overwrite: bool) -> Path:
    if (output_dir.exists() or output_dir.is_symlink()) and not output_dir.is_dir():
        raise UsageError(f"{output_dir} exists and is not a folder; choose another output folder")
    output_dir = output_dir.resolve()
    with _explained(output_dir):
        if output_dir.is_dir():
            _refuse_occupied(output_dir, file_names, overwrite)
    return output_dir


def check_free_space(path: Path, num_bytes: int, *, overwrite: bool = False) -> None:
    """Check that a result fits before its first byte is written.

    Args:
        path: Where it will be written; need not exist yet.
        num_bytes: Size of all its files together.
        overwrite: Whether older files are there, which count because they stay until the end.

    Raises:
        ResourceError: If the file system that holds ``path`` has less space for this user.
    """
    with Doing("looking at", path):
        existing = path.resolve()
        while not existing.exists():
            existing = existing.parent
        status = os.statvfs(existing)
    num_free_bytes = status.f_bavail * status.f_frsize
    if num_bytes <= num_free_bytes:
        return
    kept = " (files to be overwritten stay until the new ones are complete)" if overwrite else ""
    raise ResourceError(
        f"{path} needs {format_bytes(num_bytes)} ({num_bytes:,} bytes), but its file system has "
        f"{format_bytes(num_free_bytes)} ({num_free_bytes:,} bytes) free{kept}; free some space or "
        "choose another output folder"
    )


def _weight_names(folder: Path) -> list[str]:
    return sorted(name for name in _files_below(folder) if is_weight_file(name))


def _files_below(folder: Path) -> list[str]:
    """Name what lies in a folder, and in its folder of optimizer states (no symbolic link)."""
    names = []
    for path in folder.iterdir():
        if path.name == STATES_FOLDER and path.is_dir() and not path.is_symlink():
            names += [f"{STATES_FOLDER}/{inner.name}" for inner in path.iterdir()]
        else:
            names.append(path.name)
    return names


def _folders(file_names: Iterable[str]) -> set[str]:
    """Give the folders that files of a result lie in, the output folder itself not counted."""
    return {str(PurePosixPath(name).parent) for name in file_names} - {"."}


def _refuse_occupied(output_dir: Path, file_names: Sequence[str], overwrite: bool) -> None:
    paths = [
        output_dir / name
        for name in sorted(_files_below(output_dir))
        if is_weight_file(name) or name in file_names
    ]
    states = output_dir / STATES_FOLDER
    odd = states.is_symlink() or (states.exists() and not states.is_dir())
    if odd and _folders(file_names):
        raise UsageError(f"{states}: is no folder, but the optimizer's states go there; move it")
    folders = [path.name for path in paths if path.is_dir() and not path.is_symlink()]
    if folders:
        raise UsageError(
            listing(f"{output_dir} holds folders where files belong", folders, "Move them away.")
        )
    if paths and not overwrite:
        advice = "Pass --overwrite to replace them, or choose another output folder."
        names = [str(path.relative_to(output_dir)) for path in paths]
        raise UsageError(listing(f"{output_dir} holds weight files already", names, advice))


def _work_prefix(output_dir: Path) -> str:
    return f".{output_dir.name}.consolidating-"


def _remove_old_work(output_dir: Path) -> None:
    pattern = re.compile(re.escape(_work_prefix(output_dir)) + _TOKEN)
    for folder in (output_dir, output_dir.parent):
        # A parent that may not be listed, or another user's leftovers, stop no one.
        with contextlib.suppress(OSError):
            for path in list(folder.iterdir()):
                if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                    if _is_locked(path):
                        raise UsageError(
                            f"{output_dir}: another run is writing its result there ({path}); "
                            "wait for it, or choose another output folder"
                        )
                    shutil.rmtree(path, ignore_errors=True)


def _lock(folder: Path) -> int:
    """Hold a folder, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _is_locked(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system that cannot lock a folder (NFS)
    finally:
        os.close(descriptor)
    return False


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Reserve disk space for a file where the file system can.

    ``os.posix_fallocate`` would do, but where a file system cannot reserve space (NFS before 4.2)
    the C library writes to every block instead, which doubles the time to write; see the notes of
    posix_fallocate(3).
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None or num_bytes == 0:
        return
    start, length = ctypes.c_int64(0), ctypes.c_int64(num_bytes)
    if fallocate(descriptor, 0, start, length) != 0 and ctypes.get_errno() in _NO_SPACE:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with Doing("syncing", path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what the operating system refuses into an error that names the path."""
    try:
        yield
    except OSError as error:
        cause = f"cannot write {path}: {error.strerror} ({error.filename or path})"
        if error.errno in _NO_SPACE:
            raise ResourceError(f"{cause}; free space or choose another output folder") from error
        raise UsageError(f"{cause}; check its access rights or choose another folder") from error
