"""What each node sees of a tag: its shards, whose copy of a shard is read, and who has which.

A shard that several ranks see is one file on a shared disk, or one on each node. Which it is, inode
and times tell; copies are compared, because a node may hold what is left of another save.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from dist_consolidate.checkpoint.copies import (
    Copy,
    difference,
    is_saved_by_each_node,
    read_copy,
    read_values,
    to_be_read,
)
from dist_consolidate.checkpoint.layout import ShardFile, TagFolder, in_order
from dist_consolidate.checkpoint.search import shards_in
from dist_consolidate.doing import Doing
from dist_consolidate.errors import Caught, Problems
from dist_consolidate.runtime.control import Control
from dist_consolidate.units import numbers_text, ranks_text

# What tells a file from its copies: size, time of the last change, inode.
Mark = tuple[int, int, int]
_Seen = dict[str, tuple[ShardFile, Mark]]
# The ranks that see one and the same file.
_Ranks = tuple[int, ...]

_KINDS: Mapping[str, str] = {
    "model": "model states",
    "optim": "optimizer states",
    "expert": "expert files",
    "expert-optim": "experts' optimizer states",
    "layer": "pipeline layers",
    "swap": "swap files",
    "universal": "universal parameters",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Nodes:
    """Who sees which shards; the same on every rank.

    Attributes:
        folder: The tag folder with the shards of all nodes, and notes.
        hosts: The host of each rank.
        visible: For each rank the shards it serves.
        planner: The rank that plans: it sees the model states that are read, and as many other
            shards as any rank that does.
        marks: For each rank, what tells the shards that it sees from later ones, taken before
            anything of them was read.
    """

    folder: TagFolder
    hosts: tuple[str, ...]
    visible: tuple[frozenset[str], ...]
    planner: int
    marks: tuple[Mapping[str, Mark], ...]

    @property
    def all_visible(self) -> bool:
        """Whether every rank sees every shard."""
        return len(set(self.visible)) == 1

    def inventory(self) -> str:
        """Say what each node has: a line for each, for messages about what is missing."""
        groups: dict[tuple[str, frozenset[str]], list[int]] = defaultdict(list)
        for rank, (host, names) in enumerate(zip(self.hosts, self.visible, strict=True)):
            groups[host, names].append(rank)
        lines = [f"Every rank looked into {' and '.join(map(str, self.folder.folders))}:"]
        for (host, names), ranks in groups.items():
            mine = [shard for shard in self.folder.shards if shard.name in names]
            lines.append(f"  {host} ({ranks_text(ranks)}) has {_summary(mine)}")
        return "\n".join(lines)

    def missing_on(self) -> str:
        """Say which nodes do not see which shards; the first few of them."""
        groups: dict[tuple[str, frozenset[str]], list[int]] = defaultdict(list)
        every = frozenset().union(*self.visible)
        for rank, (host, names) in enumerate(zip(self.hosts, self.visible, strict=True)):
            groups[host, every - names].append(rank)
        texts = []
        for (host, lacks), ranks in groups.items():
            if lacks:
                more = f" and {len(lacks) - 1} more" if len(lacks) > 1 else ""
                texts.append(f"{host} ({ranks_text(ranks)}) has no {min(lacks)}{more}")
        return "; ".join(texts)


def _summary(shards: Sequence[ShardFile]) -> str:
    """Say which shards these are, by kind and rank."""
    texts = []
    for role, kind in _KINDS.items():
        mine = [shard for shard in shards if shard.role == role]
        numbers = sorted({shard.dp_rank for shard in mine if shard.dp_rank is not None})
        if role in ("model", "optim") and numbers:
            texts.append(f"{kind} of saved {ranks_text(numbers)}")
        elif role == "layer" and mine:
            layers = numbers_text(sorted({shard.layer or 0 for shard in mine}))
            texts.append(f"{kind} {layers}")
        elif mine:
            texts.append(kind if len(mine) == 1 else f"{len(mine)} {kind}")
    return ", ".join(texts) or "no shard"


def look_together(found: TagFolder, hosts: Sequence[str], control: Control) -> Nodes:
    """Let every rank list the shards it sees, and settle whose copies are read.

    Args:
        found: The tag folder; the same on every rank.
        hosts: The host of each rank.
        control: The control plane.

    Returns:
        Who sees which; the same on every rank.

    Raises:
        ConsolidateError: If files of one name contradict each other; every rank raises.
    """
    seen = _seen_by_all(_seen_here(found.folders), control)
    shares: dict[str, dict[Mark, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, mine in enumerate(seen):
        for name, (_, mark) in mine.items():
            shares[name][mark].append(rank)
    several = {
        name: [tuple(ranks) for ranks in by_mark.values()]
        for name, by_mark in sorted(shares.items())
        if len(by_mark) > 1
    }
    copies = _Copies(found, hosts, seen, several, control) if several else None
    planner = _planner(seen, {} if copies is None else copies.preferred())
    serving = {} if copies is None else copies.serving(planner)
    sets = (
        frozenset(name for name in mine if rank in serving.get(name, (rank,)))
        for rank, mine in enumerate(seen)
    )
    # A thousand ranks that see the same thousand names need them once.
    known: dict[frozenset[str], frozenset[str]] = {}
    visible = tuple(known.setdefault(names, names) for names in sets)
    shards: dict[str, ShardFile] = {}
    for rank, mine in enumerate(seen):
        for name in visible[rank]:
            shards.setdefault(name, mine[name][0])
    notes = found.notes if copies is None else (*found.notes, *copies.notes)
    folder = dataclasses.replace(found, shards=in_order(shards.values()), notes=notes)
    return Nodes(folder, tuple(hosts), visible, planner, _marks(seen))


def _marks(seen: Sequence[_Seen]) -> tuple[Mapping[str, Mark], ...]:
    known = {id(mine): {name: mark for name, (_, mark) in mine.items()} for mine in seen}
    return tuple(known[id(mine)] for mine in seen)


def _seen_here(folders: Sequence[Path]) -> _Seen:
    found: _Seen = {}
    with Doing("listing", folders[0]):
        for shard in shards_in(folders):
            try:
                status = _base(folders, shard.name).joinpath(shard.name).stat()
            except OSError:
                continue  # it has just gone
            found[shard.name] = (shard, (shard.num_bytes, status.st_mtime_ns, status.st_ino))
    return found


def _seen_by_all(mine: _Seen, control: Control) -> list[_Seen]:
    """Tell all ranks what this one sees; on a shared disk, where all see the same, only that."""
    digest = hashlib.sha256(repr(sorted(mine.items())).encode("utf-8", "surrogateescape"))
    if len(set(control.exchange(digest.digest()))) == 1:
        return [mine] * control.size
    return control.exchange(mine)


def _base(folders: Sequence[Path], name: str) -> Path:
    """Give the folder that a shard is read from here."""
    return next((folder for folder in folders if (folder / name).is_file()), folders[0])


def _planner(seen: Sequence[_Seen], preferred: Mapping[str, _Ranks]) -> int:
    """Choose who plans: who sees the model states that name the tensors, and most of the rest."""

    def rating(rank: int) -> tuple[bool, int, int]:
        names = [
            name
            for name, (shard, _) in seen[rank].items()
            if shard.role == "model" and not shard.dp_rank and not shard.mp_rank
        ]
        sees = any(rank in preferred.get(name, (rank,)) for name in names)
        return (sees, len(seen[rank]), -rank)

    return max(range(len(seen)), key=rating)


class _Copies:
    """The shards of which there are several files: compared, and chosen from.

    Attributes:
        notes: What was found, for the report.
    """

    def __init__(
        self,
        found: TagFolder,
        hosts: Sequence[str],
        seen: Sequence[_Seen],
        several: Mapping[str, Sequence[_Ranks]],
        control: Control,
    ) -> None:
        """Compare them, with all ranks.

        Args:
            found: The tag folder.
            hosts: The host of each rank.
            seen: What each rank sees.
            several: By shard, the ranks that see each of its files.
            control: The control plane.
        """
        self._found, self._hosts, self._seen, self._control = found, hosts, seen, control
        # By shard and by the ranks that see it: its file, read by the first of these ranks.
        self._copies = self._read(several)
        # Files of the same content count as one.
        self._alike: dict[str, list[_Ranks]] = {}
        for name, parts in several.items():
            by_content: dict[str, list[int]] = defaultdict(list)
            for ranks in parts:
                by_content[self._copies[name, ranks[0]].content] += ranks
            self._alike[name] = [tuple(sorted(ranks)) for ranks in by_content.values()]
        self._check()
        self.notes = self._found_notes()

    def _read(self, several: Mapping[str, Sequence[_Ranks]]) -> dict[tuple[str, int], Copy]:
        me = self._control.rank
        mine: dict[tuple[str, int], Copy] = {}
        with (caught := Caught()):
            for name, parts in several.items():
                if any(ranks[0] == me for ranks in parts):
                    shard = self._seen[me][name][0]
                    base = _base(self._found.folders, name)
                    with Doing("reading", base / name):
                        mine[name, me] = read_copy(base, shard)
        self._control.agree(caught.error)
        return {key: copy for part in self._control.exchange(mine) for key, copy in part.items()}

    def _check(self) -> None:
        """Refuse what contradicts itself; every rank comes to the same conclusion."""
        problems, pairs = Problems(), list[tuple[str, int, int]]()
        for name, (first, *others) in self._alike.items():
            for other in others:
                if not is_saved_by_each_node(self._seen[first[0]][name][0]):
                    problems.add(self._differ(name, first, other))
                    continue
                told = difference(self._copy(name, first), self._copy(name, other))
                if told:
                    problems.add(self._contradict(name, first, other, told))
                else:
                    pairs.append((name, self._reader(name, first), self._reader(name, other)))
        for name, ours, theirs, tensor in self._unequal(pairs):
            sides = self._sharers(name, ours), self._sharers(name, theirs)
            problems.add(self._contradict(name, *sides, f"the values of {tensor!r}"))
        with (caught := Caught()):
            problems.raise_if_any(
                f"{self._found.path}: nodes hold different files under one name",
                "Move away those that are of another save.",
            )
        if caught.error is not None:
            # All ranks found the same; one of them says it.
            self._control.agree(caught.error if self._control.rank == 0 else None)

    def _reader(self, name: str, ranks: _Ranks) -> int:
        return next(rank for rank in ranks if (name, rank) in self._copies)

    def _copy(self, name: str, ranks: _Ranks) -> Copy:
        return self._copies[name, self._reader(name, ranks)]

    def _sharers(self, name: str, rank: int) -> _Ranks:
        return next(ranks for ranks in self._alike[name] if rank in ranks)

    def _unequal(self, pairs: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int, str]]:
        """Compare the values of the tensors of which nothing else tells that they are equal."""
        wanted: dict[tuple[str, int], set[str]] = defaultdict(set)
        for name, one, other in pairs:
            names = to_be_read(self._copies[name, one], self._copies[name, other])
            for rank in (one, other):
                wanted[name, rank].update(names)
        if not any(wanted.values()):
            return []
        me, mine = self._control.rank, dict[str, dict[str, bytes]]()
        with (caught := Caught()):
            for (name, rank), tensors in wanted.items():
                if rank == me and tensors:
                    shard = self._seen[me][name][0]
                    base = _base(self._found.folders, name)
                    mine[name] = read_values(base, shard, sorted(tensors))
        self._control.agree(caught.error)
        values = self._control.exchange(mine)
        found = []
        for name, one, other in pairs:
            ours, theirs = values[one].get(name, {}), values[other].get(name, {})
            differing = [t for t in ours.keys() & theirs.keys() if ours[t] != theirs[t]]
            if differing:
                found.append((name, one, other, min(differing)))
        return found

    def _where(self, name: str, ranks: _Ranks) -> str:
        by_host: dict[str, list[int]] = defaultdict(list)
        for rank in ranks:
            by_host[self._hosts[rank]].append(rank)
        places = ", ".join(f"{host} ({ranks_text(mine)})" for host, mine in by_host.items())
        return f"{places} with {self._seen[ranks[0]][name][0].num_bytes:,} bytes"

    def _differ(self, name: str, one: _Ranks, other: _Ranks) -> str:
        text = f"{name}: is on {self._where(name, one)}, and another file on "
        text += self._where(name, other)
        if self._seen[one[0]][name][0].role == "swap":
            text += (
                "; with node-local storage DeepSpeed numbers the folders of swapped-out masters by "
                "the rank on its node, so that nothing tells whose they are: such checkpoints are "
                "not read"
            )
        return text

    def _contradict(self, name: str, one: _Ranks, other: _Ranks, told: str) -> str:
        return (
            f"{name}: is on {self._where(name, one)}, and on {self._where(name, other)}, and they "
            f"differ in {told}"
        )

    def preferred(self) -> dict[str, _Ranks]:
        """Give the ranks that see the copy with recorded ties, where one copy alone has them."""
        found = {}
        for name, groups in self._alike.items():
            with_ties = [ranks for ranks in groups if self._copy(name, ranks).has_ties]
            if len(groups) > 1 and len(with_ties) == 1:
                found[name] = with_ties[0]
        return found

    def serving(self, planner: int) -> dict[str, _Ranks]:
        """Give the ranks that serve each shard: those that have the planner's file, if it has one.

        What the planner reads to compare it must be of the file that it plans with.
        """
        preferred, found = self.preferred(), dict[str, _Ranks]()
        for name, groups in self._alike.items():
            own = next((ranks for ranks in groups if planner in ranks), None)
            found[name] = own or preferred.get(name) or groups[0]
        return found

    def _found_notes(self) -> tuple[str, ...]:
        equal = sum(len(groups) == 1 for groups in self._alike.values())
        notes = []
        if equal:
            what = "shard lies" if equal == 1 else "shards lie"
            notes.append(f"{equal} {what} on several nodes with the same content; read once")
        notes += [
            f"{name}: is on several nodes, as each saves it; the weights in them are equal, and "
            "one was read"
            for name, groups in self._alike.items()
            if len(groups) > 1
        ]
        return tuple(notes)
