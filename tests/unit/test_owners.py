"""Which rank fills which bytes of which output file."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from dist_consolidate.plan.owners import Owned, deal_out

PAGE, STRIPE = 4096, 4 << 20


def covered(dealt: Sequence[Sequence[Owned]], sizes: Sequence[int]) -> bool:
    """Whether the ranges of all writers together are every byte of every file once."""
    for file, size in enumerate(sizes):
        ranges = sorted(
            (start, stop) for owned in dealt for at, start, stop in owned if at == file and size
        )
        ends = [0, *(stop for _, stop in ranges)]
        starts = [*(start for start, _ in ranges), size]
        if ends != starts:
            return False
    return True


def test_files_that_are_even_are_dealt_out_whole_the_longest_first():
    # 7 | 5 + 2: the longest to the first, the next to the second, which then has the least.
    assert deal_out([2, 7, 5], 2) == [
        [Owned(1, 0, 7)],
        [Owned(0, 0, 2), Owned(2, 0, 5)],
    ]


def test_one_writer_fills_everything():
    assert deal_out([3, 10, 5], 1) == [[Owned(0, 0, 3), Owned(1, 0, 10), Owned(2, 0, 5)]]


def test_a_twentieth_over_an_equal_share_is_even_enough():
    assert deal_out([105, 95], 2) == [[Owned(0, 0, 105)], [Owned(1, 0, 95)]]
    assert deal_out([106, 94], 2) != [[Owned(0, 0, 106)], [Owned(1, 0, 94)]]


def test_one_large_file_is_cut_at_stripes():
    # A third is 5.33 stripes, two thirds are 10.67 of them.
    size = 16 * STRIPE + 77
    assert deal_out([size], 3) == [
        [Owned(0, 0, 5 * STRIPE)],
        [Owned(0, 5 * STRIPE, 10 * STRIPE)],
        [Owned(0, 10 * STRIPE, size)],
    ]


def test_a_cut_lies_at_a_stripe_of_its_own_file():
    first, second = STRIPE + 5, 15 * STRIPE
    half = (first + second) // 2 - first
    cut = half - half % STRIPE
    assert deal_out([first, second], 2) == [
        [Owned(0, 0, first), Owned(1, 0, cut)],
        [Owned(1, cut, second)],
    ]


def test_small_results_are_cut_at_pages():
    assert deal_out([2 * PAGE + 100], 2) == [
        [Owned(0, 0, PAGE)],
        [Owned(0, PAGE, 2 * PAGE + 100)],
    ]


def test_more_writers_than_bytes():
    dealt = deal_out([3], 8)
    assert [owned for owned in dealt if owned] == [[Owned(0, 0, 3)]]
    assert len(dealt) == 8


SIZES = st.lists(
    st.one_of(st.integers(0, 40), st.integers(0, 20 * PAGE), st.integers(0, 20 * STRIPE)),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=300)
@given(SIZES, st.integers(1, 9))
def test_every_byte_has_one_writer_and_no_page_has_two(sizes, num_writers):
    dealt = deal_out(sizes, num_writers)
    assert len(dealt) == num_writers
    assert covered(dealt, sizes)
    for owned in dealt:
        assert owned == sorted(owned)
    inner = [part.start_bytes for owned in dealt for part in owned if part.start_bytes]
    assert all(start % PAGE == 0 for start in inner)
    total = sum(sizes)
    if total >= 4 * num_writers * STRIPE:
        loads = [sum(part.stop_bytes - part.start_bytes for part in owned) for owned in dealt]
        assert max(loads) <= max(total * 1.05, total + num_writers * STRIPE) / num_writers + STRIPE
