"""What the variables of MPI's launchers say, who wins, and which interfaces count."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_consolidate import cli
from dist_consolidate.errors import UsageError
from dist_consolidate.runtime.interfaces import address_for, interface_address, interface_problem
from dist_consolidate.runtime.launched import Launched, find_launched
from dist_consolidate.runtime.voice import Voice

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "79036417",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {name.replace("OMPI_", "MV2_"): value for name, value in OPENMPI.items()}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
}


def as_of(launched: Launched) -> tuple[object, ...]:
    return (
        launched.launcher,
        launched.rank,
        launched.size,
        launched.local_rank,
        launched.local_size,
    )


def refusal(environ: dict[str, str], launcher: str = "auto") -> str:
    with pytest.raises(UsageError) as caught:
        find_launched(environ, launcher)
    return str(caught.value)


@pytest.mark.parametrize("environ", [OPENMPI, HYDRA, MVAPICH], ids=["openmpi", "hydra", "mvapich"])
def test_ranks(environ: dict[str, str]) -> None:
    assert as_of(find_launched(environ)) == ("mpi", 3, 4, 1, 2)
    assert find_launched(environ, "mpi") == find_launched(environ)
    # An allocation's variables are there, too, where mpirun starts its processes by srun.
    assert as_of(find_launched({**STEP, **environ})) == ("mpi", 3, 4, 1, 2)
    assert find_launched({**environ, **TORCHRUN}).launcher == "torchrun"
    assert find_launched({**environ, **TORCHRUN}, "mpi").launcher == "mpi"
    assert find_launched(environ, "none") == Launched()
    assert all(name in environ for name in find_launched(environ).variables)


def test_a_launcher_without_local_ranks() -> None:
    environ = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    assert as_of(find_launched(environ)) == ("mpi", 1, 2, None, None)


def test_pmi_variables_that_srun_has_set() -> None:
    step = {"SLURM_STEP_ID": "0", "PMI_RANK": "0", "PMI_SIZE": "2"}
    assert refusal(step, "mpi").startswith("--launcher mpi: none of its variables are set here")


@pytest.mark.parametrize(
    ("environ", "counts"),
    [
        ({"PMIX_RANK": "2"}, True),
        ({"PMIX_RANK": "2", "PMIX_NAMESPACE": "prterun-host-7@1", "SLURM_STEP_ID": "0"}, True),
        ({"PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.7.0", "SLURM_STEP_ID": "0"}, False),
        ({"PMIX_RANK": "2", "SLURM_STEP_ID": "0"}, False),
    ],
)
def test_pmix_alone(environ: dict[str, str], counts: bool) -> None:
    if counts:
        # How many there are, MPI itself has to tell.
        assert as_of(find_launched(environ, "mpi")) == ("mpi", 2, 0, None, None)
    else:
        assert "PMIX_RANK" in refusal(environ, "mpi")


@pytest.mark.parametrize("missing", ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"])
def test_half_of_the_variables(missing: str) -> None:
    message = refusal({k: v for k, v in OPENMPI.items() if k != missing})
    assert f"{missing} is not set beside it" in message


def test_numbers_that_are_none_or_too_large() -> None:
    assert "PMI_SIZE must be a number; found 'x'" in refusal({**HYDRA, "PMI_SIZE": "x"})
    assert refusal({**HYDRA, "PMI_RANK": "4"}) == "PMI_RANK is 4, but PMI_SIZE is 4"


@pytest.mark.parametrize(("launcher", "word"), [("torchrun", "WORLD_SIZE"), ("mpi", "PMI_RANK")])
def test_a_launcher_that_was_named_but_is_not_there(
    launcher: str, word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*OPENMPI, *HYDRA, *TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    assert word in refusal({}, launcher)
    assert cli.main(["nowhere", "--launcher", launcher]) == 2
    assert f"--launcher {launcher}: none of its variables" in capsys.readouterr().err


def test_interfaces_that_are_there() -> None:
    for text in ("", "lo", "lo,lo"):
        assert interface_problem({"GLOO_SOCKET_IFNAME": text}, with_nccl=False) is None
    for text in ("", "l", "=lo", "^docker", "nowhere7,l", "^nowhere7"):
        assert interface_problem({"NCCL_SOCKET_IFNAME": text}, with_nccl=True) is None


@pytest.mark.parametrize(
    ("variable", "text", "named"),
    [
        ("GLOO_SOCKET_IFNAME", "lo,nowhere7", "nowhere7"),
        ("GLOO_SOCKET_IFNAME", "l", "l"),
        ("NCCL_SOCKET_IFNAME", "nowhere7", "that begins with nowhere7"),
        ("NCCL_SOCKET_IFNAME", "=l", "l"),
    ],
)
def test_interfaces_that_are_not_there(variable: str, text: str, named: str) -> None:
    message = interface_problem({variable: text}, with_nccl=True)
    assert message is not None
    assert message.startswith(f"{variable} is {text!r}, but host {socket.gethostname()} has no ")
    assert f"interface {named}; it has " in message
    if variable.startswith("NCCL"):
        assert interface_problem({variable: text}, with_nccl=False) is None


def test_the_address_for_others() -> None:
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("nowhere7") is None
    assert address_for([], {"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert address_for([], {"NCCL_SOCKET_IFNAME": "=lo"}) == "127.0.0.1"
    # Gloo's choice counts first.
    both = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "nowhere7"}
    assert address_for([], both) == "127.0.0.1"
    # An address that others cannot use is none; nor does a name that nobody knows lead anywhere.
    assert address_for(["127.0.0.1", "no.invalid"], {}) == socket.gethostname()


SPEAKER = """
import sys, time
from dist_consolidate.runtime.voice import Voice
voice = Voice(sys.argv[1])
print(voice._listening is not None, flush=True)
sys.stdin.readline()
print(voice.is_taken(), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def here() -> str:
    """A place of this test's own: a rank that has spoken keeps its name until its process ends."""
    return secrets.token_hex(8)


@pytest.fixture
def speaker(here: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has taken the word, and waits."""
    with subprocess.Popen(
        [sys.executable, "-c", SPEAKER, here],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        yield process
        process.kill()


def test_one_process_of_a_host_speaks(
    here: str, speaker: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert speaker.stdin is not None
    assert speaker.stdout is not None
    monkeypatch.setattr("dist_consolidate.runtime.voice._PATIENCE_SEC", 0.2)
    monkeypatch.setattr("dist_consolidate.runtime.voice._STAY_SEC", 0.2)
    silent = Voice(here)
    assert Voice(f"{here} not").is_taken() is False
    # The other one has not failed: somebody has to say something.
    assert silent.is_taken() is False
    speaker.stdin.write("\n")
    speaker.stdin.flush()
    assert speaker.stdout.readline() == "False\n"
    assert silent.is_taken() is True
    # Of others, too, that failed earlier or fail later.
    assert Voice(here).is_taken() is True


def test_one_that_waits_hears_of_it_although_the_speaker_has_ended(
    here: str, speaker: subprocess.Popen[str]
) -> None:
    silent = Voice(here)
    speaker.communicate("\n\n")
    assert silent.is_taken() is True


def test_one_that_ended_without_a_word_leaves_it_to_another(
    here: str, speaker: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dist_consolidate.runtime.voice._STAY_SEC", 0.2)
    first, second = Voice(here), Voice(here)
    speaker.kill()
    speaker.wait()
    assert first.is_taken() is False
    assert second.is_taken() is True
