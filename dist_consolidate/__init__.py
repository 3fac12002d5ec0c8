"""Consolidates the ZeRO shards of a DeepSpeed run into weights that everything loads."""

from __future__ import annotations

from dist_consolidate._version import __version__
from dist_consolidate.api import consolidate, open_checkpoint, verify
from dist_consolidate.errors import (
    CheckpointError,
    ConsolidateError,
    DifferenceError,
    RankError,
    ResourceError,
    UnsupportedLayoutError,
    UsageError,
)

__all__ = [
    "CheckpointError",
    "ConsolidateError",
    "DifferenceError",
    "RankError",
    "ResourceError",
    "UnsupportedLayoutError",
    "UsageError",
    "__version__",
    "consolidate",
    "open_checkpoint",
    "verify",
]
