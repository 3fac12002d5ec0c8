"""What torch and NVML say of this rank's device: memory, name, who else is on it, which node."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch

from dist_consolidate.runtime.numa import cpus_near
from dist_consolidate.runtime.nvml import NvmlError, Sought, bus_id_of, open_nvml, users_text
from dist_consolidate.runtime.rooms import Room


def device_room(device: torch.device, machine: str) -> Room:
    """Read how much of a device's memory is free.

    The driver tells it of the whole device, other processes counted, or of the MIG instance that
    this process may use.

    Args:
        device: An accelerator.
        machine: Equal on all ranks of this machine.

    Returns:
        Its memory, with a key that does not depend on which devices a rank may see.
    """
    free_bytes, total_bytes = torch.get_device_module(device).mem_get_info(device)
    uuid = _uuid(device)
    name = str(getattr(_properties(device), "name", device.type))
    source = f"{name} {uuid or device.index}"
    key = uuid or f"{machine} {device.type} {device.index}"
    instance = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    if instance.upper().startswith("MIG-"):
        # torch may tell the UUID of the whole GPU, whose instances share no memory.
        key = f"{key} {instance}"
    return Room(source, key, int(total_bytes), int(free_bytes))


def device_users(device: torch.device, own_pids: Collection[int]) -> str:
    """Say who else uses a device.

    Args:
        device: An accelerator.
        own_pids: The processes of this run on this machine.

    Returns:
        A clause, which may be that it is not known; empty where nobody does, and where nobody can
        be asked.
    """
    if not _is_nvidia(device):
        return ""
    try:
        with open_nvml() as nvml:
            return users_text(nvml, _sought(device), own_pids)
    except NvmlError as error:
        return f"who else uses it is not known ({error})"


def device_cpus(device: torch.device) -> frozenset[int]:
    """Tell which cores are near a device; empty where that is not known."""
    bus_id = _bus_id_by_torch(device)
    if not bus_id and _is_nvidia(device):
        try:
            with open_nvml() as nvml:
                bus_id = bus_id_of(nvml, _sought(device))
        except NvmlError:
            return frozenset()
    return cpus_near(bus_id)


def _is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def _sought(device: torch.device) -> Sought:
    return Sought(_uuid(device), device.index, os.environ.get("CUDA_VISIBLE_DEVICES", ""))


def _properties(device: torch.device) -> object:
    module = torch.get_device_module(device)
    ask = getattr(module, "get_device_properties", None)
    return None if ask is None else ask(device)


def _uuid(device: torch.device) -> str:
    uuid = str(getattr(_properties(device), "uuid", "") or "")
    return uuid if uuid.strip("0-") else ""  # some virtual devices have nothing but zeros


def _bus_id_by_torch(device: torch.device) -> str:
    """Give the bus id as newer releases of torch tell it; empty on others."""
    properties = _properties(device)
    numbers = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if not all(isinstance(number, int) for number in numbers):
        return ""
    domain, bus, slot = numbers
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
