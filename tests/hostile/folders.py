"""What a stranger's folder can be, beside the content of its shards."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from dist_consolidate.checkpoint.legacy import MAGIC

# Changes a copy of a checkpoint: the run folder, its tag folder, the shard to be spoiled.
Change = Callable[[Path, Path, Path], object]
SPARSE_BYTES = 10 << 30


def _instead(make: Callable[[Path], object]) -> Change:
    def change(_ckpt: Path, _tag: Path, shard: Path) -> None:
        shard.unlink()
        make(shard)

    return change


def _linked(target: str | Path) -> Change:
    return _instead(lambda path: path.symlink_to(target))


def _latest(content: bytes | Callable[[Path], object]) -> Change:
    def change(ckpt: Path, _tag: Path, _shard: Path) -> None:
        path = ckpt / "latest"
        path.unlink(missing_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content(path)

    return change


def _beside(name: str | bytes) -> Change:
    """Lay a copy of the shard beside it, under another name."""

    def change(_ckpt: Path, _tag: Path, shard: Path) -> None:
        shutil.copy(shard, os.path.join(os.fsencode(shard.parent), os.fsencode(name)))  # noqa: PTH118

    return change


def _renamed_tag(name: str | bytes) -> Change:
    def change(ckpt: Path, tag: Path, _shard: Path) -> None:
        for path in ckpt.glob("latest*"):
            path.unlink()
        tag.rename(os.fsdecode(os.path.join(os.fsencode(ckpt), os.fsencode(name))))  # noqa: PTH118

    return change


def sparse(path: Path) -> None:
    """Make a file that calls itself ten gigabytes long."""
    with path.open("wb") as stream:
        stream.truncate(SPARSE_BYTES)


def _sparse_tail(path: Path) -> None:
    """As :func:`sparse`, ending as a zip file whose directory is nearly as long."""
    from tests.hostile.zips import Entry, written

    data = written([Entry(b"a/data.pkl", b"N.")], {"size": 2**32 - 2, "offset": 0})
    with path.open("wb") as stream:
        stream.seek(SPARSE_BYTES)
        stream.write(data)


def _sparse_pickle(path: Path) -> None:
    """A zip file, the pickle of which calls itself gigabytes long and is a hole."""
    from tests.hostile.zips import Entry, written

    size = 4_000_000_000
    sizes = {"size": size, "packed": size, "crc": 0}
    data = written([Entry(b"a/data.pkl", b"", {"size": size}, sizes)])
    head, tail = data[:40], data[40:]
    end = bytearray(tail)
    end[-6:-2] = (size + 40).to_bytes(4, "little")
    with path.open("wb") as stream:
        stream.write(head)
        stream.seek(size + 40)
        stream.write(end)


def _sparse_legacy(path: Path) -> None:
    """A file of before torch 1.6, whose first text claims gigabytes of a hole."""
    with path.open("wb") as stream:
        stream.write(MAGIC + b"X\xff\xff\xff\x7f")
        stream.truncate(SPARSE_BYTES)


def _socket(path: Path) -> None:
    here = Path.cwd()
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # the path of a socket may not be long
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def _moved_within(_ckpt: Path, tag: Path, shard: Path) -> None:
    shard.rename(tag / "blob")
    shard.symlink_to("blob")


def _linked_to_another(_ckpt: Path, tag: Path, shard: Path) -> None:
    other = next(p for p in sorted(tag.rglob("*.pt")) if p != shard)
    shard.unlink()
    shard.symlink_to(other)


def _target_elsewhere(ckpt: Path, _tag: Path, _shard: Path) -> None:
    (ckpt / "consolidated").symlink_to("/tmp")


def _deep_folders(_ckpt: Path, tag: Path, _shard: Path) -> None:
    folder = tag
    for _ in range(300):
        folder /= "zero"
        folder.mkdir(exist_ok=True)


def _tag_in_itself(ckpt: Path, tag: Path, _shard: Path) -> None:
    (tag / "zero").mkdir(exist_ok=True)
    (tag / "zero" / "loop").symlink_to(ckpt)
    (tag / "offloaded_tensors").symlink_to("offloaded_tensors")


def _config(text: str | Callable[[Path], object]) -> Change:
    def change(ckpt: Path, _tag: Path, _shard: Path) -> None:
        path = ckpt / "config.json"
        text(path) if callable(text) else path.write_text(text)

    return change


RANK = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
CHANGES: dict[str, Change] = {
    "a FIFO": _instead(os.mkfifo),
    "a socket": _instead(_socket),
    "a folder": _instead(Path.mkdir),
    "nothing": _instead(lambda path: None),
    "an empty file": _instead(Path.touch),
    "a sparse file": _instead(sparse),
    "a sparse file with an end": _instead(_sparse_tail),
    "a sparse pickle": _instead(_sparse_pickle),
    "a sparse file of before torch 1.6": _instead(_sparse_legacy),
    "not to be read": _instead(lambda path: path.symlink_to("/proc/self/mem")),
    "a link to zeros": _linked("/dev/zero"),
    "a link to random bytes": _linked("/dev/urandom"),
    "a link to a terminal": _linked("/dev/tty"),
    "a link to passwords": _linked("/etc/passwd"),
    "a link to the kernel's news": _linked("/proc/kmsg"),
    "a link to the kernel's memory": _linked("/proc/kcore"),
    "a link to the standard input": _linked("/dev/stdin"),
    "a link to nothing": _linked("/nowhere"),
    "a link in circles": _instead(lambda path: path.symlink_to(path.name)),
    "a link to a folder": _linked("/"),
    "moved and linked": _moved_within,
    "a link to another shard": _linked_to_another,
    "latest of gigabytes": _latest(sparse),
    "latest of nothing": _latest(b""),
    "latest with blanks": lambda ckpt, tag, _: (ckpt / "latest").write_text(f"\n {tag.name}\r\n "),
    "latest binary": _latest(bytes(range(256))),
    "latest with a NUL": _latest(b"global\0step"),
    "latest with an escape": _latest(b"\x1b[2J\x1b]0;owned\x07"),
    "latest of several lines": _latest(b"a\nnote: all is well"),
    "latest right to left": _latest("\u202eabc".encode()),
    "latest not utf-8": _latest(b"\xff\xfe\xfd"),
    "latest above": _latest(b"../other"),
    "latest above, later": _latest(b"a/../../other"),
    "latest absolute": _latest(b"/etc"),
    "latest that is here": _latest(b"."),
    "latest of dots": _latest(b".."),
    "latest too long": _latest(b"a" * 5000),
    "latest of many parts": _latest(b"a/" * 1000),
    "latest of one long part": _latest(b"a" * 1000),
    "latest a FIFO": _latest(os.mkfifo),
    "latest a folder": _latest(Path.mkdir),
    "latest a link to zeros": _latest(lambda path: path.symlink_to("/dev/zero")),
    "latest a link to the kernel's news": _latest(lambda path: path.symlink_to("/proc/kmsg")),
    "latest a link in circles": _latest(lambda path: path.symlink_to("latest")),
    "a tag with odd characters": _renamed_tag("\x1b[31mstep7\x07\u202e"),
    "a tag with a newline": _renamed_tag("step7\nnote: all is well"),
    "a tag of no utf-8": _renamed_tag(b"step7\xff\xfe"),
    "a tag that links to the root": lambda ckpt, tag, _: (shutil.rmtree(tag), tag.symlink_to("/")),
    "a rank beyond": _beside(RANK.format(7)),
    "a rank of a hundred digits": _beside(RANK.format("9" * 100)),
    "a rank of other digits": _beside(RANK.format("\u0663")),
    "a rank twice": _beside(RANK.format("00")),
    "an expert far beyond": _beside(f"layer_0_expert_{'9' * 50}_mp_rank_00_model_states.pt"),
    "a layer far beyond": _beside(f"layer_{'9' * 50}-model_00-model_states.pt"),
    "a model index far beyond": _beside(f"mp_rank_{'9' * 50}_model_states.pt"),
    "another writer": _beside(f"{RANK.format(0)}-{'9' * 20}.{'9' * 20}"),
    "a name of no rank": _beside("zero_pp_rank_-1_mp_rank_00_optim_states.pt"),
    "a name with an escape": _beside("\x1b]0;owned\x07.pt"),
    "a name with a newline": _beside("a\nnote: well.pt"),
    "the result elsewhere": _target_elsewhere,
    "folders in folders": _deep_folders,
    "a folder in itself": _tag_in_itself,
    "a config": _config('{"architectures": ["' + "x" * 100 + '"]}'),
    "a deep config": _config('{"architectures":' * 50_000),
    "a config of gigabytes": _config(sparse),
    "a config that is a FIFO": _config(os.mkfifo),
    "a config that links to zeros": _config(lambda path: path.symlink_to("/dev/zero")),
}
# Those after which there must be no result.
_SHARDS_REFUSED = ("a FIFO", "a socket", "a folder", "nothing", "an empty", "a sparse", "a link")
_ALSO_REFUSED = (
    "not to be read", "a rank beyond", "a rank of a hundred digits", "a rank twice",
    "a rank of other digits", "a tag with a newline", "a tag with odd characters",
)  # fmt: skip
_RIGHT = ("latest with blanks", "latest a folder", "a folder in itself")
REFUSED = [
    name
    for name in CHANGES
    if name.startswith((*_SHARDS_REFUSED, "latest", *_ALSO_REFUSED)) and name not in _RIGHT
]
UNIVERSAL_NAMES: tuple[bytes, ...] = (
    b"\x1b[2J\x1b]0;owned\x07", b"a\nnote: all is well", b"\xff\xfe", "\u202eabc".encode(),
    b"a\x9b31m", b"..a", b"x" * 255, b" ", b"-", b"*", b"[a]", b"{0}", b"%s",
)  # fmt: skip


def add_universal(tag: Path, name: bytes) -> None:
    """Add a parameter's folder of any name to a universal checkpoint."""
    folder = Path(os.fsdecode(os.fsencode(tag / "zero") + b"/" + name))
    folder.mkdir()
    shutil.copy(next(tag.glob("zero/*/fp32.pt")), folder)
