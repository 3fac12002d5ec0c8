"""A result that appears whole or not at all.

Files grow in a work folder on the output's file system, under names no loader looks for. When they
are complete they are synced and renamed: a new output folder in one step, files of an existing one
with the index last, because loaders start from the index. A run that dies leaves a work folder,
which the next run for the same output removes, or goes on from; one that dies while it renames
leaves a note in there, too, by which the next run ends that first.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dist_consolidate.doing import PUBLISHING, Doing
from dist_consolidate.errors import ConsolidateError, ResourceError, UsageError, listing
from dist_consolidate.filesystems import is_in_memory
from dist_consolidate.output import work
from dist_consolidate.output.identity import difference
from dist_consolidate.output.index import STATES_FOLDER, is_weight_file
from dist_consolidate.output.letter_case import check_letter_case
from dist_consolidate.output.lock import OutputLock, refuse_if_held, take
from dist_consolidate.output.placing import (
    end_publishing,
    files_below,
    folders_of,
    mark,
    move_folder,
    replace,
)
from dist_consolidate.output.work import sync
from dist_consolidate.units import format_bytes

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What this process holds, by work folder.
_locks: dict[Path, OutputLock] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Publication:
    """A result under way: plain data, so that one rank prepares it and sends it to the others.

    Attributes:
        output_dir: Where the result will stand, symbolic links resolved.
        work_dir: Where its files are written until then: a folder in the work folder.
        file_names: All files of the result, index and manifest included.
        notes: What became of earlier runs' work.
        overwrites: Whether an older result may be there, to be replaced.
        may_resume: Whether a later run may go on from here.
        is_resumed: Whether an earlier run's files are there.
        is_done: Whether an earlier run's result, the same as this one's, stands in place already.
    """

    output_dir: Path
    work_dir: Path
    file_names: tuple[str, ...]
    notes: tuple[str, ...] = ()
    overwrites: bool = False
    may_resume: bool = False
    is_resumed: bool = False
    is_done: bool = False

    @property
    def home(self) -> Path:
        """The work folder."""
        return self.work_dir.parent

    @property
    def is_new_folder(self) -> bool:
        """Whether ``work_dir`` becomes the output folder, rather than its files moving there."""
        return self.home.parent != self.output_dir

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
        if self.is_resumed:
            return path  # its size was looked at when it was taken over
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

    def sync_folders(self) -> None:
        """Wait until the files are on disk as far as that they exist.

        Raises:
            UsageError: If a folder cannot be synced.
        """
        with _explained(self.output_dir):
            for folder in folders_of(self.file_names):
                if (self.work_dir / folder).is_dir():
                    sync(self.work_dir / folder)
            for path in (self.work_dir, self.home, self.home.parent):
                sync(path)

    def publish(self, last: Sequence[str] = ()) -> None:
        """Put the finished result in place.

        In an existing folder, the old result is moved aside, first of all its index (or the file
        that needs none) and its manifest; then the new files come. Should that fail half-way, all
        goes back to where it was; should this process be killed, the next run for the same output
        ends it. On file systems shared by hosts, each writer must have synced what it wrote.

        Args:
            last: Names to rename after all others, in this order: manifest, then what loaders look
                for first.

        Raises:
            ConsolidateError: If the work folder does not hold exactly ``file_names``.
            UsageError: If a file cannot be synced, removed or renamed, or another run has taken
                this one for dead.
        """
        self._check_lock()
        first = tuple(name for name in self.file_names if name not in last)
        with _explained(self.output_dir):
            self._check_complete()
            for name in self.file_names:
                sync(self.work_dir / name)
            for folder in folders_of(self.file_names):
                sync(self.work_dir / folder)
            sync(self.work_dir)
            self._check_lock()
            with Doing(PUBLISHING, self.output_dir):
                self._put_in_place(first, tuple(last))
                self.abandon()

    def _put_in_place(self, first: tuple[str, ...], last: tuple[str, ...]) -> None:
        if not self.is_new_folder:
            # Others may have put files there meanwhile.
            _refuse_occupied(self.output_dir, self.file_names, self.overwrites)
        marker = mark(self.output_dir, self.work_dir, first, last)
        try:
            if not self.is_new_folder:
                work.write_marker(self.home, marker)
                replace(self.work_dir, self.output_dir, marker, self.home / work.ASIDE)
                return
            if self.may_resume:  # or else nobody would ask whether this very result is in place
                work.write_marker(self.home, marker)
            move_folder(self.work_dir, self.output_dir)
        except BaseException:
            with contextlib.suppress(OSError):
                work.remove_marker(self.home)
            raise

    def abandon(self) -> None:
        """Remove the work folder as far as possible; nothing in it is published any more."""
        work.remove_work(self.home)
        self.leave()

    def leave(self) -> None:
        """Let other runs have the work folder."""
        lock = _locks.pop(self.home, None)
        if lock is not None:
            lock.release()

    def _check_lock(self) -> None:
        lock = _locks.get(self.home)
        if lock is not None and not lock.is_held():
            raise UsageError(
                f"{self.output_dir}: this run did nothing for so long that another one took it for "
                f"dead and writes its own result there ({lock.path}); nothing was published"
            )

    def _check_complete(self) -> None:
        found = set(files_below(self.work_dir))
        wrong = sorted(found.symmetric_difference(self.file_names))
        if wrong:
            raise ConsolidateError(
                listing(f"{self.work_dir} lacks files of the result or holds others", wrong)
            )


def prepare(
    output_dir: Path,
    file_names: Sequence[str],
    token: str,
    *,
    overwrite: bool = False,
    identity: work.Identity | None = None,
) -> Publication:
    """Check that a result may be written, and make its work folder, or take an earlier one over.

    Work folders that earlier runs for the same output left behind are removed, except for the one
    that this run goes on from. A folder that exists already, even an empty one, is kept rather than
    replaced: it may be a mount point, a shell's current folder, or carry access rights or striping
    that its user chose.

    Args:
        output_dir: Where the result shall stand; a symbolic link to a folder is resolved.
        file_names: All files of the result, index and manifest included.
        token: Tells this run's work folder from others; letters, digits, ``_`` and ``-``.
        overwrite: Whether weight files that are there already may be replaced and removed.
        identity: What decides the bytes of the result, where work may be taken over and left.

    Returns:
        The publication, its work folder made.

    Raises:
        UsageError: If the output is no folder, cannot be written to, holds weight files without
            ``overwrite``, or holds a folder under the name of a file, or if another run lives that
            writes into it.
    """
    assert re.fullmatch(work.TOKEN, token), f"{token!r} is no token"
    assert folders_of(file_names) <= {STATES_FOLDER}, "a file name holds a folder"
    output_dir = _resolved(output_dir)
    if not any(work.is_over(home) for home in work.find_leftovers(output_dir)):
        check_output(output_dir, file_names, overwrite=overwrite)
    with _explained(output_dir):
        with Doing("making a folder at", output_dir):
            parent = output_dir if output_dir.is_dir() else output_dir.parent
            parent.mkdir(parents=True, exist_ok=True)
        lock = take(parent / work.lock_name(output_dir), output_dir)
        try:
            other = output_dir if parent != output_dir else output_dir.parent
            refuse_if_held(other / work.lock_name(output_dir), output_dir)
            publication = _Preparing(output_dir, tuple(file_names), overwrite, identity).run(token)
        except BaseException:  # a signal's, too
            lock.release()
            raise
        _locks[publication.home] = lock
    if publication.is_done:
        publication.leave()
    return publication


class _Preparing:
    """Making a work folder, while this process holds the output's lock."""

    def __init__(
        self,
        output_dir: Path,
        file_names: tuple[str, ...],
        overwrite: bool,
        identity: work.Identity | None,
    ) -> None:
        self._output_dir, self._names, self._overwrite = output_dir, file_names, overwrite
        self._identity, self._notes = identity, list[str]()

    def run(self, token: str) -> Publication:
        """Look at what is there, then make the folder."""
        work.remove_lock_litter(self._output_dir)
        is_done = self._end_earlier()
        name = f"{work.work_prefix(self._output_dir)}{token}"
        if is_done:
            # Where the work folder would be: there is none.
            return self._publication(self._output_dir / name / work.RESULT, is_done=True)
        try:
            check_output(self._output_dir, self._names, overwrite=self._overwrite)
        except UsageError as error:
            raise UsageError("\n".join([*self._notes, str(error)])) from error
        is_there = self._output_dir.is_dir()
        parent = self._output_dir if is_there else self._output_dir.parent
        home = parent / name
        with Doing("making a folder at", self._output_dir):
            if self._take_over(home):
                return self._publication(home / work.RESULT, is_resumed=True)
            try:
                home.mkdir()
                (home / work.RESULT).mkdir()
                check_letter_case(home / work.RESULT, self._output_dir, self._names)
                if self._identity is not None:
                    work.write_identity(home, self._identity)
            except BaseException:  # a signal's, too
                work.remove_work(home)
                raise
        return self._publication(home / work.RESULT)

    def _publication(
        self, work_dir: Path, *, is_resumed: bool = False, is_done: bool = False
    ) -> Publication:
        return Publication(
            self._output_dir,
            work_dir,
            self._names,
            tuple(self._notes),
            overwrites=self._overwrite,
            may_resume=self._identity is not None,
            is_resumed=is_resumed,
            is_done=is_done,
        )

    def _end_earlier(self) -> bool:
        """End what was cut off while it was published; tell whether that is this run's result."""
        is_mine = False
        for home in work.find_leftovers(self._output_dir):
            marker, found = work.read_marker(home), work.read_identity(home)
            if marker is None and work.is_over(home):
                work.remove_work(home)
            if marker is None or not end_publishing(self._output_dir, home, marker):
                continue
            self._notes.append(
                f"{self._output_dir}: an earlier run was killed while it put its complete result "
                "in place; this one has ended that"
            )
            is_mine = self._identity is not None and not difference(found, self._identity)
        return is_mine

    def _take_over(self, home: Path) -> bool:
        """Make an earlier run's work folder this run's, if one fits; remove all others."""
        is_taken, reasons = False, []
        for old in work.find_leftovers(self._output_dir):
            if not is_taken and not (reason := self._why_not(old)):
                try:
                    # Under another name: should its owner live after all, it finds nothing there.
                    old.rename(home)
                    is_taken = True
                    continue
                except OSError as error:
                    reason = f"{old}: cannot be moved to {home}: {error.strerror}"
            if not is_taken:
                reasons.append(reason)
            work.remove_work(old)
        if self._identity is not None and not is_taken:
            self._notes += [f"--resume: started anew: {reason}" for reason in reasons]
        if is_taken:
            work.keep_only(home, tuple(self._sizes))
        return is_taken

    @property
    def _sizes(self) -> Mapping[str, int]:
        assert self._identity is not None
        sizes: Mapping[str, int] = self._identity["files"]
        return sizes

    def _why_not(self, old: Path) -> str:
        if self._identity is None:
            return "not asked for"
        reason = difference(work.read_identity(old), self._identity)
        if not reason and not work.is_intact(old, self._sizes):
            reason = f"an earlier run's files are gone or cut short ({old})"
        return reason


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


def _resolved(output_dir: Path) -> Path:
    with Doing("looking at", output_dir):
        if (output_dir.exists() or output_dir.is_symlink()) and not output_dir.is_dir():
            raise UsageError(
                f"{output_dir} exists and is not a folder; choose another output folder"
            )
        return output_dir.resolve()


def _check_output(output_dir: Path, file_names: Sequence[str], overwrite: bool) -> Path:
    output_dir = _resolved(output_dir)
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
        num_there_bytes = work.allocated_bytes(existing)
        while not existing.exists():
            existing = existing.parent
        status = os.statvfs(existing)
    # What earlier runs have left there is used or removed.
    num_free_bytes = status.f_bavail * status.f_frsize + num_there_bytes
    if num_bytes <= num_free_bytes:
        return
    kept = " (files to be overwritten stay until the new ones are complete)" if overwrite else ""
    raise ResourceError(
        f"{path} needs {format_bytes(num_bytes)} ({num_bytes:,} bytes), but its file system has "
        f"{format_bytes(num_free_bytes)} ({num_free_bytes:,} bytes) free{kept}; free some space or "
        "choose another output folder"
    )


def _refuse_occupied(output_dir: Path, file_names: Sequence[str], overwrite: bool) -> None:
    paths = [
        output_dir / name
        for name in sorted(files_below(output_dir))
        if is_weight_file(name) or name in file_names
    ]
    states = output_dir / STATES_FOLDER
    odd = states.is_symlink() or (states.exists() and not states.is_dir())
    if odd and folders_of(file_names):
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
