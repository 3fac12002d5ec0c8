"""The benchmark: its command at a tiny size, and what its tables are made from."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dist_consolidate.runtime.stages import STAGES, StageTime
from tests.bench import compare, copy_loop, page_cache, runner, table_text
from tests.bench.contenders import Choice, Contender, Kind, Place, default_kinds, select
from tests.bench.null_writer import NullWriter
from tests.bench.rounds import Arena, Measured
from tests.bench.sizes import Size, size_of
from tests.torchrun import run_python

FP32 = Kind("safetensors", "fp32")
TINY = ("--layers", "2", "--width", "64", "--shards", "2", "--runs", "1", "--settle-sec", "0")
MEGABYTE = 1 << 20


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def cells_of(text: str, name: str) -> list[list[str]]:
    """What the tables say of a contender, one list for each table."""
    return [row[1:] for row in rows_of(text) if row[0] == name]


@pytest.mark.slow
def test_the_command_prints_tables_of_finite_numbers(tmp_path: Path) -> None:
    names = [f"1 process, {FP32}", f"cp --reflink=never of {FP32}", f"loop of {FP32}"]
    ended = run_python(
        [
            *("-m", "tests.bench.compare", *TINY, "--no-growth", "--only", *names),
            *("--dir", tmp_path / "run", "--json", tmp_path / "raw.json"),
        ],
        timeout_sec=180,
    ).ok()
    assert not (tmp_path / "run").exists()
    for name in names:
        seconds = cells_of(ended.stdout, name)[0]
        assert float(seconds[0]) >= 0
        numbers = [float(x) for x in re.findall(r"\d+\.\d+", " ".join(seconds))]
        assert all(math.isfinite(number) for number in numbers)
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert {run["contender"] for run in raw["runs"]} == set(names)
    assert raw["model"]["num_params"] == Size(2, 64).num_params
    for run in raw["runs"]:
        assert 0 < run["whole_sec"] < math.inf
        assert run["resident_ratio"] > 0.9
    (ours,) = (run["ranks"][0] for run in raw["runs"] if run["contender"] == names[0])
    assert ours["shard_read_bytes"] >= 4 * Size(2, 64).num_params
    assert 0 < ours["peak_bytes"] < 10**10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "many"], "must be a number such as 355M"),
        (["--params", "1000"], "must be at least"),
        (["--params", "355M", "--layers", "2", "--width", "64"], "not both"),
        (["--layers", "2"], "go together"),
        (["--runs", "0"], "'0' is no number above 0"),
        (["--stage", "4"], "invalid choice: 4"),
        (["--only", "tar*"], "'tar*' fits none of"),
        (["--null-writer", "--only", "loop*"], "none of the contenders writes"),
        (["--json", "nowhere/raw.json"], "its folder does not exist"),
        (["--params", "999B"], "GB free"),
        ([*TINY, "--writers", "0"], "--writers 0"),
        ([*TINY, "--bucket-size", "big"], "--bucket-size: 'big' is not a size"),
        ([*TINY, "--io", "psychic"], "io"),
    ],
)
def test_wrong_options_are_refused_at_once(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        compare.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_of_somebody_is_not_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SystemExit):
        compare.main([*TINY, "--dir", str(tmp_path)])
    assert "is not empty" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize("module", ["compare", "null_writer", "self_proc", "copy_loop"])
def test_the_benchmark_itself_imports_no_torch(module: str) -> None:
    run_python(["-c", f"import sys, tests.bench.{module}; assert 'torch' not in sys.modules"]).ok()


def test_the_runner_imports_torch_no_sooner_than_the_command_line() -> None:
    code = "import sys, {}; print('torch' in sys.modules)"
    said = [
        run_python(["-c", code.format(name)]).ok().stdout
        for name in ("dist_consolidate.cli", "tests.bench.runner")
    ]
    assert said[0] == said[1]


def asked(*arguments: str) -> list[str]:
    options: argparse.Namespace = compare.parser().parse_args(arguments)
    names = [item.name for item in select(compare.choice_asked(options))]
    assert len(set(names)) == len(names)
    return names


def test_the_default_set_is_smaller_than_all() -> None:
    some, every = asked("--ranks", "2", "4"), asked("--ranks", "2", "4", "--all")
    assert set(some) - set(every) == {
        f"{size} ranks {transport}, {FP32}"
        for size in (2, 4)
        for transport in ("direct", "gather", "allgather")
    }
    assert "2 ranks gather writers all, bin bf16" in every
    assert len(every) > 2 * len(some)


def test_io_is_passed_on_only_if_asked_for() -> None:
    kinds = (FP32,)
    assert not any(" io " in item.name for item in select(Choice(kinds)))
    names = [item.name for item in select(Choice(kinds, io=("direct", "buffered")))]
    assert f"1 process io direct, {FP32}" in names
    assert f"2 ranks gather io buffered, {FP32}" in names


def test_sizes_of_known_models() -> None:
    assert size_of("355M") == Size(24, 1024)
    assert size_of("124M") == Size(12, 768)
    assert Size(24, 1024).num_params == 354_823_168


def test_extents_leave_holes_out_and_the_loop_copies_around_them(tmp_path: Path) -> None:
    shard, out = tmp_path / "shard", tmp_path / "out"
    data = [os.urandom(MEGABYTE) for _ in range(2)]
    with shard.open("wb") as file:
        file.write(data[0])
        file.seek(8 * MEGABYTE)
        file.write(data[1])
    page_cache.warm([shard])
    assert page_cache.resident_ratio([shard]) == 1.0
    assert page_cache.resident_ratio([]) is None
    extents = list(page_cache.data_extents(shard))
    if extents == [(0, 9 * MEGABYTE)]:
        pytest.skip("this file system has no holes")
    assert extents == [(0, MEGABYTE), (8 * MEGABYTE, 9 * MEGABYTE)]
    copy_loop.main([str(2 * MEGABYTE + 5), str(out), str(shard)])
    assert (out / "copy").read_bytes() == data[0] + data[1] + data[0][:5]


def test_the_null_writer_spares_the_output_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pwrite", "pwritev", "copy_file_range"):
        monkeypatch.setattr(os, name, getattr(os, name))  # put back afterwards
    work = tmp_path / ".out.consolidating-1"
    work.mkdir()
    null = NullWriter(tmp_path / "out")
    null.install()
    files = [path.open("w+b") for path in (work / "weights", tmp_path / "other")]
    output, other = (file.fileno() for file in files)
    assert os.pwrite(other, b"12345", 0) == 5
    assert os.pwrite(output, memoryview(b"1234"), 0) == 4
    assert os.pwritev(output, [b"12", memoryview(b"3")], 4) == 3
    assert os.copy_file_range(other, output, 99, 0, 7) == 5
    assert null.discarded_bytes == 12
    assert [os.fstat(file).st_size for file in (output, other)] == [0, 5]
    for file in files:
        file.close()


WRITES_ABC = """
import pathlib, sys
out = pathlib.Path(sys.argv[1])
out.mkdir()
(out / "model.safetensors").write_text("abc")
print('{"rank": 0, "peak_growth_bytes": 5}')
"""


@pytest.mark.parametrize(
    ("reference", "timed", "whole"), [("abc", 1, 1), ("abd", 1, 0), ("ab", 0, 0)]
)
def test_each_result_is_compared_with_the_reference(
    reference: str, timed: bool, whole: bool, tmp_path: Path
) -> None:
    place = Place(tmp_path, tmp_path, tmp_path / "reference", tmp_path / "out", 1, {FP32: 3})
    place.reference_of(FP32).mkdir(parents=True)
    (place.reference_of(FP32) / "model.safetensors").write_text(reference)

    def command(place: Place) -> list[str]:
        return [sys.executable, "-c", WRITES_ABC, str(place.out)]

    item = Contender("x", "ours", "nothing", command, growth=command, kind=FP32)
    arena = Arena(tmp_path, settle_sec=0, timeout_sec=60)
    differs = pytest.raises(SystemExit, match="differs from the reference")
    with contextlib.nullcontext() if timed else differs:
        (run,) = arena.run_round(place, [item], stage=3, cache="warm", number=0)
        assert run.lead["peak_growth_bytes"] == 5
        assert run.resident_ratio is None
    with contextlib.nullcontext() if whole else differs:
        assert arena.run_growth(place, item, stage=3).ranks == run.ranks


def report_of(moving_sec: float) -> Any:
    stages = (StageTime("read", 4 * 10**9, 1.0), StageTime("write", 5 * 10**9, 2.5))
    rank = types.SimpleNamespace(num_bytes_read=4, num_bytes_written=5, peak_bytes=6, stages=stages)
    return types.SimpleNamespace(
        num_bytes_read=8 * 10**9,
        num_bytes=10**10,
        transport="gather",
        planning_sec=0.5,
        moving_sec=moving_sec,
        publishing_sec=1.0,
        duration_sec=9.0,
        ranks=(rank, rank),
    )


def runs_of(contender: Contender, seconds: Sequence[float], make: Callable[[float], Any]) -> Any:
    return [
        Measured(contender.name, 3, "warm", number, 0, sec, 1.0, 0.0, make(sec))
        for number, sec in enumerate(seconds)
    ]


def ours_of(sec: float) -> tuple[dict[str, Any], ...]:
    facts = {"rank": 0, "peak_bytes": 200_000_000, **runner._report_facts(report_of(sec - 2))}
    return facts, {**facts, "rank": 1, "peak_bytes": 150_000_000}


def test_the_tables_hold_medians_ratios_and_the_limiting_stage() -> None:
    choice = Choice(default_kinds(["safetensors"], ["fp32"]), plain=False, transports=("gather",))
    ours, sharded, one, never, plain, loop, _torch = select(choice)
    theirs = {"import_sec": 1.0, "convert_sec": 7.0, "sync_sec": 1.0, "rank": 0}
    runs = [
        *runs_of(ours, [9.0, 5.0, 6.0], ours_of),
        *runs_of(sharded, [12.0], lambda _: (theirs,)),
        *runs_of(one, [24.0], lambda _: ({**theirs, "convert_sec": 9.0},)),
        *runs_of(never, [2.0], lambda _: ()),
        *runs_of(plain, [4.0], lambda _: ()),
        *runs_of(loop, [1.5], lambda _: ({"rank": 0, "moving_sec": 1.0},)),
    ]
    contenders = (ours, sharded, one, never, plain, loop)
    growth = [dataclasses.replace(runs[0], ranks=({"rank": 0, "peak_growth_bytes": 7_000_000},))]
    text = table_text.render(table_text.Group(contenders, runs, growth, 4 * 10**9))
    seconds, ratios, memory, stages = cells_of(text, ours.name)
    assert seconds == ["6.00", "5.00..9.00", "0.50", "4.00", "1.00"]
    assert ratios == ["2.50", "1.25", "5.00", "0.50", "0.50", "0.69"]
    assert memory[:3] == ["200 / 150", "7", "2.0000"]
    cells = dict(zip(STAGES, stages, strict=False))
    assert (cells["read"], cells["write"], stages[-1]) == ("1.00 (4.00)", "2.50 (2.00)", "write")
    assert f"* {sharded.name}: import 1.00 s, conversion 7.00 s, fsync 1.00 s" in text
    assert table_text.STAGES == STAGES


def test_reports_of_old_lack_fields_and_the_table_stays() -> None:
    ours = select(Choice(default_kinds(["bin"], ["fp32"])))[0]
    report: Any = types.SimpleNamespace(num_bytes_read=4, num_bytes=4, transport="direct")
    runs = runs_of(ours, [1.0], lambda _: ({"rank": 0, **runner._report_facts(report)},))
    text = table_text.render(table_text.Group((ours,), runs, [], 4))
    assert cells_of(text, ours.name)[0] == ["1.00", "1.00..1.00", *[table_text.NOTHING] * 3]
