"""Whether ranks share devices, which NCCL refuses: asked of the devices, not of their numbers.

How many devices a rank sees says little. Under ``srun --gpus-per-task=1`` four ranks of one host
see one device each, and each another one; what ``CUDA_VISIBLE_DEVICES`` holds is no help, because
where SLURM confines a task by cgroups its only device is number 0 for every task. With
``--gpu-bind=closest`` ranks see several, and two may choose the same. So each rank tells which
piece of hardware its device is, and all of them decide alike from what all have told: a rank that
chose another backend than the others would hang.

NCCL compares the PCI address on one machine. Two slices of one GPU (MIG) have an address in common
though their UUIDs differ, and NCCL refuses them: so the address counts where torch knows it (newer
releases do), and the UUID, which no two GPUs on earth share, in any case.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """What one rank's device is.

    Attributes:
        kind: Type of the device.
        ids: Names of the hardware that no other piece of hardware has; nothing where unknown.
        is_crowded: Whether the rank's host has more ranks than the rank sees devices.
    """

    kind: str
    ids: tuple[str, ...] = ()
    is_crowded: bool = False

    def to_json(self) -> str:
        """Put it into words for other ranks."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """Read another rank's words."""
        values = json.loads(text)
        return cls(values["kind"], tuple(values["ids"]), values["is_crowded"])


def hardware_of(device: torch.device, local_size: int) -> Hardware:
    """Tell what a device is.

    Args:
        device: The device.
        local_size: Number of ranks on this host.

    Returns:
        What all ranks should know of it.
    """
    if device.type == "cpu":
        return Hardware("cpu")
    import torch

    module = torch.get_device_module(device)
    properties = module.get_device_properties(device)
    is_crowded = local_size > torch.accelerator.device_count()
    return Hardware(device.type, tuple(_ids(properties, _is_slice(device))), is_crowded)


def each_has_its_own(hardware: Sequence[Hardware]) -> bool:
    """Tell whether every rank has an accelerator to itself, all of one type.

    Args:
        hardware: What each rank has.

    Returns:
        Whether NCCL (or its like) can connect them.
    """
    if any(one.kind == "cpu" or one.kind != hardware[0].kind for one in hardware):
        return False
    if any(not one.ids for one in hardware):
        # Devices that do not say who they are: as many of them as ranks must be enough.
        return not any(one.is_crowded for one in hardware)
    owners = collections.Counter(name for one in hardware for name in set(one.ids))
    return max(owners.values()) == 1


def _ids(properties: object, is_slice: bool) -> list[str]:
    ids = []
    address = [
        getattr(properties, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")
    ]
    if None not in address:
        ids.append(f"pci {_machine()} {' '.join(map(str, address))}")
    uuid = getattr(properties, "uuid", None)
    # A slice's own UUID hides that it is one of several of the same GPU.
    if uuid is not None and (ids or not is_slice):
        ids.append(f"uuid {uuid}")
    return ids


def _is_slice(device: torch.device) -> bool:
    """Tell whether a device was given to this process as a slice of a GPU (MIG)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = device.index or 0
    return index < len(visible) and visible[index].strip().startswith("MIG-")


def _machine() -> str:
    """Name this machine as all its containers do, and no other machine does."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return platform.node()
