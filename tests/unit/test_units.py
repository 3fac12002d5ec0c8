"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_consolidate.units import (
    counted,
    format_bytes,
    format_duration,
    parse_duration,
    parse_size,
    plural,
    ranks_text,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (1, 1),
        ("1", 1),
        (10**15, 10**15),
        ("7B", 7),
        ("5GB", 5_000_000_000),
        ("5gb", 5_000_000_000),
        ("5G", 5_000_000_000),
        (" 5 GB ", 5_000_000_000),
        ("512MB", 512_000_000),
        ("3k", 3_000),
        ("3KB", 3_000),
        ("2T", 2 * 10**12),
        ("2TB", 2 * 10**12),
        ("1KiB", 1024),
        ("64MiB", 64 << 20),
        ("2GiB", 2 << 30),
        ("1TiB", 1 << 40),
        ("1.5KB", 1500),
        ("0.5MiB", 1 << 19),
        ("1.0", 1),
        ("0.001KB", 1),
    ],
)
def test_sizes(text, num_bytes):
    assert parse_size(text) == num_bytes


NO_SIZES = ["", " ", "GB", "5 giga", "5PB", "-5GB", "+5", "5GB5", "1e9", "5.", ".5GB", "5,5GB"]


@pytest.mark.parametrize(
    "text", [*NO_SIZES, "0x10", "none", "5GB\0", "5 G B", True, None, -1, 1.5j]
)
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is not a size; write it like 5GB, 512MB or 64MiB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", 0, "0GB", "0.0", "0.0001KB"])
def test_sizes_below_one_byte(text):
    with pytest.raises(ValueError, match="is below one byte"):
        parse_size(text)


@given(st.integers(1, 10**18), st.sampled_from(["", "B", "K", "mb", "GB", "tb"]))
def test_whole_numbers_are_exact(count, unit):
    factor = 1000 ** ("kmgt".find(unit[:1].lower()) + 1) if unit else 1
    assert parse_size(f"{count}{unit}") == count * factor


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (1420, "1.42 KB"),
        (5 * 10**9, "5 GB"),
        (1_418_000_000, "1.42 GB"),
        (123_456_789, "123 MB"),
        (3 * 10**12, "3 TB"),
        (12.7, "12 B"),
    ],
)
def test_sizes_for_people(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize("num_bytes", [999_500, 999_999, 999_999_999, 999_700_000_000])
def test_sizes_just_below_the_next_unit_have_no_exponent(num_bytes):
    assert "e" not in format_bytes(num_bytes)


def test_large_sizes_have_no_exponent():
    assert format_bytes(1234 * 10**12) == "1234 TB"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 files"), (1, "1 file"), (2, "2 files"), (12345, "12,345 files")]
)
def test_counts(count, text):
    assert plural(count, "file") == text


def test_counted() -> None:
    assert counted(1, "tensor has", "tensors have") == "1 tensor has"
    assert counted(0, "tensor has", "tensors have") == "0 tensors have"
    assert counted(2000, "tensor has", "tensors have") == "2,000 tensors have"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30min", 1800), ("90s", 90), ("2h", 7200), ("1h30min", 5400), ("1.5 m", 90), (5, 5),
        ("5", 5), (0.25, 0.25), ("250ms", 0.25), ("1 day", 86400), (" 2 Hours ", 7200),
    ],
)  # fmt: skip
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "soon", "5x", "-5s", "0", "0s", "1:30", "5 5", "400d", "min", True, None, "1e9", "inf",
     "9" * 400, float("nan"), [5]],
)  # fmt: skip
def test_durations_that_are_none(text):
    with pytest.raises(ValueError, match=r"duration|no time|year"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1800, "30 min"), (7200, "2 h"), (90, "90 s"), (2.5, "2.5 s"), (119, "119 s"), (120, "2 min")],
)
def test_durations_for_people(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0, 1"),
        ([2, 0, 1, 5], "ranks 0 to 2, 5"),
        (list(range(0, 40, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"),
    ],
)
def test_ranks_for_people(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
