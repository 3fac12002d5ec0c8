"""The short form of the fuzzing (``python -m tests.long.fuzz`` is the long one)."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.cases import CASES
from tests.hostile.mutations import MUTATIONS, files
from tests.long.fuzz import fuzz

SEED, COUNT = 20_241_130, 200


def test_changed_checkpoints() -> None:
    figures = fuzz(COUNT, SEED, num_processes=1)
    assert figures.failures == {}, "\n".join(figures.failures.values())
    assert sum(figures.codes.values()) == COUNT
    # Neither refuses everything, nor takes everything.
    assert figures.codes[0] >= COUNT // 20
    assert figures.codes[3] >= COUNT // 2


@pytest.mark.parametrize("kind", MUTATIONS)
def test_mutations_change_something(kind: str, tmp_path: Path) -> None:
    """Nearly always; and the same seed makes the same change."""
    case, changed = CASES["kitchen_z2_groups_w4"], 0
    kept = {path.name: path.read_bytes() for path in files(case.ckpt)}
    for number in range(6):
        made = []
        for _ in range(2):
            shutil.copytree(case.ckpt, tmp_path / "ckpt")
            MUTATIONS[kind][0](tmp_path / "ckpt", random.Random(number))
            made.append({path.name: path.read_bytes() for path in files(tmp_path / "ckpt")})
            shutil.rmtree(tmp_path / "ckpt")
        assert made[0] == made[1]
        changed += made[0] != kept
    assert changed >= 4
