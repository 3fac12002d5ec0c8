"""Who am I: rank, size, device, and the process groups to talk over.

A run is one plain process, a process that a launcher started beside others, or a rank of a process
group that the caller has initialized already.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dist_consolidate.errors import UsageError
from dist_consolidate.runtime.control import TIMEOUT, Control
from dist_consolidate.runtime.launched import Launched, find_launched

if TYPE_CHECKING:
    import torch


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
        address: Where the ranks met, if the launcher said.
    """

    rank: int
    size: int
    found_device: torch.device | None
    control: Control
    local_size: int = 1
    data_group: Any = None
    data_group_carries_device: bool = True
    address: str | None = None

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


def _backend(device: torch.device, local_size: int) -> str:
    """NCCL (or its like) for accelerators, gloo for CPUs and where ranks share an accelerator."""
    import torch
    import torch.distributed as dist

    if device.type == "cpu" or local_size > torch.accelerator.device_count():
        return "gloo"
    return dist.get_default_backend_for_device(device)


def _default_group_carries(device: torch.device) -> bool:
    """Whether the default group has the device's own backend (NCCL) for its memory."""
    import torch.distributed as dist

    return dist.get_default_backend_for_device(device) in str(dist.get_backend_config())


@contextlib.contextmanager
def join_world(device_request: str, *, launch: bool, lean: bool = False) -> Iterator[World]:
    """Become a rank of the run; everything that was set up is taken down again.

    Args:
        device_request: ``auto``, ``cpu`` or ``cuda``.
        lean: A process on its own needs no device; torch is not imported to look for one.
        launch: Initialize the default process group as the launcher says, if there is none.

    Yields:
        This rank's world.

    Raises:
        UsageError: If the environment or the device is wrong.
    """
    launched = find_launched() if launch else _hints()
    size = launched.size if launch else 1
    if lean and size == 1 and not _is_initialized():
        yield World(0, 1, None, Control(0, 1))
        return
    device = choose_device(device_request, _device_index(launched))
    with _current_device(device):
        if size > 1 or _is_initialized():
            yield from _distributed(device, launched)
        else:
            yield World(0, 1, device, Control(0, 1))


def _hints() -> Launched:
    """Say what the environment tells of a group that the caller has made, if it makes sense."""
    try:
        return find_launched()
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


def _distributed(device: torch.device, launched: Launched) -> Iterator[World]:
    import torch.distributed as dist

    local_size = launched.local_size or 1
    ours = not dist.is_initialized()
    if ours:
        _meet(device, launched, _backend(device, local_size))
    group = None
    try:
        group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        rank, size = dist.get_rank(), dist.get_world_size()
        carries = device.type == "cpu" or _default_group_carries(device)
        data_group = group if device.type == "cpu" or not carries else dist.group.WORLD
        control = Control(rank, size, group)
        where = launched.address
        yield World(rank, size, device, control, local_size, data_group, carries, where)
    finally:
        if group is not None:
            dist.destroy_process_group(group)
        if ours:
            dist.destroy_process_group()


def _meet(device: torch.device, launched: Launched, backend: str) -> None:
    """Initialize the default process group."""
    import torch.distributed as dist

    options: dict[str, Any] = {} if backend == "gloo" else {"device_id": device}
    if launched.launcher != "torchrun":  # torchrun's agent may hold the store already
        options["init_method"] = f"tcp://{launched.address}:{launched.port}"
    dist.init_process_group(backend, rank=launched.rank, world_size=launched.size, **options)
