"""Sizes in bytes and durations as people write them, and back.

Units are decimal, as on the Hugging Face Hub (``5GB`` is 5 * 10**9 bytes); ``KiB``, ``MiB``,
``GiB`` and ``TiB`` are the binary ones.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable

_FACTORS = {
    "": 1,
    "B": 1,
    "K": 10**3,
    "KB": 10**3,
    "M": 10**6,
    "MB": 10**6,
    "G": 10**9,
    "GB": 10**9,
    "T": 10**12,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_MAX_DIGITS = 30
_MAX_RUNS = 8
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SECONDS = {
    **dict.fromkeys(("ms",), 0.001),
    **dict.fromkeys(("", "s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}
_MAX_DURATION_SEC = 366 * 86400.0
_DURATION_PART = re.compile(r"\s*(\d{1,12}(?:\.\d{1,9})?)\s*([A-Za-z]*)")
_PERCENT = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*%\s*")


@dataclasses.dataclass(frozen=True, slots=True)
class Amount:
    """So many bytes, or a part of something.

    Attributes:
        text: As it was written.
        num_bytes: The bytes; ``None`` for a part.
        fraction: The part, above 0 and at most 1; 1 for bytes.
    """

    text: str
    num_bytes: int | None
    fraction: float = 1.0


def parse_amount(text: str | int) -> Amount:
    """Turn ``"5GB"`` or ``"40%"`` into an amount.

    Args:
        text: A size as :func:`parse_size` takes it, or a percentage.

    Returns:
        The amount.

    Raises:
        ValueError: If it is neither, is 0, or is more than 100%.
    """
    match = _PERCENT.fullmatch(str(text))
    if match is None:
        if _SIZE.fullmatch(str(text)) is None:
            raise ValueError(f"{text!r} is neither a size like 5GB nor a part like 40%")
        return Amount(str(text), parse_size(text))
    fraction = float(match.group(1)) / 100
    if not 0 < fraction <= 1:
        raise ValueError(f"{text!r} must be above 0% and at most 100%")
    return Amount(str(text), None, fraction)


def parse_size(text: str | int) -> int:
    """Turn ``"5GB"``, ``"512MiB"`` or a plain number into bytes.

    Args:
        text: A size with an optional unit; a number without one counts bytes.

    Returns:
        The size in bytes, at least 1.

    Raises:
        ValueError: If the text is no size, or the size is below one byte.
    """
    match = _SIZE.fullmatch(str(text))
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not a size; write it like 5GB, 512MB or 64MiB")
    if len(match.group(1)) > _MAX_DIGITS:
        raise ValueError(f"{text!r} is too large")
    num_bytes = (
        int(float(match.group(1)) * factor)
        if "." in match.group(1)
        else (int(match.group(1)) * factor)
    )
    if num_bytes < 1:
        raise ValueError(f"{text!r} is below one byte")
    return num_bytes


def parse_duration(text: str | float) -> float:
    """Turn ``"30min"``, ``"90s"``, ``"1h30min"`` or a plain number into seconds.

    Args:
        text: A duration with an optional unit; a number without one counts seconds.

    Returns:
        The duration in seconds, above 0 and at most 366 days.

    Raises:
        ValueError: If the text is no duration, or one that long or short cannot be waited for.
    """
    written = str(text).lower()
    if isinstance(text, bool) or not re.fullmatch(f"(?:{_DURATION_PART.pattern})+\\s*", written):
        raise ValueError(f"{text!r} is not a duration; write it like 30min, 90s or 2h")
    parts = _DURATION_PART.findall(written)
    units = [unit for _, unit in parts]
    if any(unit not in _SECONDS for unit in units) or (len(units) > 1 and "" in units):
        raise ValueError(f"{text!r} is not a duration; write it like 30min, 90s or 2h")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if seconds <= 0:
        raise ValueError(f"{text!r} is no time at all")
    if seconds > _MAX_DURATION_SEC:
        raise ValueError(f"{text!r} is longer than a year")
    return seconds


def format_duration(seconds: float) -> str:
    """Write a duration for people: ``30 min``, ``90 s``, ``1.5 s``."""
    if seconds >= 120 and seconds % 60 == 0:
        minutes = int(seconds) // 60
        return f"{minutes // 60} h" if minutes % 60 == 0 else f"{minutes} min"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def format_bytes(num_bytes: float) -> str:
    """Write a number of bytes for people: ``1.42 GB``, decimal units, three figures."""
    value = float(num_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        # What would be rounded to 1000 belongs to the next unit.
        if abs(value) < 999.5:
            return _figures(value, unit)
        value /= 1000
    return _figures(value, "TB")


def _figures(value: float, unit: str) -> str:
    if unit == "B":
        return f"{int(value)} B"
    decimals = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    text = f"{value:.{decimals}f}"
    return f"{text.rstrip('0').rstrip('.') if decimals else text} {unit}"


def counted(count: int, one: str, many: str) -> str:
    """Write a count with what is said of it: ``1 tensor has``, ``3 tensors have``."""
    return f"{count:,} {one if count == 1 else many}"


def plural(count: int, noun: str) -> str:
    """Write a count with its noun: ``1 file``, ``3 files``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def numbers_text(numbers: Iterable[int]) -> str:
    """Write numbers for people: ``0, 1, 4 to 7``; of more than eight runs the first ones.

    Args:
        numbers: Any numbers, in any order.
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts: list[str] = []
    for run in runs[:_MAX_RUNS]:
        texts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    left = sum(map(len, runs[_MAX_RUNS:]))
    return ", ".join(texts) + (f" and {left} more" if left else "")


def ranks_text(ranks: Collection[int]) -> str:
    """Name ranks: ``rank 3``, ``ranks 0, 1, 4 to 7``."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers_text(ranks)}"
