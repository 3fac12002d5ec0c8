"""Files saved with ``checkpoint.writer``: ``NAME-W.N``, written by writer ``W`` of ``N``.

Stages 0 to 2 name their files so; each writer that has a file writes a whole copy of it with
stock torch. Copies of model states differ a little: writer 0's alone records the ties. (Only a
patched torch would spread storages over the files; such a file lacks records, and is refused when
they are looked for.)

Source: DeepSpeed's ``model_checkpointing/writer_factory.py`` and ``io/fast_file_writer.py``.
"""

from __future__ import annotations

import dataclasses
import re

from dist_consolidate.checkpoint.layout import ShardFile, TagFolder
from dist_consolidate.errors import Problems

_SUFFIX = re.compile(r"-\d+\.\d+$")


def plain_name(name: str) -> str:
    """Give a shard's name as the plain torch engine writes it."""
    return _SUFFIX.sub("", name)


def settle(folder: TagFolder) -> tuple[TagFolder, list[str]]:
    """Keep one copy of each file.

    Args:
        folder: The shards.

    Returns:
        The folder with one copy of each, and what to say of it.

    Raises:
        CheckpointError: If the names show files of several saves on top of each other.
    """
    copies: dict[str, list[ShardFile]] = {}
    for shard in folder.shards:
        copies.setdefault(plain_name(shard.name), []).append(shard)
    problems, kept, spare = Problems(), [], 0
    for name, found in copies.items():
        found.sort(key=lambda shard: shard.writer or (0, 0))
        kept.append(found[0])
        spare += len(found) - 1
        counts = {shard.writer[1] if shard.writer else 0 for shard in found}
        if len(counts) > 1:
            names = ", ".join(shard.name for shard in found)
            problems.add(
                f"{folder.path / name}: is there as {names}, which are of several saves (the "
                "number behind the point is the number of writers); keep the copies of one save"
            )
    problems.raise_if_any(f"{folder.path}: saves lie on top of each other")
    notes = []
    if spare:
        notes.append(
            f"checkpoint.writer left {spare} copies of files that others hold too; of each file "
            "the copy of the first writer was read"
        )
    return dataclasses.replace(folder, shards=tuple(kept)), notes
