"""What a test needs of its machine: without it the test is skipped, or fails where it must run."""

from __future__ import annotations

import os

import pytest

VARIABLE = "DIST_CONSOLIDATE_REQUIRE"


def require(name: str, found: bool, reason: str) -> None:
    """Skip the test where something is missing, or fail it where the environment promises it.

    Args:
        name: What is needed, as :data:`VARIABLE` lists it (a comma list).
        found: Whether it is there.
        reason: What is missing, for people.
    """
    if found:
        return
    if name in [part.strip() for part in os.environ.get(VARIABLE, "").split(",")]:
        pytest.fail(f"{name} is required here ({VARIABLE}), but {reason}")
    pytest.skip(reason)
