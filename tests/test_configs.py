"""The files in ``configs/`` do what they say, on real checkpoints; so does ``--print-config``.

Run as a module, this file is a rank that sees the shards of its own node only.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dist_consolidate import cli, consolidate
from dist_consolidate.arguments import make_parser, parse
from dist_consolidate.config_file import load_config
from dist_consolidate.errors import CheckpointError, UsageError
from dist_consolidate.options import Options, make_options
from tests.cases import CASES, assert_same_bits, expected_fp32, load_output
from tests.torchrun import ENVIRONMENT, ROOT, start_ranks

CONFIGS = ROOT / "configs"
MODULE = "tests.test_configs"
NODES = "CONSOLIDATE_TEST_NODES"
TIED = CASES["ds0.6.1_gpt2_z2_w2"]
TENSOR_PARALLEL = CASES["tp2_z1_fp32_w2"]


def run(*arguments: str | Path) -> int:
    return cli.main([str(argument) for argument in arguments])


def number_of_names(out: Path) -> int:
    count = 0
    for path in out.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            count += len(file.keys())
    return count


# The files, on real checkpoints.


def test_archive_fp32(tmp_path: Path) -> None:
    assert run(TIED.ckpt, tmp_path / "out", "--config", CONFIGS / "archive_fp32.toml") == 0
    want = expected_fp32(TIED)
    assert_same_bits(load_output(tmp_path / "out"), want)
    assert number_of_names(tmp_path / "out") == len(want)  # the tied ones in full


def test_hub_bf16(tmp_path: Path) -> None:
    assert run(TIED.ckpt, tmp_path / "out", "--config", CONFIGS / "hub_bf16.toml") == 0
    want = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in expected_fp32(TIED).items()
    }
    dropped = sum(len(names) - 1 for names in TIED.ties)
    assert dropped
    assert number_of_names(tmp_path / "out") == len(want) - dropped
    kept = load_output(tmp_path / "out")
    for names in TIED.ties:
        (holder,) = set(names) & set(kept)
        kept.update(dict.fromkeys(names, kept[holder]))
    assert_same_bits(kept, want)


def test_low_memory(tmp_path: Path) -> None:
    assert run(TIED.ckpt, tmp_path / "out", "--config", CONFIGS / "low_memory.toml") == 0
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(TIED))


@pytest.mark.dist
def test_node_local(tmp_path: Path) -> None:
    """Two nodes, each with the shards of one rank, under the same relative path."""
    case = CASES["ds0.6.1_gpt2_z3_w2"]
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for number, node in enumerate(nodes):
        shutil.copytree(case.ckpt, node / "ckpt")
        for path in (node / "ckpt").rglob(f"*zero_pp_rank_{1 - number}_*"):
            path.unlink()
    ended = start_ranks(
        2,
        ["ckpt", "out", "--config", CONFIGS / "node_local.toml"],
        module=MODULE,
        env={NODES: os.pathsep.join(map(str, nodes))},
    )
    for rank in ended:
        rank.ok()
    assert_same_bits(load_output(nodes[0] / "out"), expected_fp32(case))
    assert not (nodes[1] / "out").exists()


def without_record(tmp_path: Path) -> Path:
    """A real tensor-parallel checkpoint whose record of the layout is gone, as older ones are."""
    run_dir = shutil.copytree(TENSOR_PARALLEL.ckpt, tmp_path / "run")
    for path in run_dir.rglob("mp_rank_*_model_states.pt"):
        state = torch.load(path, weights_only=False)
        del state["universal_checkpoint_info"]
        torch.save(state, path)
    return run_dir


def test_tensor_parallel(tmp_path: Path) -> None:
    ckpt = without_record(tmp_path)
    with pytest.raises(CheckpointError, match="nothing says how they go together"):
        consolidate(ckpt, tmp_path / "out")
    assert run(ckpt, tmp_path / "out", "--config", CONFIGS / "tensor_parallel.toml") == 0
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(TENSOR_PARALLEL))


def test_rules_given_to_the_api(tmp_path: Path) -> None:
    rules = load_config(CONFIGS / "tensor_parallel.toml")["tensor_parallel"]
    report = consolidate(without_record(tmp_path), tmp_path / "out", tensor_parallel=rules)
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(TENSOR_PARALLEL))
    assert not any("matches no tensor" in note for note in report.notes), report.notes


# One file with rules in it.


def write_toml(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


RULE = '[[tensor_parallel.rule]]\nmatch = "{}"\ndim = 0\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp_rules = 'a.toml'\n" + RULE.format("x"), "keep one of them"),
        ("[[tensor_parallel.rule]]\nmatch = 'x'\n", "rule 1 ('x'): must have exactly one of dim"),
        ("[tensor_parallel]\n", "must hold [[tensor_parallel.rule]] tables"),
        ("tensor_parallel = 3\n", "tensor_parallel 3: must be a table"),
        (RULE.format("x") + "dims = 3\n", "has the unknown key dims"),
        ("tensor_paralel = 3\n", "did you mean tensor_parallel?"),
        ("max_shard_sise = '1GB'\n", "did you mean max_shard_size?"),
    ],
)
def test_rules_that_are_refused(text: str, words: str, tmp_path: Path) -> None:
    path = write_toml(tmp_path / "a.toml", text)
    with pytest.raises(UsageError) as caught:
        load_config(path)
    assert str(caught.value).startswith(f"--config {path}: ")
    assert words in str(caught.value)


def test_both_kinds_of_rules_are_refused() -> None:
    with pytest.raises(UsageError, match="give one of them"):
        make_options({"tp_rules": "a", "tensor_parallel": {"rule": []}})


def options_of(*arguments: str | Path) -> Options:
    return parse(["CKPT", *map(str, arguments)])[2]


def test_the_last_word_on_rules_holds(tmp_path: Path) -> None:
    one = write_toml(tmp_path / "one.toml", RULE.format("x"))
    two = write_toml(tmp_path / "two.toml", "tp_rules = 'r.toml'\n")
    tables = {"rule": [{"match": "x", "dim": 0}]}
    found = [
        options_of("--config", one, "--config", two),
        options_of("--config", two, "--config", one),
        options_of("--config", one, "--tp-rules", "s.toml"),
    ]
    assert [(f.tp_rules, f.tensor_parallel) for f in found] == [
        (str(tmp_path / "r.toml"), None),
        (None, tables),
        ("s.toml", None),
    ]


# Every option of the command line.


# What is said on the command line alone.
NOT_IN_FILES = {"help", "version", "config", "print_config", "ckpt_dir", "output_dir"}
TEXTS = ("3", "10s", "1GB", "name", "a=b")


def actions() -> list[argparse.Action]:
    return [a for a in make_parser()._actions if a.dest not in NOT_IN_FILES]


def test_every_option_is_one_of_the_command_line() -> None:
    # The rules themselves fit into a file only.
    fields = {field.name for field in dataclasses.fields(Options)} - {"tensor_parallel"}
    assert {action.dest for action in actions()} == fields


def accepted(name: str, candidates: Sequence[Any]) -> list[Any]:
    found = []
    for value in candidates:
        try:
            make_options({"format": "bin", name: value})
        except UsageError:
            continue
        found.append(value)
    return found


@pytest.mark.parametrize("action", actions(), ids=lambda action: action.dest)
def test_every_option_has_a_key(action: argparse.Action, tmp_path: Path) -> None:
    name, flag = action.dest, action.option_strings[-1]
    beside = [] if name == "format" else ["--format", "bin"]
    if action.nargs == 0:
        values: list[Any] = [True]
        words = [[flag]]
    else:
        values = accepted(name, (action.choices and list(action.choices)) or TEXTS)
        assert values, name
        words = [[flag, str(value)] for value in values]
    repeats = isinstance(action, argparse._AppendAction)
    for value, said in zip(values, words, strict=True):
        text = "true" if value is True else f'["{value}"]' if repeats else f'"{value}"'
        path = write_toml(tmp_path / "sub" / "a.toml", f"{name} = {text}\n")
        want, got = options_of(*beside, *said), options_of(*beside, "--config", path)
        if name in ("tp_rules", "hf_config", "search_dir"):
            inner = str(path.parent / value)
            want = dataclasses.replace(want, **{name: (inner,) if repeats else inner})
        assert got == want
        assert getattr(got, name) != getattr(Options(), name) or value == getattr(Options(), name)


@pytest.mark.parametrize("action", actions(), ids=lambda action: action.dest)
def test_the_command_line_wins(action: argparse.Action, tmp_path: Path) -> None:
    name, flag = action.dest, action.option_strings[-1]
    if action.nargs == 0:  # a switch can only be set on the command line
        path = write_toml(tmp_path / "a.toml", f"{name} = false\n")
        assert getattr(options_of("--config", path, flag), name) is True
        return
    first, *_, last = accepted(name, [*(action.choices or ()), *TEXTS, "b=c", "other"]) * 2
    repeats = isinstance(action, argparse._AppendAction)
    path = write_toml(tmp_path / "a.toml", f"{name} = {[first] if repeats else repr(first)}\n")
    beside = [] if name == "format" else ["--format", "bin"]
    got = options_of("--config", path, flag, last, *beside)
    assert getattr(got, name) == ((last,) if repeats else last)


def test_later_files_win(tmp_path: Path) -> None:
    one = write_toml(tmp_path / "1.toml", "dtype = 'bf16'\ntie = ['a=b']\nwriters = 2\n")
    two = write_toml(tmp_path / "2.toml", "dtype = 'fp16'\ntie = ['c=d', 'e=f']\n")
    got = options_of("--config", one, "--config", two, "--writers", "all")
    assert (got.dtype, got.tie, got.writers) == ("fp16", ("c=d", "e=f"), "all")


# --print-config.

ODD = 'quote " and \\ and ü and \u2028 and \x7f, \t'


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as caught:
        run(*arguments, "--print-config")
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_what_is_printed_can_be_fed_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = (CONFIGS / "tensor_parallel.toml").read_text()
    text = f"hf-config = 'model'\nallow_16bit = true\n{rules}sub_params = [3, 5]\n"
    write_toml(tmp_path / "a b" / "c.toml", text)
    monkeypatch.chdir(tmp_path)
    given = ["--config", "a b/c.toml", "--rename", f"{ODD}=x", "--search-dir", "here", "--tag", ODD]
    out = printed(capsys, *given)
    again = write_toml(tmp_path / "elsewhere" / "again.toml", out)
    want = dataclasses.replace(
        options_of(*given),
        hf_config=str(tmp_path / "a b" / "model"),
        search_dir=(str(tmp_path / "here"),),
    )
    assert options_of("--config", again) == want
    lines = out.splitlines()
    assert 'dtype = "fp32"  # a b/c.toml' in lines
    assert 'transport = "auto"  # default' in lines
    assert "# writers is not set  # default" in lines
    assert f'search_dir = ["{tmp_path}/here"]  # command line' in lines
    assert out.count("[[tensor_parallel.rule]]  # a b/c.toml") == rules.count("[[tensor_")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_file_prints_and_reads_the_same(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = write_toml(tmp_path / "again.toml", printed(capsys, "--config", path))
    assert tomllib.loads(again.read_text()).items() >= tomllib.loads(path.read_text()).items()
    assert options_of("--config", again) == options_of("--config", path)


def test_nothing_is_touched_and_torch_stays_away(tmp_path: Path) -> None:
    code = (
        "import sys; from dist_consolidate.cli import main\n"
        "try: main(['/no/such/folder', '--print-config'])\n"
        "except SystemExit as end: code = end.code\n"
        "sys.exit(code or 7 * ('torch' in sys.modules))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **ENVIRONMENT},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert 'format = "safetensors"  # default' in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_wrong_options_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--print-config", "--ties", "alias") == 2
    assert "--ties alias" in capsys.readouterr().err
    assert run("--print-config", "--tag", "\udc80") == 2
    assert "TOML cannot hold" in capsys.readouterr().err


def main(arguments: Sequence[str]) -> int:
    """Run the command line as a rank on its own node."""
    os.chdir(os.environ[NODES].split(os.pathsep)[int(os.environ["RANK"])])
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
