"""A task of a SLURM job step: which one, of how many, and where the first one can be met.

All is read off the variables that srun sets for each task
(https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES"). Only those of the step
count: ``SLURM_NTASKS`` may be the whole job's (``srun --preserve-env``), and
``SLURM_LAUNCH_NODE_IPADDR`` is where srun itself runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

from dist_consolidate.errors import UsageError
from dist_consolidate.runtime.hostlist import expand_counts, expand_hosts
from dist_consolidate.runtime.launched import Launched, number

_T = TypeVar("_T")

_STEP_ID, _SIZE = "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"
_HOSTS, _COUNTS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
# A batch script has a rank and a job, but nothing of a step.
_STEP_ONLY = (_STEP_ID, _SIZE, _HOSTS, _COUNTS)
_NEEDED = (*_STEP_ONLY, "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
_SRUN = "start it with srun"
# Ids have 32 bits; those of federated clusters' jobs, and of steps that are no ordinary ones,
# use the upper ones.
_ID_DIGITS = 10

# Ports below those that Linux gives to outgoing connections (from 32768 on). The number of ports
# is a prime and the factor nearly its golden section: steps of one job get neighbouring ports,
# and jobs with neighbouring numbers get ports far apart.
_FIRST_PORT, _NUM_PORTS, _JOB_STRIDE = 12_000, 20_011, 12_367


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    rank: int
    size: int
    local_rank: int
    node: int
    hosts: tuple[str, ...]
    counts: tuple[int, ...]


def launched(environ: Mapping[str, str]) -> Launched | None:
    """Tell which task of a step this process is.

    A job's own shell, which is no step, is a process like any other.

    Args:
        environ: The environment.

    Returns:
        What SLURM says; ``None`` if this process is no task of a step.

    Raises:
        UsageError: If the variables are set by half, wrong, or do not say where the first task is.
    """
    if not any(environ.get(name) for name in _STEP_ONLY):
        _check_no_task(environ)
        return None
    if environ.get(_SIZE) == "1" and environ.get("SLURM_PROCID", "0") == "0":
        return Launched("slurm", 0, 1, 0, 1)
    task = _read(environ)
    _check_one_component(environ, task)
    if _is_left_over(environ, task):
        return None
    address, port, variables = _meeting_point(environ, task)
    here = task.counts[task.node]
    return Launched("slurm", task.rank, task.size, task.local_rank, here, address, port, variables)


def _check_no_task(environ: Mapping[str, str]) -> None:
    """Refuse a task whose environment has lost what says that it is one."""
    rank = environ.get("SLURM_PROCID", "0")
    if rank != "0":
        raise UsageError(
            f"SLURM_PROCID is {rank!r}, but {', '.join(_STEP_ONLY)} are not set: pass all of "
            "SLURM's variables on to this process, into a container too"
        )


def _read(environ: Mapping[str, str]) -> _Task:
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        there = next(name for name in _STEP_ONLY if environ.get(name))
        raise UsageError(
            f"{there} is {environ[there]!r}, but {', '.join(missing)} not set beside it: pass all "
            f"of SLURM's variables on to this process, or none; {_SRUN}"
        )
    task = _Task(
        number(environ, "SLURM_PROCID"),
        number(environ, _SIZE),
        number(environ, "SLURM_LOCALID"),
        number(environ, "SLURM_NODEID"),
        tuple(_expand(environ, _HOSTS, expand_hosts)),
        tuple(_expand(environ, _COUNTS, expand_counts)),
    )
    _check(environ, task)
    return task


def _expand(environ: Mapping[str, str], name: str, expand: Callable[[str], _T]) -> _T:
    try:
        return expand(environ[name])
    except ValueError as error:
        raise UsageError(f"{name} cannot be read: {error}; found {environ[name]!r}") from error


def _check(environ: Mapping[str, str], task: _Task) -> None:
    """Refuse numbers that do not fit together."""
    names: tuple[str, ...]
    if not task.rank < task.size:
        names = ("SLURM_PROCID", _SIZE)
    elif len(task.hosts) != len(task.counts):
        names = (_HOSTS, _COUNTS)
    elif sum(task.counts) != task.size:
        names = (_COUNTS, _SIZE)
    elif not task.node < len(task.hosts):
        names = ("SLURM_NODEID", _HOSTS)
    else:
        return
    found = " and ".join(f"{name}={environ[name]}" for name in names)
    raise UsageError(f"{found} contradict each other; {_SRUN}")


def _check_one_component(environ: Mapping[str, str], task: _Task) -> None:
    """Refuse a step over several components of a heterogeneous job.

    Its list of hosts is sorted, while its nodes and tasks are counted component by component:
    nothing says on which host the first task is.
    """
    size = environ.get("SLURM_HET_SIZE", "")
    if not size.isdigit() or int(size) < 2 or len(task.hosts) == 1:
        return
    for component in range(int(size)):
        # "PACK" is the older word; releases in between set both.
        for word in ("HET", "PACK"):
            nodes = environ.get(f"SLURM_JOB_NODELIST_{word}_GROUP_{component}")
            if nodes and set(task.hosts) <= set(_hosts_of(nodes)):
                return
    raise UsageError(
        f"{_HOSTS}={environ[_HOSTS]} spans several components of a heterogeneous job "
        f"(SLURM_HET_SIZE={size}); start it on one of them with srun --het-group=0"
    )


def _hosts_of(nodes: str) -> list[str]:
    """Write out a list that is looked at only for comparison."""
    try:
        return expand_hosts(nodes)
    except ValueError:
        return []


def _is_left_over(environ: Mapping[str, str], task: _Task) -> bool:
    """Tell whether this is a job's own shell that inherited a step's variables.

    ``sbatch`` passes on the environment it is called in. Called in a step (a training task that
    submits what comes after it), it hands that step's variables to a script that is no step. In
    such a shell SLURM still sets the variables of the job, and ``SLURM_GTIDS``, the tasks on this
    node, to its own 0.
    """
    if task.rank != 0 or environ.get("SLURM_GTIDS") != "0":
        return False
    if task.counts[task.node] != 1:
        return True
    nodes = _hosts_of(environ.get("SLURM_JOB_NODELIST", ""))
    return bool(nodes) and not set(task.hosts) <= set(nodes)


def _meeting_point(environ: Mapping[str, str], task: _Task) -> tuple[str, int, tuple[str, ...]]:
    """Give the address and port where the first task listens, and the variables that tell.

    Scripts like to set ``MASTER_ADDR`` and ``MASTER_PORT``: if both are there, they count.
    """
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return environ["MASTER_ADDR"], number(environ, "MASTER_PORT"), ("MASTER_ADDR", _STEP_ID)
    port = _port(number(environ, "SLURM_JOB_ID", _ID_DIGITS), number(environ, _STEP_ID, _ID_DIGITS))
    _check_first_host(environ, task)
    # On the first host itself no name has to be known.
    address = "127.0.0.1" if task.node == 0 else task.hosts[0]
    return address, port, (_HOSTS, _STEP_ID)


def _port(job: int, step: int) -> int:
    return _FIRST_PORT + (job * _JOB_STRIDE + step) % _NUM_PORTS


def _check_first_host(environ: Mapping[str, str], task: _Task) -> None:
    """Refuse a step whose first task may be on another host than the first one."""
    if len(task.hosts) == 1:
        return
    remedy = "set MASTER_ADDR to the host of task 0 and MASTER_PORT to a free port there"
    if environ.get("SLURM_DISTRIBUTION", "").partition(":")[0] == "arbitrary":
        raise UsageError(
            "SLURM_DISTRIBUTION is arbitrary, and so SLURM does not tell where task 0 is; " + remedy
        )
    name = environ.get("SLURMD_NODENAME")
    if name and name != task.hosts[task.node]:
        raise UsageError(
            f"SLURMD_NODENAME is {name}, but node {task.node} (SLURM_NODEID) of "
            f"{_HOSTS}={environ[_HOSTS]} is {task.hosts[task.node]}; {remedy}"
        )
    if task.rank == 0 and task.node != 0:
        raise UsageError(f"task 0 is on node {task.node} (SLURM_NODEID) and not on 0; {remedy}")
