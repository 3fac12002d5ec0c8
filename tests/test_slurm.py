"""As SLURM starts it: steps of one and many tasks, batch scripts, dependencies, cancelled jobs."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.cases import CASES, assert_same_bits, expected_fp32, load_output
from tests.requirements import require
from tests.slurm_cluster import Cluster, missing, running_cluster
from tests.synthetic import Param, Spec, Truth, write
from tests.torchrun import MESSAGE, ROOT

pytestmark = pytest.mark.dist

SCRIPTS = ROOT / "launch" / "slurm"
TOOL = (sys.executable, "-m", "dist_consolidate")
TASK = (sys.executable, "-m", "tests.slurm_task")
PYTHON = {"PYTHON": sys.executable}
REAL = "kitchen_z3_bf16_w2"
PARAMS = [Param(f"layer.{number}.weight", (100, 161)) for number in range(20)]
MANY_READS = ("--bucket-size", "25KB")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    reason = missing()
    require("slurm", not reason, reason)
    with running_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def truth(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return write(tmp_path_factory.mktemp("z3") / "ckpt", Spec(stage=3, world=3, params=PARAMS))


@pytest.fixture(scope="module")
def ckpt(truth: Truth) -> Path:
    return truth.tag_dir.parent


def assert_right(out: Path, truth: Truth) -> None:
    assert_same_bits(load_output(out), truth.fp32)


def batch_log(tmp_path: Path) -> list[str]:
    """Where a job writes; sbatch would leave it in the current folder."""
    return ["--output", str(tmp_path / "job.log")]


def run_batch(cluster: Cluster, tmp_path: Path, *arguments: str | Path) -> str:
    """Run a job to its good end; give what it wrote."""
    log = tmp_path / "job.log"
    # Not sbatch --wait: that looks again after 2, 4, 8, 16, 32 seconds.
    job = cluster.wait(cluster.submit(*batch_log(tmp_path), *arguments, env=PYTHON))
    said = log.read_text() if log.exists() else ""
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), f"{job}\n{said}"
    return said


# Steps.


def test_a_step_of_one_task_is_a_plain_process(cluster: Cluster, tmp_path: Path) -> None:
    case = CASES[REAL]
    program = (
        "import sys; from dist_consolidate.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('torch' in sys.modules))"
    )
    ended = cluster.srun("-n1", sys.executable, "-c", program, case.ckpt, tmp_path / "out")
    ended.ok()
    assert_same_bits(load_output(tmp_path / "out"), expected_fp32(case))


@pytest.mark.parametrize(
    ("layout", "transport"),
    # Under PMI as well, whose variables could be taken for mpirun's.
    [(("-n2", "-N1", "--mpi=pmi2"), "gather"), (("-n4", "-N2"), "allgather")],
)
def test_a_step_of_many_tasks(
    layout: Sequence[str], transport: str, cluster: Cluster, truth: Truth, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    command = [*TOOL, truth.tag_dir.parent, out, "--transport", transport, "--writers", "all"]
    ended = cluster.srun(*layout, *command).ok()
    assert ended.stdout.count("done in") == 1, ended
    assert f"transport {transport}" in ended.stdout, ended
    assert MESSAGE not in ended.stderr, ended
    assert_right(out, truth)


def test_torchrun_in_a_step_counts_its_own_ranks(
    cluster: Cluster, truth: Truth, tmp_path: Path
) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [sys.executable, *torchrun, "-m", "dist_consolidate"]
    arguments = [truth.tag_dir.parent, tmp_path / "out", "--dry-run", "--transport", "gather"]
    ended = cluster.srun("-n1", *command, *arguments).ok()
    assert "shared by 2 ranks" in ended.stdout, ended


def test_two_steps_at_once_do_not_meet(cluster: Cluster, truth: Truth, tmp_path: Path) -> None:
    step = " ".join(["srun --overlap -n2 -N1", *TOOL, str(truth.tag_dir.parent)])
    options = "--transport gather"
    outs = [tmp_path / name for name in ("one", "two")]
    script = "\n".join(
        [
            *(f"{step} {out} {options} & pids[{at}]=$!" for at, out in enumerate(outs)),
            'wait "${pids[0]}" && wait "${pids[1]}"',
        ]
    )
    (tmp_path / "steps.sh").write_text(f"#!/bin/bash\n{script}\n")
    run_batch(cluster, tmp_path, "-n4", "-N1", tmp_path / "steps.sh")
    for out in outs:
        assert_right(out, truth)


def test_two_steps_that_were_told_one_port(cluster: Cluster, truth: Truth, tmp_path: Path) -> None:
    """One gets the port. The other says who has it; its ranks never join the first one's."""
    step = " ".join(["srun --overlap -n2 -N1", *TOOL, str(truth.tag_dir.parent)])
    options = "--transport gather --rendezvous-timeout 10s"
    outs = [tmp_path / name for name in ("one", "two")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    script = "\n".join(
        [
            f"export MASTER_ADDR=127.0.0.1 MASTER_PORT={port}",
            *(f"{step} {out} {options} & pids[{at}]=$!" for at, out in enumerate(outs)),
            'for pid in "${pids[@]}"; do wait "$pid"; echo "ended $?"; done',
        ]
    )
    (tmp_path / "steps.sh").write_text(f"#!/bin/bash\n{script}\n")
    said = run_batch(cluster, tmp_path, "-n4", "-N1", tmp_path / "steps.sh")
    codes = [int(code) for code in re.findall(r"^ended (\d+)$", said, re.MULTILINE)]
    # They may also have come one after the other.
    assert sorted(code != 0 for code in codes) in ([False, True], [False, False]), said
    for out, code in zip(outs, codes, strict=True):
        if code == 0:
            assert_right(out, truth)
        else:
            # The second, where one of its ranks came late, to a store that had just ended.
            words = (f"cannot listen on port {port}", "was lost", "ranks came to")
            assert any(text in said for text in words), said
            assert not out.exists()
    assert "Traceback" not in said, said


def test_a_wrong_variable_is_told_by_name(cluster: Cluster, ckpt: Path, tmp_path: Path) -> None:
    spoilt = ["env", "SLURM_STEP_TASKS_PER_NODE=2(x"]
    ended = cluster.srun("-n2", *spoilt, *TOOL, ckpt, tmp_path / "out")
    assert ended.returncode == 2, ended
    assert "SLURM_STEP_TASKS_PER_NODE cannot be read" in ended.stderr, ended
    assert "Traceback" not in ended.stderr, ended


# Batch scripts.


def test_a_batch_shell_that_is_no_step_is_one_process(
    cluster: Cluster, ckpt: Path, truth: Truth, tmp_path: Path
) -> None:
    """Also when it was submitted in a step, whose variables it then has."""
    out = tmp_path / "out"
    command = " ".join([*TOOL, str(ckpt), str(out)])
    log = tmp_path / "job.log"
    submit = f'[ "$SLURM_PROCID" = 0 ] || exit 0; sbatch --wait -n4 -N2 -o {log} --wrap "{command}"'
    cluster.srun("-n2", "bash", "-c", submit).ok()
    assert "done in" in log.read_text()
    assert_right(out, truth)


def test_consolidate_sbatch(cluster: Cluster, truth: Truth, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--transport", "allgather", "--format", "bin"]
    script = SCRIPTS / "consolidate.sbatch"
    said = run_batch(
        cluster, tmp_path, "--ntasks-per-node=2", script, truth.tag_dir.parent, out, *options
    )
    assert "transport allgather" in said
    assert_right(out, truth)


def train(cluster: Cluster, ckpt: Path, run: Path, tmp_path: Path, code: int) -> str:
    """Submit a job that needs its time to write a checkpoint; give its id."""
    work = f"sleep 1; cp -r {ckpt} {run}; exit {code}"
    return cluster.submit("--output", tmp_path / "train.log", "--wrap", work)


def test_after_training_sbatch_waits_for_success(
    cluster: Cluster, ckpt: Path, truth: Truth, tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    after = f"--dependency=afterok:{train(cluster, ckpt, run, tmp_path, 0)}"
    script = SCRIPTS / "after_training.sbatch"
    said = run_batch(cluster, tmp_path, after, "--ntasks-per-node=2", script, run, out)
    assert "done in" in said
    assert_right(out, truth)


def test_after_training_sbatch_never_starts_after_a_failure(
    cluster: Cluster, ckpt: Path, tmp_path: Path
) -> None:
    training = train(cluster, ckpt, tmp_path / "run", tmp_path, 3)
    job = cluster.submit(
        *batch_log(tmp_path),
        f"--dependency=afterok:{training}",
        SCRIPTS / "after_training.sbatch",
        tmp_path / "run",
        tmp_path / "out",
        env=PYTHON,
    )
    assert cluster.wait(training)["JobState"] == "FAILED"
    assert cluster.wait(job)["JobState"] == "CANCELLED"
    assert not (tmp_path / "job.log").exists()
    assert not (tmp_path / "out").exists()


def test_after_training_sbatch_wants_something_to_wait_for(
    cluster: Cluster, ckpt: Path, tmp_path: Path
) -> None:
    script = SCRIPTS / "after_training.sbatch"
    ended = cluster.run(["sbatch", "--wait", *batch_log(tmp_path), script, ckpt, tmp_path / "out"])
    assert ended.returncode == 2, ended
    assert "--dependency=afterok" in (tmp_path / "job.log").read_text()
    assert not (tmp_path / "out").exists()


def test_step_in_job_runs_beside_the_training(
    cluster: Cluster, ckpt: Path, truth: Truth, tmp_path: Path
) -> None:
    out, script = tmp_path / "out", SCRIPTS / "step_in_job.sh"
    lines = [
        "#!/bin/bash",
        "export MASTER_ADDR=nowhere.invalid MASTER_PORT=1",  # as training scripts do
        "srun -n4 sleep 600 & training=$!",
        f"NTASKS=2 bash {script} {ckpt} {out} --transport gather; code=$?",
        'kill -0 "$training" && kill "$training"; exit "$code"',
    ]
    (tmp_path / "train.sh").write_text("\n".join(lines))
    run_batch(cluster, tmp_path, "-n4", "-N2", tmp_path / "train.sh")
    assert_right(out, truth)


def test_scripts_say_how_they_are_called(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    for script in sorted(SCRIPTS.iterdir()):
        ended = cluster.run(["bash", script])
        assert (ended.returncode, ended.stderr[:6]) == (2, "usage:"), ended
    ended = cluster.run(["bash", SCRIPTS / "step_in_job.sh", "ckpt"])
    assert "no allocation" in ended.stderr, ended


# What goes wrong in the middle.


def notes_of(notes: Path, kind: str) -> Mapping[int, str]:
    return {int(p.suffix[1:]): p.read_text() for p in sorted(notes.glob(f"{kind}.*"))}


def assert_nothing_finished(out: Path) -> None:
    assert not [path for path in out.rglob("*") if path.is_file()]


def make_notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


def test_a_rank_that_fails_ends_all_of_them(cluster: Cluster, ckpt: Path, tmp_path: Path) -> None:
    """Though srun would let the others run on."""
    notes, out = make_notes(tmp_path), tmp_path / "out"
    layout = ["-n4", "-N2", "--kill-on-bad-exit=0"]
    ended = cluster.srun(*layout, *TASK, "fail", notes, ckpt, out, *MANY_READS)
    assert ended.returncode == 3, ended
    assert notes_of(notes, "code") == dict.fromkeys(range(4), "3"), ended
    assert ended.stderr.count(MESSAGE) == 1, ended
    assert "rank 1 (on " in ended.stderr, ended
    assert "Input/output error" in ended.stderr, ended
    assert "Traceback" not in ended.stderr, ended
    assert_nothing_finished(out)
    assert not list(tmp_path.glob(".*consolidating-*"))


def codes_told(tmp_path: Path) -> dict[int, str]:
    """What srun says of each task's end, in a batch job's log."""
    said = (tmp_path / "job.log").read_text()
    found = {}
    for tasks, code in re.findall(r"tasks? ([\d,-]+): Exited with exit code (\d+)", said):
        for part in tasks.split(","):
            first, _, last = part.partition("-")
            found |= dict.fromkeys(range(int(first), int(last or first) + 1), code)
    return found


def test_a_cancelled_job_ends_all_ranks(
    cluster: Cluster, ckpt: Path, truth: Truth, tmp_path: Path
) -> None:
    notes, out = make_notes(tmp_path), tmp_path / "out"
    command = [*TASK, "slow", notes, ckpt, out, *MANY_READS]
    job = cluster.submit(
        *batch_log(tmp_path), "-n4", "-N2", "--wrap", "srun " + " ".join(map(str, command))
    )
    deadline = time.monotonic() + 60
    while len(notes_of(notes, "reads")) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(notes_of(notes, "reads")) == 4, (tmp_path / "job.log").read_text()
    cluster.run(["scancel", job]).ok()
    found = cluster.wait(job)
    assert found["JobState"] == "CANCELLED", found
    # On a busy machine a task may have to end itself before it can leave a note: srun tells, too.
    while len(codes := codes_told(tmp_path)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert codes == dict.fromkeys(range(4), "143"), (tmp_path / "job.log").read_text()
    assert_nothing_finished(out)
    # What is left is no hindrance.
    shutil.rmtree(out, ignore_errors=True)
    cluster.srun("-n1", *TOOL, ckpt, out).ok()
    assert_right(out, truth)


def test_nothing_outlives_a_cluster() -> None:
    """A cluster that is given up in the middle of a job takes all its processes with it."""
    reason = missing()
    require("slurm", not reason, reason)

    class GivenUp(Exception):
        pass

    with pytest.raises(GivenUp), running_cluster() as cluster:
        cluster.submit("-n2", "-N2", "-o", "/dev/null", "--wrap", "srun sleep 600")
        raise GivenUp
    assert not cluster.folder.exists()
    mark = f"{cluster.folder}/".encode()
    left = [
        path.parent.name
        for path in Path("/proc").glob("[0-9]*/environ")
        if path.parent.name != str(os.getpid()) and mark in _read(path)
    ]
    assert not left


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
