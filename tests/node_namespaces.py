"""Nodes on one machine: namespaces of their own for network, mounts, processes and host name.

Each node is one process that holds its namespaces, and goes with it: when that process is killed,
all that runs on the node is killed, and links and mounts are gone. A switch, which is a network
namespace with a bridge in it, joins them. Nothing of the machine's own network is touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.requirements import require
from tests.torchrun import ENVIRONMENT, INHERITED, ROOT, Ended, show

PORT = 29577  # each network namespace has all ports to itself
_TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount", "hostname")
_PROBE = (
    "ip link add bridge0 type bridge; ip link add port0 type veth peer name eth0; "
    "tc qdisc add dev port0 root tbf rate 1mbit burst 16kb latency 200ms; mount -t tmpfs none /mnt"
)
_SUBNET = "10.77.0"


def require_namespaces() -> None:
    """Skip the test where namespaces cannot be made (see :func:`tests.requirements.require`)."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    require("netns", not missing, f"{', '.join(missing)} not installed (iproute2, util-linux)")
    require("netns", os.geteuid() == 0, "namespaces with links between them need root")
    probe = _try(["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "sh", "-ec", _PROBE])
    require("netns", not probe, f"namespaces and links cannot be made here: {probe}")


def _try(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def _do(*command: str | Path) -> None:
    """Run a command that must succeed."""
    error = _try([str(word) for word in command])
    assert not error, (command, error)


@dataclasses.dataclass(frozen=True)
class Node:
    """One node.

    Attributes:
        name: Its host name.
        number: Its place among the nodes, from 0.
        pid: The process that holds its namespaces.
        switch: The process that holds the switch's.
    """

    name: str
    number: int
    pid: int
    switch: int

    @property
    def port(self) -> str:
        """Its port on the switch."""
        return f"port{self.number}"

    def inside(self, *command: str | Path) -> list[str]:
        """Give a command line that runs a command on the node."""
        spaces = ["--net", "--mount", "--uts", "--pid"]
        start = ["nsenter", "--target", str(self.pid), *spaces, f"--wd={ROOT}"]
        return [*start, "--", *map(str, command)]

    def do(self, *command: str | Path) -> None:
        """Run a command on the node; it must succeed."""
        _do(*self.inside(*command))

    def bind(self, folder: Path, at: Path) -> None:
        """Show a folder of the machine under a path of the node."""
        self.do("mount", "--bind", folder, at)

    def hide(self, folder: Path) -> None:
        """Show an empty folder in place of one."""
        self.do("mount", "-t", "tmpfs", "none", folder)

    def slow_down(self, rate: str) -> None:
        """Limit what goes to and from the node, such as ``2mbit``."""
        for pid, device in ((self.pid, "eth0"), (self.switch, self.port)):
            limit = ["tbf", "rate", rate, "burst", "16kb", "latency", "200ms"]
            _do(*_in_network(pid), "tc", "qdisc", "add", "dev", device, "root", *limit)

    def cut_off(self) -> None:
        """Pull the plug: nothing comes to or from the node any more, and nobody is told."""
        _do(*_in_network(self.switch), "ip", "link", "set", self.port, "down")

    def kill_all(self) -> None:
        """End everything that runs on the node, and the node."""
        os.kill(self.pid, signal.SIGKILL)

    def num_bytes_sent(self) -> int:
        """Give what has left the node through its link."""
        path = Path(f"/proc/{self.pid}/net/dev")
        (line,) = (text for text in path.read_text().splitlines() if "eth0:" in text)
        return int(line.split(":")[1].split()[8])


def _in_network(pid: int) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net", "--"]


@contextlib.contextmanager
def nodes(names: Sequence[str], folder: Path) -> Iterator[list[Node]]:
    """Start nodes that reach each other by name.

    Args:
        names: Their host names.
        folder: Takes what is needed for that.

    Yields:
        The nodes; they and all that runs on them end with the block.
    """
    require_namespaces()
    hosts = folder / "hosts"
    lines = [f"{_SUBNET}.{number + 1} {name}" for number, name in enumerate(names)]
    hosts.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
    # No name server is reached from here, and nobody shall wait for one.
    switches = folder / "nsswitch.conf"
    switches.write_text("hosts: files\n")
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(_holder("--net"))
        _do(*_in_network(switch), "ip", "link", "add", "bridge0", "type", "bridge")
        _do(*_in_network(switch), "ip", "link", "set", "bridge0", "up")
        found = []
        for number, name in enumerate(names):
            pid = stack.enter_context(_holder("--net", "--mount", "--uts"))
            node = Node(name, number, pid, switch)
            _join(node)
            node.do("hostname", name)
            node.bind(hosts, Path("/etc/hosts"))
            node.bind(switches, Path("/etc/nsswitch.conf"))
            found.append(node)
        yield found


def _join(node: Node) -> None:
    switch = _in_network(node.switch)
    peer = ["peer", "name", "eth0", "netns", str(node.pid)]
    _do(*switch, "ip", "link", "add", node.port, "type", "veth", *peer)
    _do(*switch, "ip", "link", "set", node.port, "master", "bridge0", "up")
    own = _in_network(node.pid)
    _do(*own, "ip", "address", "add", f"{_SUBNET}.{node.number + 1}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        _do(*own, "ip", "link", "set", device, "up")


@contextlib.contextmanager
def _holder(*spaces: str) -> Iterator[int]:
    """Hold namespaces; give the process that is in them. It goes when the tests do."""
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "--pid", "--fork"]
    command += ["--kill-child=KILL", "--mount-proc", "sleep", "infinity"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield _child_of(process.pid)
    finally:
        process.kill()
        process.wait()


def _child_of(pid: int) -> int:
    """Give the one process that another has started, once it runs what it is to run."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if children and Path(f"/proc/{children[0]}/comm").read_text().strip() == "sleep":
            return int(children[0])
        time.sleep(0.01)
    raise AssertionError("no namespace after 20 seconds")


class Running:
    """A command that runs on a node; its output goes to files, which no full pipe can stop."""

    def __init__(self, node: Node, arguments: Sequence[str | Path], env: Mapping[str, str]) -> None:
        """Start this interpreter on the node."""
        inherited = {k: v for k, v in os.environ.items() if k not in INHERITED}
        self.node = node
        self._files = [os.memfd_create(name) for name in ("stdout", "stderr")]
        self._started, self._ended = time.monotonic(), 0.0
        self._process = subprocess.Popen(
            node.inside(sys.executable, *arguments),
            env={**inherited, **ENVIRONMENT, **env},
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
        )

    def ends_before(self, deadline: float) -> bool:
        """Wait for its end until a time of the monotonic clock."""
        try:
            self._process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            return False
        self._ended = self._ended or time.monotonic()
        return True

    def close(self) -> None:
        """End it, if it still runs (what it started ends with the node)."""
        self._process.kill()
        self._process.wait()
        self._ended = self._ended or time.monotonic()

    def ended(self) -> Ended:
        """Give how it ended, once it has; ask only once."""
        stdout, stderr = (
            Path(f"/proc/self/fd/{file}").read_text(errors="replace") for file in self._files
        )
        for file in self._files:
            os.close(file)
        return Ended(self._process.returncode, stdout, stderr, self._ended - self._started)


def finish(running: Sequence[Running], timeout_sec: float) -> list[Ended]:
    """Wait for commands to end by themselves.

    Args:
        running: The commands.
        timeout_sec: After this, counted for all together, they are killed and the test fails.

    Returns:
        How each ended, in order.

    Raises:
        AssertionError: If one took too long; with the output of all.
    """
    deadline = time.monotonic() + timeout_sec
    in_time = all([command.ends_before(deadline) for command in running])
    for command in running:
        command.close()
    ended = [command.ended() for command in running]
    assert in_time, f"took too long: {show(ended)}"
    return ended


def start_torchrun(
    nodes: Sequence[Node], ranks_per_node: int, arguments: Sequence[str | Path]
) -> list[Running]:
    """Start torchrun on each node, as one would by hand.

    Args:
        nodes: The nodes.
        ranks_per_node: Ranks on each.
        arguments: ``-m MODULE`` and its arguments.
    """
    return [
        Running(
            node,
            [
                *("-m", "torch.distributed.run", f"--nnodes={len(nodes)}"),
                *(f"--nproc_per_node={ranks_per_node}", f"--node_rank={number}"),
                *(f"--master_addr={nodes[0].name}", f"--master_port={PORT}"),
                *arguments,
            ],
            {},
        )
        for number, node in enumerate(nodes)
    ]


def start_steps(
    nodes: Sequence[Node], ranks_per_node: int, arguments: Sequence[str | Path]
) -> list[Running]:
    """Start every rank on its own, with nothing but the variables that tell it who it is.

    Args:
        nodes: The nodes.
        ranks_per_node: Ranks on each.
        arguments: ``-m MODULE`` and its arguments.
    """
    size = len(nodes) * ranks_per_node
    return [
        Running(
            node,
            arguments,
            {
                "RANK": str(number * ranks_per_node + local),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(ranks_per_node),
                "MASTER_ADDR": nodes[0].name,
                "MASTER_PORT": str(PORT),
            },
        )
        for number, node in enumerate(nodes)
        for local in range(ranks_per_node)
    ]
