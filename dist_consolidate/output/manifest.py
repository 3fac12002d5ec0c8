"""``consolidation.json``: what a result consists of and where each tensor came from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import xxhash

# Digest of the manifest itself, without the line that holds it.
SELF_KEY = "manifest_xxh3_128"


def manifest_json(
    *,
    version: str,
    checkpoint: Mapping[str, object],
    options: Mapping[str, object],
    plan_digest: str,
    tensors: Mapping[str, Mapping[str, object]],
    left_out: Mapping[str, str],
    notes: Sequence[str],
    files: Mapping[str, Mapping[str, object]] | None = None,
    optimizer: Mapping[str, object] | None = None,
    with_digest: bool = False,
    salvage: Mapping[str, object] | None = None,
) -> bytes:
    """Write the manifest; equal arguments give equal bytes.

    It holds no time and no absolute path, so that the same checkpoint consolidated twice, or
    elsewhere, gives the same file.

    Args:
        version: Version of this tool.
        checkpoint: Tag, step, ZeRO stage, world sizes and DeepSpeed version of the input.
        options: The options that shape the result.
        plan_digest: Digest of the plan that was carried out.
        tensors: For each name its dtype, shape, file, source, source dtype and, where it is tied,
            the name it is tied to.
        left_out: For each name that is not in the result, why.
        notes: What was assumed, cast, dropped or inferred, for people to read.
        files: For each weight file and index its size and checksums.
        optimizer: The optimizer's step, settings and states, where they are in the result.
        with_digest: Add a digest of the manifest's own bytes.
        salvage: What is missing or of lower precision because the checkpoint is damaged.

    Returns:
        Sorted JSON, indented by two, with a closing newline.
    """
    content: dict[str, object] = {
        "tool": {"name": "dist_consolidate", "version": version},
        "checkpoint": dict(checkpoint),
        "options": dict(options),
        "plan_digest": plan_digest,
        "tensors": {name: dict(facts) for name, facts in tensors.items()},
        "left_out": dict(left_out),
        "notes": list(notes),
    }
    if files is not None:
        content["files"] = {name: dict(facts) for name, facts in files.items()}
    if optimizer is not None:
        content["optimizer"] = dict(optimizer)
    if salvage:
        content["salvage"] = dict(salvage)
    if with_digest:
        content[SELF_KEY] = self_digest(content)
    return as_bytes(content)


def as_bytes(content: Mapping[str, object]) -> bytes:
    """Write a manifest's content the one way it is written."""
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode("ascii")


def self_digest(content: Mapping[str, object]) -> str:
    """Digest a manifest's bytes without the line that holds this digest."""
    rest = {key: value for key, value in content.items() if key != SELF_KEY}
    return xxhash.xxh3_128_hexdigest(as_bytes(rest))
