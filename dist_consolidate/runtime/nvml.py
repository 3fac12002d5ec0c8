"""Who else uses an NVIDIA card, and where it is plugged in; optional, and never in the way.

Cards are found by UUID. Ordinals differ between NVML (bus order, every card of the machine) and
CUDA (``CUDA_DEVICE_ORDER``, ``CUDA_VISIBLE_DEVICES``); UUIDs do not.

Sources: NVIDIA's NVML API reference (device queries, multi-instance GPU management) and the CUDA
programming guide on ``CUDA_VISIBLE_DEVICES``, which takes full and abbreviated UUIDs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from dist_consolidate.units import format_bytes

_T = TypeVar("_T")
_MAX_SHOWN = 4
_INSTALL = "install nvidia-ml-py to be told who else uses the card"


class Card(NamedTuple):
    """A GPU, or an instance of one in MIG mode.

    Attributes:
        uuid: As NVML writes it: ``GPU-...`` or ``MIG-...``.
        parent: The UUID of the GPU that it is an instance of; empty for a GPU.
    """

    uuid: str
    parent: str = ""


class Process(NamedTuple):
    """A process that holds memory of a card.

    Attributes:
        pid: As the host counts, which a container may not.
        num_bytes: What it holds; ``None`` where the driver does not say.
        name: What it runs; empty where that cannot be read.
    """

    pid: int
    num_bytes: int | None
    name: str


class NvmlError(Exception):
    """NVML has no answer; the text says why."""


class Nvml(Protocol):
    """What is asked of NVML; every method may raise :class:`NvmlError`."""

    def cards(self) -> Sequence[Card]:
        """Give all cards of the machine, and their instances, that may be seen from here."""

    def bus_id(self, uuid: str) -> str:
        """Give where a GPU is plugged in, such as ``00000000:65:00.0``."""

    def processes(self, uuid: str) -> Sequence[Process]:
        """Give the processes that use a card."""


@contextlib.contextmanager
def open_nvml() -> Iterator[Nvml]:
    """Open NVML by the ``pynvml`` module.

    Yields:
        NVML.

    Raises:
        NvmlError: If the module or the driver's library is not there or does not work.
    """
    try:
        import pynvml
    except ImportError as error:
        raise NvmlError(_INSTALL) from error
    answers = _Pynvml(pynvml)
    answers.asked(pynvml.nvmlInit)
    try:
        yield answers
    finally:
        with contextlib.suppress(NvmlError):
            answers.asked(pynvml.nvmlShutdown)


class _Pynvml:
    """NVML through ``pynvml``: handles and errors stay in here."""

    def __init__(self, module: Any) -> None:  # noqa: ANN401 - a module without types
        self._module = module

    def asked(self, call: Callable[..., _T], *arguments: object) -> _T:
        """Call NVML; whatever it says against it becomes one kind of error."""
        try:
            return call(*arguments)
        # A library older than the module lacks functions; an older module lacks names.
        except (self._module.NVMLError, AttributeError, OSError, ValueError) as error:
            raise NvmlError(f"NVML: {error}") from error

    def _call(self, name: str, *arguments: object) -> Any:  # noqa: ANN401 - without types
        return self.asked(lambda: getattr(self._module, name)(*arguments))

    def cards(self) -> Sequence[Card]:
        found = []
        for index in range(self._call("nvmlDeviceGetCount")):
            # A container may be kept from some of the cards.
            with contextlib.suppress(NvmlError):
                handle = self._call("nvmlDeviceGetHandleByIndex", index)
                uuid = _text(self._call("nvmlDeviceGetUUID", handle))
                found += [Card(uuid), *(Card(one, uuid) for one in self._instances(handle))]
        return found

    def _instances(self, handle: object) -> Iterator[str]:
        try:
            if not self._call("nvmlDeviceGetMigMode", handle)[0]:
                return
            count = self._call("nvmlDeviceGetMaxMigDeviceCount", handle)
        except NvmlError:  # a card that has no such mode
            return
        for index in range(count):
            with contextlib.suppress(NvmlError):  # not every place is taken
                instance = self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
                yield _text(self._call("nvmlDeviceGetUUID", instance))

    def bus_id(self, uuid: str) -> str:
        handle = self._call("nvmlDeviceGetHandleByUUID", uuid.encode())
        return _text(self._call("nvmlDeviceGetPciInfo", handle).busId)

    def processes(self, uuid: str) -> Sequence[Process]:
        handle = self._call("nvmlDeviceGetHandleByUUID", uuid.encode())
        found = {}
        for kind in ("Compute", "Graphics"):
            for one in self._call(f"nvmlDeviceGet{kind}RunningProcesses", handle):
                found[one.pid] = Process(one.pid, one.usedGpuMemory, self._name(one.pid))
        return list(found.values())

    def _name(self, pid: int) -> str:
        # Not from /proc: in a container the same number there is another process.
        with contextlib.suppress(NvmlError):
            return _text(self._call("nvmlSystemGetProcessName", pid))
        return ""


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


@dataclasses.dataclass(frozen=True, slots=True)
class Sought:
    """A device as this process knows it.

    Attributes:
        uuid: As torch says, with or without the kind in front.
        index: Its ordinal in this process.
        visible: ``CUDA_VISIBLE_DEVICES``; empty where it is not set.
    """

    uuid: str
    index: int
    visible: str = ""


def find_card(cards: Sequence[Card], sought: Sought) -> Card | None:
    """Find the card that a device of this process is.

    Args:
        cards: All there are.
        sought: The device.

    Returns:
        The card, or ``None`` where that is not sure.
    """
    named = _by_prefix(cards, _visible_uuid(sought))
    same = [card for card in cards if _bare(card.uuid) == _bare(sought.uuid)]
    instances = [card for card in same if card.parent]
    if instances:
        return instances[0]
    if not same:
        return named
    gpu = same[0]
    if not any(card.parent == gpu.uuid for card in cards):
        return gpu
    # torch may have told the UUID of the whole GPU, while its memory is that of an instance.
    return named if named is not None and named.parent == gpu.uuid else None


def _visible_uuid(sought: Sought) -> str:
    entries = [entry.strip() for entry in sought.visible.split(",")]
    if entries[0].upper().startswith("MIG-"):
        return entries[0]  # CUDA gives a process one instance, whatever else is listed
    entry = entries[sought.index] if sought.index < len(entries) else ""
    return entry if entry.upper().startswith("GPU-") else ""


def _by_prefix(cards: Sequence[Card], prefix: str) -> Card | None:
    """Find what an abbreviation stands for, if it stands for one card only."""
    found = [card for card in cards if prefix and card.uuid.lower().startswith(prefix.lower())]
    return found[0] if len(found) == 1 else None


def _bare(uuid: str) -> str:
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def bus_id_of(nvml: Nvml, sought: Sought) -> str:
    """Tell where a device is plugged in.

    Args:
        nvml: NVML.
        sought: The device.

    Returns:
        The bus id; empty where the card is not found.

    Raises:
        NvmlError: If NVML does not say.
    """
    cards = nvml.cards()
    card = find_card(cards, sought)
    if card is not None:
        return nvml.bus_id(card.parent or card.uuid)
    # Which instance it is does not matter for that.
    gpus = [one for one in cards if not one.parent and _bare(one.uuid) == _bare(sought.uuid)]
    return nvml.bus_id(gpus[0].uuid) if gpus else ""


def users_text(nvml: Nvml, sought: Sought, own_pids: Collection[int]) -> str:
    """Say who else uses a card.

    Args:
        nvml: NVML.
        sought: The device.
        own_pids: The processes of this run.

    Returns:
        A clause without a full stop; empty if nobody does.

    Raises:
        NvmlError: If NVML does not say.
    """
    card = find_card(nvml.cards(), sought)
    if card is None:
        raise NvmlError("NVML: does not show which card this is")
    everyone = nvml.processes(card.uuid)
    others = sorted(
        (one for one in everyone if one.pid not in own_pids),
        key=lambda one: (-(one.num_bytes or 0), one.pid),
    )
    if not others:
        return ""
    shown = [_process_text(one) for one in others[:_MAX_SHOWN]]
    if len(others) > _MAX_SHOWN:
        shown.append(f"{len(others) - _MAX_SHOWN} more")
    # This run has a context on the card; if it is not in the list, the list counts otherwise.
    is_ours = len(others) < len(everyone)
    doubt = "" if is_ours else " (process ids of the host; this run's own may be among them)"
    return f"also in use by {', '.join(shown)}{doubt}"


def _process_text(one: Process) -> str:
    held = "an unknown amount" if one.num_bytes is None else format_bytes(one.num_bytes)
    return f"process {one.pid} ({one.name}, {held})" if one.name else f"process {one.pid} ({held})"
