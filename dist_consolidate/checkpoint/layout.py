"""From a directory to the shards of one tag, by role and rank.

The folder may be the run folder, the tag folder itself, or what Lightning, accelerate and the
Hugging Face Trainer make of them (a run folder each, with a tag of their own). Ranks are parsed
from file names as numbers and never sorted as text.

Source: DeepSpeed's ``engine._get_*_ckpt_name`` for the names.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal

from dist_consolidate.checkpoint.archive import scan_integer
from dist_consolidate.checkpoint.opening import open_plain
from dist_consolidate.errors import CheckpointError, UnsupportedLayoutError, has_controls, listing

Role = Literal["model", "optim", "expert", "expert-optim", "layer", "swap", "universal"]

_PATTERNS: tuple[tuple[Role, re.Pattern[str]], ...] = (
    ("model", re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")),
    ("model", re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?model_states\.pt")),
    (
        "optim",
        re.compile(
            r"(?P<prefix>bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_?optim_states\.pt"
        ),
    ),
    ("expert-optim", re.compile(r"expp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")),
    (
        "expert",
        re.compile(
            r"(layer_(?P<layer>\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"
        ),
    ),
    (
        "layer",
        re.compile(r"layer_(?P<layer>\d+)(-model_(?P<mp>\d+))?-model_states\.pt"),
    ),
    ("universal", re.compile(r"zero/[^/]+/fp32\.pt")),
    ("swap", re.compile(r"offloaded_tensors/(rank(?P<dp>\d+)/)?\d+(_\d+)*\.tensor\.swp")),
)
# What checkpoint.writer hangs on a name: the writer and the number of writers.
_WRITER = re.compile(r"(?P<plain>.*)-(?P<rank>\d+)\.(?P<count>\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class ShardFile:
    """One file DeepSpeed wrote.

    Attributes:
        name: File name inside the tag folder, with slashes where it lies deeper.
        role: What it holds.
        dp_rank: Data-parallel rank, or ``None`` where the name has none (then rank 0 wrote it); of
            experts' optimizer states without ZeRO the expert-parallel rank.
        mp_rank: Model-parallel index of the name (0 where the name has none); of a pipeline
            layer its tensor-parallel rank.
        prefix: ``bf16_``, ``fp16_`` or nothing.
        num_bytes: Size.
        layer: Number of a pipeline layer, or of the layer an expert belongs to.
        expert: Global number of an expert within its layer.
        writer: Which writer of how many wrote it, where the name tells (``checkpoint.writer``).
    """

    name: str
    role: Role
    dp_rank: int | None
    mp_rank: int
    prefix: str
    num_bytes: int
    layer: int | None = None
    expert: int | None = None
    writer: tuple[int, int] | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """What it is, however its name is written."""
        return (self.role, self.dp_rank or 0, self.mp_rank, self.layer, self.expert)


@dataclasses.dataclass(frozen=True, slots=True)
class TagFolder:
    """The shards of one tag.

    Attributes:
        path: The tag folder.
        tag: Its name.
        chosen: How the tag was chosen, in words.
        shards: Its files, by role, model-parallel index and rank.
        search: All folders its files may lie in, in order of preference; empty for ``path`` alone.
        notes: What was found about files in several folders, for the report.
    """

    path: Path
    tag: str
    chosen: str
    shards: tuple[ShardFile, ...]
    search: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def folders(self) -> tuple[Path, ...]:
        """All folders its files may lie in."""
        return self.search or (self.path,)

    def file(self, name: str) -> Path:
        """Give a shard's path (see :func:`locate`); where it is missing, one in ``path``."""
        return self.path / name if not self.search else locate(self.search, name, self.path)

    def of(self, role: Role) -> tuple[ShardFile, ...]:
        """Give the shards of one role."""
        return tuple(shard for shard in self.shards if shard.role == role)

    def only(self, mp_rank: int) -> TagFolder:
        """Give the folder as one model-parallel index sees it; pipeline layers are no index's."""
        mine = (s for s in self.shards if s.mp_rank == mp_rank and s.role != "layer")
        return dataclasses.replace(self, shards=tuple(mine))


# No file system takes longer paths.
_MAX_TAG_BYTES = 4096
# What is recorded may be any number; so many missing ones tell enough.
_MAX_MISSING = 1000


def missing_numbers(count: int, present: Collection[int | None], first: int = 0) -> list[int]:
    """Give the numbers from ``first`` to ``count`` that are not there, at most a thousand.

    Args:
        count: Behind the last number.
        present: Those that are there.
        first: The first number.

    Returns:
        The missing ones, in order.
    """
    absent = (number for number in range(first, count) if number not in present)
    return list(itertools.islice(absent, _MAX_MISSING))


def is_seen(folders: Path | Sequence[Path], name: str) -> bool:
    """Tell whether a shard can be seen from here.

    Args:
        folders: The tag folder, or all folders its shards lie in.
        name: The shard.

    Returns:
        Whether it is in any of them.
    """
    every = (folders,) if isinstance(folders, Path) else folders
    return any((folder / name).is_file() for folder in every)


def parse_name(name: str, num_bytes: int = 0) -> ShardFile | None:
    """Read role and ranks off a file name; ``None`` if it is no shard's name."""
    suffix = _WRITER.fullmatch(name)
    for role, pattern in _PATTERNS:
        match = pattern.fullmatch(suffix["plain"] if suffix else name)
        if match:
            found = match.groupdict()
            ranks = {k: int(found[k]) for k in ("dp", "mp", "layer", "expert") if found.get(k)}
            return ShardFile(
                name,
                role,
                dp_rank=ranks.get("dp"),
                mp_rank=ranks.get("mp", 0),
                prefix=found.get("prefix") or "",
                num_bytes=num_bytes,
                layer=ranks.get("layer"),
                expert=ranks.get("expert"),
                writer=(int(suffix["rank"]), int(suffix["count"])) if suffix else None,
            )
    return None


def locate(folders: Sequence[Path], name: str, default: Path | None = None) -> Path:
    """Give a shard's path: in the first folder that has it here.

    Args:
        folders: Where to look, in order of preference.
        name: The shard.
        default: The folder to name where none has it; by default the first one.

    Returns:
        The path.
    """
    paths = [folder / name for folder in folders]
    return next((path for path in paths if path.is_file()), (default or folders[0]) / name)


def list_shards(folder: Path) -> tuple[ShardFile, ...]:
    """List the shards of a tag folder, in order of role, model-parallel index and rank."""
    shards = []
    for entry in (*folder.iterdir(), *_swap_files(folder), *folder.glob("zero/*/fp32.pt")):
        shard = parse_name(entry.relative_to(folder).as_posix())
        if shard is not None and entry.is_file():
            shards.append(dataclasses.replace(shard, num_bytes=entry.stat().st_size))
    return in_order(shards)


def in_order(shards: Iterable[ShardFile]) -> tuple[ShardFile, ...]:
    """Sort shards by role, model-parallel index and rank."""
    key = {role: index for index, (role, _) in enumerate(_PATTERNS)}
    order = sorted(
        shards,
        key=lambda s: (
            key[s.role], s.mp_rank, s.dp_rank or 0, s.layer or 0, s.expert or 0, s.name
        ),
    )  # fmt: skip
    return tuple(order)


def _swap_files(folder: Path) -> Iterable[Path]:
    """Give what the optimizer swapper left, in one folder or in one for each rank."""
    swapped = folder / "offloaded_tensors"
    return (*swapped.glob("*.swp"), *swapped.glob("rank*/*.swp")) if swapped.is_dir() else ()


def _holds_shards(folder: Path) -> bool:
    try:
        return any(parse_name(entry.name) for entry in folder.iterdir())
    except PermissionError:
        return False  # such as lost+found beside the tags


def _is_universal(folder: Path) -> bool:
    """Whether ds_to_universal made it: one folder per parameter below ``zero``."""
    return (folder / "zero").is_dir()


def _step(name: str) -> int:
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else -1


TagOrder = tuple[int, int, float, str]


def tag_order(tag: Path) -> TagOrder:
    """Give what tells newer tags from older ones.

    Args:
        tag: A tag folder.

    Returns:
        The step in the name; where it has none, the step that is recorded. When the folder was
        written comes last: clocks of nodes and of file servers differ.
    """
    step = _step(tag.name)
    recorded = _recorded_step(tag) if step < 0 else -1
    return (step, recorded, tag.stat().st_mtime, tag.name)


def _recorded_step(tag: Path) -> int:
    models = [shard for shard in list_shards(tag) if shard.role == "model"]
    try:
        step = scan_integer(tag / models[0].name, "global_steps") if models else None
    except CheckpointError:  # to be told if this is the tag that is read
        step = None
    return -1 if step is None else step


def _newest(tags: Sequence[Path]) -> tuple[Path, str]:
    """Pick the highest step; say how that is known."""
    if len(tags) == 1:
        return tags[0], "the only tag"
    orders = sorted(((tag_order(tag), tag) for tag in tags), reverse=True)
    (best, newest), (second, _) = orders[:2]
    if best[:2] == second[:2]:
        return newest, f"the last written of {len(tags)} tags that tell no step, or the same"
    told = "" if best[0] >= 0 else ", by the steps they record"
    return newest, f"the newest of {len(tags)} tags{told}"


def named_by_latest(root: Path) -> str | None:
    """Give the tag that ``latest`` names, whether or not it is there.

    Args:
        root: A run folder.

    Returns:
        The tag; ``None`` where no ``latest`` is, or none that can be read.
    """
    try:
        return _latest(root)
    except (OSError, ValueError, CheckpointError):
        return None


def _latest(root: Path, name: str = "latest") -> str | None:
    path = root / name
    if path.is_dir() or not (path.exists() or path.is_symlink()):
        return None
    with open_plain(path, "the name of a tag") as stream:
        content = stream.read(_MAX_TAG_BYTES + 1)
    if len(content) > _MAX_TAG_BYTES:
        raise CheckpointError(
            f"{path}: has more than {_MAX_TAG_BYTES} bytes, expected the name of a tag; name the "
            "right one with --tag"
        )
    tag = content.decode("utf-8-sig", "replace").strip().strip("\0")
    odd = has_controls(tag)
    if not tag or odd or Path(tag).is_absolute() or ".." in Path(tag).parts:
        found = f"holds {tag!r}, which is no tag (a folder beside it)" if tag else "is empty"
        raise CheckpointError(f"{path}: {found}; name the right one with --tag")
    return tag


def find_tag(checkpoint_dir: Path, tag: str | None = None) -> TagFolder:
    """Find the tag folder to read.

    Args:
        checkpoint_dir: A run folder (with or without ``latest``) or a tag folder.
        tag: The tag to read; by default what ``latest`` names, else the newest step.

    Returns:
        The folder with its shards.

    Raises:
        CheckpointError: If there is no such folder, or no shard in it.
    """
    try:
        return _find_tag(checkpoint_dir, tag)
    except OSError as error:
        reason, path = error.strerror or str(error), error.filename or checkpoint_dir
        raise CheckpointError(f"{path}: cannot be read: {reason}") from error


def _find_tag(root: Path, tag: str | None) -> TagFolder:
    if not root.is_dir():
        found = "is a file" if root.exists() else "does not exist"
        raise CheckpointError(
            f"{root}: {found}; expected the folder that DeepSpeed saved into (the one that holds "
            "`latest`) or a tag folder inside it"
        )
    tags = {entry.name: entry for entry in root.iterdir() if entry.is_dir()}
    if tag is not None:
        inside = not Path(tag).is_absolute() and ".." not in Path(tag).parts
        if inside and (root / tag).is_dir():
            return _folder(root / tag, (root / tag).name, "asked for")
        if root.resolve().name == tag and _holds_shards(root):
            return _folder(root, tag, "asked for")
        raise CheckpointError(listing(f"{root}: has no tag {tag!r}; found", _tags(tags)))
    if _holds_shards(root):
        return _folder(root, root.resolve().name, "the folder itself")
    latest = _latest(root)
    if latest is not None:
        if not (root / latest).is_dir():
            names = _tags(tags)
            raise CheckpointError(
                listing(f"{root}: `latest` names {latest!r}, which is not there; found", names)
                + "\nname the one to read with --tag"
            )
        return _folder(root / latest, latest, "named by `latest`")
    with_shards = [entry for entry in tags.values() if _holds_shards(entry)]
    # A run's own tag is read rather than what was made from one.
    own = [entry for entry in with_shards if not _is_universal(entry)]
    with_shards = own or with_shards
    made = None if own else _latest(root, "latest_universal")
    if made is not None:
        if not (root / made).is_dir():
            head = f"{root}: `latest_universal` names {made!r}, which is not there; found"
            raise CheckpointError(listing(head, _tags(tags)) + "\nname the one to read with --tag")
        return _folder(root / made, made, "named by `latest_universal`")
    if not with_shards:
        raise CheckpointError(_nothing_found(root, tags))
    newest, chosen = _newest(with_shards)
    return _folder(newest, newest.name, f"no `latest`; {chosen}")


def _tags(folders: dict[str, Path]) -> list[str]:
    names = sorted(name for name, path in folders.items() if _holds_shards(path))
    return names or ["no tag folder at all"]


def _folder(path: Path, tag: str, chosen: str) -> TagFolder:
    if has_controls(tag):
        raise CheckpointError(
            f"{path.parent}: the tag folder {path.name!r} has control characters in its name; "
            "rename it"
        )
    shards = list_shards(path)
    if not shards or all(shard.role == "universal" for shard in shards):
        raise CheckpointError(_nothing_found(path, {p.name: p for p in path.iterdir()}))
    return TagFolder(path, tag, chosen, shards)


def _nothing_found(root: Path, entries: dict[str, Path]) -> str:
    if _is_universal(root):
        raise UnsupportedLayoutError(
            f"{root}: is a universal checkpoint (ds_to_universal) without the copied model states "
            "(mp_rank_00_model_states.pt, ...), which name the model's tensors; pass the ZeRO "
            "checkpoint it was made from"
        )
    runs = sorted(n for n, p in entries.items() if p.is_dir() and (p / "latest").is_file())
    if runs:
        return listing(f"{root}: holds checkpoints; pass one of them", runs)
    return (
        f"{root}: no file named like a DeepSpeed shard (mp_rank_00_model_states.pt, "
        "zero_pp_rank_0_mp_rank_00_optim_states.pt, ...) here or one folder down; pass the folder "
        "that holds `latest`"
    )
