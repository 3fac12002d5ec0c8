"""Random changes to kept checkpoints that know what they change: opcodes, headers, bytes, files."""

from __future__ import annotations

import functools
import pickletools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from dist_consolidate.checkpoint.legacy import is_legacy
from tests.cases import CASES
from tests.hostile import pickles, zips
from tests.hostile.places import pickle_of, records, with_pickle

_INTERESTING = (0, 1, 2, 3, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
_HUGE = (2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def files(ckpt: Path) -> list[Path]:
    """Give the files of a checkpoint that hold something."""
    return sorted(path for path in ckpt.rglob("*") if path.is_file())


def shards(ckpt: Path) -> list[Path]:
    """Give its torch files."""
    return [path for path in files(ckpt) if path.suffix == ".pt" or ".pt-" in path.name]


def replace(path: Path, data: bytes) -> None:
    """Give a file another content; what shares its bytes by a hard link keeps them."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


@functools.cache
def _segments(pickled: bytes) -> tuple[bytes, ...]:
    """Cut a pickle into its opcodes, each with its argument."""
    positions = [position or 0 for _, _, position in pickletools.genops(pickled)]
    pairs = zip(positions, [*positions[1:], len(pickled)], strict=True)
    return tuple(pickled[start:stop] for start, stop in pairs)


@functools.cache
def _fragments() -> tuple[bytes, ...]:
    small = [data for data in pickles.wasteful().values() if len(data) < 5000]
    kinds = (pickles.impossible().values(), pickles.running("/nowhere/canary").values(), small)
    return (*(data for kind in kinds for data in kind), *pickles.NAMES.values())


def mutate_bytes(ckpt: Path, choice: random.Random) -> None:
    """Change, insert, remove or repeat bytes of one file."""
    path = choice.choice(files(ckpt))
    data = bytearray(path.read_bytes())
    for _ in range(choice.choice((1, 1, 1, 2, 4, 16))):
        # Headers lie at the ends.
        near = choice.choice((0, 0, 1, 2))
        at = choice.randrange(len(data) + 1)
        if near and len(data) > 600:
            at = choice.randrange(600) if near == 1 else len(data) - choice.randrange(600)
        what = choice.randrange(5)
        if what == 0:
            data[at : at + 1] = bytes([choice.randrange(256)])
        elif what == 1:
            data[at:at] = choice.randbytes(choice.choice((1, 2, 8, 100)))
        elif what == 2:
            del data[at : at + choice.choice((1, 2, 8, 100, 4000))]
        elif what == 3:
            value = choice.choice(_INTERESTING)
            data[at : at + 4] = (value & 0xFFFFFFFF).to_bytes(4, "little")
        else:
            start = choice.randrange(len(data) + 1)
            data[at:at] = data[start : start + choice.choice((1, 16, 500))]
    replace(path, bytes(data))


def _number(choice: random.Random) -> bytes:
    value = choice.choice((*_INTERESTING, *_HUGE, choice.randrange(1000)))
    if choice.random() < 0.1:
        return pickles.real(choice.choice((0.5, float("nan"), float("inf"), -1.0)))
    return pickles.number(choice.choice((value, value, -value)))


def mutate_pickle(ckpt: Path, choice: random.Random) -> None:
    """Change the opcodes of one torch file's pickle; its checksum is right."""
    path = choice.choice(shards(ckpt))
    try:
        parts = list(_segments(pickle_of(path)))
    except (ValueError, KeyError, OSError):
        return mutate_bytes(ckpt, choice)
    numbers = [i for i, part in enumerate(parts) if part[:1] in b"KMJ\x8a" and len(part) > 1]
    texts = [i for i, part in enumerate(parts) if part[:1] == b"X"]
    for _ in range(choice.choice((1, 1, 1, 1, 2, 3, 8))):
        at = choice.randrange(1, max(len(parts) - 1, 2)) if len(parts) > 2 else 0
        what = choice.randrange(9)
        if what == 0:
            del parts[at]
        elif what == 1:
            parts.insert(at, parts[choice.randrange(len(parts))])
        elif what == 2:
            other = choice.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
        elif what in (3, 4) and numbers:
            at = choice.choice(numbers)
            if at < len(parts):
                parts[at] = _number(choice)
        elif what == 5 and texts:
            at = choice.choice(texts)
            if at < len(parts):
                other = parts[choice.choice(texts) % len(parts)]
                parts[at] = choice.choice((choice.choice(_fragments()), other))
        elif what == 6:
            parts[at] = choice.choice(_fragments())
        elif what == 7:
            parts.insert(at, choice.choice(_fragments()))
        else:
            start = choice.randrange(len(parts))
            parts[at:at] = parts[start : start + choice.choice((2, 10, 50))]
    replace(path, with_pickle(path, b"".join(parts)))
    return None


def mutate_item(ckpt: Path, choice: random.Random) -> None:
    """Set one item of a torch file's dictionary, or its only object, to something else."""
    path = choice.choice(shards(ckpt))
    try:
        pickled = pickle_of(path)
        texts = [part[5:].decode() for part in _segments(pickled) if part[:1] == b"X"]
    except (ValueError, KeyError, OSError):
        return mutate_bytes(ckpt, choice)
    key, value = choice.choice(texts or ["a"]), choice.choice(_fragments())
    inside = choice.choice(("optimizer_state_dict", "module", "ds_config", None, None))
    keys = (key,) if inside is None else (inside, key)
    try:
        made = pickles.overridden(pickled, keys, value)
    except (AssertionError, StopIteration, IndexError):
        made = None
    replace(path, with_pickle(path, made or b"\x80\x02" + value + b"."))
    return None


def mutate_zip(ckpt: Path, choice: random.Random) -> None:
    """Write one torch zip file anew, with lies in its headers."""
    path = choice.choice(shards(ckpt))
    try:
        kept = {} if is_legacy(path) else records(path)
    except (ValueError, KeyError, OSError):
        kept = {}
    if not kept:
        return mutate_bytes(ckpt, choice)
    entries = [zips.Entry(name.encode(), data) for name, data in kept.items()]
    end: dict[str, int | bytes] = {}
    for _ in range(choice.choice((1, 1, 2, 3))):
        entry, what = choice.choice(entries), choice.randrange(9)
        value = choice.choice((*_INTERESTING, choice.randrange(5000)))
        if what == 0:
            entry.local[choice.choice(("flags", "method", "extra_bytes"))] = value & 0xFFFF
        elif what == 1:
            entry.local["size"] = value
        elif what == 2:
            entry.central[choice.choice(("flags", "method", "disk", "version"))] = value & 0xFFFF
        elif what == 3:
            entry.central[choice.choice(("size", "packed", "offset", "crc"))] = value
        elif what == 4:
            sizes = {"size": 2**32 - 1, "packed": 2**32 - 1, "offset": 2**32 - 1}
            wide = [choice.choice(_HUGE) for _ in range(choice.randrange(4))]
            entry.central |= {**sizes, "extra": zips.zip64(*wide)}
        elif what == 5:
            other = choice.choice(entries)
            entry.data, other.data = other.data, entry.data
        elif what == 6:
            entries.append(choice.choice((entry, zips.Entry(entry.name, b"N."))))
        elif what == 7:
            entry.name = choice.choice((b"../" + entry.name, entry.name[::-1], b"\xff", b"a\0b"))
        else:
            end[choice.choice(("count", "size", "offset", "disk"))] = value & 0xFFFF
    choice.random() < 0.3 and choice.shuffle(entries)
    replace(path, zips.written(entries, end))
    return None


def mutate_files(ckpt: Path, choice: random.Random) -> None:
    """Exchange, cut, empty, double, rename or remove files."""
    every = files(ckpt)
    path, what = choice.choice(every), choice.randrange(8)
    data = path.read_bytes()
    if what == 0:
        other = choice.choice(every)
        mine, its = data, other.read_bytes()
        replace(path, its)
        replace(other, mine)
    elif what == 1:
        replace(path, data[: choice.randrange(len(data) + 1)])
    elif what == 2:
        replace(path, bytes(len(data)))
    elif what == 3:
        other = choice.choice(shards(CASES[choice.choice(sorted(CASES))].ckpt))
        replace(path, other.read_bytes())
    elif what == 4:
        path.unlink()
    elif what == 5:
        numbers = "0123"
        name = "".join(choice.choice(numbers) if c in numbers else c for c in path.name)
        shutil.copy(path, path.with_name(name)) if name != path.name else path.unlink()
    elif what == 6:
        replace(path, data + choice.randbytes(choice.choice((1, 22, 5000))))
    else:
        target = path.with_name(choice.choice(every).name)
        path.replace(target)


def mutate_latest(ckpt: Path, choice: random.Random) -> None:
    """Write something else into ``latest``."""
    tags = [path.name for path in ckpt.iterdir() if path.is_dir()]
    text = choice.choice((*tags, "..", "/", "a/b", "x" * 300, "\x1b[2J", "\0", "")).encode()
    noise = choice.randbytes(choice.randrange(6)) if choice.random() < 0.6 else b""
    replace(ckpt / "latest", text + noise)


MUTATIONS: dict[str, tuple[Callable[[Path, random.Random], None], int]] = {
    "bytes": (mutate_bytes, 25),
    "pickle": (mutate_pickle, 35),
    "item": (mutate_item, 15),
    "zip": (mutate_zip, 15),
    "files": (mutate_files, 9),
    "latest": (mutate_latest, 1),
}
