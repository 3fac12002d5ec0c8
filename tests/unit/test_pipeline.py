"""The loop's surroundings: what is switched off in it comes back, descriptors stay few."""

from __future__ import annotations

import gc
import resource

import pytest
import torch

from dist_consolidate.runtime.pipeline import _num_readers, _num_writers, _undisturbed


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_and_torchs_threads_come_back(collects):
    threads, before = torch.get_num_threads(), gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(KeyError), _undisturbed():
            assert not gc.isenabled()
            assert torch.get_num_threads() == 1
            raise KeyError
        assert gc.isenabled() == collects
        assert torch.get_num_threads() == threads
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize(
    ("limit", "num_files", "readers"),
    [(1024, 0, 4), (1024, 100, 4), (1024, 200, 2), (1024, 1024, 1), (1 << 20, 1024, 4)],
)
def test_many_shards_are_read_by_fewer_threads(monkeypatch, limit, num_files, readers):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert _num_readers(4, num_files) == readers


@pytest.mark.parametrize(
    ("num_files", "checksums", "writers"),
    [(1, False, 1), (1, True, 4), (3, False, 3), (9, False, 4)],
)
def test_threads_do_not_wait_for_each_other_at_one_file(num_files, checksums, writers):
    assert _num_writers(4, num_files, checksums=checksums) == writers
