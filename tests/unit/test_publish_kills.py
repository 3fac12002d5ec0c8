"""kill -9 before every single call that publishing makes on the file system, one after another.

A child process publishes and kills itself before its n-th call, for each n until it comes through.
After every kill the output folder holds the old result, none, or the whole new one; and the next
run for the same output ends what was begun.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from dist_consolidate.errors import UsageError
from dist_consolidate.output import work
from dist_consolidate.output.index import MANIFEST_NAME, STATES_FOLDER, is_entry_point
from dist_consolidate.output.publish import Publication, prepare
from tests.children import die_before, end_of, start_child
from tests.long import IS_LONG

CALLS = ("rename", "replace", "unlink", "rmdir", "mkdir", "link", "fsync", "write")
IDENTITY = {"version": "1", "options": {}, "plan": "p", "files": {}, "layout": "l", "shards": {}}
MINE = {"config.json": b"{}", "model.bin": b"of another tool", "tokenizer/vocab.txt": b"a b"}


def sharded(stem: str, suffix: str, count: int) -> list[str]:
    names = [f"{stem}-{i:05d}-of-{count:05d}.{suffix}" for i in range(1, count + 1)]
    return [*names, f"{stem}.{suffix}.index.json"]


RESULTS: Mapping[str, list[str]] = {
    "one": ["model.safetensors"],
    "two": sharded("model", "safetensors", 2),
    "three": sharded("model", "safetensors", 3),
    "bin": ["pytorch_model.bin"],
    "bins": sharded("pytorch_model", "bin", 2),
    "states": [
        *sharded("model", "safetensors", 2),
        *sharded(f"{STATES_FOLDER}/exp_avg", "safetensors", 2),
        f"{STATES_FOLDER}/exp_avg_sq.safetensors",
    ],
}


@dataclasses.dataclass(frozen=True)
class Result:
    """The files of a result, each with content that tells which result it is of."""

    files: Mapping[str, bytes]

    @staticmethod
    def of(kind: str, mark: str) -> Result:
        names = [*RESULTS[kind], MANIFEST_NAME]
        return Result({name: f"{mark} {name}".encode() for name in names})

    @property
    def last(self) -> tuple[str, ...]:
        """As a run orders them: states, manifest, and the weights' entry point at the end."""
        entries = [name for name in self.files if is_entry_point(name)]
        states = [name for name in entries if STATES_FOLDER in name]
        return (*states, MANIFEST_NAME, *(name for name in entries if name not in states))

    def put(self, folder: Path) -> None:
        put(folder, self.files)


def put(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def visible(folder: Path) -> dict[str, bytes]:
    """All files of a folder but for those in or under a hidden name."""
    paths = folder.rglob("*") if folder.is_dir() else ()
    found = {path.relative_to(folder): path for path in paths if path.is_file()}
    return {
        str(name): path.read_bytes()
        for name, path in found.items()
        if not any(part.startswith(".") for part in name.parts)
    }


def hidden(folder: Path) -> list[str]:
    paths = folder.rglob(".*consolidating*") if folder.is_dir() else ()
    return sorted(str(path.relative_to(folder)) for path in paths)


def assert_old_or_none_or_new(found: Mapping[str, bytes], old: Result, new: Result) -> None:
    """The rule, as a loader sees it and as somebody who reads the manifest does."""
    for name, content in found.items():
        assert content in (old.files.get(name), new.files.get(name), MINE.get(name)), name
    for name, content in MINE.items():
        assert found.get(name) == content, name
    entries = [name for name in found if is_entry_point(name) and STATES_FOLDER not in name]
    is_new = [found[name] == new.files.get(name) for name in entries]
    if any(is_new):
        assert found == {**new.files, **MINE}, "half of the new result, or some of the old"
    for entry in entries:  # of the old result: what it stands for is still there, too
        stem = entry.split(".")[0]
        for name in old.files:
            if not any(is_new) and name.startswith(f"{stem}-"):
                assert found.get(name) == old.files[name], f"{entry} without {name}"
    manifest = found.get(MANIFEST_NAME)
    if manifest == new.files[MANIFEST_NAME]:
        late = [name for name in new.last if STATES_FOLDER not in name]
        assert all(found.get(n) == c for n, c in new.files.items() if n not in late)
        assert not [n for n, c in found.items() if c == old.files.get(n)]


def fill(publication: Publication, result: Result) -> None:
    for name, content in result.files.items():
        if name.endswith(".json"):
            publication.write_file(name, content)
        else:
            path = publication.create_file(name, len(content))
            path.write_bytes(content)


def killed(action: Callable[[], None]) -> bool:
    """Run something in a child process; tell whether it was killed, fail if it failed."""
    code = end_of(start_child(action))
    assert code <= 0, "the child failed"
    return code < 0


def one_run(out: Path, old: str | None, new: Result, *, resume: bool, number: int) -> None:
    identity = IDENTITY if resume else None
    publication = prepare(out, tuple(new.files), "t1", overwrite=old is not None, identity=identity)
    fill(publication, new)
    die_before(CALLS, number)
    publication.publish(new.last)


CASES = [
    ("new folder", None, "two", True),
    ("overwrite", "one", "three", False),
    ("overwrite", "states", "states", True),
]
MORE_CASES = [
    ("new folder", None, "states", False),
    ("empty folder", None, "one", True),
    ("empty folder", None, "states", False),
    ("overwrite", "one", "one", True),
    ("overwrite", "three", "one", False),
    ("overwrite", "two", "two", True),
    ("overwrite", "two", "bins", False),
    ("overwrite", "bins", "bin", True),
    ("overwrite", "bin", "states", False),
    ("overwrite", "states", "two", True),
]


@pytest.mark.parametrize(
    ("place", "before", "after", "resume"), [*CASES, *(MORE_CASES if IS_LONG else [])]
)
def test_a_kill_before_any_call_leaves_the_old_result_none_or_the_new_one(
    place: str, before: str | None, after: str, resume: bool, tmp_path: Path
) -> None:
    new = Result.of(after, "new")
    old = Result.of(before, "old") if before else Result({MANIFEST_NAME: b"no manifest"})
    seen = set()
    for number in itertools.count():
        out = tmp_path / str(number) / "out"
        out.parent.mkdir()
        if place != "new folder":
            put(out, MINE)
        if before:
            old.put(out)
        was_killed = killed(lambda: one_run(out, before, new, resume=resume, number=number))  # noqa: B023
        if place == "new folder":
            assert visible(out) in ({}, dict(new.files)), number
        else:
            assert_old_or_none_or_new(visible(out), old, new)
        whole = {**new.files, **(MINE if place != "new folder" else {})}
        seen.add(
            "new"
            if visible(out) == whole
            else "old"
            if old.files[MANIFEST_NAME] in visible(out).values()
            else "none"
        )
        if not was_killed:
            break
        assert_next_run_ends_it(out, before, new, resume=resume, whole=whole)
    assert number > 10
    assert visible(out) == whole
    assert not hidden(tmp_path / str(number))
    assert "new" in seen
    assert before is None or "old" in seen


def assert_next_run_ends_it(
    out: Path, before: str | None, new: Result, *, resume: bool, whole: Mapping[str, bytes]
) -> None:
    """Another run comes: the first one's result is in place whole, or untouched and refused."""
    was = visible(out)
    homes = work.find_leftovers(out)
    was_begun = any(work.read_marker(home) for home in homes)
    # At the very end of clearing up, nothing tells any more that the result is this run's.
    resume = resume and any(work.read_identity(home) for home in homes)
    identity = IDENTITY if resume else None
    names = tuple(new.files)
    if was_begun and resume:
        publication = prepare(out, names, "t2", overwrite=before is not None, identity=identity)
        assert publication.is_done
        assert "killed while it put" in publication.notes[0]
    elif was_begun:
        with pytest.raises(UsageError, match=r"(?s)this one has ended that.*--overwrite"):
            raise_occupied(out, names)
    if was_begun:
        assert visible(out) == whole
        assert not hidden(out.parent)
        return
    publication = prepare(out, names, "t2", overwrite=True, identity=identity)
    assert visible(out) == was
    assert not publication.is_done
    publication.abandon()
    assert visible(out) == was
    assert not hidden(out.parent)


def raise_occupied(out: Path, names: tuple[str, ...]) -> None:
    prepare(out, names, "t2").abandon()


def test_what_others_put_there_since_is_not_replaced(tmp_path: Path) -> None:
    out, new = tmp_path / "out", Result.of("two", "new")
    put(out, MINE)
    Result.of("one", "old").put(out)
    assert killed(lambda: one_run_until(out, new, "model.safetensors"))
    assert any(work.read_marker(home) for home in work.find_leftovers(out))
    # Somebody else consolidates by hand meanwhile.
    theirs = {"pytorch_model.bin": b"theirs"}
    put(out, theirs)
    before = visible(out)
    with pytest.raises(UsageError, match=r"pytorch_model\.bin"):
        prepare(out, tuple(new.files), "t2")
    assert visible(out) == before


def one_run_until(out: Path, new: Result, name: str) -> None:
    """Publish, and die before a certain old file is moved aside."""
    publication = prepare(out, tuple(new.files), "t1", overwrite=True)
    fill(publication, new)
    real = os.rename

    def rename(path: Path, target: Path) -> None:
        if path.name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, target)

    os.rename = rename
    publication.publish(new.last)


def test_weight_files_that_appear_while_it_runs_are_not_replaced_unasked(tmp_path: Path) -> None:
    out, new = tmp_path / "out", Result.of("two", "new")
    put(out, MINE)
    publication = prepare(out, tuple(new.files), "t1")
    fill(publication, new)
    put(out, {"model.safetensors": b"theirs"})
    with pytest.raises(UsageError, match="--overwrite"):
        publication.publish(new.last)
    publication.abandon()
    assert visible(out) == {**MINE, "model.safetensors": b"theirs"}
    assert not hidden(tmp_path)
