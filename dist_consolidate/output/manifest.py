"""``consolidation.json``: what a result consists of and where each tensor came from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence


def manifest_json(
    *,
    version: str,
    checkpoint: Mapping[str, object],
    options: Mapping[str, object],
    plan_digest: str,
    tensors: Mapping[str, Mapping[str, object]],
    left_out: Mapping[str, str],
    notes: Sequence[str],
    optimizer: Mapping[str, object] | None = None,
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
        optimizer: The optimizer's step, settings and states, where they are in the result.
        salvage: What is missing or of lower precision because the checkpoint is damaged.

    Returns:
        Sorted JSON, indented by two, with a closing newline.
    """
    content = {
        "tool": {"name": "dist_consolidate", "version": version},
        "checkpoint": dict(checkpoint),
        "options": dict(options),
        "plan_digest": plan_digest,
        "tensors": {name: dict(facts) for name, facts in tensors.items()},
        "left_out": dict(left_out),
        "notes": list(notes),
    }
    if optimizer is not None:
        content["optimizer"] = dict(optimizer)
    if salvage:
        content["salvage"] = dict(salvage)
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode("ascii")
