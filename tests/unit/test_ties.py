"""The tie map: who stands for whom, on whose word, and what is not believed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from dist_consolidate.checkpoint.extents import TensorSpan, contiguous_stride
from dist_consolidate.checkpoint.layout import find_tag
from dist_consolidate.checkpoint.model import Checkpoint, FlatSlot, ModuleKey, Origin, Source
from dist_consolidate.checkpoint.reader import read_checkpoint
from dist_consolidate.dtypes import BFLOAT16, FLOAT32
from dist_consolidate.plan.ties import Tie, TieMap, build_tie_map
from tests.cases import CASES
from tests.synthetic import Buffer, Param, Spec, write

Shape = tuple[int, ...]
EMB = (8, 4)


def data(shape: Shape, origin: Origin = "fp32 partition") -> Source:
    """A source of some values; where they lie plays no part here."""
    if origin != "module":
        return Source(origin, shape, FLOAT32, FlatSlot(0, 0))
    span = TensorSpan("f", 0, BFLOAT16, shape, contiguous_stride(shape))
    return Source(origin, shape, BFLOAT16, span=span)


def placeholder(record: str) -> ModuleKey:
    """What ZeRO-3 leaves of a parameter in `module`."""
    return ModuleKey((0,), (record, 0, (0,), (1,), "bfloat16"), None, False)


def full(record: str, shape: Shape, *, offset: int = 0, buffer: bool = False) -> ModuleKey:
    """A whole tensor in `module`."""
    identity = (record, offset, shape, contiguous_stride(shape), "bfloat16")
    return ModuleKey(shape, identity, data(shape, "module"), buffer)


def checkpoint(
    module: Mapping[str, ModuleKey],
    *,
    stored: Mapping[str, Shape] | None = None,
    frozen: Mapping[str, Shape] | None = None,
    recorded: Mapping[str, str] | None = None,
    saves_frozen: bool = True,
) -> Checkpoint:
    return Checkpoint(
        tag="t",
        chosen="",
        stage=3,
        world_size=2,
        step=1,
        ds_version="0.19.8",
        groups=(),
        partitions={name: data(shape) for name, shape in (stored or {}).items()},
        frozen={name: data(shape, "frozen") for name, shape in (frozen or {}).items()},
        module=dict(module),
        saves_frozen=saves_frozen,
        recorded_ties=dict(recorded or {}),
        odd_entries={},
        file_bytes={},
        notes=(),
    )


def ties_of(ckpt: Checkpoint, **user: str) -> TieMap:
    return build_tie_map(ckpt, user)


def settled(tie_map: TieMap) -> dict[str, tuple[str, str]]:
    """The ties of a map in which nothing is doubtful."""
    assert (tie_map.notes, tie_map.conflicts, tie_map.excluded) == ((), (), {})
    return {alias: (tie.holder, tie.found) for alias, tie in tie_map.ties.items()}


# Testimonies.


def test_a_recorded_tie():
    module = {"emb": placeholder("0"), "w": placeholder("1"), "head": placeholder("2")}
    ckpt = checkpoint(module, stored={"emb": EMB, "w": (4, 4)}, recorded={"head": "emb"})
    assert settled(ties_of(ckpt)) == {"head": ("emb", "recorded")}


def test_a_tie_by_storage_record():
    module = {"emb": placeholder("0"), "w": placeholder("1"), "head": placeholder("0")}
    ckpt = checkpoint(module, stored={"emb": EMB, "w": (4, 4)})
    assert settled(ties_of(ckpt)) == {"head": ("emb", "storage record")}


def test_a_tie_with_both_testimonies_counts_as_recorded():
    module = {"emb": placeholder("0"), "head": placeholder("0")}
    ckpt = checkpoint(module, stored={"emb": EMB}, recorded={"head": "emb"})
    assert settled(ties_of(ckpt)) == {"head": ("emb", "recorded")}


def test_no_tie_without_testimony():
    module = {"emb": placeholder("0"), "head": placeholder("1")}
    assert settled(ties_of(checkpoint(module, stored={"emb": EMB}))) == {}


def test_the_alias_may_come_first():
    module = {"head": placeholder("0"), "emb": placeholder("0")}
    assert settled(ties_of(checkpoint(module, stored={"emb": EMB}))) == {
        "head": ("emb", "storage record")
    }


@pytest.mark.parametrize("names", [("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")])
def test_three_names(names):
    module = {name: placeholder("0") for name in names}
    found = settled(ties_of(checkpoint(module, stored={"b": EMB})))
    assert found == {name: ("b", "storage record") for name in names if name != "b"}
    assert list(found) == [name for name in names if name != "b"]


@pytest.mark.parametrize("order", ["abcd", "dcba", "bdac"])
def test_a_chain_of_records(order):
    module = {name: placeholder(name) for name in order}
    ckpt = checkpoint(module, stored={"a": EMB}, recorded={"b": "a", "c": "b", "d": "c"})
    found = settled(ties_of(ckpt))
    assert found == {name: ("a", "recorded") for name in "bcd"}
    assert list(found) == [name for name in order if name != "a"]


def test_a_chain_of_records_and_storage():
    module = {name: placeholder(name) for name in "abc"} | {"d": placeholder("c")}
    ckpt = checkpoint(module, stored={"a": EMB}, recorded={"b": "a", "c": "b"})
    assert settled(ties_of(ckpt)) == {
        "b": ("a", "recorded"),
        "c": ("a", "recorded"),
        "d": ("a", "storage record"),
    }


def test_a_record_that_points_at_an_alias():
    module = {"a": placeholder("0"), "b": placeholder("0"), "c": placeholder("1")}
    ckpt = checkpoint(module, stored={"a": EMB}, recorded={"c": "b"})
    assert settled(ties_of(ckpt)) == {"b": ("a", "storage record"), "c": ("a", "recorded")}


def test_a_tie_to_a_frozen_parameter():
    module = {"emb": placeholder("0"), "head": placeholder("1")}
    ckpt = checkpoint(module, frozen={"emb": (5, 3)}, recorded={"head": "emb"})
    assert settled(ties_of(ckpt)) == {"head": ("emb", "recorded")}


def test_names_that_share_a_whole_tensor():
    module = {"emb": full("0", EMB), "head": full("0", EMB), "other": full("1", EMB)}
    assert settled(ties_of(checkpoint(module, stored={"emb": EMB, "other": EMB}))) == {
        "head": ("emb", "storage record")
    }


def test_whole_tensors_without_a_master():
    module = {"a": full("0", EMB), "b": full("0", EMB)}
    assert settled(ties_of(checkpoint(module))) == {"b": ("a", "storage record")}


def test_tied_buffers_are_held_by_the_recorded_one():
    module = {"a": full("0", (3,)), "b": full("0", (3,), buffer=True)}
    assert settled(ties_of(checkpoint(module))) == {"a": ("b", "storage record")}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (full("0", (4,)), full("0", (4,), offset=4)),
        (full("0", (8,)), full("0", (4,))),
        (full("0", (2, 4)), full("0", (8,))),
        (full("0", (2, 4)), full("1", (2, 4))),
        (
            full("0", (2, 2)),
            ModuleKey((2, 2), ("0", 0, (2, 2), (1, 2), "bfloat16"), data((2, 2), "module"), False),
        ),
        (
            full("0", (4,)),
            ModuleKey((4,), ("0", 0, (4,), (1,), "float16"), data((4,), "module"), False),
        ),
    ],
)
def test_views_that_are_no_ties(one, other):
    assert settled(ties_of(checkpoint({"a": one, "b": other}))) == {}


# Records that are not believed.


def notes_of(ckpt: Checkpoint) -> tuple[str, ...]:
    found = ties_of(ckpt)
    assert (found.ties, found.conflicts, found.excluded) == ({}, (), {})
    return found.notes


def test_an_alias_with_data_of_its_own():
    module = {"a": placeholder("0"), "b": placeholder("1")}
    ckpt = checkpoint(module, stored={"a": EMB, "b": (2, 2)}, recorded={"b": "a"})
    note = "recorded tie b -> a was not followed: b has data of its own"
    assert notes_of(ckpt) == (note,)


def test_an_alias_with_frozen_data_of_its_own():
    module = {"a": placeholder("0"), "b": placeholder("1")}
    ckpt = checkpoint(module, stored={"a": EMB}, frozen={"b": EMB}, recorded={"b": "a"})
    assert notes_of(ckpt) == ("recorded tie b -> a was not followed: b has data of its own",)


def test_an_alias_with_a_tensor_of_its_own():
    module = {"a": full("0", EMB), "b": full("1", EMB)}
    ckpt = checkpoint(module, stored={"a": EMB}, recorded={"b": "a"})
    note = "recorded tie b -> a was not followed: b has a tensor of its own in `module`"
    assert notes_of(ckpt) == (note,)


def test_an_alias_that_the_model_does_not_have():
    ckpt = checkpoint({"a": placeholder("0")}, stored={"a": EMB}, recorded={"b": "a"})
    assert notes_of(ckpt) == ("recorded tie b -> a was not followed: the model has no b",)


def test_a_source_that_is_nowhere():
    module = {"a": placeholder("0"), "b": placeholder("1")}
    ckpt = checkpoint(module, stored={"a": EMB}, recorded={"b": "gone"})
    note = "recorded tie b -> gone was not followed: gone is nowhere in the checkpoint"
    assert notes_of(ckpt) == (note,)


def test_a_source_that_was_left_out_when_saving():
    module = {"a": placeholder("0"), "b": placeholder("1")}
    ckpt = checkpoint(module, stored={"a": EMB}, recorded={"b": "gone"}, saves_frozen=False)
    found = ties_of(ckpt)
    assert (found.ties, found.notes, found.conflicts) == ({}, (), ())
    assert list(found.excluded) == ["b"]
    assert "tied to gone, which was left out" in found.excluded["b"]


def test_a_record_of_itself_is_no_tie():
    ckpt = checkpoint({"a": placeholder("0")}, recorded={"a": "a"})
    found = ties_of(ckpt)
    assert (found.ties, found.conflicts) == ({}, ())


def test_records_in_a_circle_are_no_tie():
    module = {"a": placeholder("0"), "b": placeholder("1")}
    found = ties_of(checkpoint(module, recorded={"a": "b", "b": "a"}))
    assert (found.ties, found.conflicts) == ({}, ())


def test_records_that_contradict_each_other():
    module = {n: placeholder(r) for n, r in (("a", "0"), ("b", "1"), ("c", "2"), ("d", "2"))}
    ckpt = checkpoint(module, stored={"a": EMB, "b": EMB}, recorded={"c": "a", "d": "b"})
    found = ties_of(ckpt)
    assert found.ties == {}
    assert found.conflicts == (
        "c: is tied to a and b at once; say which with --tie",
        "d: is tied to a and b at once; say which with --tie",
    )


def test_a_record_that_contradicts_the_storage():
    module = {n: placeholder(r) for n, r in (("a", "0"), ("b", "1"), ("c", "0"))}
    ckpt = checkpoint(module, stored={"a": EMB, "b": EMB}, recorded={"c": "b"})
    found = ties_of(ckpt)
    assert found.conflicts or found.notes, found
    assert [n for n in (*found.conflicts, *found.notes) if "c" in n]


def test_two_holders_that_share_a_record_with_an_alias():
    module = {name: placeholder("0") for name in "abc"}
    found = ties_of(checkpoint(module, stored={"a": EMB, "b": EMB}))
    assert len(found.conflicts) == 1
    assert found.conflicts[0].startswith("c: shares its storage record with a and b")


def test_two_holders_that_share_a_record_are_no_tie():
    module = {name: placeholder("0") for name in "ab"}
    assert settled(ties_of(checkpoint(module, stored={"a": EMB, "b": EMB}))) == {}


# What the user says.


def user_model() -> Checkpoint:
    module = {name: placeholder(name) for name in "abcde"}
    return checkpoint(module, stored={"a": EMB, "b": (2, 2)})


def test_a_tie_the_user_adds():
    assert settled(ties_of(user_model(), c="a")) == {"c": ("a", "--tie")}


def test_a_chain_the_user_adds():
    found = settled(ties_of(user_model(), d="c", c="a", e="d"))
    assert found == {name: ("a", "--tie") for name in "cde"}


def test_a_tie_the_user_adds_to_an_alias():
    module = {n: placeholder(r) for n, r in (("a", "0"), ("b", "0"), ("c", "2"))}
    found = settled(ties_of(checkpoint(module, stored={"a": EMB}), c="b"))
    assert found == {"b": ("a", "storage record"), "c": ("a", "--tie")}


def test_the_user_settles_a_conflict():
    module = {n: placeholder(r) for n, r in (("a", "0"), ("b", "1"), ("c", "2"), ("d", "2"))}
    ckpt = checkpoint(module, stored={"a": EMB, "b": EMB}, recorded={"c": "a", "d": "b"})
    found = ties_of(ckpt, c="a", d="a")
    assert found.conflicts == ()
    assert found.notes == ("recorded tie d -> b was not followed: --tie says a",)
    assert found.ties == {"c": Tie("a", "--tie"), "d": Tie("a", "--tie")}


def test_the_user_overrules_a_record():
    module = {name: placeholder(name) for name in "abc"}
    ckpt = checkpoint(module, stored={"a": EMB, "b": EMB}, recorded={"c": "a"})
    found = ties_of(ckpt, c="b")
    assert found.conflicts == ()
    assert found.notes == ("recorded tie c -> a was not followed: --tie says b",)
    assert found.ties == {"c": Tie("b", "--tie")}


def test_the_user_cannot_overrule_the_storage():
    module = {n: placeholder(r) for n, r in (("a", "0"), ("b", "1"), ("c", "0"))}
    ckpt = checkpoint(module, stored={"a": EMB, "b": EMB})
    (conflict,) = ties_of(ckpt, c="b").conflicts
    assert conflict.startswith("c: is the same tensor as a by storage record, not as b")


def test_who_shares_a_record_with_what_the_user_ties_follows():
    module = {n: placeholder(r) for n, r in (("a", "0"), ("c", "1"), ("d", "1"))}
    found = ties_of(checkpoint(module, stored={"a": EMB}), c="a")
    assert found.conflicts == ()
    assert {alias: tie.holder for alias, tie in found.ties.items()} == {"c": "a", "d": "a"}


def test_who_is_recorded_as_tied_to_what_the_user_ties_follows():
    module = {name: placeholder(name) for name in "acd"}
    ckpt = checkpoint(module, stored={"a": EMB}, recorded={"d": "c"})
    found = ties_of(ckpt, c="a")
    assert found.conflicts == ()
    assert {alias: tie.holder for alias, tie in found.ties.items()} == {"c": "a", "d": "a"}


def test_the_user_may_replace_a_16_bit_copy_of_the_same_values():
    module = {"a": full("0", EMB), "b": full("1", EMB)}
    apart = checkpoint(module, stored={"a": EMB})
    (conflict,) = ties_of(apart, b="a").conflicts
    assert conflict.startswith("b: has a tensor of its own in `module`")
    same = dataclasses.replace(apart, confirmed_ties=frozenset({("b", "a")}))
    assert settled(ties_of(same, b="a")) == {"b": ("a", "--tie")}


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ({"zz": "a"}, "zz: named by --tie, but the model has no such key"),
        ({"c": "zz"}, "c: --tie names zz, which holds no data"),
        ({"c": "d"}, "c: --tie names d, which holds no data"),
        ({"b": "a"}, "b: has data of its own, which --tie must not replace"),
        ({"c": "c"}, "c: --tie c=c leads back to itself"),
    ],
)
def test_ties_the_user_cannot_have(user, words):
    found = build_tie_map(user_model(), user)
    assert found.ties == {}
    assert found.conflicts == (words,)


def test_a_circle_the_user_cannot_have():
    found = ties_of(user_model(), c="d", d="e", e="c")
    assert found.ties == {}
    assert [conflict.split(":")[0] for conflict in found.conflicts] == ["c", "d", "e"]
    assert all("leads back to itself" in conflict for conflict in found.conflicts)


def test_a_tie_into_a_circle():
    found = ties_of(user_model(), c="d", d="e", e="d")
    assert found.ties == {}
    assert len(found.conflicts) == 3


def test_a_shape_that_does_not_fit():
    module = {"a": full("0", EMB), "b": full("1", (4, 8))}
    found = ties_of(checkpoint(module, stored={"a": EMB}), b="a")
    assert found.ties == {}
    assert found.conflicts == ("b: has shape [4, 8], but a, which --tie names, has [8, 4]",)


def test_several_impossible_ties_are_all_told():
    found = ties_of(user_model(), zz="a", c="nowhere", b="a", d="a")
    assert found.ties == {"d": Tie("a", "--tie")}
    assert len(found.conflicts) == 3


# The same, out of files.


def read(root: Path) -> Checkpoint:
    return read_checkpoint(find_tag(root))


TIED = (
    Param("emb", (8, 4)),
    Param("w", (4, 4)),
    Param("base", (3, 3), kind="frozen"),
    Param("head", (8, 4), tie_of="emb"),
    Param("again", (8, 4), tie_of="head"),
    Param("base2", (3, 3), kind="frozen", tie_of="base"),
)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("era", ["0.9.2", "now"])
def test_ties_of_synthetic_files(tmp_path, stage, era):
    mean = torch.tensor([1.0, 2.0])
    buffers = [Buffer("mean", mean), Buffer("mean2", mean, tie_of="mean")]
    era = era if stage else "now"
    write(tmp_path, Spec(stage=stage, params=TIED, buffers=buffers, era=era))
    found = ties_of(read(tmp_path))
    holders = {alias: tie.holder for alias, tie in found.ties.items()}
    assert holders == {"head": "emb", "again": "emb", "base2": "base", "mean2": "mean"}
    assert (found.conflicts, found.notes) == ((), ())


def test_a_cloned_alias_keeps_its_own_copy(tmp_path):
    params = [Param("emb", (8, 4)), Param("head", (8, 4), tie_of="emb", storage_tie=False)]
    write(tmp_path, Spec(stage=2, params=params, era="0.6"))
    assert settled(ties_of(read(tmp_path))) == {}


def test_poisoned_records_of_a_file(tmp_path):
    params = [Param("a", (8, 4)), Param("b", (2, 2))]
    extra = {"b": "a", "a": "gone"}
    write(tmp_path, Spec(stage=3, params=params, extra_shared=extra))
    found = ties_of(read(tmp_path))
    assert (found.ties, found.conflicts) == ({}, ())
    assert len(found.notes) == 2


REAL = [name for name, case in CASES.items() if case.layout == "plain" and case.ties]


@pytest.mark.parametrize("name", [n for n in REAL if n not in ("lora_z2_exclude_w2",)])
def test_ties_of_real_files(name):
    case = CASES[name]
    found = ties_of(read(case.ckpt))
    classes = [frozenset({alias, tie.holder}) for alias, tie in found.ties.items()]
    truth = [frozenset(names) for names in case.ties]
    assert (found.conflicts, found.notes) == ((), ())
    assert all(any(pair <= names for names in truth) for pair in classes)
    assert sum(len(names) - 1 for names in truth) == len(found.ties)
