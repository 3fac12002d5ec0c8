"""Every shard of every kept checkpoint missing, cut short, doubled or replaced by another one.

Each run ends with the exact result or with one of the tool's own errors; a damaged file is named.
"""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dist_consolidate import ConsolidateError, consolidate
from dist_consolidate.checkpoint.layout import ShardFile, parse_name
from tests.cases import (
    CASES,
    Case,
    assert_same_bits,
    expected_fp32,
    load_output,
    lost_keys,
)

READ = {name for name, case in CASES.items() if case.layout in ("plain", "experts", "pipeline")}
# At stage 0 no file holds the name of a tied layer.
RENAMED = {"pipe_z0_fp32_w2": [r"^0\.weight$=tied_modules.embed.weight"]}
Damage = Callable[[Path], object]
DAMAGES: dict[str, Damage] = {
    "removed": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut by a byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
}


def shard_of(path: Path) -> ShardFile | None:
    return parse_name(path.name) if path.is_file() else None


def shards(ckpt: Path) -> list[Path]:
    return sorted(path for path in ckpt.rglob("*") if shard_of(path))


def plain_name(path: Path) -> str:
    """Name a shard without the numbers of the writer."""
    return path.name.partition("-0.")[0].partition("-1.")[0]


def kinds(path: Path) -> Iterator[str]:
    """Give what a message calls files that must be somewhere, whatever their numbers."""
    yield re.sub(r"pp_rank_\d+", "pp_rank_*", path.name)
    yield re.sub(r"layer_\d+", "layer_*", path.name)


def outcome(case: Case, ckpt: Path, out: Path) -> str | None:
    """Consolidate what can be; give the error's text, or check the result."""
    try:
        consolidate(
            ckpt,
            out,
            tag=case.tag,
            allow_missing=lost_keys(case),
            rename=RENAMED.get(case.name, ()),
        )
    except ConsolidateError as error:
        assert not out.exists()
        return str(error)
    expected = {k: v for k, v in expected_fp32(case).items() if k not in lost_keys(case)}
    assert_same_bits(load_output(out), expected)
    return None


@pytest.mark.parametrize("name", sorted(READ))
def test_damaged(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    for number, path in enumerate(shards(case.ckpt)):
        for what, damage in DAMAGES.items():
            ckpt, out = tmp_path / "ckpt", tmp_path / f"out{number}"
            shutil.copytree(case.ckpt, ckpt)
            damage(ckpt / path.relative_to(case.ckpt))
            message = outcome(case, ckpt, out)
            # Of an earlier tag, or not needed: a model state of ZeRO-3 that holds nothing.
            names = {plain_name(path), *kinds(path)}
            assert message is None or any(name in message for name in names), (path, what, message)
            shutil.rmtree(ckpt)
            shutil.rmtree(out, ignore_errors=True)


def doubles(path: Path) -> Iterator[Path]:
    """Give names under which a copy of a shard may lie beside it."""
    for pattern, format_ in (
        (r"pp_rank_(\d+)", "pp_rank_{}"),
        (r"mp_rank_(\d+)", "mp_rank_{:02d}"),
    ):
        for step in (1, 7):
            name = re.sub(pattern, lambda m: format_.format(int(m[1]) + step), path.name)  # noqa: B023
            yield path.with_name(name)
    yield path.with_name(f"bf16_{path.name}")
    yield path.with_name(path.name.removeprefix("bf16_"))


@pytest.mark.parametrize("name", sorted(READ))
def test_doubled(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    for path in shards(case.ckpt):
        for double in doubles(path):
            if double.exists():
                continue
            ckpt, out = tmp_path / "ckpt", tmp_path / "out"
            shutil.copytree(case.ckpt, ckpt)
            shutil.copy(path, ckpt / double.relative_to(case.ckpt))
            outcome(case, ckpt, out)
            shutil.rmtree(ckpt)
            shutil.rmtree(out, ignore_errors=True)


def says_no_name(case: Case) -> bool:
    """Whether files do not tell what they were saved as: releases that saved through a stream."""
    return case.name.startswith(("ds0.6", "fast_writer", "not_zip"))


@pytest.mark.parametrize("name", sorted(READ))
def test_replaced(name: str, tmp_path: Path) -> None:
    """By another rank's, by another checkpoint's of the same kind, by one of another kind."""
    case, choice = CASES[name], random.Random(name)
    others = [p for n, other in sorted(CASES.items()) if n != name for p in shards(other.ckpt)]
    for path in shards(case.ckpt):
        shard = shard_of(path)
        assert shard is not None
        own = [p for p in shards(case.ckpt) if p.parent == path.parent and p != path]
        alike = [p for p in others if shard_of(p) and parse_name(p.name).role == shard.role]  # type: ignore[union-attr]
        for source in (*own, *choice.sample(alike, min(4, len(alike))), *choice.sample(others, 2)):
            ckpt, out = tmp_path / "ckpt", tmp_path / "out"
            shutil.copytree(case.ckpt, ckpt)
            shutil.copy(source, ckpt / path.relative_to(case.ckpt))
            if source in own and not says_no_name(case):
                message = outcome(case, ckpt, out)
                assert message is None or plain_name(path) in message, f"{source.name}: {message}"
            else:
                # Two runs of one model may fit each other in everything that is recorded.
                try:
                    consolidate(ckpt, out, tag=case.tag)
                except ConsolidateError:
                    assert not out.exists()
            shutil.rmtree(ckpt)
            shutil.rmtree(out, ignore_errors=True)
