"""What verifying finds, and the report of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

from dist_consolidate.errors import DifferenceError, listing
from dist_consolidate.units import format_bytes, plural

# Where more elements than this part are off by more than one step, the weights are others.
_MANY = 0.001
_SHOWN = 20


class Difference(NamedTuple):
    """Something that is not as it must be: a file, the tensor in it (or nothing), and what."""

    file: str
    tensor: str
    what: str

    def text(self) -> str:
        """Put it into one line."""
        return ": ".join(part for part in self if part)


class Rounded(NamedTuple):
    """A 16-bit weight of the model states beside its fp32 value, rounded.

    Attributes:
        tensor: The name.
        num_numel: Elements.
        num_unequal: Elements that differ.
        num_beyond: Of these, the ones that are off by more than one step of the 16-bit type.
        at: The element with the largest difference.
        master: The rounded fp32 value there.
        weight: The 16-bit weight there.
        steps: How many steps of the 16-bit type lie between the two.
    """

    tensor: str
    num_numel: int
    num_unequal: int
    num_beyond: int
    at: int
    master: float
    weight: float
    steps: int

    @property
    def is_far(self) -> bool:
        """Whether the weights can hardly be the masters, rounded."""
        return self.num_beyond > _MANY * self.num_numel

    def text(self) -> str:
        """Say where the largest difference is."""
        words = (
            f"{self.tensor}: {self.num_unequal:,} of {self.num_numel:,} elements differ, "
            f"{self.num_beyond:,} of them by more than one step; the most at element {self.at}: "
            f"{self.weight!r} in the model states, {self.master!r} is the rounded master "
            f"({plural(self.steps, 'step')})"
        )
        return f"{words}; these weights are not this checkpoint's masters" if self.is_far else words


@dataclasses.dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was verified; the same on every rank.

    Attributes:
        output_dir: The result.
        differences: Everything that is not as it must be; empty if all is well.
        num_tensors: Tensors in its files.
        num_bytes: Their bytes.
        num_digests: Tensors whose digest was compared with the manifest's.
        num_sha256: Files whose SHA-256 was compared with the manifest's.
        num_compared: Tensors that were compared with the shards; ``None`` where nobody asked.
        num_rounded: 16-bit weights that were compared with the fp32 values.
        rounded: The ones of them that differ, which is no fault of the result.
        notes: What people should hear of.
        duration_sec: Wall time.
    """

    output_dir: Path
    differences: tuple[Difference, ...]
    num_tensors: int
    num_bytes: int
    num_digests: int
    num_sha256: int
    num_compared: int | None
    num_rounded: int
    rounded: tuple[Rounded, ...]
    notes: tuple[str, ...]
    duration_sec: float

    def raise_if_different(self, headline: str = "") -> None:
        """Raise if anything differs.

        Args:
            headline: What to say of the result in front of the list.

        Raises:
            DifferenceError: With every difference.
        """
        if self.differences:
            first = headline or f"{self.output_dir} is not what it must be"
            error = DifferenceError(listing(first, [item.text() for item in self.differences]))
            error.agreed = True  # every rank has the same report
            raise error

    def lines(self) -> list[str]:
        """Put it into lines for people."""
        checked = [f"{plural(self.num_digests, 'digest')} of the manifest"]
        if self.num_sha256:
            checked.append(f"SHA-256 of {plural(self.num_sha256, 'file')}")
        if self.num_compared is not None:
            checked.append(f"{plural(self.num_compared, 'tensor')} with the shards, bit for bit")
        text = f"verified {plural(self.num_tensors, 'tensor')}, {format_bytes(self.num_bytes)}"
        lines = [f"{text} in {self.duration_sec:.1f} s: {', '.join(checked)}"]
        if self.num_rounded:
            equal = self.num_rounded - len(self.rounded)
            lines.append(
                f"16-bit weights of the model states: {equal} of {self.num_rounded} equal the "
                "rounded fp32 values"
            )
        ordered = sorted(self.rounded, key=lambda item: (not item.is_far, -item.num_beyond))
        for item in ordered[:_SHOWN]:
            lines.append(f"{'warning' if item.is_far else 'note'}: {item.text()}")
        if len(ordered) > _SHOWN:
            lines.append(f"note: and {len(ordered) - _SHOWN} more that differ")
        return [*lines, *(f"note: {note}" for note in self.notes)]
