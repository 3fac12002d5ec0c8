"""A SLURM cluster of two nodes on this machine, for as long as tests need it.

munged, slurmctld and two slurmd run as root with a configuration, keys, sockets and ports of their
own, beside whatever the machine has. The nodes' names are known only where the daemons run, in a
mount namespace of each: as on a cluster, nobody else has to know them.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.torchrun import ENVIRONMENT, INHERITED, ROOT, TIMEOUT_SEC, Ended

NODES = ("dcnode01", "dcnode02")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "unshare")
START_SEC, STOP_SEC = 60.0, 20.0
# Where Debian has daemons, which need not be in PATH.
_SBIN = ("/usr/sbin", "/usr/local/sbin", "/sbin")
_CPUS_PER_NODE = 16  # more than there are: see config_overrides


def missing() -> str:
    """Say why no cluster can be started here; nothing if one can."""
    if os.geteuid() != 0:
        return "the daemons of SLURM want to be started by root"
    absent = [name for name in PROGRAMS if _program(name) is None]
    if absent:
        return f"{', '.join(absent)} not found (Debian: slurm-wlm, munge, util-linux)"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    return f"no mount namespace to be had: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True)
class Cluster:
    """A running cluster.

    Attributes:
        folder: Its configuration, state and logs.
    """

    folder: Path

    @property
    def env(self) -> dict[str, str]:
        """The environment to call SLURM's commands in; nothing of a launcher around the tests."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in INHERITED and not name.startswith("SLURM")
        }
        return {**inherited, **ENVIRONMENT, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command as a user of the cluster would."""
        return subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def run(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        timeout_sec: float = TIMEOUT_SEC,
    ) -> Ended:
        """Run a command as a user of the cluster would.

        Args:
            command: What to run.
            env: Variables to set on top of the usual ones.
            timeout_sec: After this all jobs are cancelled and the test fails.

        Returns:
            How it ended.

        Raises:
            AssertionError: If it took too long; with all output.
        """
        started = time.monotonic()
        process = self.start(command, env)
        try:
            stdout, stderr = process.communicate(timeout=timeout_sec)
        except subprocess.TimeoutExpired:
            self.cancel_all()
            process.kill()
            stdout, stderr = process.communicate()
            raise AssertionError(f"took too long\n{stdout}\n{stderr}\n{self.logs()}") from None
        return Ended(process.returncode, stdout, stderr, time.monotonic() - started)

    def srun(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> Ended:
        """Run a job of one step."""
        return self.run(["srun", *arguments], env)

    def submit(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Submit a job; give its id."""
        ended = self.run(["sbatch", "--parsable", *arguments], env).ok()
        return ended.stdout.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """Give what the controller knows of a job."""
        text = self.run(["scontrol", "show", "job", "--oneliner", job_id]).ok().stdout
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait(self, job_id: str, timeout_sec: float = TIMEOUT_SEC) -> dict[str, str]:
        """Wait for a job's end; give what the controller knows of it then."""
        running = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING"}

        def ended() -> bool:
            return self.job(job_id)["JobState"] not in running

        if not _comes_true(ended, timeout_sec):
            self.cancel_all()
            raise AssertionError(f"took too long: {self.job(job_id)}\n{self.logs()}")
        return self.job(job_id)

    def cancel_all(self) -> None:
        """Ask all jobs to end."""
        subprocess.run(["scancel", "--user=root"], env=self.env, capture_output=True, timeout=30)

    def logs(self) -> str:
        """Give the ends of what all daemons said."""
        paths = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-3000:]}" for p in paths)


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start a cluster, and end it with all that runs on it.

    Yields:
        The cluster, with both nodes idle.

    Raises:
        RuntimeError: If it does not come up; with what the daemons said.
    """
    # A short path: munge's socket is a name of at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="dcslurm-"))
    cluster = Cluster(folder)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _configure(folder)
        _start_daemons(cluster, daemons)
        yield cluster
    finally:
        cluster.cancel_all()
        _comes_true(lambda: not _is_busy(cluster), STOP_SEC)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(STOP_SEC)
            if daemon.poll() is None:
                daemon.kill()
                daemon.wait()
        _kill_leftovers(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _configure(folder: Path) -> None:
    host = socket.gethostname().partition(".")[0]
    controller, *ports = _free_ports(1 + len(NODES))
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o400)
    key.write_bytes(secrets.token_bytes(1024))
    hosts = Path("/etc/hosts")
    known = hosts.read_text() if hosts.exists() else "127.0.0.1 localhost\n"
    (folder / "hosts").write_text(f"{known.rstrip()}\n127.0.0.1 {' '.join(NODES)}\n")
    # Newer releases look for cgroups wherever they are, unless told not to.
    if _version() >= (23, 11):
        (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={_CPUS_PER_NODE}"
        for name, port in zip(NODES, ports, strict=True)
    )
    (folder / "slurm.conf").write_text(f"""\
ClusterName=dctest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
KillWait=10
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")


def _start_daemons(cluster: Cluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    folder = cluster.folder

    def start(name: str, *command: str | Path | None) -> None:
        with (folder / f"{name}.out.log").open("wb") as log:
            arguments = [str(part) for part in command]
            # Groups of their own: an interrupt from the keyboard is for the tests alone.
            daemons.append(
                subprocess.Popen(
                    arguments, env=cluster.env, stdout=log, stderr=log, start_new_session=True
                )
            )

    files = {
        "key-file": "munge.key",
        "socket": "munge.socket",
        "pid-file": "munged.pid",
        "log-file": "munged.log",
        "seed-file": "munged.seed",
    }
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    start("munged", _program("munged"), "--foreground", "--force", *options)
    if not _comes_true((folder / "munge.socket").exists, START_SEC):
        raise RuntimeError(f"munged does not come up\n{cluster.logs()}")
    start("slurmctld", _program("slurmctld"), "-D")
    bind = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'
    for node in NODES:
        inner = ["sh", "-c", bind, "sh", folder / "hosts", _program("slurmd"), "-D", "-N", node]
        start(f"slurmd-{node}", "unshare", "--mount", *inner)
    if not _comes_true(lambda: _is_idle(cluster), START_SEC):
        raise RuntimeError(f"the cluster does not come up\n{cluster.logs()}")


def _is_idle(cluster: Cluster) -> bool:
    command = ["sinfo", "--noheader", "--Node", "--format=%t"]
    found = subprocess.run(command, env=cluster.env, capture_output=True, text=True)
    return found.stdout.split() == ["idle"] * len(NODES)


def _is_busy(cluster: Cluster) -> bool:
    found = subprocess.run(
        ["squeue", "--noheader"], env=cluster.env, capture_output=True, text=True, timeout=30
    )
    return bool(found.stdout.strip())


def _kill_leftovers(folder: Path) -> None:
    """Kill what still has this cluster's configuration in its environment."""
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)


def _comes_true(condition: Callable[[], bool], timeout_sec: float) -> bool:
    deadline = time.monotonic() + timeout_sec
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *_SBIN)))


def _version() -> tuple[int, ...]:
    """Give SLURM's release: year and month."""
    said = subprocess.run([str(_program("slurmctld")), "-V"], capture_output=True, text=True).stdout
    found = re.search(r"(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)
