"""Whether the shards are what was saved, and were left alone: told once everything has been read.

Torch's zip files hold a CRC-32 of each record. What the ranks noted while they read is put together
on the rank that publishes and held against it. Padding, which is not part of any tensor, is read
now where there is little of it. And a shard that has other times, or is another file, than when its
metadata was read may have given half of one save and half of another.
"""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from dist_consolidate.checkpoint.fragments import Fragments, Read
from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.model import Source
from dist_consolidate.checkpoint.records import Judged, Record, judge, read_records
from dist_consolidate.checkpoint.shards import ShardReader
from dist_consolidate.crc_pieces import CrcRange, ReadCrcs
from dist_consolidate.errors import Caught, Problems, listed
from dist_consolidate.filesystems import has_lasting_inodes
from dist_consolidate.nodes import Mark
from dist_consolidate.plan.plan import Plan
from dist_consolidate.planning import Planned, on_rank
from dist_consolidate.runtime.control import Control
from dist_consolidate.units import format_bytes, plural

# What is left of a record is read for its checksum's sake if it is no more than this, or than this
# part of it.
_MAX_REST_BYTES, _MAX_REST_PART = 1 << 20, 0.05

_Ranges = Mapping[str, Sequence[CrcRange]]
# By rank, what to read: file, first byte, behind the last byte.
_Todo = list[list[tuple[str, int, int]]]


@dataclasses.dataclass(frozen=True, slots=True)
class SourceCheck:
    """What was checked.

    Attributes:
        num_records: Records whose checksum is right.
        num_bytes: Their length.
        notes: What was not checked.
    """

    num_records: int = 0
    num_bytes: int = 0
    notes: tuple[str, ...] = ()


def check_source(
    planned: Planned, policy: str, control: Control, publisher: int, read: _Ranges
) -> SourceCheck:
    """Check the shards on all ranks.

    Args:
        planned: The plan, and the shards as they were before.
        policy: ``auto``, ``always`` or ``never``: which records' checksums are looked at.
        control: The control plane.
        publisher: The rank that gets to know all.
        read: What this rank has read.

    Returns:
        What was checked; the same on every rank.

    Raises:
        CheckpointError: If a record is not what was saved, or a shard was changed; every rank
            raises.
    """
    rank, owners = control.rank, {}
    if policy != "never":
        owners = _deal_out(sorted(files_of(planned.plan)), planned.visible)
    tables: dict[str, tuple[Record, ...]] = {}
    changed: list[str] = []
    with (caught := Caught()):
        changed = _changed(planned, rank, control.size)
        mine = [name for name, owner in owners.items() if owner == rank]
        # A shard that was changed may be no zip file any more.
        tables = {} if changed else {name: read_records(_path(planned, name)) for name in mine}
    control.agree(caught.error)
    told = control.gather((read, tables, changed), publisher)
    check = _Check(planned, policy, owners, control.size)
    todo = on_rank(control, publisher, lambda: check.begin(told))
    if any(todo):
        rest: _Ranges = {}
        with caught:
            rest = _read_rest(planned, todo[rank])
        control.agree(caught.error)
        rests = control.gather(rest, publisher)
        return on_rank(control, publisher, lambda: check.end(rests))
    return on_rank(control, publisher, lambda: check.end(()))


class _Check:
    """What the publishing rank finds out of what all ranks tell."""

    def __init__(
        self, planned: Planned, policy: str, owners: Mapping[str, int], num_ranks: int
    ) -> None:
        self._planned, self._policy = planned, policy
        self._owners, self._num_ranks = owners, num_ranks
        self._ranges: dict[str, list[CrcRange]] = defaultdict(list)
        self._records: dict[str, tuple[Record, ...]] = {}
        self._strided = strided_places(planned.plan)

    def begin(
        self, told: Sequence[tuple[_Ranges, Mapping[str, tuple[Record, ...]], Sequence[str]]]
    ) -> _Todo:
        """Take what the ranks have read, and say what is to be read besides.

        Raises:
            CheckpointError: If a shard was changed.
        """
        problems = Problems()
        for read, tables, changed in told:
            self._take(read)
            self._records |= tables
            for text in changed:
                problems.add(text)
        problems.raise_if_any(
            f"{self._planned.folder.path}: shards were changed while they were being read",
            "Nothing was published. Start again when nobody writes there any more.",
        )
        todo: _Todo = [[] for _ in range(self._num_ranks)]
        for file, record, judged in self._judged():
            if self._is_worth_it(file, record, judged):
                todo[self._owners[file]] += [(file, *gap) for gap in judged.gaps]
        return todo

    def end(self, rests: Sequence[_Ranges]) -> SourceCheck:
        """Take what was read besides, and judge.

        Raises:
            CheckpointError: If a record has another checksum than when it was saved.
        """
        for rest in rests:
            self._take(rest)
        problems, checked, partly = Problems(), list[Record](), list[str]()
        for file, record, judged in self._judged():
            if judged.crc is None:
                read_bytes = record.num_bytes - judged.num_gap_bytes
                partly.append(
                    f"{record.name} of {file} ({format_bytes(read_bytes)} of "
                    f"{format_bytes(record.num_bytes)})"
                )
            elif judged.crc == record.crc:
                checked.append(record)
            else:
                problems.add(self._mismatch(file, record, judged.crc))
        problems.raise_if_any(
            f"{self._planned.folder.path}: shards hold other bytes than were saved",
            "Nothing was published. Copy these files again from where they were saved"
            f"{_salvage_hint(self._planned.folder)}.",
        )
        return SourceCheck(
            len(checked), sum(record.num_bytes for record in checked), _partly_notes(partly)
        )

    def _take(self, ranges: _Ranges) -> None:
        for file, found in ranges.items():
            self._ranges[file] += found

    def _judged(self) -> Iterator[tuple[str, Record, Judged]]:
        """Judge the records of which anything was read."""
        for file, records in sorted(self._records.items()):
            found = sorted(self._ranges[file], key=lambda r: (r.start_bytes, -r.stop_bytes))
            for record in records:
                judged = judge(record, found)
                if judged.is_touched or self._is_strided(file, record):
                    yield file, record, judged

    def _is_strided(self, file: str, record: Record) -> bool:
        """Tell whether anything of a record is gathered element by element, unchecked so far."""
        return any(
            low < record.stop_bytes and record.start_bytes < high
            for low, high in self._strided.get(file, ())
        )

    def _is_worth_it(self, file: str, record: Record, judged: Judged) -> bool:
        most = max(_MAX_REST_BYTES, int(record.num_bytes * _MAX_REST_PART))
        # Next to gathering elements one by one, reading them in a row costs little.
        wanted = self._policy == "always" or self._is_strided(file, record)
        return wanted or judged.num_gap_bytes <= most

    def _mismatch(self, file: str, record: Record, crc: int) -> str:
        plan = self._planned.plan
        names = listed(list(tensors_in(plan, file, record.start_bytes, record.stop_bytes)))
        return (
            f"{_path(self._planned, file)}{_rank_text(self._planned.folder, file)}: record "
            f"{record.name} ({record.num_bytes:,} bytes from byte {record.start_bytes:,} on) has "
            f"the CRC-32 {crc:08x}, but {record.crc:08x} when it was saved; it fills {names}"
        )


def _salvage_hint(folder: TagFolder) -> str:
    """Mention ``--salvage`` where it helps: for dense models."""
    dense = all(shard.role in ("model", "optim") and not shard.mp_rank for shard in folder.shards)
    return "; if that is all there is, --salvage writes what is intact" if dense else ""


def _partly_notes(partly: Sequence[str]) -> tuple[str, ...]:
    if not partly:
        return ()
    return (
        f"{plural(len(partly), 'record')} of shards were read in part only, and not held against "
        f"their CRC-32 (--check-crc always does): {listed(partly, 3)}",
    )


def _path(planned: Planned, file: str) -> Path:
    return planned.folder.file(file)


def _rank_text(folder: TagFolder, file: str) -> str:
    """Name the rank that saved a shard, where its name tells."""
    shard = next((shard for shard in folder.shards if shard.name == file), None)
    return "" if shard is None or shard.dp_rank is None else f" (of rank {shard.dp_rank})"


def _deal_out(files: Sequence[str], visible: Sequence[frozenset[str]]) -> dict[str, int]:
    """Choose for each file a rank that sees it, by turns."""
    owners = {}
    for index, file in enumerate(files):
        able = [rank for rank, names in enumerate(visible) if file in names]
        if able:
            owners[file] = able[index % len(able)]
    return owners


def _changed(planned: Planned, rank: int, num_ranks: int) -> list[str]:
    """Look at shards again: on a shared disk a part of them, else all that this rank sees."""
    marks = planned.nodes.marks[rank]
    if planned.all_visible:
        names = [s.name for s in planned.folder.shards][rank::num_ranks]
    else:
        names = sorted(planned.visible[rank])
    found = []
    for name in names:
        path, before = _path(planned, name), marks.get(name)
        now = _mark(path)
        if before is not None and now != before and not _is_renumbered(path, before, now):
            what = "it is gone" if now is None else _difference(before, now)
            found.append(f"{path}{_rank_text(planned.folder, name)}: {what}")
    return found


def _mark(path: Path) -> Mark | None:
    """Give size, time and inode; opening it asks a network file system for them anew."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return status.st_size, status.st_mtime_ns, status.st_ino


def _is_renumbered(path: Path, before: Mark, now: Mark | None) -> bool:
    """Whether nothing but the inode is another one, where that means nothing."""
    return now is not None and before[:2] == now[:2] and not has_lasting_inodes(path)


def _difference(before: Mark, now: Mark) -> str:
    if before[2] != now[2]:
        return "it is another file now (it was replaced)"
    if before[0] != now[0]:
        return f"it had {before[0]:,} bytes when the run began and has {now[0]:,} now"
    return "it was written to after the run began"


def _read_rest(planned: Planned, todo: Iterable[tuple[str, int, int]]) -> _Ranges:
    """Read ranges for the sake of their checksums."""
    crcs = ReadCrcs()
    reader = ShardReader(planned.folder.folders, {}, crcs)
    try:
        for file, start, stop in todo:
            for _ in reader.read_again(file, start, stop - start):
                pass  # it notes what it reads
    finally:
        reader.close()
    return crcs.ranges()


def files_of(plan: Plan) -> set[str]:
    """Name the shards that a plan reads from."""
    files: set[str] = set()
    groups: set[int] = set()
    waiting: dict[int, Source] = {id(t.source): t.source for t in plan.tensors}
    while waiting:
        _, source = waiting.popitem()
        waiting |= {id(block.source): block.source for block in source.blocks}
        if source.span is not None:
            files.add(source.span.file)
        elif source.slot is not None:
            groups.add(source.slot.group)
    return files.union(*({part.file for part in plan.groups[group].parts} for group in groups))


def tensors_in(plan: Plan, file: str, start_bytes: int, stop_bytes: int) -> Iterator[str]:
    """Name the tensors that are read from a range of a shard, at least in part."""
    fragments = Fragments(plan.groups)
    for tensor in plan.tensors:
        if file in fragments.files(tensor.source) and any(
            low < stop_bytes and high > start_bytes
            for low, high in _places(fragments, tensor.source, file)
        ):
            yield f"{tensor.name} ({tensor.state})" if tensor.state else tensor.name


def _places(fragments: Fragments, source: Source, file: str) -> Iterator[tuple[int, int]]:
    for read in fragments.reads(source, 0, source.num_numel):
        name, start, stop = read.place()
        if name == file:
            yield start, stop


def strided_places(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    """Give, by shard, the ranges that tensors lie in which are read element by element."""
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    waiting: dict[int, Source] = {id(t.source): t.source for t in plan.tensors}
    while waiting:
        _, source = waiting.popitem()
        waiting |= {id(block.source): block.source for block in source.blocks}
        if source.span is not None and not source.span.is_contiguous:
            file, start, stop = Read(0, None, source.span).place()
            found[file].append((start, stop))
    return found
