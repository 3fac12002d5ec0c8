"""Going on from an earlier run: which checkpoint that was for, and what it had finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dist_consolidate._version import __version__
from dist_consolidate.checkpoint.layout import locate
from dist_consolidate.errors import Caught
from dist_consolidate.output.identity import ShardStat, make_identity
from dist_consolidate.output.layout import FileLayout
from dist_consolidate.output.publish import Publication
from dist_consolidate.output.work import Identity, identity_digest
from dist_consolidate.planning import Planned
from dist_consolidate.runtime.control import Control
from dist_consolidate.runtime.journal import JournalPlace, has_claims, read_journals
from dist_consolidate.units import format_bytes


def look_at_shards(
    planned: Planned, control: Control, publisher: int
) -> list[dict[str, ShardStat]]:
    """Look at the shards that each rank serves.

    Args:
        planned: The plan.
        control: The control plane.
        publisher: The rank that gets to know.

    Returns:
        On that rank for each rank what it sees of its shards; elsewhere nothing.
    """
    found: dict[str, ShardStat] = {}
    with (caught := Caught()):
        for name in planned.visible[control.rank]:
            stat = locate(planned.folder.folders, name).stat()
            found[name] = stat.st_size, stat.st_mtime_ns, stat.st_ino
    control.agree(caught.error)
    return control.gather(found, publisher)


def identify(
    planned: Planned,
    layouts: Sequence[FileLayout],
    options: Mapping[str, object],
    seen: Sequence[Mapping[str, ShardStat]],
) -> Identity:
    """Put together what decides the bytes of this run's result.

    Args:
        planned: The plan.
        layouts: Byte layout of each output file.
        options: The options that shape the result.
        seen: For each rank what it sees of its shards.
    """
    views: dict[str, set[ShardStat]] = {}
    for mine in seen:
        for name, view in mine.items():
            views.setdefault(name, set()).add(view)
    return make_identity(
        version=__version__,
        options=options,
        plan_digest=planned.plan.digest,
        files=[file.name for file in planned.plan.files],
        layouts=layouts,
        shards={name: sorted(found) for name, found in views.items()},
    )


def open_journals(
    publication: Publication, identity: Identity, sizes: Sequence[int]
) -> JournalPlace:
    """Read what earlier runs have claimed, and make ready for this one's claims.

    Args:
        publication: Its files exist.
        identity: What decides their bytes.
        sizes: Size of each output file.
    """
    publication.sync_folders()
    return read_journals(publication.home, identity_digest(identity), sizes)


def resumed_notes(publication: Publication, place: JournalPlace, num_bytes: int) -> list[str]:
    """Say what is taken over.

    Args:
        publication: The result.
        place: What earlier runs have claimed.
        num_bytes: Size of all output files.
    """
    if not publication.is_resumed:
        return []
    there = format_bytes(place.finished.num_bytes)
    return [f"resumed: {there} of {format_bytes(num_bytes)} were there"]


def kept_text(home: Path) -> str:
    """Say that a later run can go on from here; empty where nothing is claimed."""
    if not has_claims(home):
        return ""
    return (
        f"what has been written is kept in {home}; the same command with --resume goes on from "
        "there, and one without removes it"
    )
