"""Zip files by hand: every field of every header can be a lie."""

from __future__ import annotations

import dataclasses
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.hostile.places import records, zipped


@dataclasses.dataclass
class Entry:
    """A record, and what its two headers say of it.

    Attributes:
        name: Its name in the directory.
        data: Its bytes.
        local: What differs in the local header: ``name``, ``flags``, ``method``, ``size``,
            ``extra``, ``signature``.
        central: What differs in the directory: ``flags``, ``method``, ``size``, ``packed``,
            ``offset``, ``extra``, ``crc``, ``disk``.
    """

    name: bytes
    data: bytes
    local: dict[str, Any] = dataclasses.field(default_factory=dict)
    central: dict[str, Any] = dataclasses.field(default_factory=dict)


def written(
    entries: Iterable[Entry], end: Mapping[str, Any] | None = None, gap: bytes = b""
) -> bytes:
    """Write a zip file; ``end`` says what differs in its end: count, size, offset, comment."""
    body, directory, count = bytearray(gap), b"", 0
    for entry in entries:
        offset, count = len(body), count + 1
        size, name = len(entry.data), entry.local.get("name", entry.name)
        local = {"flags": 0, "method": 0, "size": size, "extra": b"", **entry.local}
        body += struct.pack(
            "<4sHHHHHIIIHH",
            local.get("signature", b"PK\3\4"),
            20,
            local["flags"],
            local["method"],
            0,
            33,
            zlib.crc32(entry.data),
            local["size"],
            local["size"],
            len(name),
            local.get("extra_bytes", len(local["extra"])),
        )
        body += name + local["extra"] + entry.data
        c = {"flags": 0, "method": 0, "size": size, "packed": size, "offset": offset, "extra": b"",
             "crc": zlib.crc32(entry.data), "disk": 0, **entry.central}  # fmt: skip
        directory += struct.pack(
            "<4sHHHHHHIIIHHHHHII",
            b"PK\1\2",
            20,
            c.get("version", 20),
            c["flags"],
            c["method"],
            0,
            33,
            c["crc"],
            c["packed"],
            c["size"],
            len(entry.name),
            len(c["extra"]),
            0,
            c["disk"],
            0,
            0,
            c["offset"],
        )
        directory += entry.name + c["extra"]
    facts = {"count": count, "size": len(directory), "offset": len(body), "comment": b"",
             "before": b"", "disk": 0, **(end or {})}  # fmt: skip
    tail = struct.pack(
        "<4sHHHHIIH",
        b"PK\5\6",
        facts["disk"],
        0,
        facts["count"] & 0xFFFF,
        facts["count"] & 0xFFFF,
        facts["size"],
        facts["offset"],
        facts.get("comment_bytes", len(facts["comment"])),
    )
    return bytes(body) + directory + facts["before"] + tail + facts["comment"]


def zip64(*values: int) -> bytes:
    """Give an extra field with numbers of 64 bits."""
    return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values)


def _end64(size: int, offset: int, count: int = 3) -> bytes:
    record = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, offset)
    return record + struct.pack("<4sIQI", b"PK\6\7", 0, 0, 1)


def lies(path: Path) -> dict[str, bytes]:
    """Give the torch zip file in every hostile form."""
    kept = records(path)
    names = [name.encode() for name in kept]
    root = next(name for name in kept if name.endswith("data.pkl")).removesuffix("data.pkl")
    pickled = f"{root}data.pkl".encode()
    stored = next((n for n in names if b"/data/" in n), pickled)

    def made(which: bytes, end: Mapping[str, Any] | None = None, gap: bytes = b"", **facts: Any):
        entries = [Entry(name, kept[name.decode()]) for name in names]
        for entry in entries:
            if entry.name == which:
                entry.local |= facts.get("local", {})
                entry.central |= facts.get("central", {})
                entry.name = facts.get("name", entry.name)
                entry.data = facts.get("data", entry.data)
        return written([*entries, *facts.get("more", ())], end, gap)

    found = {
        "deflated": zipped(kept, zipfile.ZIP_DEFLATED),
        "bzip2": zipped(kept, zipfile.ZIP_BZIP2),
        "lzma": zipped(kept, zipfile.ZIP_LZMA),
        "a zip in a zip": zipped({"a.zip": zipped(kept)}),
        "a zip as the pickle": zipped({**kept, f"{root}data.pkl": zipped(kept)}),
        "a bomb beside": zipped({**kept, f"{root}bomb": b"\0" * 50_000_000}, zipfile.ZIP_DEFLATED),
        "a bomb as the pickle": zipped(
            {**kept, f"{root}data.pkl": b"\0" * 50_000_000}, zipfile.ZIP_DEFLATED
        ),
        "lies that it is not packed": made(pickled, central={"packed": 10**9}),
        "comment": made(pickled, {"comment": b"PK\5\6" + b"x" * 60_000}),
        "comment cut short": made(pickled, {"comment_bytes": 50_000}),
        "two ends": made(pickled) + made(pickled)[-22:],
        "in front": made(pickled, gap=b"x" * 5000),
        "an offset in the end that is too large": made(pickled, {"offset": 2**31}),
        "an offset in the end of nothing": made(pickled, {"offset": 0}),
        "a directory that is too large": made(pickled, {"size": 2**32 - 1}),
        "a directory of nothing": made(pickled, {"size": 0}),
        "a directory cut short": made(pickled, {"size": 50}),
        "another disk": made(pickled, {"disk": 7}),
        "many records by its end": made(pickled, {"count": 65535}),
        "zip64 end of everything": made(
            pickled, {"before": _end64(2**63, 2**63), "size": 2**32 - 1, "offset": 2**32 - 1}
        ),
        "zip64 end of all bits": made(
            pickled, {"before": _end64(2**64 - 1, 2**64 - 1), "size": 2**32 - 1}
        ),
        "zip64 locator only": made(pickled, {"before": struct.pack("<4sIQI", b"PK\6\7", 0, 9, 1)}),
        "no pickle": zipped({n: d for n, d in kept.items() if not n.endswith(".pkl")}),
        "two pickles": zipped({**kept, "other/data.pkl": b"N."}),
        "byteorder big": zipped({**kept, f"{root}byteorder": b"big"}),
        "byteorder long": zipped({**kept, f"{root}byteorder": b"x" * 1_000_000}),
        "many records": zipped({**kept, **{f"{root}x{i}": b"" for i in range(30_000)}}),
        "names of 60 kilobytes": made(
            pickled, more=[Entry(b"x" * 60_000 + b"%d" % i, b"") for i in range(50)]
        ),
        "half": made(pickled)[: len(made(pickled)) // 2],
        "front half missing": made(pickled)[len(made(pickled)) // 2 :],
        "a record of the directory": made(stored, central={"offset": 0}),
        "a record inside another": made(stored, central={"offset": 4}),
        "extra that is cut short": made(pickled, central={"extra": b"\1\0\xff\xff"}),
        "zip64 extra that is missing": made(pickled, central={"size": 2**32 - 1}),
        "zip64 of other kinds": made(pickled, central={"extra": zip64(1, 2, 3, 4)}),
        "a version of the future": made(pickled, central={"version": 255}),
    }
    for what, name in (("pickle", pickled), ("storage", stored)):
        for bad, value in {
            "path": b"../../../../tmp/owned", "absolute": b"/etc/passwd", "nul": b"a\0b",
            "escape": b"\x1b[2J\x1b]0;owned\7", "newline": b"a\nnote: well", "empty": b"",
            "not utf-8": b"\xff\xfe", "right to left": "\u202e".encode(),
        }.items():  # fmt: skip
            found[f"{what} named with {bad}"] = made(
                name, name=value + b"/data.pkl" if what == "pickle" else value
            )
        found |= {
            f"{what} twice": made(name, more=[Entry(name, b"N.")]),
            f"{what} encrypted": made(name, central={"flags": 1}, local={"flags": 1}),
            f"{what} encrypted inside": made(name, local={"flags": 1}),
            f"{what} not utf-8": made(name, name=b"\xff" + name, central={"flags": 0x800}),
            f"{what} deflated inside": made(name, local={"method": 8}),
            f"{what} of another method": made(name, central={"method": 99}),
            f"{what} of another size inside": made(name, local={"size": 3}),
            f"{what} of another name inside": made(name, local={"name": b"x" * len(name)}),
            f"{what} of a longer name inside": made(name, local={"name": b"x" * 3000}),
            f"{what} behind the end by its extra": made(name, local={"extra_bytes": 65535}),
            f"{what} past the end": made(name, central={"offset": 2**31}),
            f"{what} far past the end": made(
                name, central={"offset": 2**32 - 1, "extra": zip64(2**63)}
            ),
            f"{what} of all bits past the end": made(
                name, central={"offset": 2**32 - 1, "extra": zip64(2**64 - 1)}
            ),
            f"{what} of huge size": made(
                name,
                central={
                    "size": 2**32 - 1, "packed": 2**32 - 1, "extra": zip64(2**63, 2**63)
                },
            ),
            f"{what} of gigabytes": made(name, central={"size": 2**31, "packed": 2**31}),
            f"{what} of a negative size": made(
                name,
                central={
                    "size": 2**32 - 1, "packed": 2**32 - 1,
                    "extra": zip64(2**64 - 1, 2**64 - 1),
                },
            ),
            f"{what} of size 0": made(name, central={"size": 0, "packed": 0}),
            f"{what} without a header": made(name, local={"signature": b"XX\3\4"}),
            f"{what} of another checksum": made(name, central={"crc": 12345}),
            f"{what} of no bytes": made(name, data=b""),
        }  # fmt: skip
    return found
