"""Processes that mpirun or mpiexec started: which rank each is, and how they become one run.

MPI starts the world and never carries weights. The environment tells each process its rank, for
which nothing is imported. Joining takes mpi4py: the ranks count themselves, rank 0 takes a port and
tells all others which, and MPI is ended again before torch is imported, because a rank that waits
in MPI keeps a core busy. From then on
a rank may end at any time with any exit code (leaving an MPI that runs makes ``mpirun`` end with
1, and ``MPI_Finalize`` waits for ranks that may be gone), and ``mpirun`` still ends all others
when one is killed or fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dist_consolidate.errors import Caught, ConsolidateError, RendezvousError, UsageError
from dist_consolidate.runtime.interfaces import address_for
from dist_consolidate.runtime.launched import Launched, meeting_place, number
from dist_consolidate.runtime.voice import Voice

# Rank, size, local rank, local size. Sources: "Environment variables" in mpirun(1) of Open MPI,
# MPICH's hydra (Intel MPI's mpiexec is one) and the user guide of MVAPICH2.
_FAMILIES = (
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_PMIX, _PMIX_JOB = "PMIX_RANK", "PMIX_NAMESPACE"
_BACKLOG = 2048
_OTHERWISE = "or start it with torchrun (--launcher none: each process is a run of its own)"


def launched(environ: Mapping[str, str]) -> Launched | None:
    """Tell which rank of an MPI run this process is.

    Args:
        environ: The environment.

    Returns:
        What the variables say; ``None`` if no launcher of MPI has set any.

    Raises:
        UsageError: If they are set by half or hold no numbers.
    """
    for names in _FAMILIES:
        rank_name, size_name, local_rank, local_size = names
        if not (rank_name in environ or size_name in environ) or _are_srun_s(environ, names):
            continue
        for name, other in ((rank_name, size_name), (size_name, rank_name)):
            if name not in environ:
                raise UsageError(
                    f"{other} is {environ[other]!r}, but {name} is not set beside it: pass all "
                    "variables of mpirun on to this process, or use --launcher none"
                )
        rank, size = number(environ, rank_name), number(environ, size_name)
        if not rank < size:
            raise UsageError(f"{rank_name} is {rank}, but {size_name} is {size}")
        return Launched(
            "mpi",
            rank,
            size,
            number(environ, local_rank) if local_rank in environ else None,
            number(environ, local_size) if local_size in environ else None,
            variables=(rank_name, size_name),
        )
    if _PMIX in environ and not _is_srun_s_pmix(environ):
        return Launched("mpi", number(environ, _PMIX), 0, variables=(_PMIX,))
    return None


def _are_srun_s(environ: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Tell whether srun has set PMI's variables itself (``--mpi=pmi2``); hydra sets more."""
    return names[0] == "PMI_RANK" and "SLURM_STEP_ID" in environ and names[2] not in environ


def _is_srun_s_pmix(environ: Mapping[str, str]) -> bool:
    """Tell whether a SLURM step (``--mpi=pmix``) is the PMIx job; SLURM names it after itself."""
    job = environ.get(_PMIX_JOB)
    return "SLURM_STEP_ID" in environ if job is None else job.startswith("slurm.")


def join(told: Launched) -> tuple[Launched, socket.socket | None]:
    """Find out, together with all other processes, who is who and where rank 0 can be met.

    Args:
        told: What the environment says.

    Returns:
        This rank, with the address and port to meet at; on rank 0, where there are others, also
        the socket that listens there.

    Raises:
        RendezvousError: If mpi4py or its library is missing, or belongs to another MPI than
            mpirun, or rank 0 has no port to listen on.
    """
    voice = Voice(meeting_place(told))
    try:
        return _join(told)
    except ConsolidateError as error:
        refused = RendezvousError(str(error), error.exit_code)
        refused.silent = voice.is_taken()
        raise refused from error


def _join(told: Launched) -> tuple[Launched, socket.socket | None]:
    with _started(told) as mpi:
        world = mpi.COMM_WORLD
        _check_size(told, world.Get_size(), mpi.Get_library_version())
        node = world.Split_type(mpi.COMM_TYPE_SHARED)
        mine = dataclasses.replace(
            told,
            rank=world.Get_rank(),
            size=world.Get_size(),
            local_rank=node.Get_rank(),
            local_size=node.Get_size(),
        )
        node.Free()
        if mine.size == 1:
            return mine, None
        hosts = world.gather(mpi.Get_processor_name(), root=0)
        listening, place = _listen(mine, hosts) if mine.rank == 0 else (None, None)
        place = world.bcast(place, root=0)
        if isinstance(place, Exception):
            raise place
        address, port = place
        return dataclasses.replace(mine, address=address, port=port), listening


def _listen(mine: Launched, hosts: Sequence[str]) -> tuple[socket.socket | None, Any]:
    """Listen on a free port of every address; give what to tell the others: where, or an error."""
    with (caught := Caught()):
        if socket.has_dualstack_ipv6():
            listening = socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
        else:
            listening = socket.create_server(("", 0), backlog=_BACKLOG)
        # On one host no name has to be known.
        address = "127.0.0.1" if mine.local_size == mine.size else _address(hosts)
        return listening, (address, int(listening.getsockname()[1]))
    host = socket.gethostname()
    return None, RendezvousError(f"rank 0 on host {host} cannot listen on a port: {caught.error}")


def _address(hosts: Sequence[str]) -> str:
    """Choose the address of rank 0, whose host comes first, for all other hosts."""
    return address_for([host for host in hosts if host != hosts[0]])


@contextlib.contextmanager
def _started(told: Launched) -> Iterator[Any]:
    """Start MPI, and end it where it was started here.

    Ending waits for all ranks. What is raised on purpose is raised by all of them; after anything
    else this rank leaves without, and mpirun ends the others.
    """
    mpi = _import(told)
    if mpi.Is_finalized():
        raise UsageError("MPI has been ended in this process already and cannot start again")
    ours = not mpi.Is_initialized()
    if ours:
        # Threads read and write weights; none of them will know of MPI.
        mpi.Init_thread(mpi.THREAD_FUNNELED)
    refused: ConsolidateError | None = None
    try:
        yield mpi
    except ConsolidateError as error:
        refused = error
    if ours:
        mpi.Finalize()
    if refused is not None:
        raise refused


def _import(told: Launched) -> Any:  # noqa: ANN401 - a module
    found = f"{_deciding(told)}: joining them takes mpi4py"
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{found}, which is not installed here; pip install mpi4py (the extra "
            f"dist-consolidate[mpi]), {_OTHERWISE}"
        ) from error
    except (ImportError, RuntimeError) as error:
        why = " ".join(str(error).split())[:300]
        raise UsageError(
            f"{found}, which finds no MPI library: {why}; put the library of the MPI that mpirun "
            f"belongs to on LD_LIBRARY_PATH (or load its module), {_OTHERWISE}"
        ) from error
    return MPI


def _check_size(told: Launched, size: int, library: str) -> None:
    """Refuse an MPI that does not know of the others: each process would be a run of its own."""
    # The size that only MPI can tell is wrong for sure if this rank is not in it.
    if size == told.size or (told.size == 0 and told.rank < size):
        return
    version = library.split(",")[0].split("\n")[0].strip()
    raise UsageError(
        f"{_deciding(told)}, but the MPI that mpi4py was built for ({version}) counts "
        f"{size}: it is another one than mpirun's; install mpi4py against mpirun's (pip install "
        f"--force-reinstall --no-binary=mpi4py mpi4py), {_OTHERWISE}"
    )


def _deciding(told: Launched) -> str:
    if told.size:
        return f"mpirun has started {told.size} processes ({' and '.join(told.variables)} are set)"
    return f"a launcher of MPI has started this process ({' and '.join(told.variables)} is set)"
