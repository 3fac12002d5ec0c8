"""Every error a user can meet, and the exit code that goes with it.

All of them derive from :class:`ConsolidateError`, so one ``except`` catches what the tool refuses.
An error message names the file, the rank and the tensor it speaks of, says what was found and
what was expected, and ends with what to do.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from types import TracebackType


class ConsolidateError(Exception):
    """Base class of all errors raised on purpose; ``exit_code`` is what the program ends with."""

    exit_code = 1
    # Set where all ranks raise in the same round, so that they can still talk to each other.
    agreed = False
    # Set where another rank is the one to say it.
    silent = False


class UsageError(ConsolidateError):
    """The request contradicts itself or cannot be carried out as asked (exit code 2)."""

    exit_code = 2


class CheckpointError(ConsolidateError):
    """The checkpoint is incomplete, inconsistent or unreadable (exit code 3)."""

    exit_code = 3


class UnsupportedLayoutError(CheckpointError):
    """The checkpoint is of a kind that this version does not read (exit code 3)."""


class ResourceError(ConsolidateError):
    """Not enough disk space or memory for the request (exit code 4)."""

    exit_code = 4


class DifferenceError(ConsolidateError):
    """A result is not what its manifest or the checkpoint says (exit code 5)."""

    exit_code = 5


class RankError(ConsolidateError):
    """Another rank failed; carries that rank's message and exit code, so that all ranks agree."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        """Keep the failing rank's exit code beside its message."""
        super().__init__(message)
        self.exit_code = exit_code


class RendezvousError(ConsolidateError):
    """The ranks could not find or reach each other before the run began."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        """Keep the exit code: 2 where the environment's variables are wrong."""
        super().__init__(message)
        self.exit_code = exit_code


class NoPortError(RendezvousError):
    """Rank 0 cannot listen: others only see that it does not come, so that it always speaks."""


class LostError(RankError):
    """Contact with another rank was lost; which one it is, and why, is not known here."""


class Caught:
    """A block that must not raise here, because someone else has to hear of it first.

    Threads and ranks end their work with it: what goes wrong inside ``with caught:`` is kept,
    and raised by whoever waits for them. Only exceptions that mean the end of the program
    (``KeyboardInterrupt``, ``SystemExit``) pass.

    Attributes:
        error: The first exception, or ``None``.
    """

    def __init__(self) -> None:
        """Start with no error."""
        self.error: Exception | None = None

    def __enter__(self) -> Caught:
        """Enter the block."""
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> bool:
        """Keep the exception and go on behind the block."""
        if isinstance(error, Exception):
            self.error = self.error or error
        return isinstance(error, Exception)

    def raise_if_any(self) -> None:
        """Raise what was kept."""
        if self.error is not None:
            raise self.error


class Problems:
    """Collects problems, so that all are raised at once before the first byte is written."""

    def __init__(self) -> None:
        """Start with no problem."""
        self._messages: list[str] = []

    def add(self, message: str) -> None:
        """Note one problem (a sentence without a trailing newline)."""
        self._messages.append(message)

    def extend(self, others: Problems) -> None:
        """Take over what others noted."""
        self._messages += others._messages

    def __bool__(self) -> bool:
        """Tell whether anything was noted."""
        return bool(self._messages)

    def raise_if_any(self, headline: str, advice: str = "") -> None:
        """Raise a :class:`CheckpointError` that lists every problem noted.

        Args:
            headline: What was being done, without a trailing colon.
            advice: What the user can do about it; a closing line.

        Raises:
            CheckpointError: If at least one problem was noted.
        """
        if self._messages:
            raise CheckpointError(listing(headline, self._messages, advice))


def listing(headline: str, items: Sequence[str], advice: str = "") -> str:
    """Format a headline, one line for each distinct item, and an optional closing line."""
    lines = [f"{headline}:", *(f"  - {item}" for item in dict.fromkeys(items))]
    if advice:
        lines.append(advice)
    return "\n".join(lines)


def listed(names: Sequence[str], most: int = 6) -> str:
    """Write names one behind the other, the first of them where there are many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


# Longer lines are names that no model has.
_MAX_LINE_LENGTH = 4000


def has_controls(text: str) -> bool:
    """Whether characters are in a text that move a terminal's cursor, or end a line."""
    return not text.isprintable() and any(unicodedata.category(c) == "Cc" for c in text)


def printable(text: str) -> str:
    """Make a text fit for a terminal: what a checkpoint's names do to one is up to a stranger.

    Args:
        text: Lines; names of files and tensors may be in them.

    Returns:
        The same lines, every character that is none to be seen (control characters, marks that
        turn the direction of writing, halves of surrogates) written as an escape, and the middle
        of endless lines left out.
    """
    return "\n".join(map(_printable_line, text.split("\n")))


def _printable_line(line: str) -> str:
    if len(line) > _MAX_LINE_LENGTH:
        half = _MAX_LINE_LENGTH // 2
        line = f"{line[:half]}[... {len(line) - 2 * half} characters ...]{line[-half:]}"
    if line.isprintable():
        return line
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return "".join(escaped)
