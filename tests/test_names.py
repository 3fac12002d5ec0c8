"""``--strip-prefix`` and ``--rename`` reach every name of a result, and never make two alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dist_consolidate import consolidate
from dist_consolidate.cli import main
from dist_consolidate.config_file import load_config
from dist_consolidate.errors import UsageError
from dist_consolidate.options import make_options
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output
from tests.synthetic import Buffer, Param, Spec, Truth, write

PARAMS = (
    Param("net.emb.weight", (31, 9)),
    Param("net.a.weight", (17, 6)),
    Param("net.a.bias", (17,), group=1),
    Param("net.head.weight", (31, 9), tie_of="net.emb.weight"),
    Param("netto", (3,)),
)
BUFFERS = (Buffer("net.ids", torch.arange(7)),)


@pytest.fixture
def truth(tmp_path: Path) -> Truth:
    return write(tmp_path / "ckpt", Spec(stage=2, world=2, params=PARAMS, buffers=BUFFERS))


def manifest(folder: Path) -> dict:
    return json.loads((folder / "consolidation.json").read_text())


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_prefix_and_patterns(tmp_path, truth, file_format):
    report = consolidate(
        tmp_path / "ckpt",
        tmp_path / "out",
        format=file_format,
        strip_prefix=["net."],
        rename=[r"^(a)\.=first_\1.", r"\.weight(?=$)=.w"],
        max_shard_size=500,
    )
    new = {
        "net.emb.weight": "emb.w",
        "net.a.weight": "first_a.w",
        "net.a.bias": "first_a.bias",
        "net.head.weight": "head.w",
        "netto": "netto",
        "net.ids": "ids",
    }
    assert_same_bits(load_output(tmp_path / "out"), {new[n]: t for n, t in truth.fp32.items()})
    assert report.ties == {"head.w": "emb.w"}
    facts = manifest(tmp_path / "out")
    old = {n: f.get("name_in_checkpoint", n) for n, f in facts["tensors"].items()}
    assert old == {new_name: name for name, new_name in new.items()}
    assert "name_in_checkpoint" not in facts["tensors"]["netto"]
    assert facts["tensors"]["head.w"]["tied_to"] == "emb.w"
    assert facts["options"]["strip_prefix"] == ["net."]
    (index,) = (tmp_path / "out").glob("*.index.json")
    assert set(json.loads(index.read_text())["weight_map"]) == set(new.values())
    assert any(note.startswith("5 of 6 names were changed") for note in report.notes)


def test_dropped_ties_have_new_names(tmp_path, truth):
    consolidate(tmp_path / "ckpt", tmp_path / "out", ties="drop", strip_prefix=["net."])
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "emb.weight"}
        assert "head.weight" not in file.keys()  # noqa: SIM118 - safe_open is no mapping


def test_options_speak_of_the_checkpoint(tmp_path):
    params = (*PARAMS, Param("net.lost", (4,), kind="unoptimized"))
    truth = write(tmp_path / "ckpt", Spec(stage=3, world=2, params=params, buffers=BUFFERS))
    report = consolidate(
        tmp_path / "ckpt", tmp_path / "out", strip_prefix=["net."], allow_missing=["net.lost"]
    )
    assert set(report.left_out) == {"lost"}
    assert "(in the checkpoint: net.lost)" in manifest(tmp_path / "out")["left_out"]["lost"]
    want = {n.removeprefix("net."): t for n, t in truth.fp32.items() if n != "net.lost"}
    assert_same_bits(load_output(tmp_path / "out"), want)


def test_collisions_are_all_listed(tmp_path, truth):
    with pytest.raises(UsageError) as refusal:
        consolidate(
            tmp_path / "ckpt", tmp_path / "out", rename=[r"^net\.(emb|head)\.=x.", "^.*a.bias$="]
        )
    lines = str(refusal.value).splitlines()
    assert lines[1:-1] == [
        "  - net.emb.weight and net.head.weight would get the name x.weight",
        "  - net.a.bias would get an empty name",
    ]
    assert not (tmp_path / "out").exists()


def test_a_dropped_tie_collides_too(tmp_path, truth):
    """Its name stands in the file's metadata."""
    with pytest.raises(UsageError, match=r"net\.a\.weight and net\.head\.weight would get"):
        consolidate(
            tmp_path / "ckpt", tmp_path / "out", ties="drop", rename=["head.weight=a.weight"]
        )


def test_names_may_be_swapped(tmp_path, truth):
    """One after another would collide on the way; only the end counts."""
    rules = ["netto=tmp", r"^net\.a\.bias$=netto", r"^tmp$=net.a.bias"]
    consolidate(tmp_path / "ckpt", tmp_path / "out", rename=rules)
    found = load_output(tmp_path / "out")
    assert torch.equal(found["netto"], truth.fp32["net.a.bias"])
    assert torch.equal(found["net.a.bias"], truth.fp32["netto"])


def test_what_fits_nothing_is_a_note(tmp_path, truth):
    report = consolidate(
        tmp_path / "ckpt", tmp_path / "out", strip_prefix=["model."], rename=["q(.*)=\\1"]
    )
    assert "--strip-prefix model. fits no name of the checkpoint" in report.notes
    assert "--rename q(.*)=\\1 fits no name of the checkpoint" in report.notes
    assert not any("names were changed" in note for note in report.notes)
    assert_same_bits(load_output(tmp_path / "out"), truth.fp32)


def test_the_digest_covers_names(tmp_path, truth):
    digests = set()
    for number, rename in enumerate(([], ["netto=other"], ["nett=othe", "otheo=other"])):
        out = tmp_path / f"out{number}"
        consolidate(tmp_path / "ckpt", out, rename=rename)
        digests.add(manifest(out)["plan_digest"])
    assert len(digests) == 2  # how a name came about makes no difference


def test_real_checkpoint_from_the_command_line(tmp_path):
    case = CASES["kitchen_z3_bf16_w2"]
    want = expected_fp32(case)
    out = tmp_path / "out"
    assert main([str(case.ckpt), str(out), "--rename", "^=wrapped.module."]) == 0
    assert_same_bits(load_output(out), {f"wrapped.module.{n}": t for n, t in want.items()})


@pytest.mark.parametrize("text", ["x", "=x", "(=x", r"a=\2", r"a=\g<no>", "*=x"])
def test_bad_rules(text):
    with pytest.raises(UsageError) as refusal:
        make_options({"rename": [text]})
    assert str(refusal.value).startswith(f"--rename {text}: ")
    assert "\n" not in str(refusal.value)


def test_bad_prefix():
    with pytest.raises(UsageError, match="--strip-prefix: is empty"):
        make_options({"strip_prefix": [""]})
    with pytest.raises(UsageError, match="--strip-prefix"):
        make_options({"strip_prefix": 3})


def test_rules_in_a_file(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text("strip-prefix = 'a.'\nrename = ['(?<=x)y=z', 'b=']\n")
    found = make_options(load_config(path))
    assert found.strip_prefix == ("a.",)
    assert found.rename_pairs == (("(?<=x)y", "z"), ("b", ""))
