"""mpirun's processes are ranks of one run; ranks that cannot meet say why; the launch scripts.

Run as a module, this file is a rank under mpirun with a fault in it (see tests/test_failures.py).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from dist_consolidate.errors import RendezvousError
from dist_consolidate.runtime.launched import Launched
from dist_consolidate.runtime.rendezvous import connecting, meet
from tests import test_failures
from tests.cases import assert_same_bits, load_output
from tests.requirements import require
from tests.synthetic import Param, Spec, Truth, write
from tests.torchrun import MESSAGE, Ended, messages, run_python, show, start_ranks

pytestmark = pytest.mark.dist

MPI_SCRIPT, NODE_SCRIPT = "launch/mpi/consolidate.sh", "launch/torchrun/multi_node.sh"
# As root, and with more ranks than cores: Open MPI 4 and its later releases.
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PYTHON": sys.executable,
}
# 0.6 MB in fp32, of which a bucket moves a fiftieth.
PARAMS = [Param(f"layer.{number}.weight", (100, 73)) for number in range(20)]
BUCKET = ["--bucket-size", "12KB"]
# Runs a command in place of the interpreter.
BECOME = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
# A package of that name cannot be imported where this is sitecustomize.
BLOCKER = """
import sys
class Blocker:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "mpi4py":
            raise ModuleNotFoundError("No module named 'mpi4py'", name="mpi4py")
sys.meta_path.insert(0, Blocker)
"""
WATCHED = """
import sys
from dist_consolidate.cli import main
code = main(sys.argv[1:])
loaded = [name for name in ("torch", "mpi4py") if name in sys.modules]
sys.exit(f"loaded {loaded}" if loaded else code)
"""


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    folder = tmp_path_factory.mktemp("checkpoint")
    return write(folder / "ckpt", Spec(stage=3, world=3, params=PARAMS))


@pytest.fixture
def mpi() -> None:
    require("mpi", shutil.which("mpirun") is not None, "there is no mpirun")
    require("mpi", importlib.util.find_spec("mpi4py") is not None, "there is no mpi4py")


def run_command(
    command: Sequence[str | Path], env: Mapping[str, str] | None = None, timeout_sec: float = 120.0
) -> Ended:
    """Run any command as the tests run the interpreter; all that it starts ends with the test."""
    arguments = ["-c", BECOME, *command]
    return run_python(arguments, timeout_sec=timeout_sec, env={**ALLOWED, **(env or {})})


def mpirun(
    num_ranks: int, arguments: Sequence[str | Path], env: Mapping[str, str] | None = None
) -> Ended:
    return run_command(["mpirun", "-n", str(num_ranks), sys.executable, *arguments], env)


def free_port() -> int:
    with socket.create_server(("", 0)) as taken:
        return int(taken.getsockname()[1])


# Under mpirun.


def test_the_mpi_script_with_two_ranks(mpi: None, truth: Truth, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [truth.tag_dir.parent, out, "--transport", "allgather", *BUCKET]
    ended = run_command(["bash", MPI_SCRIPT, *arguments], {"NP": "2"}).ok()
    assert ended.stdout.count("done in") == 1, ended
    assert "transport allgather" in ended.stdout, ended
    assert "dist-consolidate" not in ended.stderr, ended
    assert_same_bits(load_output(out), truth.fp32)


def test_four_ranks(mpi: None, truth: Truth, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [truth.tag_dir.parent, out, "--transport", "gather", "--writers", "2", *BUCKET]
    ended = mpirun(4, ["-m", "dist_consolidate", *arguments]).ok()
    assert ended.stdout.count("done in") == 1, ended
    assert_same_bits(load_output(out), truth.fp32)


def test_a_damaged_checkpoint_is_told_once(mpi: None, truth: Truth, tmp_path: Path) -> None:
    ckpt, out = shutil.copytree(truth.tag_dir.parent, tmp_path / "ckpt"), tmp_path / "out"
    lost = next((ckpt / truth.tag_dir.name).glob("*_rank_1_*optim_states.pt"))
    lost.unlink()
    ended = mpirun(2, ["-m", "dist_consolidate", ckpt, out])
    assert ended.returncode == 3, ended
    assert ended.stderr.count(MESSAGE) == 1, ended
    assert lost.name in ended.stderr, ended
    assert "Traceback" not in ended.stderr, ended
    assert not out.exists()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_all(killed: int, mpi: None, truth: Truth, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = [truth.tag_dir.parent, out, "--transport", "gather", *BUCKET]
    fault = {test_failures.FAULT: f"kill:{killed}:{test_failures.MIDDLE}"}
    ended = mpirun(2, ["-m", "tests.test_mpi", *arguments], fault)
    assert ended.returncode != 0, ended
    assert f"signal {signal.SIGKILL:d}" in ended.stdout + ended.stderr, ended
    assert not out.exists()


def test_one_process_imports_nothing(mpi: None, truth: Truth, tmp_path: Path) -> None:
    out = tmp_path / "out"
    mpirun(1, ["-c", WATCHED, truth.tag_dir.parent, out]).ok()
    assert_same_bits(load_output(out), truth.fp32)


def test_without_mpi4py_nothing_is_written(mpi: None, truth: Truth, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    out = tmp_path / "out"
    arguments = ["-m", "dist_consolidate", truth.tag_dir.parent, out]
    ended = mpirun(2, arguments, {"PYTHONPATH": path})
    assert ended.returncode == 2, ended
    # Once, unless one process is through before the other has begun.
    assert ended.stderr.count(MESSAGE) in (1, 2), ended
    for word in ("OMPI_COMM_WORLD_SIZE", "pip install mpi4py", "torchrun"):
        assert word in ended.stderr, ended
    assert not out.exists()


def test_an_mpi_that_is_not_mpirun_s_is_refused(mpi: None, truth: Truth, tmp_path: Path) -> None:
    # As with mpirun of one MPI and mpi4py of another: each process is alone in its world.
    env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    out = tmp_path / "out"
    arguments = ["-m", "dist_consolidate", truth.tag_dir.parent, out]
    ended = run_python(arguments, env={**ALLOWED, **env})
    assert ended.returncode == 2, ended
    (message,) = messages([ended])
    assert "started 4 processes (OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE" in message, ended
    assert "counts 1" in message, ended
    assert not out.exists()


# Several nodes under torchrun.


@pytest.mark.parametrize("rdzv", [False, True], ids=["numbered", "rdzv"])
def test_the_script_for_several_nodes(rdzv: bool, truth: Truth, tmp_path: Path) -> None:
    out, port = tmp_path / "out", free_port()
    ends = ["--rdzv", f"127.0.0.1:{port}"] if rdzv else []
    arguments = ["bash", NODE_SCRIPT, *ends, truth.tag_dir.parent, out, "--transport", "gather"]
    place = {} if rdzv else {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    every = {"NNODES": "2", "NPROC": "1", **place}
    with ThreadPoolExecutor() as pool:
        nodes = [
            pool.submit(
                run_command, arguments, every if rdzv else {**every, "NODE_RANK": str(node)}
            )
            for node in range(2)
        ]
        ended = [node.result() for node in nodes]
    assert [node.returncode for node in ended] == [0, 0], show(ended)
    assert sum(node.stdout.count("done in") for node in ended) == 1, show(ended)
    assert_same_bits(load_output(out), truth.fp32)


# Ranks that cannot meet.


def test_a_rank_that_never_comes_is_named_once(truth: Truth, tmp_path: Path) -> None:
    arguments = [truth.tag_dir.parent, tmp_path / "out", "--rendezvous-timeout", "2s"]
    ended = start_ranks(2, arguments, env={"WORLD_SIZE": "3", "GLOO_SOCKET_IFNAME": "lo"})
    assert [rank.returncode for rank in ended] == [1, 1], show(ended)
    (message,) = messages(ended)
    assert f"ranks 0, 1 on host {socket.gethostname()}; rank 2 did not" in message, message
    for words in ("within 2 s", "WORLD_SIZE", "GLOO_SOCKET_IFNAME is 'lo'", "NCCL_SOCKET_IFNAME"):
        assert words in message, message
    assert "Traceback" not in show(ended), show(ended)
    assert not (tmp_path / "out").exists()


def test_an_interface_that_is_not_there_is_told_by_its_variable(
    truth: Truth, tmp_path: Path
) -> None:
    arguments = [truth.tag_dir.parent, tmp_path / "out"]
    ended = start_ranks(2, arguments, env={"GLOO_SOCKET_IFNAME": "nowhere7"})
    assert [rank.returncode for rank in ended] == [2, 2], show(ended)
    (message,) = messages(ended)
    assert "GLOO_SOCKET_IFNAME is 'nowhere7'" in message, message
    assert " lo" in message, message


def refusal(launched: Launched) -> str:
    with pytest.raises(RendezvousError) as caught:
        meet(launched, 1.5)
    assert caught.value.exit_code == 1
    assert not caught.value.silent
    return str(caught.value)


def test_nobody_listens() -> None:
    port = free_port()
    message = refusal(Launched("slurm", 1, 2, address="127.0.0.1", port=port))
    assert f"could not reach rank 0 at 127.0.0.1:{port} within 1.5 s" in message
    assert "connection refused" in message
    assert "slurm's variables say that there are 2" in message


def test_a_name_that_does_not_resolve() -> None:
    variables = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    launched = Launched("torchrun", 1, 2, address="no.invalid", port=29500, variables=variables)
    message = refusal(launched)
    assert "MASTER_ADDR, 'no.invalid', does not resolve" in message
    assert "firewalls let all hosts reach port 29500 of no.invalid" in message


def test_a_program_that_is_no_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = refusal(Launched("mpi", 1, 2, address="127.0.0.1", port=port))
    assert "something answers there, but as no rank 0 does" in message


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        message = refusal(Launched("slurm", 0, 2, address="127.0.0.1", port=port))
    assert f"cannot listen on port {port} of host {socket.gethostname()}" in message
    assert "MASTER_PORT" in message


def test_what_torch_says_when_ranks_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
    launched = Launched("mpi", 0, 1, address="127.0.0.1", port=1)
    with pytest.raises(RendezvousError) as caught, connecting(launched):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    message = str(caught.value)
    assert message.startswith(f"rank 0 of 1 on host {socket.gethostname()} has met the others")
    assert "Unable to find address for: nowhere7" in message
    assert "GLOO_SOCKET_IFNAME is 'nowhere7'" in message


if __name__ == "__main__":
    # There, RANK says which rank has the fault; alone it means nothing to the package.
    os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
    sys.exit(test_failures.main(sys.argv[1:]))
