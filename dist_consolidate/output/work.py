"""Work folders: where a result grows, what earlier runs have left, and what of it can be used.

A work folder lies beside the output folder, or in it where that exists, under a hidden name that
says whose it is. In it are

* ``result``: the files of the result, which are renamed into place in the end;
* ``older``: those that they replace, until that is done;
* ``identity.json``, where the run may be resumed: everything that decides what bytes the result
  has (see :mod:`dist_consolidate.resuming`), and beside it the journals of what is written;
* ``publishing.json``, once the result is complete and is being put in place: whatever happens then,
  the next run for the same output completes that first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_consolidate.doing import Doing

RESULT, ASIDE = "result", "older"
TOKEN = r"[A-Za-z0-9_-]+"
_TRIES, _PAUSE_SEC = 5, 0.05
_IDENTITY, _MARKER = "identity.json", "publishing.json"

Identity = Mapping[str, Any]


def work_prefix(output_dir: Path) -> str:
    """Give what the names of an output's work folders begin with."""
    return f".{output_dir.name}.consolidating-"


def lock_name(output_dir: Path) -> str:
    """Name the file that a run for an output holds."""
    return f".{output_dir.name}.consolidating.lock"


def find_leftovers(output_dir: Path) -> list[Path]:
    """Find the work folders of an output, in it and beside it.

    Args:
        output_dir: The output folder, symbolic links resolved; need not exist.

    Returns:
        The folders. Those that cannot be listed stop no one.
    """
    pattern = re.compile(re.escape(work_prefix(output_dir)) + TOKEN)
    found = []
    for folder in (output_dir, output_dir.parent):
        with contextlib.suppress(OSError):
            found += [
                path
                for path in sorted(folder.iterdir())
                if pattern.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
            ]
    return found


def remove_work(home: Path) -> None:
    """Remove a work folder as far as possible."""
    # The journal goes first: what is half removed must not look as if it could be gone on from.
    for name in (_IDENTITY, _MARKER):
        with contextlib.suppress(OSError):
            (home / name).unlink()
    # Other ranks may just be ending, and claim what they have written.
    for _ in range(_TRIES):
        shutil.rmtree(home, ignore_errors=True)
        if not home.exists():
            return
        time.sleep(_PAUSE_SEC)


def remove_lock_litter(output_dir: Path) -> None:
    """Remove what a run that was killed while it took the lock has left."""
    pattern = re.compile(re.escape(lock_name(output_dir)) + r"-[0-9a-f]{32}")
    for folder in (output_dir, output_dir.parent):
        with contextlib.suppress(OSError):
            for path in list(folder.iterdir()):
                if pattern.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    path.unlink()


def allocated_bytes(output_dir: Path) -> int:
    """Tell how much disk space the work folders of an output take; they are used or removed."""
    total = 0
    for home in find_leftovers(output_dir):
        for folder, _, names in os.walk(home):
            for name in names:
                with contextlib.suppress(OSError):
                    total += Path(folder, name).lstat().st_blocks * 512
    return total


def identity_digest(identity: Identity) -> str:
    """Digest an identity."""
    return hashlib.sha256(_as_json(identity)).hexdigest()


def write_identity(home: Path, identity: Identity) -> None:
    """Put an identity into a work folder, on disk."""
    _write_safely(home / _IDENTITY, _as_json(identity))


def read_identity(home: Path) -> Identity | None:
    """Give the identity in a work folder; ``None`` where there is none, or not a whole one."""
    found = _read_json(home / _IDENTITY)
    return found if isinstance(found, dict) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Marker:
    """What was being published.

    Attributes:
        first: Files to rename first.
        last: Files to rename after those, in this order.
        old: Inode of each weight file that was in the output folder.
        new: Inode of each file of the result.
    """

    first: tuple[str, ...]
    last: tuple[str, ...]
    old: Mapping[str, int]
    new: Mapping[str, int]


def write_marker(home: Path, marker: Marker) -> None:
    """Note, on disk, that the result in a work folder is complete and is being put in place."""
    _write_safely(home / _MARKER, _as_json(dataclasses.asdict(marker)))


def read_marker(home: Path) -> Marker | None:
    """Give what was being published from a work folder; ``None`` where nothing was."""
    found = _read_json(home / _MARKER)
    keys = {field.name for field in dataclasses.fields(Marker)}
    if not isinstance(found, dict) or found.keys() != keys:
        return None
    lists = (found["first"], found["last"])
    if not all(isinstance(names, list) and all(map(_is_text, names)) for names in lists):
        return None
    return Marker(tuple(found["first"]), tuple(found["last"]), found["old"], found["new"])


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def is_over(home: Path) -> bool:
    """Tell whether the run that left a work folder was publishing, or had published already."""
    return read_marker(home) is not None or not (home / RESULT).exists()


def remove_marker(home: Path) -> None:
    """Take the note back."""
    (home / _MARKER).unlink(missing_ok=True)
    sync(home)


def is_intact(home: Path, sizes: Mapping[str, int]) -> bool:
    """Tell whether the files of a result are there with their sizes.

    Args:
        home: The work folder.
        sizes: Size in bytes of each file, by its path in the result.
    """
    for name, num_bytes in sizes.items():
        path = home / RESULT / name
        if path.is_symlink() or not path.is_file() or path.stat().st_size != num_bytes:
            return False
    return True


def keep_only(home: Path, file_names: Sequence[str]) -> None:
    """Remove from a result under way all but some files: what was made of them at its end."""
    result = home / RESULT
    for path in list(result.rglob("*")):
        if not path.is_dir() and path.relative_to(result).as_posix() not in file_names:
            path.unlink()


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with Doing("syncing", path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _as_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode("ascii")


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _write_safely(path: Path, data: bytes) -> None:
    """Write a file that is there whole or does not parse, also after a power loss."""
    with Doing("writing", path), path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    sync(path.parent)
