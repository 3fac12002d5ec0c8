"""Planning a thousand shards and a hundred thousand tensors stays small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.plan_scale import shapes

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_plan_of_1024_shards(stage: int) -> None:
    """The plan holds every byte, and its making stays far below 2 GB."""
    command = [sys.executable, "-m", "tests.bench.plan_scale", "--stage", str(stage)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    numel = sum(rows * columns for rows, columns in shapes(100_000).values())
    assert found["output_bytes"] == 4 * numel
    assert found["peak_bytes"] < 2 * 10**9
    assert 0 < found["sampled_numel"] <= numel * 1.01
