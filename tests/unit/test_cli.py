"""The command line: what wins, what it answers, and with which exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dist_consolidate import __version__
from dist_consolidate.arguments import parse
from dist_consolidate.cli import _summary, _tell, main
from dist_consolidate.errors import CheckpointError, UsageError
from dist_consolidate.options import Options
from dist_consolidate.report import RankReport, Report
from dist_consolidate.runtime.launched import Launched, meeting_place
from dist_consolidate.runtime.voice import Voice
from tests.cases import CASES, assert_same_bits, load_output
from tests.synthetic import Param, Spec, write

ROOT = Path(__file__).resolve().parents[2]
PARAMS = (Param("emb", (5, 3)), Param("b", (7,)), Param("head", (5, 3), tie_of="emb"))
# Runs the command line and says on the last line of standard error whether torch was loaded.
WATCHED = """
import sys
from dist_consolidate.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code or 0
loaded = [name for name in ("torch", "numpy") if name in sys.modules]
sys.exit(f"loaded {loaded}" if loaded else code)
"""


def options(*arguments: str) -> Options:
    return parse(["run", *arguments])[2]


def run_apart(
    *arguments: str, rank: str | None = None, port: int = 29500
) -> subprocess.CompletedProcess[str]:
    """Run the command line in an interpreter in which torch must stay unloaded."""
    environment = {k: v for k, v in os.environ.items() if k != "RANK"}
    if rank is not None:
        environment |= {"RANK": rank, "WORLD_SIZE": "2"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.run(
        [sys.executable, "-c", WATCHED, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


# What is understood.


def test_folders():
    assert parse(["a"]) == ("a", None, Options())
    assert parse(["a", "b c"]) == ("a", "b c", Options())
    assert parse(["--overwrite", "a", "--format", "bin", "b"])[:2] == ("a", "b")


def test_every_option():
    found = options(
        *("--tag", "global_step5", "--format", "bin", "--dtype", "bf16"),
        *("--max-shard-size", "1GB", "--ties", "drop", "--tie", "a=b", "--tie", "c=d"),
        *("--allow-missing", "x*", "--allow-missing", "y", "--exclude-frozen"),
        *("--transport", "gather", "--writers", "all", "--bucket-size", "8MB"),
        *("--device-memory", "40%", "--host-memory", "2GB", "--device", "cpu", "--overwrite"),
    )
    assert found == Options(
        tag="global_step5",
        format="bin",
        dtype="bf16",
        max_shard_size="1GB",
        ties="drop",
        tie=("a=b", "c=d"),
        allow_missing=("x*", "y"),
        exclude_frozen=True,
        transport="gather",
        writers="all",
        bucket_size="8MB",
        device_memory="40%",
        host_memory="2GB",
        device="cpu",
        overwrite=True,
    )


def test_short_and_old_names():
    assert options("-t", "global_step5").tag == "global_step5"
    assert options("--exclude_frozen_parameters").exclude_frozen
    assert options("--max_shard_size", "3GB").max_shard_bytes == 3 * 10**9
    assert options("--max_shard_size=3GB").max_shard_bytes == 3 * 10**9
    assert options("--allow_missing=a_b").allow_missing == ("a_b",)
    assert options("--bucket_size", "1_0".replace("_", "")).bucket_bytes == 10


def test_values_keep_their_underscores():
    assert options("--tag", "global_step5", "--tie=a_b=c_d").tie_pairs == (("a_b", "c_d"),)
    assert parse(["my_run", "my_out", "--tag=global_step_5"]) == (
        "my_run",
        "my_out",
        Options(tag="global_step_5"),
    )


def test_the_command_line_wins_over_the_file(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text("format = 'bin'\ndtype = 'bf16'\ntie = ['a=b']\nmax-shard-size = '1GB'\n")
    found = options("--config", str(path), "--dtype", "fp16", "--max_shard_size", "none")
    assert (found.format, found.dtype) == ("bin", "fp16")
    assert found.max_shard_bytes is None
    assert found.tie == ("a=b",)
    assert options("--tie", "c=d", "--config", str(path)).tie == ("c=d",)


def test_what_contradicts_only_with_the_file(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text("format = 'bin'\nties = 'alias'\n")
    assert options("--config", str(path)).tie_policy == "alias"
    with pytest.raises(UsageError, match="cannot share bytes"):
        options("--config", str(path), "--format", "safetensors")


def test_a_file_that_contradicts_itself(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text("ties = 'alias'\n")
    with pytest.raises(UsageError, match="cannot share bytes"):
        options("--config", str(path))


def test_a_file_that_is_good_only_with_the_command_line(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text("ties = 'alias'\n")
    assert options("--config", str(path), "--format", "bin").tie_policy == "alias"


# What it answers. In a process of its own, where torch must not be loaded.


def test_help():
    outcome = run_apart("--help")
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert outcome.stdout.startswith("usage: dist-consolidate ")
    for name in (
        "--max-shard-size",
        "--allow-missing",
        "--exclude-frozen",
        "--config",
        "exit codes",
    ):
        assert name in outcome.stdout


def test_version():
    outcome = run_apart("--version")
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert outcome.stdout == f"dist-consolidate {__version__}\n"


USAGE_ERRORS = [
    ((), "required: CKPT_DIR"),
    (("a", "--fromat", "bin"), "--fromat"),
    (("a", "--form", "bin"), "--form"),
    (("a", "--format", "gguf"), "'gguf'"),
    (("a", "b", "c"), "unrecognized arguments: c"),
    (("a", "--max-shard-size", "big"), "--max-shard-size: 'big' is not a size"),
    (("a", "--bucket_size", "0"), "--bucket-size: '0' is below one byte"),
    (("a", "--tie", "x"), "--tie x: must be NAME=SOURCE"),
    (("a", "--writers", "none"), "--writers none: must be a number of ranks"),
    (("a", "--ties", "alias"), "--ties alias: tensors in a safetensors file"),
    (("a", "--config", "/no/such/file.toml"), "--config /no/such/file.toml: "),
]


@pytest.mark.parametrize(("arguments", "words"), USAGE_ERRORS)
def test_usage_errors(arguments, words):
    outcome = run_apart(*arguments)
    assert (outcome.returncode, outcome.stdout) == (2, ""), outcome.stderr
    assert "Traceback" not in outcome.stderr
    last = outcome.stderr.splitlines()[-1]
    assert last.startswith("dist-consolidate: error: ")
    assert words in last


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "are required: CKPT_DIR"),
        (("a", "--fromat"), "unrecognized arguments: --fromat"),
        (("a", "--writers", "0"), "--writers 0: must be"),
    ],
)
def test_a_rank_whose_arguments_are_wrong_says_so(arguments, words):
    """The others may have been given right ones, and would wait for it."""
    outcome = run_apart(*arguments, rank="1")
    assert (outcome.returncode, outcome.stdout) == (2, "")
    said = outcome.stderr.splitlines()[-1]
    assert said.startswith(f"dist-consolidate: error: rank 1 (on {socket.gethostname()}): "), said
    assert words in said


def test_what_another_rank_has_said_is_not_repeated():
    launched = Launched("torchrun", 0, 2, address="127.0.0.1", port=29501)
    other = Voice(f"arguments {meeting_place(launched, {})}")
    other.speak()
    outcome = run_apart("a", "--fromat", rank="1", port=29501)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (2, "", "")


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--print-config", 0)])
def test_other_ranks_are_silent_about_the_rest(argument, code):
    outcome = run_apart(argument, rank="1")
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (code, "", "")
    assert run_apart(argument, rank="0").stdout


# What it does.


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    """Let this process look like one that no launcher has started."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Run in this process; give the exit code and the lines of standard error."""
    code = main([*arguments, "--device", "cpu"])
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    return code, said.err.splitlines()


def test_a_checkpoint_is_consolidated(tmp_path, capsys):
    truth = write(tmp_path / "run", Spec(stage=2, params=PARAMS))
    assert main([str(tmp_path / "run"), str(tmp_path / "out"), "--device", "cpu"]) == 0
    assert_same_bits(load_output(tmp_path / "out"), truth.fp32)
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert said.err == ""
    assert lines[0] == "tag global_step3 (named by `latest`), ZeRO stage 2, 2 ranks, step 3"
    assert lines[1] == f"3 tensors, 148 B in 1 file at {tmp_path / 'out'}"
    assert lines[2] == "ties: head = emb"
    assert lines[-1].startswith("done in ")


def test_the_default_output_folder(tmp_path):
    truth = write(tmp_path, Spec(stage=1, params=PARAMS, tag="best"))
    assert main([str(tmp_path), "--device", "cpu", "--format", "bin"]) == 0
    assert_same_bits(load_output(tmp_path / "consolidated" / "best"), truth.fp32)


def test_a_folder_that_is_not_there(tmp_path, capsys):
    code, lines = error_of(capsys, str(tmp_path / "gone"))
    assert code == 3
    assert len(lines) == 1
    assert lines[0].startswith(f"dist-consolidate: error: {tmp_path / 'gone'}: does not exist")


def test_a_missing_rank(tmp_path, capsys):
    truth = write(tmp_path / "run", Spec(stage=3, params=PARAMS))
    (truth.tag_dir / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    code, lines = error_of(capsys, str(tmp_path / "run"), str(tmp_path / "out"))
    assert code == 3
    assert lines[0].startswith("dist-consolidate: error: ")
    assert "is missing (rank 1 of 2)" in "\n".join(lines)
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_a_kind_that_is_not_read(capsys, tmp_path):
    config = {"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}}
    write(tmp_path / "run", Spec(stage=3, params=PARAMS, client_state={"ds_config": config}))
    code, lines = error_of(capsys, str(tmp_path / "run"))
    assert (code, len(lines)) == (3, 1)


@pytest.mark.parametrize(
    ("tie", "words"), [("head=nothing", "nothing"), ("no=emb", "no"), ("b=emb", "b")]
)
def test_a_tie_that_cannot_be(tmp_path, capsys, tie, words):
    write(tmp_path / "run", Spec(stage=2, params=PARAMS))
    code, lines = error_of(capsys, str(tmp_path / "run"), str(tmp_path / "out"), "--tie", tie)
    assert code == 2
    assert words in "\n".join(lines)


def test_an_earlier_result_is_not_replaced_unasked(tmp_path, capsys):
    write(tmp_path / "run", Spec(stage=2, params=PARAMS))
    arguments = [str(tmp_path / "run"), str(tmp_path / "out")]
    assert main([*arguments, "--device", "cpu"]) == 0
    capsys.readouterr()
    code, lines = error_of(capsys, *arguments)
    assert code == 2
    assert str(tmp_path / "out") in lines[0]
    assert "--overwrite" in "\n".join(lines)
    assert main([*arguments, "--device", "cpu", "--overwrite"]) == 0


def test_keys_that_are_lost(capsys, tmp_path):
    case = CASES["unoptimized_z3_w2"]
    code, lines = error_of(capsys, str(case.ckpt), str(tmp_path / "out"))
    assert code == 3
    named = {line.removeprefix("  - ").split(":")[0] for line in lines if line.startswith("  - ")}
    assert named == set(case.truth["unoptimized"])
    arguments = [str(case.ckpt), str(tmp_path / "out"), "--allow-missing", "*", "--device", "cpu"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    (left_out,) = (line for line in said.splitlines() if line.startswith("left out: "))
    assert set(left_out.removeprefix("left out: ").split(": ")[0].split(", ")) == named


def test_a_dry_run_names_neighbours_that_do_the_same_together():
    limits = {"memory_limits": ("2 GB of device memory (x)", "1 GB of host memory (y)")}
    some, less = (RankReport(n, 2 * n, 3, 4000, **limits) for n in (1000, 500))
    none = RankReport(0, 0, 3, 4000)
    told = Report(
        output_dir=Path("out"),
        files=("model.safetensors",),
        num_tensors=3,
        num_bytes=7000,
        ties={},
        left_out={},
        notes=(),
        facts={"tag": "t", "tag_chosen": "c", "step": 1, "stage": 3, "world_size": 2},
        transport="direct",
        num_bytes_read=3500,
        duration_sec=0.1,
        planning_sec=0.1,
        moving_sec=0.0,
        publishing_sec=0.0,
        ranks=(some, less, some, some, none),
        is_dry_run=True,
    )
    each = "3 buckets, holds 4 KB of weights at most"
    assert _summary(told)[-6:] == [
        "transport direct; nothing was written (--dry-run)",
        f"rank 0: reads 1 KB, writes 2 KB, {each}",
        f"rank 1: reads 500 B, writes 1 KB, {each}",
        f"ranks 2 to 3: each reads 1 KB, writes 2 KB, {each}",
        f"rank 4: reads 0 B, writes 0 B, {each}",
        "ranks 0 to 3: each can have 2 GB of device memory (x) and 1 GB of host memory (y)",
    ]


@pytest.mark.parametrize("leads", [True, False])
def test_torchrun_gets_the_reason_from_whichever_rank_ends_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], leads: bool
):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    error = CheckpointError("a.pt: empty")
    error.agreed = True
    _tell(error, Launched("torchrun", 0 if leads else 1, 2))
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "a.pt: empty"
    assert ("a.pt: empty" in capsys.readouterr().err) is leads
