"""Telling memory from disks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dist_consolidate.filesystems import is_in_memory


def kind_of(path: Path) -> str:
    command = ["stat", "--file-system", "--format=%T", str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("path", ["/dev/shm", "/proc", "/", "/tmp"])
def test_it_is_what_stat_says(path):
    if Path(path).is_dir():
        assert is_in_memory(Path(path)) == (kind_of(Path(path)) in ("tmpfs", "ramfs"))


def test_a_file_is_where_its_folder_is(tmp_path):
    (tmp_path / "file").touch()
    assert is_in_memory(tmp_path / "file") == (kind_of(tmp_path) in ("tmpfs", "ramfs"))


def test_what_does_not_exist_is_not(tmp_path):
    assert not is_in_memory(tmp_path / "none")
