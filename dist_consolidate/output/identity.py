"""What decides which bytes a result has: an earlier run's work is taken over only if all is equal.

Of a shard its size, its time of change and its inode are compared, as each host sees them: a
checkpoint that was saved again, or copied to another place, is another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from dist_consolidate.errors import listed
from dist_consolidate.output.layout import FileLayout
from dist_consolidate.output.work import Identity, identity_digest

# For each host's view of a shard: size in bytes, time of change in nanoseconds, inode.
ShardStat = tuple[int, int, int]
_NO_JOURNAL = "an earlier run has kept no journal (it was started without --resume)"


def make_identity(
    *,
    version: str,
    options: Mapping[str, object],
    plan_digest: str,
    files: Sequence[str],
    layouts: Sequence[FileLayout],
    shards: Mapping[str, Sequence[ShardStat]],
) -> Identity:
    """Put together what decides the bytes of a result.

    Args:
        version: Version of this tool.
        options: The options that shape the result.
        plan_digest: Digest of the plan.
        files: The output files.
        layouts: Their layouts.
        shards: What each host sees of each shard, different views only, sorted.

    Returns:
        Plain data, the same in every run with the same of all that.
    """
    places = hashlib.sha256()
    for layout in layouts:
        places.update(repr((layout.data_offset_bytes, layout.blocks)).encode())
    return {
        "version": version,
        "options": {name: repr(value) for name, value in options.items()},
        "plan": plan_digest,
        "files": {name: layout.num_bytes for name, layout in zip(files, layouts, strict=True)},
        "layout": places.hexdigest(),
        "shards": {name: [list(view) for view in views] for name, views in shards.items()},
    }


def difference(found: Identity | None, wanted: Identity) -> str:
    """Say why an earlier run's work is not this run's.

    Args:
        found: The earlier run's identity; ``None`` where it has left none.
        wanted: This run's.

    Returns:
        A reason, empty where there is none.
    """
    if found is None:
        return _NO_JOURNAL
    if identity_digest(found) == identity_digest(wanted):
        return ""
    if found.get("version") != wanted["version"]:
        return f"an earlier run was one of version {found.get('version')} of this tool"
    changed = _changed(found.get("shards"), wanted["shards"])
    if changed:
        return f"the checkpoint has changed since an earlier run: {listed(changed, 3)}"
    changed = _changed(found.get("options"), wanted["options"])
    if changed:
        flags = ["--" + name.replace("_", "-") for name in changed]
        return f"an earlier run had other options: {listed(flags)}"
    return "an earlier run had another plan"


def _changed(found: object, wanted: Mapping[str, object]) -> list[str]:
    """Name the keys under which two mappings differ."""
    old = found if isinstance(found, dict) else {}
    return sorted(name for name in old.keys() | wanted.keys() if old.get(name) != wanted.get(name))
