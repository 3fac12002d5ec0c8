"""Verifying a result: nothing wrong is said of a good one, and no damage goes unseen.

Digests are compared with those of xxhash and hashlib over what other readers load; differing values
with the ones that were written there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from dist_consolidate import DifferenceError, UsageError, cli, consolidate, verify
from dist_consolidate.output.manifest import SELF_KEY, as_bytes, self_digest
from dist_consolidate.verifying import comparing
from dist_consolidate.verifying.findings import VerifyReport
from tests.cases import CASES, bits, load_output, lost_keys
from tests.synthetic import Buffer, Param, Spec, write
from tests.torchrun import messages, show
from tests.zygote import fork_ranks, fork_together

PARAMS = (
    Param("emb.weight", (70, 101)),
    Param("a.weight", (30, 50)),
    Param("b.weight", (30, 50)),
    Param("a.bias", (17,), group=1),
    Param("base.weight", (25, 99), kind="frozen"),
    Param("scale", (), group=1),
    Param("head.weight", (70, 101), tie_of="emb.weight"),
)
BUFFERS = (
    Buffer("ids", torch.arange(100) + 2**40),
    Buffer("mask", torch.tensor([True, False, True])),
    Buffer("none", torch.zeros(0)),
)
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "files": {"max_shard_size": "40KB", "include": ["optimizer"], "sha256": True},
    "one": {"max_shard_size": "none", "ties": "drop"},
    "bin": {"format": "bin", "max_shard_size": "40KB", "include": ["optimizer"]},
    "bin_copy": {"format": "bin", "ties": "copy", "dtype": "bf16"},
    "fp16": {"dtype": "fp16", "strip_prefix": ["a."], "rename": ["^b=c"]},
}


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoint") / "run"
    write(root, Spec(stage=2, world=2, params=PARAMS, buffers=BUFFERS))
    return root


@pytest.fixture(scope="module")
def results(ckpt: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One result of each shape, which no test may change."""
    folder = tmp_path_factory.mktemp("results")
    for name, options in SHAPES.items():
        consolidate(ckpt, folder / name, **options)
    return {name: folder / name for name in SHAPES}


@pytest.fixture
def copy(results: dict[str, Path], tmp_path: Path):
    """Gives a copy of a result, to be damaged."""

    def make(shape: str) -> Path:
        return Path(shutil.copytree(results[shape], tmp_path / "copy"))

    return make


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "consolidation.json").read_bytes())


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write a manifest that is whole in itself."""
    content[SELF_KEY] = self_digest(content)
    (folder / "consolidation.json").write_bytes(as_bytes(content))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def texts(report: VerifyReport) -> list[str]:
    return [difference.text() for difference in report.differences]


def run_cli(*arguments: str | Path) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def flipped(path: Path, at: int, bit: int = 0) -> Iterator[None]:
    """A file with one bit the other way round."""
    with path.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 1 << bit]))
    yield
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(bytes([byte]))


# What the digests are.


@pytest.mark.parametrize("shape", SHAPES)
def test_digests_are_those_of_the_tensors_in_the_files(shape, results):
    content, tensors = manifest_of(results[shape]), load_output(results[shape])
    held = {name: facts for name, facts in content["tensors"].items() if name in tensors}
    assert held.keys() == tensors.keys()
    for name, facts in held.items():
        assert facts["xxh3_128"] == xxhash.xxh3_128_hexdigest(bytes(bits(tensors[name]).numpy()))
    assert content["tensors"].keys() - held.keys() == ({"head.weight"} if shape == "one" else set())
    tied = content["tensors"]["head.weight"]
    assert tied["tied_to"] == "emb.weight"
    assert tied["xxh3_128"] == content["tensors"]["emb.weight"]["xxh3_128"]
    for state, facts in content.get("optimizer", {}).get("tensors", {}).items():
        loaded = {}
        for path in (results[shape] / "optimizer_states").glob(f"{state}[-.]*"):
            if path.suffix == ".safetensors":
                loaded |= load_file(path)
            elif path.suffix == ".bin":
                loaded |= torch.load(path, weights_only=True)
        assert loaded.keys() == facts.keys()
        for name, tensor in loaded.items():
            digest = xxhash.xxh3_128_hexdigest(bytes(bits(tensor).numpy()))
            assert facts[name]["xxh3_128"] == digest


@pytest.mark.parametrize("shape", ["files", "bin"])
def test_files_are_listed_with_their_sizes_and_checksums(shape, results):
    content, folder = manifest_of(results[shape]), results[shape]
    names = {str(path.relative_to(folder)) for path in files_of(folder)} - {"consolidation.json"}
    assert content["files"].keys() == names
    for name, facts in content["files"].items():
        data = (folder / name).read_bytes()
        assert facts["num_bytes"] == len(data)
        sha256 = hashlib.sha256(data).hexdigest() if SHAPES[shape].get("sha256") else None
        assert facts.get("sha256") == sha256
        if name.endswith(".safetensors"):
            header = data[: 8 + int.from_bytes(data[:8], "little")]
            assert facts["xxh3_128_outside_tensors"] == xxhash.xxh3_128_hexdigest(header)
        elif name.endswith(".json"):
            assert facts["xxh3_128"] == xxhash.xxh3_128_hexdigest(data)


def test_the_manifests_own_digest_is_that_of_all_its_other_lines(results):
    lines = (results["files"] / "consolidation.json").read_bytes().splitlines(keepends=True)
    rest = b"".join(line for line in lines if SELF_KEY.encode() not in line)
    assert xxhash.xxh3_128_hexdigest(rest) == manifest_of(results["files"])[SELF_KEY]


def test_without_digests_there_are_none(ckpt, tmp_path):
    consolidate(ckpt, tmp_path / "out", digest="none")
    assert "xxh3" not in (tmp_path / "out" / "consolidation.json").read_text()
    report = verify(tmp_path / "out")
    assert (report.differences, report.num_digests) == ((), 0)
    assert "has no digests of the tensors" in report.lines()[-1]


# Good results.


@pytest.mark.parametrize("shape", SHAPES)
def test_a_good_result_is_good(shape, results, ckpt):
    report = verify(results[shape], ckpt)
    assert texts(report) == []
    tensors = len(load_output(results[shape]))
    assert report.num_compared is not None
    assert report.num_digests >= tensors - 1
    assert report.num_compared >= tensors
    assert (report.num_sha256 > 0) == bool(SHAPES[shape].get("sha256"))
    # Every trained parameter has a 16-bit copy, the rounded master; a tie shares it.
    assert (report.num_rounded, report.rounded) == (5, ())


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if not lost_keys(case)])
def test_results_of_real_checkpoints_are_good(name, tmp_path):
    case = CASES[name]
    odd = sum(map(ord, name)) % 2
    options = {"format": "bin", "dtype": "keep"} if odd else {"max_shard_size": "20KB"}
    consolidate(case.ckpt, tmp_path, tag=case.tag, **options)
    report = verify(tmp_path, case.ckpt)
    assert texts(report) == []
    assert report.num_compared


# Damage.


def spots(path: Path, chance: random.Random) -> list[int]:
    """Bytes to flip a bit of: the first and the last ones, and some between."""
    size = path.stat().st_size
    count = 40 if path.suffix == ".json" else 8
    drawn = (chance.randrange(size) for _ in range(count))
    return sorted({0, 7, 8, 15, size - 1, *drawn})


@pytest.mark.parametrize("shape", ["files", "one", "bin", "bin_copy"])
def test_a_flipped_bit_anywhere_is_found(shape, copy):
    """In headers, padding, weights, zip directories, indexes and the manifest itself."""
    folder, chance, missed = copy(shape), random.Random(shape), []
    for path in files_of(folder):
        for at in spots(path, chance):
            bit = chance.randrange(8)
            with flipped(path, at, bit):
                report = verify(folder)
            name = str(path.relative_to(folder))
            if not any(difference.file == name for difference in report.differences):
                missed.append((name, at, bit))
    assert missed == []
    assert texts(verify(folder)) == []


@pytest.mark.parametrize("shape", ["files", "bin"])
def test_every_bit_of_a_header_counts(shape, copy):
    """A whole header, and for a zip file its pickle and directory, byte by byte."""
    folder = copy(shape)
    path = next(path for path in files_of(folder) if path.suffix in (".bin", ".safetensors"))
    size = path.stat().st_size
    ends = range(size - 600, size, 7) if shape == "bin" else ()
    missed = []
    for at in [*range(0, 700, 7), *ends]:
        with flipped(path, at, at % 8):
            if not verify(folder).differences:
                missed.append(at)
    assert missed == []


def damaged(copy, shape: str, name: str) -> tuple[Path, str]:
    """A result with one damaged tensor, and the file it is in."""
    folder = copy(shape)
    file = manifest_of(folder)["tensors"][name]["file"]
    data = (folder / file).read_bytes()
    raw = bytes(bits(load_output(folder)[name]).numpy())
    at = data.index(raw)
    width = len(raw) // load_output(folder)[name].numel()
    changed = bytearray(data)
    for element in (41, 1000):
        changed[at + element * width + width - 1] ^= 0x40
    (folder / file).write_bytes(changed)
    return folder, file


@pytest.mark.parametrize("shape", ["files", "bin", "bin_copy", "fp16"])
def test_a_differing_tensor_is_named_with_both_values(shape, copy, results, ckpt):
    folder, file = damaged(copy, shape, "emb.weight")
    good = load_output(results[shape])["emb.weight"].reshape(-1)
    bad = load_output(folder)["emb.weight"].reshape(-1)
    assert int((good != bad).nonzero()[0]) == 41
    want = (
        f"{file}: emb.weight: element 41 is the first of 2 of 7,070 that differ: "
        f"{bad[41].item()!r} in the result, {good[41].item()!r} in the shards"
    )
    assert want in texts(verify(folder, ckpt))
    without = texts(verify(folder))
    assert any(text.startswith(f"{file}: emb.weight: xxh3_128 is ") for text in without)
    code, out, err = run_cli("verify", folder, ckpt)
    assert (code, out) == (5, "")
    assert want in err


def test_blocks_of_any_size_find_the_same(copy, ckpt, monkeypatch):
    folder, _ = damaged(copy, "files", "emb.weight")
    reports = []
    for size in (40, 999, 1 << 20):
        monkeypatch.setattr(comparing, "_BLOCK_NUMEL", size)
        reports.append(texts(verify(folder, ckpt)))
    assert reports[0] == reports[1] == reports[2] != []


def test_a_result_that_agrees_with_its_manifest_may_still_be_wrong(copy, ckpt):
    """Two tensors that were taken for each other: only the shards tell."""
    folder = copy("files")
    content = manifest_of(folder)
    places = [content["tensors"][name] for name in ("a.weight", "b.weight")]
    values = [bytes(bits(load_output(folder)[n]).numpy()) for n in ("a.weight", "b.weight")]
    datas = {facts["file"]: (folder / facts["file"]).read_bytes() for facts in places}
    spots = [datas[f["file"]].index(value) for f, value in zip(places, values, strict=True)]
    for facts, at, other in zip(places, spots, values[::-1], strict=True):
        data = bytearray((folder / facts["file"]).read_bytes())
        data[at : at + len(other)] = other
        (folder / facts["file"]).write_bytes(data)
    digests = [facts["xxh3_128"] for facts in places]
    for facts, digest in zip(places, digests[::-1], strict=True):
        facts["xxh3_128"] = digest
    for name, facts in content["files"].items():
        facts["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    write_manifest(folder, content)
    assert texts(verify(folder)) == []
    found = verify(folder, ckpt).differences
    assert [difference.tensor for difference in found] == ["a.weight", "b.weight"]
    assert all("element 0 is the first of 1,500 of 1,500" in item.what for item in found)


def test_another_checkpoint_differs_in_every_trained_tensor(results, tmp_path):
    write(tmp_path / "other", Spec(stage=2, world=2, params=PARAMS, buffers=BUFFERS, seed=1))
    report = verify(results["files"], tmp_path / "other")
    weights = {item.tensor for item in report.differences if "(" not in item.tensor}
    assert weights == {param.name for param in PARAMS}


def test_tensors_that_only_one_of_the_two_has(results, tmp_path):
    params = [*(p for p in PARAMS if p.name != "b.weight"), Param("new", (5,))]
    write(tmp_path / "other", Spec(stage=2, world=2, params=params, buffers=BUFFERS))
    found = texts(verify(results["one"], tmp_path / "other"))
    assert "consolidation.json: new: is in the checkpoint, but not in the result" in found
    assert "model.safetensors: b.weight: is not in the checkpoint" in found


@pytest.mark.parametrize("shape", ["files", "bin"])
def test_files_that_are_not_as_they_should_be(shape, copy, results):
    folder = copy(shape)
    suffix = "bin" if shape == "bin" else "safetensors"
    stem = "pytorch_model" if shape == "bin" else "model"
    last, first = sorted(folder.glob(f"{stem}-*.{suffix}"))[-1:], folder / f"{stem}.{suffix}"
    path, data = last[0], last[0].read_bytes()

    def found() -> list[str]:
        return texts(verify(folder))

    path.unlink()
    assert f"{path.name}: is not there" in found()
    path.mkdir()
    assert f"{path.name}: is no regular file" in found()
    path.rmdir()
    path.write_bytes(data[:-1])
    size = f"has {len(data) - 1:,} bytes, the manifest says {len(data):,}"
    assert found() == [f"{path.name}: {size}"]
    path.write_bytes(data + b"\0")
    assert any(f"has {len(data) + 1:,} bytes" in text for text in found())
    path.write_bytes(data)
    assert found() == []
    for stray in (first, folder / "optimizer_states" / f"more.{suffix}"):
        stray.write_bytes(data)
        name = stray.relative_to(folder)
        assert found() == [f"{name}: is a weight file that the manifest does not name"]
        stray.unlink()
    (folder / "tokenizer.json").write_text("{}")  # not ours
    assert found() == []


def test_sha256_alone_finds_a_flipped_bit(ckpt, tmp_path):
    consolidate(ckpt, tmp_path, digest="none", sha256=True)
    (path,) = tmp_path.glob("*.safetensors")
    with flipped(path, path.stat().st_size - 5):
        (difference,) = verify(tmp_path).differences
    assert difference.file == "model.safetensors"
    assert difference.what.startswith("sha256 is ")
    assert verify(tmp_path).differences == ()


def test_a_manifest_from_a_stranger_leads_nowhere_else(copy):
    folder = copy("one")
    shutil.copytree(folder, folder.parent / "good")
    (folder.parent / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    for name in ("../model.safetensors", "/etc/passwd", "consolidation.json", "x/../y.bin"):
        content = manifest_of(folder)
        content["files"][name] = content["files"]["model.safetensors"]
        write_manifest(folder, content)
        (text,) = texts(verify(folder))
        assert text.startswith("consolidation.json: is damaged")
        del content["files"][name]
        write_manifest(folder, content)
    for change in ([], {}, {"tensors": 3}, None, {"tensors": {"x": []}, "files": {}}):
        (folder / "consolidation.json").write_text(json.dumps(change))
        assert len(texts(verify(folder))) >= 1
    (folder / "consolidation.json").write_text("[" * 100_000)
    assert "is no JSON" in texts(verify(folder))[0]
    for key, value in (("xxh3_128", [1]), ("tied_to", {}), ("shape", [-1]), ("dtype", "int3")):
        content = manifest_of(folder.parent / "good")
        content["tensors"]["a.weight"][key] = value
        write_manifest(folder, content)
        assert "does not say what a manifest says" in texts(verify(folder))[0]
    (folder / "consolidation.json").unlink()
    os.mkfifo(folder / "consolidation.json")
    with pytest.raises(UsageError, match="is no regular file"):
        verify(folder)


# The 16-bit weights beside the masters.


def changed_weights(source: Path, target: Path, change: Mapping[str, Any]) -> Path:
    """A checkpoint whose model states hold other 16-bit weights than the rounded masters."""
    shutil.copytree(source, target)
    (tag,) = (path for path in target.iterdir() if path.is_dir())
    for path in tag.glob("*mp_rank_00_model_states.pt"):
        states = torch.load(path, weights_only=False)
        for name, action in change.items():
            action(states["module"][name])
        torch.save(states, path)
    return target


@pytest.mark.deepspeed
def test_16bit_weights_that_are_not_the_rounded_masters_are_told(tmp_path):
    pytest.importorskip("deepspeed")
    case = CASES["z1_bf16opt_groups_w4"]
    (path,) = case.ckpt.glob("*/mp_rank_00_model_states.pt")
    module = torch.load(path, weights_only=False)["module"]
    truth = case.truth["fp32"]
    names = [name for name in module if module[name].dtype == torch.bfloat16]
    small, *_, large = sorted(names, key=lambda name: module[name].numel())
    index = int(module[large].reshape(-1).abs().argmax())

    def one_step(tensor: torch.Tensor) -> None:
        tensor.view(torch.int16).reshape(-1)[index] += 1

    def others(tensor: torch.Tensor) -> None:
        tensor.mul_(4.0).add_(1.0)

    ckpt = changed_weights(case.ckpt, tmp_path / "other", {large: one_step, small: others})
    consolidate(ckpt, tmp_path / "out", trust_masters=True)
    report = verify(tmp_path / "out", ckpt)
    assert texts(report) == []
    by_name = {item.tensor: item for item in report.rounded}
    assert by_name.keys() == {large, small}
    step = by_name[large]
    assert (step.num_unequal, step.num_beyond, step.at, step.steps) == (1, 0, index, 1)
    assert step.master == truth[large].reshape(-1)[index].bfloat16().item()
    assert not step.is_far
    far = by_name[small]
    assert far.is_far
    gaps = (truth[small].bfloat16().float() * 3 + 1).abs().reshape(-1)
    assert abs(far.weight - far.master) == pytest.approx(float(gaps.max()), rel=0.05)
    lines = report.lines()
    assert report.num_rounded == len(names) > 2
    assert f"{len(names) - 2} of {len(names)} equal the rounded fp32 values" in lines[1]
    assert lines[2].startswith(f"warning: {small}: ")
    assert lines[2].endswith("these weights are not this checkpoint's masters")
    assert lines[3].startswith(f"note: {large}: 1 of ")


def test_steps_between_16bit_values():
    for dtype, tiny in ((torch.bfloat16, 9.2e-41), (torch.float16, 6e-8)):
        values = torch.tensor([-torch.inf, -1.0, -tiny, 0.0, tiny, 1.0, torch.inf]).to(dtype)
        order = comparing._ordinal(values)
        assert (order.diff() > 0).all()
        assert order[3] == 0
        assert order[4] - order[2] == 2
        assert (comparing._ordinal(values) == -comparing._ordinal(-values)).all()


def test_a_nan_is_a_nan_after_a_cast_and_only_then():
    nans = torch.tensor([0x7FC00000, 0x7FC00001, 0x3F800000]).to(torch.int32).view(torch.float32)
    cast = nans.bfloat16().view(torch.int16)
    cast[0] = 0x7FFF
    assert comparing._unequal(cast.view(torch.bfloat16), nans).tolist() == []
    assert comparing._unequal(nans[[0, 0, 2]], nans).tolist() == [1]
    cast[2] = 0x7FFF
    assert comparing._unequal(cast.view(torch.bfloat16), nans).tolist() == [2]


# The command line.


def test_the_command_line(results, ckpt, monkeypatch, tmp_path):
    code, out, err = run_cli("verify", results["files"])
    assert (code, err) == (0, "")
    assert out.startswith("verified 20 tensors, ")
    assert "SHA-256 of " in out
    code, out, err = run_cli("verify", results["files"], ckpt, "--tag", "global_step3")
    assert (code, err) == (0, "")
    assert "20 tensors with the shards, bit for bit" in out
    assert "16-bit weights of the model states: 5 of 5 equal the rounded fp32 values" in out
    code, out, err = run_cli("verify", tmp_path)
    assert (code, out) == (2, "")
    assert f"{tmp_path / 'consolidation.json'}: No such file or directory; verify takes" in err
    code, out, err = run_cli("verify", results["files"], ckpt, "--tag", "x")
    assert code == 3
    monkeypatch.chdir(tmp_path)
    (tmp_path / "verify").symlink_to(ckpt)
    assert run_cli("./verify", tmp_path / "out")[0] == 0
    assert run_cli("verify", "out", "./verify")[0] == 0
    code, out, err = run_cli("--dtype", "fp32", "verify", "elsewhere")
    assert code == 2
    assert "a folder of that name is reached as ./verify" in err


def test_verifying_right_after_the_run(ckpt, tmp_path):
    code, out, err = run_cli(ckpt, tmp_path / "out", "--verify")
    assert (code, err) == (0, "")
    assert "verified 10 tensors, " in out
    assert "10 tensors with the shards, bit for bit" in out
    report = consolidate(ckpt, tmp_path / "dry", verify=True, dry_run=True)
    assert (report.verified, (tmp_path / "dry").exists()) == ((), False)


def test_a_difference_right_after_the_run_leaves_the_result(ckpt, tmp_path, monkeypatch):
    """A disk that loses a bit between the writing and the reading."""
    from dist_consolidate.output.publish import Publication

    publish = Publication.publish

    def lossy(self: Publication, last: tuple[str, ...] = ()) -> None:
        publish(self, last)
        path = self.output_dir / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(Publication, "publish", lossy)
    with pytest.raises(DifferenceError) as caught:
        consolidate(ckpt, tmp_path / "out", verify=True)
    assert caught.value.exit_code == 5
    assert f"the result is in place at {tmp_path / 'out'}, but it is not what" in str(caught.value)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_options_in_the_manifest_that_cannot_be(copy, ckpt):
    folder = copy("one")
    content = manifest_of(folder)
    content["options"]["dtype"] = "int3"
    write_manifest(folder, content)
    with pytest.raises(UsageError, match=r"consolidation\.json: its options are not possible"):
        verify(folder, ckpt)


@pytest.mark.dist
def test_ranks_share_the_work_and_one_of_them_tells(ckpt, copy, tmp_path):
    out = tmp_path / "out"
    options = [*("--transport", "gather", "--writers", "2", "--max-shard-size", "40KB"), "--verify"]
    good = fork_together(2, [ckpt, out, *options]).ok()
    assert good.stdout.count("verified 10 tensors, ") == 1
    assert good.stdout.count("10 tensors with the shards, bit for bit") == 1
    folder, file = damaged(copy, "files", "emb.weight")
    ranks = fork_ranks(2, ["verify", folder, ckpt])
    assert [rank.returncode for rank in ranks] == [5, 5], show(ranks)
    (message,) = messages(ranks)
    assert f"{file}: emb.weight: element 41 is the first of 2 of 7,070 that differ" in message


def test_without_torch_unless_the_shards_are_compared(results):
    code = (
        "import sys\nfrom dist_consolidate import cli\n"
        f"assert cli.main(['verify', {str(results['files'])!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def test_the_report_is_plain_data(results, ckpt):
    report = verify(results["one"], ckpt)
    assert dataclasses.replace(report, duration_sec=0.0) == dataclasses.replace(
        verify(results["one"], ckpt), duration_sec=0.0
    )
    report.raise_if_different()
