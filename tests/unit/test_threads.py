"""A few threads for many things: each is done once, and the first error is told."""

from __future__ import annotations

import threading

import pytest

from dist_consolidate.runtime.threads import in_threads


@pytest.mark.parametrize("num_threads", [0, 1, 3, 50])
def test_each_item_is_done_once(num_threads):
    done, lock = [], threading.Lock()

    def action(item: int) -> None:
        with lock:
            done.append(item)

    in_threads(action, iter(range(100)), num_threads)
    assert sorted(done) == list(range(100))


@pytest.mark.parametrize("num_threads", [1, 4])
def test_the_first_error_ends_all(num_threads):
    begun = []

    def action(item: int) -> None:
        begun.append(item)
        if item == 5:
            raise ValueError(f"number {item}")

    with pytest.raises(ValueError, match="number 5"):
        in_threads(action, range(10**9), num_threads)
    assert set(range(6)) <= set(begun)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_it_can_be_stopped(num_threads):
    begun = []
    in_threads(begun.append, range(10**9), num_threads, lambda: len(begun) >= 10)
    assert 10 <= len(begun) < 20
