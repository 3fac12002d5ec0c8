"""Ranks of one run, and runs beside each other: same options, one output, a result that stays."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dist_consolidate import UsageError, cli, consolidate
from dist_consolidate.output import publish
from dist_consolidate.output.lock import take
from tests.cases import assert_same_bits, load_output
from tests.synthetic import Param, Spec, Truth, write
from tests.torchrun import messages, run_python, show
from tests.zygote import fork_ranks

MODULE = "tests.test_alike"
PARAMS = [Param(f"layer.{number}.weight", (20, 16)) for number in range(6)]
SMALL = ["--max-shard-size", "2KB"]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return write(tmp_path_factory.mktemp("run") / "ckpt", Spec(stage=3, world=2, params=PARAMS))


@pytest.mark.dist
def test_ranks_with_different_options_end_at_once(truth: Truth, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = fork_ranks(2, ["unlike", truth.tag_dir.parent, out], module=MODULE)
    assert [rank.returncode for rank in ended] == [2, 2], show(ended)
    (message,) = messages(ended)
    assert "bucket_size: '1001' on rank 0 (on " in message, message
    assert "'1000' on rank 1 (on " in message, message
    assert not out.exists()


def test_another_run_at_the_same_output_is_left_alone(truth: Truth, tmp_path: Path) -> None:
    out = tmp_path / "out"
    work = tmp_path / ".out.consolidating-0123abcd-1"
    work.mkdir()
    lock = take(tmp_path / ".out.consolidating.lock", out)
    with pytest.raises(UsageError, match="another run is writing"):
        consolidate(truth.tag_dir.parent, out)
    assert work.is_dir()
    lock.release()
    consolidate(truth.tag_dir.parent, out)
    assert_same_bits(load_output(out), truth.fp32)
    assert not work.exists()


@pytest.mark.parametrize("at", range(1, 5))
def test_a_signal_while_publishing_loses_no_result(at: int, truth: Truth, tmp_path: Path) -> None:
    """Neither the old one nor the new one: what has begun is finished."""
    out = tmp_path / "out"
    consolidate(truth.tag_dir.parent, out, max_shard_size="2KB", dtype="bf16")
    arguments = [truth.tag_dir.parent, out, *SMALL, "--overwrite"]
    ended = run_python(["-m", MODULE, f"term{at}", *arguments])
    assert ended.returncode == 0, ended
    assert "done in" in ended.stdout, ended
    assert_same_bits(load_output(out), truth.fp32)
    assert not [path for path in tmp_path.rglob("*consolidating*")]


@pytest.mark.parametrize("moment", ["locked", "prepared"])
def test_a_signal_after_something_was_made_leaves_nothing(
    moment: str, truth: Truth, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = run_python(["-m", MODULE, moment, truth.tag_dir.parent, out])
    assert ended.returncode == 143, ended
    assert not list(tmp_path.iterdir())


def main(arguments: Sequence[str]) -> int:
    """Be a rank with options of its own, or one that gets a signal at a certain moment."""
    how, *rest = arguments
    if how == "unlike":
        return cli.main([*rest, "--bucket-size", f"100{1 - int(os.environ['RANK'])}"])
    if how == "locked":
        publish.refuse_if_held = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
        return cli.main(rest)
    if how == "prepared":
        real_mkdir = Path.mkdir

        def mkdir(self: Path, *arguments: Any, **options: Any) -> None:
            real_mkdir(self, *arguments, **options)
            if self.name == "result":
                os.kill(os.getpid(), signal.SIGTERM)

        Path.mkdir = mkdir  # type: ignore[method-assign]
        return cli.main(rest)
    left = int(how.removeprefix("term"))
    real_rename = Path.rename

    def rename(self: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return real_rename(self, target)

    Path.rename = rename  # type: ignore[method-assign,assignment]
    return cli.main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
