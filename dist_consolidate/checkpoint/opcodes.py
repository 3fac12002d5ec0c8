"""Looks through a pickle before it is given to Python's machine, which trusts what it reads.

Three things would harm even where nothing is imported or run: a memo index makes the machine
allocate and fill a table of that length; a few bytes can ask for millions of objects; and a key of
a dictionary is hashed at once, which never ends for tuples of tuples of tuples that share their
items, and overflows the stack for deep ones. So sizes and indices are checked against the pickle's
own length, and opcodes that hash are replaced by ones that ask the unpickler first.

The walk costs little: everything between two texts is skipped by one regular expression.

Source: the opcodes' descriptions in ``pickletools.py`` and ``Modules/_pickle.c`` of CPython.
"""

from __future__ import annotations

import functools
import re

# Torch's own are a few kilobytes for each hundred tensors.
MAX_PICKLE_BYTES = 256 << 20
# Objects made by opcodes of one byte; each takes a hundred bytes of memory or so.
_MAX_OBJECTS = 2_000_000
_OBJECT_MAKERS = b"]}R\x81\x8f\x92"
_NOT_OBJECT_MAKERS = bytes(set(range(256)) - set(_OBJECT_MAKERS))
_MAX_LINE_BYTES = 1000
_MAX_INTEGER_BYTES = 255


@functools.cache
def _run_below(num_indices: int) -> re.Pattern[bytes]:
    """Give what matches opcodes without danger, with arguments of fixed length.

    What no torch.save writes is not among them: instances of Python 2, copyreg's numbers, other
    buffers. Memo indices may be up to so many times 2 ** 16.
    """
    high = b"[\\x00-\\x%02x]" % (min(num_indices, 256) - 1)
    return re.compile(
        rb"(?:[(012NRbaetlQ)\]}\x81\x85-\x89\x8f\x92-\x94]|[Khq].|\x80.|M..|[Jj]....|r.."
        + high
        + rb"\0|G.{8})*+",
        re.DOTALL,
    )


# Opcodes that are followed by a length (of so many bytes, little-endian) and so many bytes.
_SIZED = {
    ord("B"): 4, ord("T"): 4, ord("C"): 1, ord("U"): 1,
    0x8A: 1, 0x8B: 4, 0x8C: 1, 0x8D: 8, 0x8E: 8, 0x96: 8,
}  # fmt: skip
# Opcodes that are followed by lines of text, and how many.
_LINES = {ord(c): 1 for c in "FILSVpg"} | {ord("c"): 2}
_LONG_TEXTS = b"SV"
_PUT, _GET, _LONG_PUT, _TEXT, _STOP = map(ord, "pgrX.")
_LONG4, _FRAME = 0x8B, 0x95
# What hashes, and what is done instead: the arguments become a tuple that is looked up by
# persistent_load, which sees by its form what is meant (see unpickle.py).
_ASKED = {
    ord("s"): b"\x87Q",  # SETITEM: (mapping, key, value)
    ord("u"): b"t\x86Q",  # SETITEMS: (mapping, (key, value, ...))
    ord("d"): b"t\x85Q",  # DICT: ((key, value, ...),)
    0x90: b"t\x85\x86Q",  # ADDITEMS: (set, ((item, ...),))
    0x91: b"t\x85\x85Q",  # FROZENSET: (((item, ...),),)
}


class PickleError(ValueError):
    """The pickle is not one that torch writes, or asks for too much."""


class CutShortError(PickleError):
    """The pickle goes on behind the bytes that are there."""


def secured(data: bytes) -> tuple[bytes, int]:
    """Check a pickle, and replace what must not be carried out unasked.

    Args:
        data: Bytes that begin with a pickle.

    Returns:
        The pickle to be carried out, and where the original ends in ``data``.

    Raises:
        CutShortError: If ``data`` ends before the pickle does.
        PickleError: If it is damaged, or asks for more than it is long.
    """
    walk = _Walk(data)
    walk.go()
    if sum(map(data.count, _single(_OBJECT_MAKERS))) > _MAX_OBJECTS:
        _Counting(data).go()
    return b"".join((*walk.pieces, data[walk.kept : walk.at])), walk.at


def _single(codes: bytes) -> list[bytes]:
    return [bytes([code]) for code in codes]


class _Walk:
    """Goes from opcode to opcode.

    Attributes:
        at: Where it is.
        kept: Up to where ``pieces`` holds what is carried out.
        pieces: The beginning of what is carried out.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.at, self.kept = data, 0, 0
        self.pieces: list[bytes] = []
        # An object takes a byte, and its PUT with such an index five more.
        self._max_index = max(len(data) // 5, 1 << 16)
        self._run = _run_below(self._max_index >> 16)

    def passed(self, start: int, stop: int) -> None:
        """Take note of a run of opcodes without danger."""

    def go(self) -> None:
        """Go to the end of the pickle."""
        data, run, length = self.data, self._run.match, len(self.data)
        while True:
            match = run(data, self.at)
            assert match is not None  # it matches nothing at all, too
            self.passed(self.at, match.end())
            at = self.at = match.end()
            if at >= length:
                raise CutShortError("pickle data was truncated")
            code = data[at]
            if code == _TEXT:  # most of what is no run; the others take the longer way
                self.at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
                if self.at > length:
                    raise CutShortError("pickle data was truncated")
            elif code == _STOP:
                self.at += 1
                return
            else:
                self._step(code)

    def _step(self, code: int) -> None:
        if (width := _SIZED.get(code)) is not None:
            self._skip_sized(code, width)
        elif code in _ASKED:
            self._replace(1, _ASKED[code])
        elif code in _LINES:
            self._skip_lines(code, _LINES[code])
        elif code == _LONG_PUT:
            self._check_index(int.from_bytes(self._argument(4), "little"))
            self.at += 5
        elif code == _FRAME:  # lengths change; frames are of use for streams only
            self._argument(8)
            self._replace(9, b"")
        else:
            # An opcode that the run does not take may also be a good one that is cut short.
            error = CutShortError if len(self.data) - self.at < 9 else PickleError
            raise error(f"invalid load key, {bytes([code])!r}, or out of place")

    def _argument(self, num_bytes: int) -> bytes:
        found = self.data[self.at + 1 : self.at + 1 + num_bytes]
        if len(found) < num_bytes:
            raise CutShortError("pickle data was truncated")
        return found

    def _skip_sized(self, code: int, width: int) -> None:
        size = int.from_bytes(self._argument(width), "little")
        if size > MAX_PICKLE_BYTES or (code == _LONG4 and size > _MAX_INTEGER_BYTES):
            raise PickleError(f"a value claims {size} bytes")
        self.at += 1 + width + size
        if self.at > len(self.data):
            raise CutShortError("pickle data was truncated")

    def _skip_lines(self, code: int, count: int) -> None:
        start = self.at + 1
        for _ in range(count):
            end = self.data.find(b"\n", start)
            if end < 0:
                raise CutShortError("pickle data was truncated")
            line = self.data[start:end]
            if len(line) > _MAX_LINE_BYTES and code not in _LONG_TEXTS:
                raise PickleError(f"a name or number is {len(line)} bytes long")
            if code in (_PUT, _GET):
                if not line.isdigit() or len(line) > 10:
                    raise PickleError("a memo index is none")
                self._check_index(int(line))
            start = end + 1
        self.at = start

    def _check_index(self, index: int) -> None:
        if index > self._max_index:
            raise PickleError(f"memo index {index} in a pickle of {len(self.data)} bytes")

    def _replace(self, num_bytes: int, instead: bytes) -> None:
        self.pieces += (self.data[self.kept : self.at], instead)
        self.at += num_bytes
        self.kept = self.at


class _Counting(_Walk):
    """Counts the objects; only done where there may be too many."""

    num_objects = 0

    def passed(self, start: int, stop: int) -> None:
        """Count what a run makes."""
        self.num_objects += len(self.data[start:stop].translate(None, _NOT_OBJECT_MAKERS))
        if self.num_objects > _MAX_OBJECTS:
            raise PickleError(f"it makes more than {_MAX_OBJECTS} objects")
