"""Publishing: what stands in the output folder before, after and in the middle."""

from __future__ import annotations

import ctypes
import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from dist_consolidate.errors import ConsolidateError, ResourceError, UsageError
from dist_consolidate.output.publish import check_free_space, prepare
from dist_consolidate.output.work import RESULT

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
LAST = ("consolidation.json", INDEX)
NAMES = (*SHARDS, *LAST)
OLD = {
    "model-00001-of-00002.safetensors": b"old 1",
    "model-00002-of-00002.safetensors": b"old 2",
    "pytorch_model.bin": b"old bin",
    INDEX: b"old index",
    "pytorch_model.bin.index.json": b"old bin index",
    "consolidation.json": b"old manifest",
}
MINE = {"config.json": b"{}", "notes.txt": b"keep me"}


def fill(publication, file_names=NAMES):
    for name in file_names:
        if name.endswith(".json"):
            publication.write_file(name, b"new " + name.encode())
        else:
            path = publication.create_file(name, 64)
            with path.open("r+b") as file:
                file.write(b"new " + name.encode())


def new_content(name):
    data = b"new " + name.encode()
    return data if name.endswith(".json") else data.ljust(64, b"\0")


def content(folder):
    """All files that are seen; hidden are a lock and work folders."""
    files = (path for path in folder.iterdir() if path.is_file())
    return {path.name: path.read_bytes() for path in files if path.name[0] != "."}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def put(folder, files):
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


NEW = {name: new_content(name) for name in NAMES}


def test_a_new_folder_appears_in_one_step(tmp_path):
    out = tmp_path / "deep" / "out"
    publication = prepare(out, NAMES, "t1")
    assert publication.home == tmp_path / "deep" / ".out.consolidating-t1"
    assert publication.is_new_folder
    fill(publication)
    assert not out.exists()
    publication.publish(LAST)
    assert content(out) == NEW
    assert names(tmp_path / "deep") == ["out"]


@pytest.mark.parametrize("others", [{}, MINE])
def test_an_existing_folder_is_kept(tmp_path, others):
    out = tmp_path / "out"
    put(out, others)
    out.chmod(0o750)
    inode = out.stat().st_ino
    publication = prepare(out, NAMES, "t1")
    assert publication.home == out / ".out.consolidating-t1"
    fill(publication)
    assert content(out) == others
    publication.publish(LAST)
    assert content(out) == {**others, **NEW}
    assert names(out) == sorted({**others, **NEW})
    assert (out.stat().st_ino, out.stat().st_mode & 0o777) == (inode, 0o750)
    assert names(tmp_path) == ["out"]


def test_overwriting_leaves_nothing_of_the_old_result(tmp_path):
    out = tmp_path / "out"
    put(out, {**OLD, **MINE})
    publication = prepare(out, NAMES, "t1", overwrite=True)
    fill(publication)
    assert content(out) == {**OLD, **MINE}
    publication.publish(LAST)
    assert content(out) == {**NEW, **MINE}


@pytest.mark.parametrize("overwritten", [False, True])
def test_order_of_changes(tmp_path, monkeypatch, overwritten):
    out = tmp_path / "out"
    put(out, OLD if overwritten else {})
    publication = prepare(out, NAMES, "t1", overwrite=overwritten)
    fill(publication)
    steps = []
    rename, unlink, fsync = os.rename, os.unlink, os.fsync

    def noted(verb, function):
        def call(*paths, **options):
            if options.get("dir_fd") is None:
                steps.append((verb, Path(paths[-1]).name))
            return function(*paths, **options)

        return call

    def synced(descriptor):
        steps.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    monkeypatch.setattr(os, "rename", noted("rename", rename))
    monkeypatch.setattr(os, "unlink", noted("unlink", unlink))
    monkeypatch.setattr(os, "fsync", synced)
    publication.publish(LAST)
    first = ("pytorch_model.bin.index.json", "pytorch_model.bin", INDEX, "consolidation.json")
    moved = [("rename", name) for name in first]
    moved += [("sync", "out"), *(("rename", name) for name in SHARDS[::-1]), ("sync", "out")]
    assert steps == [
        *(("sync", name) for name in NAMES),
        ("sync", "result"),
        ("sync", "publishing.json"),
        ("sync", ".out.consolidating-t1"),
        *(moved if overwritten else [("sync", "out")] * 2),
        *(("rename", name) for name in SHARDS),
        ("sync", "out"),
        *(("rename", name) for name in LAST),
        ("sync", "out"),
        ("unlink", "identity.json"),
        ("unlink", "publishing.json"),
        ("unlink", ".out.consolidating.lock"),
    ]


@pytest.mark.parametrize("old", sorted(OLD))
def test_weight_files_are_not_overwritten_unasked(tmp_path, old):
    out = tmp_path / "out"
    put(out, {old: b"old", **MINE})
    with pytest.raises(UsageError) as caught:
        prepare(out, NAMES, "t1")
    assert f"- {old}\n" in str(caught.value)
    assert "--overwrite" in str(caught.value)
    assert "config.json" not in str(caught.value)
    assert content(out) == {old: b"old", **MINE}
    assert names(out) == sorted([old, *MINE])


def test_a_file_of_another_kind_in_the_way_is_refused(tmp_path):
    put(tmp_path / "out", MINE)
    with pytest.raises(UsageError, match=r"- config\.json"):
        prepare(tmp_path / "out", (*NAMES, "config.json"), "t1")


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_named_like_a_file_is_refused(tmp_path, overwrite):
    (tmp_path / "out" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"folders where files belong:\n  - model\.safetensors"):
        prepare(tmp_path / "out", NAMES, "t1", overwrite=overwrite)


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_an_output_that_is_no_folder_is_refused(tmp_path, kind):
    out = tmp_path / "out"
    if kind == "file":
        out.write_bytes(b"mine")
    else:
        out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="exists and is not a folder"):
        prepare(out, NAMES, "t1", overwrite=True)
    assert names(tmp_path) == ["out"]


def test_a_parent_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="cannot write"):
        prepare(tmp_path / "file" / "out", NAMES, "t1")


def test_a_link_to_a_folder_is_resolved_once(tmp_path):
    real = tmp_path / "real"
    put(real, MINE)
    (tmp_path / "out").symlink_to(real)
    publication = prepare(tmp_path / "out", NAMES, "t1")
    assert publication.output_dir == real
    (tmp_path / "out").unlink()
    fill(publication)
    publication.publish(LAST)
    assert content(real) == {**MINE, **NEW}


def test_links_under_weight_names_are_replaced_and_not_followed(tmp_path):
    put(tmp_path / "elsewhere", {"a": b"precious", "b": b"precious"})
    out = tmp_path / "out"
    out.mkdir()
    (out / SHARDS[0]).symlink_to(tmp_path / "elsewhere" / "a")
    (out / "pytorch_model.bin").symlink_to(tmp_path / "elsewhere" / "b")
    (out / INDEX).symlink_to(tmp_path / "nowhere")
    publication = prepare(out, NAMES, "t1", overwrite=True)
    fill(publication)
    publication.publish(LAST)
    assert content(out) == NEW
    assert not any(path.is_symlink() for path in out.iterdir())
    assert content(tmp_path / "elsewhere") == {"a": b"precious", "b": b"precious"}


@pytest.mark.parametrize("exists", [False, True])
def test_leftovers_of_dead_runs_are_removed_and_nothing_else(tmp_path, exists):
    out = tmp_path / "o+t"
    put(tmp_path / ".o+t.consolidating-dead1", {"model.safetensors": b""})
    others = [".o+t.consolidating-", ".oot.consolidating-x", ".o+t.consolidating-a.b", "x"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / ".o+t.consolidating-link").symlink_to(tmp_path / "target")
    if exists:
        put(out, MINE)
        put(out / ".o+t.consolidating-dead2", {"model.safetensors": b""})
        put(out / ".o+t.consolidating-t1", {"model.safetensors": b""})
    publication = prepare(out, NAMES, "t1")
    assert list(publication.work_dir.iterdir()) == []
    assert publication.home.parent == (out if exists else tmp_path)
    kept = {*others, "target", ".o+t.consolidating-link"}
    mine = {publication.home.name, ".o+t.consolidating.lock"}
    assert set(names(tmp_path)) - {"o+t", *mine} == kept
    if exists:
        assert set(names(out)) == {*MINE, *mine}


@pytest.mark.parametrize("exists", [False, True])
def test_abandoning_leaves_no_trace(tmp_path, exists):
    out = tmp_path / "out"
    if exists:
        put(out, OLD)
    publication = prepare(out, NAMES, "t1", overwrite=True)
    fill(publication, SHARDS)
    publication.abandon()
    publication.abandon()
    assert names(tmp_path) == (["out"] if exists else [])
    if exists:
        assert content(out) == OLD


def test_a_publication_travels_to_other_ranks(tmp_path):
    publication = prepare(tmp_path / "out", NAMES, "t1")
    assert pickle.loads(pickle.dumps(publication)) == publication


def test_created_files_have_their_full_size(tmp_path):
    publication = prepare(tmp_path / "out", ("model.safetensors", "empty"), "t1")
    path = publication.create_file("model.safetensors", 3 * 2**20)
    assert path.stat().st_size == 3 * 2**20
    assert path.read_bytes() == bytes(3 * 2**20)
    assert publication.create_file("empty", 0).stat().st_size == 0


def test_a_file_too_large_for_the_file_system_is_refused(tmp_path):
    publication = prepare(tmp_path / "out", ("model.safetensors",), "t1")
    with pytest.raises(ResourceError, match=r"model\.safetensors: .*free space or choose"):
        publication.create_file("model.safetensors", 2**62)
    publication.abandon()
    assert names(tmp_path) == []


class FakeLibrary:
    """A C library whose fallocate fails with a given error number."""

    def __init__(self, code):
        self.code, self.calls = code, []

    def fallocate(self, descriptor, mode, start, length):
        self.calls.append((mode, start.value, length.value))
        ctypes.set_errno(self.code)
        return -1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path, monkeypatch, code):
    publication = prepare(tmp_path / "out", ("model.safetensors",), "t1")
    library = FakeLibrary(code)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)
    with pytest.raises(ResourceError, match=os.strerror(code)):
        publication.create_file("model.safetensors", 5 * 2**30)
    assert library.calls == [(0, 0, 5 * 2**30)]


@pytest.mark.parametrize("library", [FakeLibrary(errno.EOPNOTSUPP), object()])
def test_file_systems_that_reserve_nothing_still_get_full_size(tmp_path, monkeypatch, library):
    publication = prepare(tmp_path / "out", ("model.safetensors",), "t1")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)
    assert publication.create_file("model.safetensors", 5 * 2**30).stat().st_size == 5 * 2**30


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, ResourceError), (errno.EDQUOT, ResourceError),
                       (errno.EACCES, UsageError), (errno.EIO, UsageError)]
)  # fmt: skip
def test_what_the_system_refuses_becomes_our_error(tmp_path, monkeypatch, code, kind):
    publication = prepare(tmp_path / "out", NAMES, "t1")
    fill(publication)

    def refuse(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(kind, match=os.strerror(code)):
        publication.publish(LAST)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["lacking", "surplus"])
def test_an_incomplete_result_is_not_published(tmp_path, change):
    out = tmp_path / "out"
    put(out, OLD)
    publication = prepare(out, NAMES, "t1", overwrite=True)
    fill(publication, NAMES if change == "surplus" else SHARDS)
    if change == "surplus":
        (publication.work_dir / "core").write_bytes(b"")
    named = "core" if change == "surplus" else "consolidation.json"
    with pytest.raises(ConsolidateError, match=f"- {named}"):
        publication.publish(LAST)
    assert content(out) == OLD


def test_a_folder_filled_meanwhile_is_not_clobbered(tmp_path):
    out = tmp_path / "out"
    publication = prepare(out, NAMES, "t1")
    fill(publication)
    put(out, MINE)
    with pytest.raises(UsageError, match="not empty"):
        publication.publish(LAST)
    assert content(out) == MINE
    assert content(publication.work_dir) == NEW


@pytest.mark.parametrize(
    ("fails_at", "old"),
    [*((at, {}) for at in range(4)), *((at, OLD) for at in range(4 + len(OLD)))],
)
def test_a_failing_rename_leaves_all_as_it_was(tmp_path, monkeypatch, fails_at, old):
    out = tmp_path / "out"
    put(out, {**old, **MINE})
    publication = prepare(out, NAMES, "t1", overwrite=True)
    fill(publication)
    rename = os.rename
    calls = []

    def failing(source, target):
        calls.append(target)
        if len(calls) == fails_at + 1:
            raise OSError(errno.EIO, "broken")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(UsageError, match="broken"):
        publication.publish(LAST)
    assert content(publication.work_dir) == NEW
    assert content(out) == {**old, **MINE}
    publication.abandon()
    assert content(out) == {**old, **MINE}
    assert not any(name.startswith(".") for name in names(out))


def test_an_older_index_does_not_come_back_beside_a_newer_shard(tmp_path, monkeypatch):
    out = tmp_path / "out"
    put(out, {**OLD, **MINE})
    publication = prepare(out, NAMES, "t1", overwrite=True)
    fill(publication)
    rename = os.rename

    def failing(source, target):
        # The disk fails once the first new file is in place, and lets nothing back.
        is_first = Path(source).name == SHARDS[0] and Path(target).parent == out
        if RESULT in (Path(source).parent.name, Path(target).parent.name) and not is_first:
            raise OSError(errno.EIO, "broken")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(UsageError, match="broken"):
        publication.publish(LAST)
    left = content(out)
    assert left[SHARDS[0]] == NEW[SHARDS[0]]
    assert not [name for name in left if name.endswith(".json") and name not in MINE]
    assert not [name for name, data in left.items() if data == OLD.get(name)]


KILLED = """
import os, sys
from pathlib import Path
from dist_consolidate.output.publish import prepare
names = sys.argv[3].split(",")
publication = prepare(Path(sys.argv[1]), names, "t1", overwrite=True)
for name in names:
    (publication.work_dir / name).write_bytes(b"new " + name.encode())
steps = [0]
def dying(function):
    def call(*paths, **options):
        if steps[0] == int(sys.argv[2]):
            os._exit(9)
        steps[0] += 1
        return function(*paths, **options)
    return call
os.rename, os.unlink = dying(os.rename), dying(os.unlink)
publication.publish(("consolidation.json", names[-1]))
"""


@pytest.mark.parametrize("steps", range(4 + len(OLD)))
def test_a_kill_between_two_steps_leaves_no_mixture(tmp_path, steps):
    out = tmp_path / "out"
    put(out, {**OLD, **MINE})
    command = [sys.executable, "-c", KILLED, str(out), str(steps), ",".join(NAMES)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run(command, env=environment, check=False).returncode == 9
    left = content(out)
    old, new = OLD, {name: b"new " + name.encode() for name in NAMES}
    assert all(
        data in (old.get(name), new.get(name), MINE.get(name)) for name, data in left.items()
    )
    # An index is there only while every file it names is still there, and old.
    if INDEX in left:
        assert left[INDEX] == old[INDEX]
        assert all(left[name] == old[name] for name in SHARDS)
    # A later run is not misled: it refuses, or on request makes everything new.
    with pytest.raises(UsageError, match="--overwrite"):
        prepare(out, NAMES, "t2")
    publication = prepare(out, NAMES, "t2", overwrite=True)
    fill(publication)
    publication.publish(LAST)
    assert content(out) == {**NEW, **MINE}
    assert names(out) == sorted({**NEW, **MINE})


def test_free_space(tmp_path):
    status = os.statvfs(tmp_path)
    total = status.f_blocks * status.f_frsize
    check_free_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(ResourceError) as caught:
        check_free_space(tmp_path / "not" / "yet", total + 1)
    assert caught.value.exit_code == 4
    assert f"({total + 1:,} bytes)" in str(caught.value)
    assert "free; free some space" in str(caught.value)
    assert not (tmp_path / "not").exists()


def test_free_space_counts_exactly_and_mentions_old_files(tmp_path, monkeypatch):
    class Status:
        f_bavail, f_bfree, f_frsize, f_bsize = 10, 99, 512, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Status)
    check_free_space(tmp_path, 5120, overwrite=True)
    with pytest.raises(ResourceError, match=r"5\.12 KB.*5\.12 KB.*overwritten stay until"):
        check_free_space(tmp_path, 5121, overwrite=True)
