"""Who started this process, and as which rank of how many: found in the environment.

Cheap on purpose: neither torch nor MPI is imported to answer.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Literal

from dist_consolidate.errors import UsageError

Launcher = Literal["plain", "torchrun", "slurm", "mpi"]

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOOKED_FOR = {
    "torchrun": "RANK and WORLD_SIZE",
    "mpi": "OMPI_COMM_WORLD_RANK, PMI_RANK, MV2_COMM_WORLD_RANK, PMIX_RANK",
    "slurm": "those of a step, as srun sets them: SLURM_STEP_ID, SLURM_PROCID and others",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """One process as its launcher sees it.

    Attributes:
        launcher: Who started it; ``plain`` for a process on its own.
        rank: This process.
        size: Number of processes; 0 where only MPI itself can tell.
        local_rank: Its number on its host; ``None`` where the launcher does not say.
        local_size: Number of processes on its host; ``None`` where the launcher does not say.
        address: Where this process meets rank 0; ``None`` for a process on its own.
        port: The port there.
        variables: Those that decided, for messages.
    """

    launcher: Launcher = "plain"
    rank: int = 0
    size: int = 1
    local_rank: int | None = None
    local_size: int | None = None
    address: str | None = None
    port: int | None = None
    variables: tuple[str, ...] = ()


def find_launched(environ: Mapping[str, str] = os.environ, launcher: str = "auto") -> Launched:
    """Tell who started this process.

    Args:
        environ: The environment.
        launcher: Whose variables to look at; ``auto`` for those of all, ``none`` for nobody's.

    Returns:
        What the launcher says; a process on its own where there is none.

    Raises:
        UsageError: If a launcher's variables are set by half, hold no numbers, or are not there
            though it was named; if a world of one is set for each of several tasks.
    """
    for name, find in _finders():
        if launcher in ("auto", name) and (found := find(environ)) is not None:
            if launcher == "auto":
                _check_not_exported(environ, found)
            return found
    if launcher in ("auto", "none"):
        return Launched()
    raise UsageError(
        f"--launcher {launcher}: none of its variables are set here ({_LOOKED_FOR[launcher]}); "
        "start it with that launcher, or leave --launcher out"
    )


def _finders() -> tuple[tuple[str, Callable[[Mapping[str, str]], Launched | None]], ...]:
    """Give who may have started this process; the first that has found something wins.

    torchrun may be started by each of the others, and mpirun inside of a SLURM allocation.
    """
    # They need what stands here.
    from dist_consolidate.runtime import mpi, slurm

    return (
        ("torchrun", _torchrun),
        ("mpi", mpi.launched),
        ("slurm", slurm.launched),
    )


def _torchrun(environ: Mapping[str, str]) -> Launched | None:
    """Read torchrun's variables (https://docs.pytorch.org/docs/stable/elastic/run.html)."""
    # RANK alone, without a world, is somebody else's variable.
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    rank, size = (number(environ, name) for name in ("RANK", "WORLD_SIZE"))
    missing = [name for name in _TORCHRUN if name not in environ]
    if size > 1 and missing:
        raise UsageError(
            f"{' and '.join(missing)} not set beside RANK: start with "
            "torchrun, or unset RANK and WORLD_SIZE"
        )
    if not 0 <= rank < size:
        raise UsageError(f"RANK is {rank}, but WORLD_SIZE is {size}")
    return Launched(
        "torchrun",
        rank,
        size,
        number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else None,
        number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else None,
        environ.get("MASTER_ADDR"),
        number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None,
        _TORCHRUN,
    )


def _check_not_exported(environ: Mapping[str, str], found: Launched) -> None:
    """Refuse a world of one that all tasks of a step have inherited: each would do all the work."""
    if found.launcher != "torchrun" or found.size > 1 or "TORCHELASTIC_RUN_ID" in environ:
        return
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if environ.get(name, "1") != "1":
            raise UsageError(
                f"RANK is 0 and WORLD_SIZE is 1, but {name} is {environ[name]}: unset RANK and "
                "WORLD_SIZE for a run of all of them, or say --launcher torchrun for one on its own"
            )


def run_id(launched: Launched, environ: Mapping[str, str] = os.environ) -> str:
    """Tell runs apart that may meet at one place.

    Args:
        launched: This rank.
        environ: The environment.

    Returns:
        The same text on all ranks of a run, as far as their launcher tells.
    """
    names = {
        "torchrun": ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
        "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    }.get(launched.launcher, ())
    return "/".join([launched.launcher, *(environ.get(name, "") for name in names)])


def meeting_place(launched: Launched, environ: Mapping[str, str] = os.environ) -> str:
    """Name what the ranks of a run on one host have in common, before they have met.

    Args:
        launched: This rank.
        environ: The environment.

    Returns:
        A text that other runs on the host do not have.
    """
    if launched.address is None:
        # MPI's processes of a host have one parent, mpirun's daemon there.
        return f"{launched.launcher} {os.getppid()}"
    return f"{launched.address}:{launched.port} {run_id(launched, environ)}"


def number(environ: Mapping[str, str], name: str, max_digits: int = 9) -> int:
    """Read a variable that must be set and hold a number of at most nine digits.

    Args:
        environ: The environment.
        name: The variable.
        max_digits: Where it may have more.

    Returns:
        The number.

    Raises:
        UsageError: If it does not.
    """
    value = environ.get(name)
    if value is None:
        raise UsageError(f"{name} is not set")
    if not (value.isascii() and value.isdigit() and len(value) <= max_digits):
        raise UsageError(f"{name} must be a number; found {value!r}")
    return int(value)
