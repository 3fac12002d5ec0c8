"""Runs under limits of memory that are there: options, ulimit, control groups, shared hosts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.cases import CASES
from tests.memory_groups import MemoryGroup, NoGroup, memory_group
from tests.synthetic import Truth, write_large
from tests.test_memory import check_some_tensors, measure
from tests.torchrun import Ended, messages, run_python, start_ranks
from tests.zygote import fork_together

MB = 10**6
CASE = CASES["kitchen_z3_bf16_w2"]
LIMIT_AND_RUN = """
import sys
from pathlib import Path
from dist_consolidate import cli, consolidation
limit, usage, more = sys.argv[1:4]
if limit.startswith("RLIMIT"):
    import resource
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    now = int(status[usage].split()[0]) * 1024 + int(more)
    resource.setrlimit(getattr(resource, limit), (now, now))
else:
    Path(usage).parent.joinpath("cgroup.procs").write_text("0")
    # What is in use by now was counted elsewhere and stays there.
    Path(limit).write_text(str(int(Path(usage).read_text()) + int(more)))
sys.exit(cli.main(sys.argv[4:]))
"""


@pytest.fixture(scope="module")
def middling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Truth]:
    """A model of sixty megabytes: more than the buffers of a run in little memory."""
    folder = tmp_path_factory.mktemp("middling")
    yield write_large(folder, 3, 2, layers=6, width=256)
    shutil.rmtree(folder)


def ckpt_of(truth: Truth) -> Path:
    return truth.tag_dir.parent


def run_limited(limit: str, usage: str, more: int, arguments: Sequence[str | Path]) -> Ended:
    return run_python(["-c", LIMIT_AND_RUN, limit, usage, str(more), *arguments])


# Options.


@pytest.mark.parametrize("transport", ["direct", "gather"])
def test_a_megabyte_is_too_little_and_nothing_is_written(tmp_path: Path, transport: str) -> None:
    out = tmp_path / "new" / "out"
    options = ["--host-memory", "1MB", "--transport", transport]
    ended = run_python(["-m", "dist_consolidate", CASE.ckpt, out, *options])
    assert ended.returncode == 4, ended
    (message,) = messages([ended])
    host = os.uname().nodename
    assert message.startswith(f"not enough memory:\n  - rank 0 on {host}: needs 1"), message
    assert "can have 1 MB of host memory (--host-memory 1MB)" in message, message
    assert message.endswith("allow more by --host-memory"), message
    assert not out.parent.exists()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("num_ranks", "options", "limit"),
    [
        (1, ["--host-memory", "200MB"], 200 * MB),
        (1, ["--host-memory", "16MB"], 16 * MB),
        (1, ["--host-memory", "16MB", "--dtype", "bf16"], 16 * MB),
        (1, ["--host-memory", "40MB", "--transport", "allgather"], 40 * MB),
        (2, ["--host-memory", "30MB", "--transport", "gather"], 30 * MB),
    ],
)
def test_a_run_stays_below_what_it_may_take(
    middling: Truth, num_ranks: int, options: list[str], limit: int, tmp_path: Path
) -> None:
    lines = measure(ckpt_of(middling), tmp_path / "out", num_ranks, options)
    assert max(line["peak_growth_bytes"] for line in lines) <= limit, lines
    if "bf16" not in options:
        check_some_tensors(tmp_path / "out", middling)


def test_a_size_of_buckets_that_cannot_be_had(middling: Truth, tmp_path: Path) -> None:
    options = ["--host-memory", "40MB", "--bucket-size", "100MB"]
    ended = run_python(["-m", "dist_consolidate", ckpt_of(middling), tmp_path / "out", *options])
    assert ended.returncode == 4, ended
    assert "use a smaller --bucket-size or allow more by --host-memory" in ended.stderr, ended
    assert not (tmp_path / "out").exists()


# Two ranks on one host.


@pytest.mark.dist
def test_two_ranks_share_the_host_and_say_so(tmp_path: Path) -> None:
    told = fork_together(
        2, [CASE.ckpt, tmp_path / "out", "--transport", "gather", "--dry-run"]
    ).ok()
    assert "ranks 0 to 1: each can have " in told.stdout, told
    assert ", shared by 2 ranks: " in told.stdout, told
    assert not (tmp_path / "out").exists()


@pytest.mark.dist
@pytest.mark.parametrize("transport", ["direct", "allgather"])
def test_both_ranks_end_with_one_message(tmp_path: Path, transport: str) -> None:
    options = ["--host-memory", "2MB", "--transport", transport]
    ended = start_ranks(2, [CASE.ckpt, tmp_path / "out", *options])
    assert [rank.returncode for rank in ended] == [4, 4], ended
    (message,) = messages(ended)
    assert f"ranks 0, 1 on {os.uname().nodename}: each needs " in message
    assert not (tmp_path / "out").exists()


# ulimit.


def test_address_space_that_is_nearly_used_up(middling: Truth, tmp_path: Path) -> None:
    # Threads' stacks and arenas are set aside first.
    aside = 64 * 2**20
    out = tmp_path / "out"
    few = run_limited("RLIMIT_AS", "VmSize", aside + 36 * MB, [ckpt_of(middling), out]).ok()
    assert "host memory is short: rank 0 on " in few.stdout, few
    assert "RLIMIT_AS of this process" in few.stdout, few
    check_some_tensors(out, middling)
    none = run_limited("RLIMIT_AS", "VmSize", aside + 9 * MB, [ckpt_of(middling), tmp_path / "no"])
    assert none.returncode == 4, none
    assert "RLIMIT_AS of this process" in none.stderr, none
    assert not (tmp_path / "no").exists()


# Control groups.


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        with memory_group() as made:
            yield made
    except NoGroup as reason:
        pytest.skip(f"no control group can be made here: {reason}")


def test_a_control_groups_limit(middling: Truth, group: MemoryGroup, tmp_path: Path) -> None:
    out, names = tmp_path / "out", [str(group.limit), str(group.usage)]
    # First, because the cache of what a run has written counts as well, until it is given back.
    none = run_limited(*names, 10 * MB, [CASE.ckpt, tmp_path / "no"])
    assert none.returncode == 4, none
    assert f": {group.limit})" in none.stderr, none
    assert not (tmp_path / "no").exists()
    few = run_limited(*names, 50 * MB, [ckpt_of(middling), out]).ok()
    assert "host memory is short: rank 0 on " in few.stdout, few
    assert f": {group.limit})" in few.stdout, few
    check_some_tensors(out, middling)
