"""Memory that weights pass through: host buffers, and what stands for them on a device."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


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


class Slot:
    """A buffer on the device, with the host memory its bytes come from or go to.

    On the CPU both are the same memory. The tensor must outlive the view, so both stay together.

    Attributes:
        tensor: uint8 on the device, shape ``(num_bytes,)``.
        host: uint8 on the host, the same bytes after a copy.
        view: The host bytes.
        done: Event behind the last copy between the two; ``None`` on the CPU.
        used_bytes: How much of it holds something, where that varies.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Allocate ``num_bytes`` on the device, and page-locked on the host where they differ."""
        on_host = device.type == "cpu"
        self.host, self.view = host_bytes(num_bytes, pinned=not on_host)
        self.tensor = (
            self.host if on_host else torch.empty(num_bytes, dtype=torch.uint8, device=device)
        )
        self.done: Any = None if on_host else torch.Event(device)
        self.used_bytes = 0

    def wait(self) -> None:
        """Block until the last copy has arrived."""
        if self.done is not None:
            self.done.synchronize()


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
