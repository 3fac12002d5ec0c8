"""Kept checkpoints, taken apart and put together again with something hostile in one place."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from dist_consolidate.checkpoint import unpickle
from dist_consolidate.checkpoint.archive import Archive
from dist_consolidate.checkpoint.layout import find_tag, list_shards
from dist_consolidate.checkpoint.legacy import is_legacy
from tests.cases import CASES

# One checkpoint of each layout and format.
LAYOUTS = (
    "frozen_half_z1_w2",
    "kitchen_z2_groups_w4",
    "kitchen_z3_bf16_w2",
    "z0_bf16_w2",
    "z1_bf16opt_groups_w4",
    "not_zip_z2_w2",
    "not_zip_z3_w2",
    "moe_z2_bf16_w2",
    "ds0.14.5_moe_z1_w2",
    "pipe_z1_bf16_w2",
    "tp2_z1_fp32_w2",
    "universal_frozen_half_z1_w2",
    "universal_kitchen_z3_bf16_w2",
    "nested_module_z1_w2",
    "zenflow_z1_fp32_w3",
    "ds0.5.4_half_z1_w2",
    "ds0.6.1_t5real_z3_w2",
)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where something can be put: a shard of a kept checkpoint, and the way to a value in it.

    Attributes:
        case: The checkpoint.
        file: The shard, from the run folder.
        keys: Keys from dictionary to dictionary; none for the whole object.
    """

    case: str
    file: str
    keys: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The shard as it is kept."""
        return CASES[self.case].ckpt / self.file

    def __str__(self) -> str:
        return f"{self.case}/{self.file}:{'.'.join(self.keys)}"


def files_of(case: str) -> list[str]:
    """Give one shard of each role, of the tag that is read."""
    ckpt = CASES[case].ckpt
    tag = find_tag(ckpt).tag
    by_role = {}
    for shard in list_shards(ckpt / tag):
        by_role.setdefault((shard.role, shard.layer is not None), shard.name)
    return [f"{tag}/{name}" for name in by_role.values()]


@functools.cache
def places() -> tuple[Place, ...]:
    """Give all places: each key, two levels deep, of one file of each role of each layout."""
    return tuple(place for case in LAYOUTS for file in files_of(case) for place in _of(case, file))


def _of(case: str, file: str) -> Iterator[Place]:
    yield Place(case, file)
    if file.endswith(".swp"):
        return
    tree = Archive(CASES[case].ckpt / file).tree
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        yield Place(case, file, (key,))
        if key in ("optimizer_state_dict", "module", "optimizer", "ds_config"):
            inner = value if isinstance(value, Mapping) else {}
            few = list(inner) if key == "optimizer_state_dict" else list(inner)[:2]
            yield from (Place(case, file, (key, k)) for k in few if isinstance(k, str))


@functools.cache
def pickle_of(path: Path) -> bytes:
    """Give the pickle of a torch file."""
    if is_legacy(path):
        data, (start, stop) = path.read_bytes(), _legacy_bounds(path)
        return data[start:stop]
    with zipfile.ZipFile(path) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
        return archive.read(name)


def _legacy_bounds(path: Path) -> tuple[int, int]:
    stream = io.BytesIO(path.read_bytes())
    for _ in range(3):
        unpickle.load_stream(stream)
    start = stream.tell()
    unpickle.load_stream(stream)
    return start, stream.tell()


def with_pickle(path: Path, pickled: bytes) -> bytes:
    """Give a torch file's bytes with another pickle in them."""
    if is_legacy(path):
        data, (start, stop) = path.read_bytes(), _legacy_bounds(path)
        return data[:start] + pickled + data[stop:]
    return zipped({n: pickled if n.endswith("/data.pkl") else d for n, d in records(path).items()})


@functools.cache
def records(path: Path) -> dict[str, bytes]:
    """Give a torch zip file's records."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def zipped(content: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """Make a zip file."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in content.items():
            # Without a date of today, so that the same content gives the same bytes.
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return buffer.getvalue()


def copy_with(case: str, target: Path, file: str | None = None, data: bytes = b"") -> Path:
    """Copy a kept checkpoint, the one file with other content.

    Args:
        case: The checkpoint.
        target: The new run folder.
        file: The file that is another.
        data: What it holds.

    Returns:
        ``target``.
    """
    shutil.rmtree(target, ignore_errors=True)
    source = CASES[case].ckpt
    for folder, _, names in os.walk(source):
        there = target / Path(folder).relative_to(source)
        there.mkdir(parents=True)
        for name in names:
            # Nothing writes to shards; what did would be found out by the snapshots.
            shutil.copyfile(Path(folder) / name, there / name)
    if file is not None:
        (target / file).unlink()
        (target / file).write_bytes(data)
    return target


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Note what lies below a folder, so that a change to it shows."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found
