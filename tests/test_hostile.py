"""Checkpoints of strangers: each ends in a refusal within seconds, and nothing is run or written.

The corpus is made by code (``tests/hostile``): pickles, zip headers and folders. In its short form
each hostile thing is put into a few places, and every place gets a few; with
``DIST_CONSOLIDATE_LONG=1`` every one goes everywhere.
"""

from __future__ import annotations

import dataclasses
import random
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from dist_consolidate.checkpoint.layout import find_tag
from dist_consolidate.checkpoint.legacy import is_legacy
from tests.cases import CASES
from tests.hostile import folders, pickles, zips
from tests.hostile.places import (
    LAYOUTS,
    Place,
    copy_with,
    files_of,
    pickle_of,
    places,
    snapshot,
    with_pickle,
)
from tests.hostile.worker import Outcome, Worker
from tests.long import IS_LONG

LIMIT_SEC, LIMIT_BYTES = 5.0, 500 * 10**6
# What a terminal must not be sent; lines are the tool's own.
CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
FORGED = ("\nnote: all is well", "\nnote: well")


@dataclasses.dataclass
class Range:
    """Where hostile checkpoints are tried out.

    Attributes:
        worker: Runs the command line.
        folder: Holds nothing but the checkpoint and the result.
        results: Of each unchanged checkpoint, the bytes of the result.
    """

    worker: Worker
    folder: Path
    results: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)

    @property
    def ckpt(self) -> Path:
        return self.folder / "ckpt"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    @property
    def canary(self) -> Path:
        return self.folder / "canary"

    def result(self) -> dict[str, bytes]:
        """Give the bytes of the weight files that were written."""
        return {path.name: path.read_bytes() for path in self.out.rglob("*.safetensors")}

    def expected(self, case: str) -> dict[str, bytes]:
        """Give what the unchanged checkpoint gives."""
        if case not in self.results:
            copy_with(case, self.ckpt)
            got = self.run()
            assert got.code == 0 or CASES[case].release < (0, 9, 1), got.text
            self.results[case] = self.result()
        return self.results[case]

    def run(self) -> Outcome:
        """Consolidate, from an empty output folder."""
        shutil.rmtree(self.out, ignore_errors=True)
        return self.worker.run(self.ckpt, self.out)

    def wrong(self) -> tuple[Outcome, list[str]]:
        """Consolidate what lies there; say what is wrong with what happened."""
        before = snapshot(self.ckpt)
        got = self.run()
        left = {path.name for path in self.folder.iterdir()} - {"ckpt", "out"}
        found = [
            f"exit code {got.code}" * (got.code not in (0, 2, 3)),
            "a traceback" * ("Traceback" in got.text),
            "control characters" * bool(CONTROLS.search(got.text)),
            "a forged line" * any(line in got.text for line in FORGED),
            "no reason" * (got.code != 0 and "dist-consolidate: error: " not in got.text),
            f"{got.seconds:.1f} s" * (got.seconds > LIMIT_SEC),
            f"{got.peak_bytes >> 20} MiB" * (got.peak_bytes > LIMIT_BYTES),
            "the checkpoint was changed" * (snapshot(self.ckpt) != before),
            "a result in spite of an error" * (got.code != 0 and self.out.exists()),
            f"left behind: {sorted(left)}" * bool(left),
        ]
        return got, [text for text in found if text]


@pytest.fixture(scope="module")
def shooting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Range]:
    with Worker() as worker:
        yield Range(worker, tmp_path_factory.mktemp("hostile"))


def told(label: object, got: Outcome, wrong: Sequence[str]) -> str:
    return f"{label}: {'; '.join(wrong)}\n{got.text[:2000]}"


def chosen(names: Sequence[str], where: Sequence[Place], few: int) -> list[tuple[str, Place]]:
    """Pair hostile things with places: each with a few places, each place with a few of them."""
    if IS_LONG:
        return [(name, place) for place in where for name in names]
    choice = random.Random(7)
    alike: dict[tuple[object, ...], list[Place]] = {}
    for place in where:
        alike.setdefault((re.sub(r"\d+", "", Path(place.file).name), *place.keys), []).append(place)
    found = [(name, place) for name in names for place in choice.sample(where, few)]
    return found + [(choice.choice(names), choice.choice(group)) for group in alike.values()]


def spoiled(place: Place, value: bytes) -> bytes | None:
    """Give a shard's bytes with an object pushed by opcodes in one place."""
    if not place.keys:
        return with_pickle(place.path, b"\x80\x02" + value + b".")
    made = pickles.overridden(pickle_of(place.path), place.keys, value)
    return None if made is None else with_pickle(place.path, made)


def try_out(
    shooting: Range, objects: dict[str, bytes], pairs: Sequence[tuple[str, Place]]
) -> list[str]:
    problems = []
    for name, place in pairs:
        expected = shooting.expected(place.case)
        data = spoiled(place, objects[name])
        if data is None:
            continue
        copy_with(place.case, shooting.ckpt, place.file, data)
        got, wrong = shooting.wrong()
        same = got.code != 0 or shooting.result() == expected
        # What was left out of the model states, or recorded otherwise, is told.
        if not same and not re.search("^(note|left out): ", got.text, re.MULTILINE):
            wrong.append("another result, and nothing is said of it")
        if wrong:
            problems.append(told(f"{name} at {place}", got, wrong))
    return problems


WHOLE = [place for place in places() if not place.keys]


def test_what_would_run(shooting: Range) -> None:
    objects = pickles.running(str(shooting.canary))
    pairs = [(n, p) for n in objects for p in (WHOLE if IS_LONG else WHOLE[:1])]
    problems = try_out(shooting, objects, pairs + chosen(list(objects), places(), 2))
    assert not problems, "\n".join(problems)


def test_what_takes_for_ever(shooting: Range) -> None:
    objects = pickles.wasteful()
    inside = [place for place in places() if place.keys]
    pairs = [(name, WHOLE[i % len(WHOLE)]) for i, name in enumerate(objects)]
    few = random.Random(3).sample(inside, 8) if IS_LONG else inside[2:3]
    pairs += [(name, place) for name in objects for place in few]
    problems = try_out(shooting, objects, pairs)
    assert not problems, "\n".join(problems)


def test_what_cannot_be(shooting: Range) -> None:
    objects = pickles.impossible()
    problems = try_out(shooting, objects, chosen(list(objects), places(), 1))
    assert not problems, "\n".join(problems)


# Where tensors are listed by name.
NAMED = [
    ("frozen_half_z1_w2", "module"),
    ("kitchen_z3_bf16_w2", "module"),
    ("z0_bf16_w2", "module"),
    ("not_zip_z2_w2", "module"),
    ("universal_frozen_half_z1_w2", "module"),
]


@pytest.mark.parametrize(("case", "key"), NAMED)
def test_names(shooting: Range, case: str, key: str) -> None:
    """A name with a control character is refused; what others do to a terminal is escaped."""
    (file,) = [f for f in files_of(case) if "model_states" in f][:1]
    path, problems = CASES[case].ckpt / file, []
    for name, opcodes in pickles.NAMES.items():
        made = pickles.renamed(pickle_of(path), (key,), opcodes)
        assert made is not None
        copy_with(case, shooting.ckpt, file, with_pickle(path, made))
        got, wrong = shooting.wrong()
        harmless = name in ("right to left", "path", "absolute", "empty", "dots", "huge")
        if got.code == 0 and not harmless:
            wrong.append("was accepted")
        if wrong:
            problems.append(told(name, got, wrong))
    assert not problems, "\n".join(problems)


ZIPPED = [
    Place(case, file)
    for case in LAYOUTS
    for file in files_of(case)
    if file.endswith(".pt") and not is_legacy(CASES[case].ckpt / file)
]
# Records that are read, so that a lie about them shows.
SHOWN = ("pickle ", "deflated", "bzip2", "lzma", "a bomb as", "no pickle", "two pickles", "half")


@pytest.mark.parametrize("case", LAYOUTS if IS_LONG else ("universal_kitchen_z3_bf16_w2",))
def test_zips(shooting: Range, case: str) -> None:
    problems = []
    for place in ZIPPED:
        if place.case != case:
            continue
        expected = shooting.expected(case)
        for name, data in zips.lies(place.path).items():
            copy_with(case, shooting.ckpt, place.file, data)
            got, wrong = shooting.wrong()
            if got.code == 0 and shooting.result() != expected:
                wrong.append("another result")
            if wrong:
                problems.append(told(f"{name} at {place}", got, wrong))
    assert not problems, "\n".join(problems)


def test_every_lie_about_what_is_read_is_refused(shooting: Range) -> None:
    """Of a shard that holds masters, in which every record matters."""
    place = next(p for p in ZIPPED if "optim_states" in p.file)
    harmless = ("named with", "of another checksum")
    for name, data in zips.lies(place.path).items():
        if not name.startswith(("pickle ", *SHOWN)) or any(text in name for text in harmless):
            continue
        copy_with(place.case, shooting.ckpt, place.file, data)
        got, wrong = shooting.wrong()
        assert got.code == 3, told(name, got, wrong)
        assert place.path.name in got.text, got.text


def changed(shooting: Range, case: str, change: Callable[[Path, Path], object]) -> list[str]:
    """Spoil a copy of a checkpoint in place; say what is wrong with what happens."""
    expected = shooting.expected(case)
    copy_with(case, shooting.ckpt)
    tag = find_tag(shooting.ckpt).path
    change(shooting.ckpt, tag)
    got, wrong = shooting.wrong()
    if got.code == 0 and shooting.result() != expected:
        wrong.append("another result")
    return [told("", got, wrong)] if wrong else []


@pytest.mark.parametrize("name", folders.CHANGES)
def test_folders(shooting: Range, name: str) -> None:
    problems = []
    for case in LAYOUTS if IS_LONG else (LAYOUTS[2],):
        for file in files_of(case) if IS_LONG else files_of(case)[-1:]:
            problems += changed(
                shooting,
                case,
                lambda ckpt, tag: folders.CHANGES[name](ckpt, tag, ckpt / file),  # noqa: B023
            )
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("name", folders.REFUSED)
def test_folders_that_are_refused(shooting: Range, name: str) -> None:
    """A shard that is needed, or the choice of the tag, is spoiled: there is no result."""
    case = "kitchen_z2_groups_w4"
    (file,) = [f for f in files_of(case) if "optim_states" in f][:1]
    copy_with(case, shooting.ckpt)
    tag = find_tag(shooting.ckpt).path
    folders.CHANGES[name](shooting.ckpt, tag, shooting.ckpt / file)
    got, wrong = shooting.wrong()
    assert not wrong, told(name, got, wrong)
    assert got.code == 3, got.text


def test_the_default_target_does_not_lead_elsewhere(shooting: Range, tmp_path: Path) -> None:
    """Whoever made the checkpoint does not choose where the result goes."""
    copy_with(LAYOUTS[0], shooting.ckpt)
    (shooting.ckpt / "consolidated").symlink_to(tmp_path)
    got = shooting.worker.run(shooting.ckpt)
    assert got.code == 2
    assert "lies outside" in got.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", folders.UNIVERSAL_NAMES, ids=ascii)
def test_parameters_of_any_name(shooting: Range, name: bytes) -> None:
    problems = changed(
        shooting,
        "universal_frozen_half_z1_w2",
        lambda _ckpt, tag: folders.add_universal(tag, name),
    )
    assert not problems, "\n".join(problems)
