"""Finding a tag's shards in several folders, with all ranks: each sees those of its own node."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.search import (
    Twice,
    candidates,
    compare,
    find_twice,
    refuse_unfound,
    shards_in,
    with_search_dirs,
)
from dist_consolidate.errors import Caught
from dist_consolidate.runtime.control import Control


def search_together(found: TagFolder, search_dirs: Sequence[str], control: Control) -> TagFolder:
    """Widen a tag folder to the folders the user named, and compare what lies in several.

    Args:
        found: The tag folder; the same on every rank.
        search_dirs: The folders.
        control: The control plane.

    Returns:
        The tag folder that looks into all of them, with notes; the same on every rank.

    Raises:
        ConsolidateError: If the tag is in none of the folders on any rank, or files of one name
            contradict each other; every rank raises.
    """
    # Which folder comes first is for rank 0 to say; what is in them is another on each node.
    folder: TagFolder = control.broadcast(with_search_dirs(found, search_dirs))
    twice: list[Twice] = []
    seen: list[bool] = []
    with (caught := Caught()):
        seen = [bool(shards_in(candidates(text, found.tag))) for text in search_dirs]
        twice = find_twice(folder.folders)
    control.agree(caught.error)
    views = control.exchange((seen, [item.marks for item in twice]))
    notes: tuple[str, ...] = ()
    with caught:
        refuse_unfound(search_dirs, found.tag, [flags for flags, _ in views])
        known = {mark for _, marks in views[: control.rank] for mark in marks}
        notes = compare([item for item in twice if item.marks not in known])
    control.agree(caught.error)
    told = dict.fromkeys(note for part in control.exchange(notes) for note in part)
    return dataclasses.replace(folder, notes=tuple(told))
