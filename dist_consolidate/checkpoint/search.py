"""Shards of one tag in several folders: node-local copies side by side, and staging folders.

Every shard is taken once. Files of one name must hold the same bytes, with one exception: with
node-local storage each node saves model states of its own, of which only the run's first rank's
records ties. Those must agree in every weight.

Sources: DeepSpeed's ``use_node_local_storage`` (``engine.save_non_zero_checkpoint``);
transformers' Trainer, which saves into ``tmp-checkpoint-N`` and renames it to ``checkpoint-N``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from dist_consolidate.checkpoint.layout import ShardFile, TagFolder, in_order, list_shards
from dist_consolidate.checkpoint.model import own_source
from dist_consolidate.checkpoint.model_states import read_model_state
from dist_consolidate.checkpoint.opening import open_plain
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModelState
from dist_consolidate.errors import Caught, Problems

_CHUNK_BYTES = 4 << 20
_STAGED = re.compile(r"(tmp-)?checkpoint-(\d+)")


def with_search_dirs(found: TagFolder, search_dirs: Sequence[str]) -> TagFolder:
    """Let a tag's shards be looked for in further folders as well.

    Args:
        found: The tag folder.
        search_dirs: Folders that hold a folder of the tag's name, or have that name themselves.

    Returns:
        The tag folder that looks into all of them, present or not (they may be another node's);
        the one whose run folder has ``latest`` comes first, because the run's first rank saved it.
    """
    folders = [found.path]
    for text in search_dirs:
        folders += [path for path in candidates(text, found.tag) if path not in folders]
    folders.sort(key=lambda path: not _is_file(path.parent / "latest"))
    return dataclasses.replace(found, search=tuple(folders))


def _is_file(path: Path) -> bool:
    """Tell whether a file is there; a name that no file system takes is nowhere."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def candidates(search_dir: str, tag: str) -> list[Path]:
    """Give the folders that a search folder stands for."""
    root = Path(search_dir)
    return [root / tag, *([root] if root.name == tag else ())]


def shards_in(folders: Sequence[Path]) -> tuple[ShardFile, ...]:
    """List the shards that are seen here, each name once.

    Args:
        folders: Where to look, in order of preference.

    Returns:
        The shards, in order.
    """
    by_name: dict[str, ShardFile] = {}
    for folder in folders:
        try:
            for shard in list_shards(folder):
                by_name.setdefault(shard.name, shard)
        except (OSError, ValueError):
            continue  # a node without this folder serves no shards from it
    return in_order(by_name.values())


@dataclasses.dataclass(frozen=True, slots=True)
class Twice:
    """A shard that lies in several folders.

    Attributes:
        shard: The one that is taken.
        paths: All of them, in order of preference.
        marks: What tells the files from others, so that ranks that see the same ones share the
            work.
    """

    shard: ShardFile
    paths: tuple[Path, ...]
    marks: tuple[tuple[str, int, int, int], ...]


def find_twice(folders: Sequence[Path]) -> list[Twice]:
    """Find the shards that lie in several folders seen here; links to one file count once.

    Args:
        folders: Where to look, in order of preference.

    Returns:
        Those shards, in order.
    """
    found = []
    for shard in shards_in(folders):
        paths: list[Path] = []
        for path in (folder / shard.name for folder in folders):
            if _is_file(path) and not any(path.samefile(other) for other in paths):
                paths.append(path)
        if len(paths) > 1:
            status = [path.stat() for path in paths]
            marks = tuple((shard.name, s.st_size, s.st_mtime_ns, s.st_ino) for s in status)
            found.append(Twice(shard, tuple(paths), marks))
    return found


def compare(twice: Sequence[Twice]) -> tuple[str, ...]:
    """Check that what lies in several folders is the same in each.

    Args:
        twice: The shards to compare.

    Returns:
        Notes for the report.

    Raises:
        CheckpointError: If files of one name are of different saves; all of them are named.
    """
    problems, notes, equal = Problems(), [], 0
    for item in twice:
        first, *others = item.paths
        differing = [path for path in others if not _same_bytes(first, path)]
        equal += not differing
        for path in differing:
            with (caught := Caught()):
                difference = _difference(item.shard, first, path)
            if caught.error is not None:
                difference = f"cannot be compared: {caught.error}"
            if difference:
                problems.add(f"{first} and {path}: are one shard, but {difference}")
            else:
                notes.append(
                    f"{item.shard.name}: is in several folders, as each node saves it; the weights "
                    f"in them are equal, and {first.parent}'s was read"
                )
    if equal:
        notes.append(f"{equal} shards lie in several folders with the same content; read once")
    problems.raise_if_any(
        "shards contradict each other", "Move away those that are of another save."
    )
    return tuple(notes)


def _same_bytes(one: Path, other: Path) -> bool:
    if one.stat().st_size != other.stat().st_size:
        return False
    with open_plain(one) as left, open_plain(other) as right:
        while data := left.read(_CHUNK_BYTES):
            if data != right.read(_CHUNK_BYTES):
                return False
    return True


def _difference(shard: ShardFile, one: Path, other: Path) -> str:
    """Say why two files of different bytes are of different saves; empty if they are not."""
    if shard.role != "model" or shard.dp_rank is not None:
        return "differ in content"
    ours, theirs = read_model_state(one.parent, shard), read_model_state(other.parent, shard)
    for what in ("global_steps", "dp_world_size", "mp_world_size", "param_shapes", "buffer_names"):
        if getattr(ours, what) != getattr(theirs, what):
            return f"differ in {what}"
    return _different_tensor(ours, theirs, one.parent, other.parent)


def _different_tensor(ours: ModelState, theirs: ModelState, one: Path, other: Path) -> str:
    """Name a tensor of ``module`` that is another in the other file; buffers may be."""
    left, right = ours.module or {}, theirs.module or {}
    if left.keys() != right.keys():
        return "differ in the keys of `module`"
    mine, its = Fingerprints(one), Fingerprints(other)
    try:
        for name, entry in left.items():
            spans = entry.span, right[name].span
            if (spans[0].shape, spans[0].dtype) != (spans[1].shape, spans[1].dtype):
                return f"differ in the shape or element type of {name}"
            if name in (ours.buffer_names or ()):
                continue
            a, b = (own_source(s) for s in spans)
            if mine.of(a, a.dtype) != its.of(b, b.dtype):
                return f"differ in the values of {name}"
    finally:
        mine.close()
        its.close()
    return ""


def advice(folder: TagFolder, before: str = "") -> str:
    """Say where a missing shard was looked for, and where it may be.

    Args:
        folder: The tag folder, as seen here.
        before: What to put before it.

    Returns:
        A line, or nothing at all.
    """
    texts = []
    if len(folder.folders) > 1:
        texts.append(f"Looked for in: {', '.join(map(str, folder.folders))}.")
    root = folder.path.parent
    staged = _STAGED.fullmatch(root.name)
    if staged:
        name = f"checkpoint-{staged[2]}" if staged[1] else f"tmp-checkpoint-{staged[2]}"
        other = root.with_name(name) / folder.tag
        if other not in folder.folders and shards_in([other]):
            texts.append(
                f"{other.parent} holds shards of this tag; add --search-dir {other.parent}"
            )
    return before + " ".join(texts) if texts else ""


def _why_unfound(root: Path, tag: str) -> str:
    if shards_in([root]):
        return (
            f"holds shards, but as tag {root.name}, while {tag} is read; expected a folder of that "
            "name, or the one that holds it. If these are shards of the same save, rename the "
            "folder or link to it under that name"
        )
    return f"holds no folder {tag} with shards, and is none itself"


def refuse_unfound(search_dirs: Sequence[str], tag: str, seen: Sequence[Sequence[bool]]) -> None:
    """Refuse search folders that no rank finds the tag in.

    Args:
        search_dirs: The folders.
        tag: The tag.
        seen: For each rank and each of them, whether it finds the tag there.

    Raises:
        CheckpointError: Naming each such folder.
    """
    problems = Problems()
    for text, *found in zip(search_dirs, *seen, strict=True):
        if not any(found):
            problems.add(f"{text}: {_why_unfound(Path(text), tag)}")
    problems.raise_if_any(f"--search-dir: no shard of tag {tag} there")
