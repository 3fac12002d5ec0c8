"""Which tag to read, where each node sees a run folder of its own.

Every rank looks for itself, and all of them settle on one tag. With node-local storage only the
node of the run's first rank has ``latest``; a node may have no such folder at all. Nodes that name
different tags were not saved together, and nobody guesses between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from dist_consolidate.checkpoint.layout import (
    TagFolder,
    TagOrder,
    find_tag,
    named_by_latest,
    tag_order,
)
from dist_consolidate.doing import Doing
from dist_consolidate.errors import CheckpointError, listing
from dist_consolidate.runtime.control import Control
from dist_consolidate.units import ranks_text

_ITSELF = "the folder itself"
_BY_LATEST = "named by `latest`"


@dataclasses.dataclass(frozen=True, slots=True)
class TagView:
    """What one rank finds.

    Attributes:
        host: Its host.
        found: The tag folder without its shards; ``None`` where there is none to be read.
        order: How new that is.
        latest: What ``latest`` names there.
        error: Why nothing was found.
    """

    host: str
    found: TagFolder | None
    order: TagOrder = (-1, -1, 0.0, "")
    latest: str | None = None
    error: CheckpointError | None = None


def look_here(root: Path, tag: str | None, host: str) -> TagView:
    """Look for the tag on this rank.

    Args:
        root: The folder that the user named.
        tag: The tag asked for.
        host: This rank's host.

    Returns:
        What is found.
    """
    with Doing("looking into", root):
        latest = named_by_latest(root)
        try:
            found = find_tag(root, tag)
            order = tag_order(found.path)
        except CheckpointError as error:
            return TagView(host, None, latest=latest, error=error)
        except (OSError, ValueError) as error:
            return TagView(host, None, latest=latest, error=CheckpointError(f"{root}: {error}"))
    return TagView(host, dataclasses.replace(found, shards=()), order, latest)


def find_together(
    root: Path, tag: str | None, hosts: Sequence[str], control: Control
) -> list[TagView]:
    """Let every rank look for the tag.

    Args:
        root: The folder that the user named.
        tag: The tag asked for.
        hosts: The host of each rank.
        control: The control plane.

    Returns:
        What each rank finds.
    """
    views: list[TagView] = control.exchange(look_here(root, tag, hosts[control.rank]))
    return views


def settle(root: Path, tag: str | None, views: Sequence[TagView]) -> TagFolder:
    """Settle on one tag.

    Args:
        root: The folder that the user named.
        tag: The tag asked for.
        views: What each rank found.

    Returns:
        The tag folder, without shards; its notes name the nodes that have none.

    Raises:
        CheckpointError: If no node has one, or nodes name different ones.
    """
    found = [view.found for view in views if view.found is not None]
    if not found:
        raise _nothing(root, views)
    if tag is None and not any(folder.chosen == _ITSELF for folder in found):
        chosen = _by_latest(root, views) or _newest(views)
    else:
        chosen = found[0]
        if len({(folder.path, folder.tag) for folder in found}) > 1:
            raise _torn(
                f"{root}: is not the same on all nodes", views, lambda view: _tag_text(view.found)
            )
    return dataclasses.replace(chosen, notes=(*chosen.notes, *_absent(root, views)))


def _by_latest(root: Path, views: Sequence[TagView]) -> TagFolder | None:
    """Give the tag that ``latest`` names, wherever there is one; it must be one tag."""
    named = {view.latest for view in views if view.latest is not None}
    if len(named) > 1:
        raise _torn(
            f"{root}: `latest` names different tags on different nodes, so that a save was not "
            "finished everywhere",
            views,
            lambda view: f"`latest` names {view.latest!r}" if view.latest else "",
        )
    for view in views:
        if view.found is not None and view.found.chosen == _BY_LATEST:
            return view.found
    # `latest` is there, but what it names is not, where it is: another node may have it.
    for name in named:
        for view in views:
            if view.found is not None and view.found.tag == name:
                return dataclasses.replace(view.found, chosen=_BY_LATEST)
        raise next(view.error for view in views if view.latest == name and view.error)
    return None


def _newest(views: Sequence[TagView]) -> TagFolder:
    newest = max((view for view in views if view.found is not None), key=lambda view: view.order)
    assert newest.found is not None
    tags = {view.found.tag for view in views if view.found is not None}
    if len(tags) == 1:
        return newest.found
    chosen = f"no `latest`; the newest of the tags on {len({view.host for view in views})} hosts"
    return dataclasses.replace(newest.found, chosen=chosen)


def _nothing(root: Path, views: Sequence[TagView]) -> CheckpointError:
    errors = [view.error for view in views if view.error is not None]
    if len({str(error) for error in errors}) == 1:
        return errors[0]
    by_rank = _by_node(views, lambda view: str(view.error))
    return CheckpointError(listing(f"{root}: no node has a checkpoint to be read", by_rank))


def _torn(
    headline: str, views: Sequence[TagView], says: Callable[[TagView], str]
) -> CheckpointError:
    advice = "Name the tag to read with --tag; each node then serves what it has of it."
    return CheckpointError(listing(headline, _by_node(views, says), advice))


def _tag_text(found: TagFolder | None) -> str:
    return "" if found is None else f"tag {found.tag!r} ({found.chosen}: {found.path})"


def _absent(root: Path, views: Sequence[TagView]) -> list[str]:
    """Name the nodes that have nothing, if others have."""
    lines = _by_node(views, lambda view: "" if view.error is None else str(view.error))
    return [
        f"{line.splitlines()[0].rstrip(':')} (its ranks take part all the same)" for line in lines
    ]


def _by_node(views: Sequence[TagView], says: Callable[[TagView], str]) -> list[str]:
    """Give what ranks say, those of one host that say the same in one line."""
    found: dict[tuple[str, str], list[int]] = {}
    for rank, view in enumerate(views):
        if text := says(view):
            found.setdefault((view.host, text), []).append(rank)
    return [f"{host} ({ranks_text(ranks)}): {text}" for (host, text), ranks in found.items()]
