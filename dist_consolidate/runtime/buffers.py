"""Memory that weights pass through: allocated once, handed from stage to stage, and given back."""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import torch

_Buffer = TypeVar("_Buffer")


def use_device(device: torch.device) -> None:
    """Make a device the calling thread's current one; a new thread starts on the first."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def host_bytes(num_bytes: int, *, pinned: bool) -> tuple[torch.Tensor, memoryview]:
    """Allocate host memory that both torch and the operating system can write into.

    Args:
        num_bytes: Size.
        pinned: Page-lock it, so that copies from and to an accelerator need not wait.

    Returns:
        A uint8 tensor of shape ``(num_bytes,)`` and a view of the same memory.
    """
    tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    if not num_bytes:
        return tensor, memoryview(bytearray())
    raw = (ctypes.c_char * num_bytes).from_address(tensor.data_ptr())
    return tensor, memoryview(raw).cast("B")


class Pool(Generic[_Buffer]):
    """Buffers that go round: who gives one back lets somebody else go on.

    This is how credits flow: nobody can be further ahead than there are buffers.
    """

    def __init__(self, buffers: Iterable[_Buffer]) -> None:
        """Own the buffers."""
        self._free: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)

    def take(self) -> _Buffer | None:
        """Give a buffer; blocks until there is one, or gives ``None`` once the pool is closed."""
        return self._free.get()

    def give_back(self, buffer: _Buffer) -> None:
        """Return a buffer."""
        self._free.put(buffer)

    def close(self) -> None:
        """Wake one thread that waits for a buffer, in vain."""
        self._free.put(None)


class Table:
    """Room for the rows of one bucket, on the device.

    The tensor must outlive the view, so both stay together.

    Attributes:
        tensor: uint8, shape ``(num_bytes,)``.
        view: The same memory for the operating system, on the CPU; else ``None``.
        arrived: Event behind the last copy of rows into it, on an accelerator.
        gathered: Event behind the exchange, on an accelerator.
        released: Event behind the last use of what was in it, on an accelerator.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate it."""
        self.view: memoryview | None = None
        if device.type == "cpu":
            self.tensor, self.view = host_bytes(num_bytes, pinned=False)
        else:
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self.arrived, self.gathered = torch.Event(device), torch.Event(device)
            self.released = torch.Event(device)

    def rows(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """Give its first bytes as rows, shape ``(num_rows, row_bytes)``."""
        return self.tensor[: num_rows * row_bytes].view(num_rows, row_bytes)


class Slot:
    """A staging buffer: output bytes on the device, with the host memory they go to.

    On the CPU both are the same memory. The tensor must outlive the view, so both stay together.

    Attributes:
        tensor: uint8 on the device, shape ``(num_bytes,)``.
        host: uint8 on the host, the same bytes after a copy.
        view: The host bytes.
        filled: Event behind what was put into ``tensor``; ``None`` on the CPU.
        arrived: Event behind the copy to the host; ``None`` on the CPU.
        used_bytes: How much of it holds something.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate ``num_bytes`` on the device, and page-locked on the host where they differ."""
        on_host = device.type == "cpu"
        self.host, self.view = host_bytes(num_bytes, pinned=not on_host)
        self.tensor = (
            self.host if on_host else torch.empty(num_bytes, dtype=torch.uint8, device=device)
        )
        self.filled: Any = None if on_host else torch.Event(device)
        self.arrived: Any = None if on_host else torch.Event(device)
        self.used_bytes = 0


class HostSlot:
    """Page-locked host memory on the way to a device.

    Attributes:
        tensor: uint8, shape ``(num_bytes,)``.
        view: The same memory for the operating system.
        done: Event behind the last copy out of it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate; ``device`` is an accelerator."""
        self.tensor, self.view = host_bytes(num_bytes, pinned=True)
        self.done = torch.Event(device)
