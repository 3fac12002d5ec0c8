"""Who am I: rank, size, device, and the process groups to talk over.

A run is one plain process, a process that a launcher started beside others, or a rank of a process
group that the caller has initialized already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dist_consolidate.errors import UsageError
from dist_consolidate.runtime import mpi, rendezvous
from dist_consolidate.runtime.control import TIMEOUT_SEC, Control
from dist_consolidate.runtime.launched import Launched, find_launched
from dist_consolidate.runtime.sharing import Hardware, each_has_its_own, hardware_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

    from dist_consolidate.runtime.watch import Watch

# Where a watch tells live ranks from dead ones, a rank may wait for one that gets on.
_PATIENCE = 10
_UNWATCHED = (
    "not every rank reaches the port of rank 0 that tells which rank has failed (a firewall?); one "
    "that is killed or hangs would be noticed by gloo, without its name and file"
)


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """One rank's view of the run.

    Attributes:
        rank: This process.
        size: Number of processes.
        found_device: Where weights pass through; ``None`` where nobody looked, because one process
            on its own needs none.
        control: The control plane.
        local_size: Number of processes on this host, as far as the launcher says.
        data_group: The process group that carries weights.
        data_group_carries_device: Whether it takes the device's memory as it is.
        notes: What the report must say.
    """

    rank: int
    size: int
    found_device: torch.device | None
    control: Control
    local_size: int = 1
    data_group: Any = None
    data_group_carries_device: bool = True
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where weights pass through; the CPU where nobody looked for another one."""
        import torch

        return self.found_device or torch.device("cpu")

    @property
    def has_accelerator(self) -> bool:
        """Whether that is another device than the CPU."""
        return self.found_device is not None and self.found_device.type != "cpu"


def choose_device(request: str, local_rank: int) -> torch.device:
    """Choose the device that weights pass through.

    Args:
        request: ``auto``, ``cpu`` or ``cuda``.
        local_rank: This rank's number on its host.

    Returns:
        The device; where only one is visible, that one.

    Raises:
        UsageError: If there is no such device.
    """
    import torch

    if request == "cpu":
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or (request != "auto" and found.type != request):
        if request == "auto":
            return torch.device("cpu")
        raise UsageError(f"--device {request}: torch sees no such device here; use --device cpu")
    return torch.device(found.type, local_rank % torch.accelerator.device_count())


def _device_index(launched: Launched) -> int:
    """Give the rank's number on its host; in a group without one, the caller's current device."""
    import torch

    if launched.local_rank is not None:
        return launched.local_rank
    if _is_initialized() and torch.accelerator.is_available():
        return torch.accelerator.current_device_index()
    return 0


def _backend(device: torch.device, hardware: Sequence[Hardware]) -> str:
    """NCCL (or its like) for accelerators, gloo for CPUs and where ranks share an accelerator."""
    import torch.distributed as dist

    if not each_has_its_own(hardware):
        return "gloo"
    return dist.get_default_backend_for_device(device)


def _default_group_carries(device: torch.device) -> bool:
    """Whether the default group has the device's own backend (NCCL) for its memory."""
    import torch.distributed as dist

    return dist.get_default_backend_for_device(device) in str(dist.get_backend_config())


@contextlib.contextmanager
def join_world(
    device_request: str,
    *,
    launch: bool,
    lean: bool = False,
    launcher: str = "auto",
    rendezvous_timeout_sec: float = rendezvous.TIMEOUT_SEC,
    timeout_sec: float = TIMEOUT_SEC,
    watch: Watch | None = None,
) -> Iterator[World]:
    """Become a rank of the run; everything that was set up is taken down again.

    Args:
        device_request: ``auto``, ``cpu`` or ``cuda``.
        lean: A process on its own needs no device; torch is not imported to look for one.
        launch: Initialize the default process group as the launcher says, if there is none.
        launcher: Whose variables count; see :func:`find_launched`.
        rendezvous_timeout_sec: How long ranks wait for each other at the start.
        timeout_sec: How long ranks wait for one that gets nothing done.
        watch: Who ends this process where the main thread cannot.

    Yields:
        This rank's world.

    Raises:
        UsageError: If the environment or the device is wrong.
        RendezvousError: If not all ranks come.
    """
    launched = find_launched(launcher=launcher) if launch else _hints(launcher)
    listening: socket.socket | None = None
    if launch and launched.launcher == "mpi" and launched.size != 1:
        launched, listening = mpi.join(launched)
    size = launched.size if launch else 1
    if lean and size == 1 and not _is_initialized():
        yield World(0, 1, None, Control(0, 1, watch=watch))
        return
    device = choose_device(device_request, _device_index(launched))
    with _current_device(device):
        if _is_initialized():
            yield from _distributed(device, launched, timeout_sec, watch)
        elif size > 1:
            _meet(device, launched, rendezvous_timeout_sec, listening, watch)
            try:
                yield from _distributed(device, launched, timeout_sec, watch)
            finally:
                _leave()
        else:
            yield World(0, 1, device, Control(0, 1, watch=watch))


def _hints(launcher: str) -> Launched:
    """Say what the environment tells of a group that the caller has made, if it makes sense."""
    try:
        return find_launched(launcher=launcher)
    except UsageError:
        return Launched()


def _is_initialized() -> bool:
    if "torch" not in sys.modules:
        return False  # and so nobody can have initialized anything
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


@contextlib.contextmanager
def _current_device(device: torch.device) -> Iterator[None]:
    if device.type == "cpu":
        yield
        return
    import torch

    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


def _distributed(
    device: torch.device, launched: Launched, timeout_sec: float, watch: Watch | None
) -> Iterator[World]:
    import torch.distributed as dist

    group = None
    notes: tuple[str, ...] = ()
    try:
        rank, size = dist.get_rank(), dist.get_world_size()
        patience = 1 if watch is None or size == 1 else _PATIENCE
        with rendezvous.connecting(launched):
            group = _new_group(patience * timeout_sec)
        control = Control(rank, size, group, timeout_sec=timeout_sec, watch=watch)
        if watch is not None and size > 1 and not watch.join(control, launched.address):
            # Nobody tells who lives: then the group's own timeout must.
            dist.destroy_process_group(group)
            group = _new_group(timeout_sec)
            control = Control(rank, size, group, timeout_sec=timeout_sec, watch=watch)
            notes = (_UNWATCHED,)
        carries = device.type == "cpu" or _default_group_carries(device)
        data_group = group if device.type == "cpu" or not carries else dist.group.WORLD
        here = launched.local_size or 1
        yield World(rank, size, device, control, here, data_group, carries, notes)
    finally:
        if watch is not None:
            watch.part()
        if group is not None:
            dist.destroy_process_group(group)


def _new_group(timeout_sec: float) -> Any:  # noqa: ANN401 - a process group
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_sec))


def _leave() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def _meet(
    device: torch.device,
    launched: Launched,
    timeout_sec: float,
    listening: socket.socket | None,
    watch: Watch | None,
) -> None:
    """Initialize the default process group."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store = rendezvous.meet(launched, timeout_sec, listening, with_nccl=device.type != "cpu")
    if watch is not None:
        watch.connect_within(timeout_sec)
    with rendezvous.connecting(launched):
        hardware = _tell_hardware(PrefixStore("devices", store), device, launched)
        backend = _backend(device, hardware)
        options: dict[str, Any] = {"device_id": device}
        if backend == "gloo":  # no weights pass through this group: its time is for connecting
            options = {"timeout": datetime.timedelta(seconds=timeout_sec)}
        dist.init_process_group(
            backend,
            rank=launched.rank,
            world_size=launched.size,
            store=PrefixStore("default_pg", store),
            **options,
        )


def _tell_hardware(store: Store, device: torch.device, launched: Launched) -> list[Hardware]:
    """Tell all ranks what this one's device is, and learn of theirs, before there is a group."""
    store.set(str(launched.rank), hardware_of(device, launched.local_size or 1).to_json())
    told = [store.get(str(rank)) for rank in range(launched.size)]
    return [Hardware.from_json(text.decode()) for text in told]
