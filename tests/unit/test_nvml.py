"""NVML's answers, recorded in its words and shapes, and what is said of them."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import pytest

from dist_consolidate.runtime import device_memory
from dist_consolidate.runtime.nvml import (
    Card,
    NvmlError,
    Process,
    Sought,
    bus_id_of,
    find_card,
    open_nvml,
    users_text,
)

H100 = "GPU-8c2f1a70-3f0e-6e1f-0c4a-5b8f6a2d9e11"
H100_BARE = H100.removeprefix("GPU-")
OTHER = "GPU-8c2f9b31-aaaa-bbbb-cccc-0123456789ab"
MIG_3G = "MIG-5f1a7d0e-94a1-5b7c-9b53-2f0c7e1d4a66"
MIG_1G = "MIG-77d0c1b2-1c1c-5d5d-8e8e-aabbccddeeff"
OLD_MIG = f"MIG-{H100}/1/0"
GB = 10**9


@dataclasses.dataclass
class Recorded:
    """Answers of one machine; an error is raised instead of being given."""

    cards_: list = dataclasses.field(default_factory=lambda: [Card(H100), Card(OTHER)])
    processes_: dict = dataclasses.field(default_factory=dict)
    bus_ids: dict = dataclasses.field(default_factory=lambda: {H100: "00000000:65:00.0"})

    def cards(self):
        return self.cards_

    def bus_id(self, uuid):
        return self.bus_ids[uuid]

    def processes(self, uuid):
        answer = self.processes_[uuid]
        if isinstance(answer, Exception):
            raise answer
        return answer


# An H100 in half: 3g.40gb and 1g.10gb.
MIG_CARDS = [Card(H100), Card(MIG_3G, H100), Card(MIG_1G, H100), Card(OTHER)]


def test_an_h100_with_two_processes():
    held = [
        Process(4242, 61 * GB, "/opt/conda/bin/python"),
        Process(77, 500_000_000, "ours"),
        Process(4300, 12 * GB, ""),
    ]
    nvml = Recorded(processes_={H100: held})
    text = users_text(nvml, Sought(H100_BARE, 0), {77})
    assert text == (
        "also in use by process 4242 (/opt/conda/bin/python, 61 GB), process 4300 (12 GB)"
    )


def test_a_card_for_ourselves():
    assert users_text(Recorded(processes_={H100: []}), Sought(H100_BARE, 0), {77}) == ""
    mine = [Process(77, GB, "ours"), Process(78, GB, "ours")]
    assert users_text(Recorded(processes_={H100: mine}), Sought(H100_BARE, 0), {77, 78}) == ""


def test_in_a_container_ids_are_the_hosts_and_memory_is_not_told():
    nvml = Recorded(processes_={H100: [Process(918273, None, "")]})
    assert users_text(nvml, Sought(H100_BARE, 0), {12}) == (
        "also in use by process 918273 (an unknown amount) (process ids of the host; this run's "
        "own may be among them)"
    )


def test_many_processes_are_counted():
    held = [Process(1, 1, "ours"), *(Process(100 + n, n * GB, f"p{n}") for n in range(1, 8))]
    text = users_text(Recorded(processes_={H100: held}), Sought(H100_BARE, 0), {1})
    assert text.startswith("also in use by process 107 (p7, 7 GB), process 106 (p6, 6 GB), ")
    assert text.endswith(", process 104 (p4, 4 GB), 3 more")


def test_insufficient_permissions():
    nvml = Recorded(processes_={H100: NvmlError("NVML: Insufficient Permissions")})
    with pytest.raises(NvmlError, match="Insufficient Permissions"):
        users_text(nvml, Sought(H100_BARE, 0), set())


@pytest.mark.parametrize("uuid", [H100, H100_BARE, H100_BARE.upper()])
@pytest.mark.parametrize("visible", ["", "1,0", "7", f"{OTHER},{H100}"])
def test_a_gpu_is_found_by_its_uuid_whatever_ordinals_say(uuid, visible):
    assert find_card([Card(OTHER), Card(H100)], Sought(uuid, 0, visible)) == Card(H100)


@pytest.mark.parametrize(
    ("visible", "index", "card"),
    [
        (H100, 0, H100),
        ("GPU-8c2f1", 0, H100),
        ("GPU-8c2f1, gpu-8c2f9", 1, OTHER),
        ("GPU-8c2f", 0, None),  # stands for two
        ("GPU-0", 0, None),
        ("GPU-8c2f1", 1, None),
        ("0,1", 1, None),  # an ordinal says nothing
    ],
)
def test_abbreviated_uuids_where_torch_tells_none(visible, index, card):
    found = find_card([Card(H100), Card(OTHER)], Sought("", index, visible))
    assert found == (None if card is None else Card(card))


@pytest.mark.parametrize("visible", [MIG_3G, MIG_3G[:12], f"{MIG_3G},{MIG_1G}", ""])
def test_an_instance_by_torchs_uuid(visible):
    sought = Sought(MIG_3G.removeprefix("MIG-"), 0, visible)
    assert find_card(MIG_CARDS, sought) == Card(MIG_3G, H100)


@pytest.mark.parametrize("visible", [MIG_3G, MIG_3G[:12].lower(), f"{MIG_3G},{MIG_1G}"])
def test_an_instance_where_torch_tells_the_whole_gpus_uuid(visible):
    assert find_card(MIG_CARDS, Sought(H100_BARE, 0, visible)) == Card(MIG_3G, H100)


@pytest.mark.parametrize("visible", ["", "0", H100, "MIG-", "MIG-0000"])
def test_the_processes_of_other_instances_are_not_ours_to_name(visible):
    sought = Sought(H100_BARE, 0, visible)
    assert find_card(MIG_CARDS, sought) is None
    # Where the card is plugged in is the same for all of them.
    assert bus_id_of(Recorded(MIG_CARDS), sought) == "00000000:65:00.0"
    with pytest.raises(NvmlError, match="which card this is"):
        users_text(Recorded(MIG_CARDS), sought, set())


def test_the_names_of_instances_before_driver_470():
    cards = [Card(H100), Card(OLD_MIG, H100), Card(f"MIG-{H100}/2/0", H100)]
    assert find_card(cards, Sought(H100_BARE, 0, OLD_MIG)) == Card(OLD_MIG, H100)


def test_an_instance_lists_its_own_processes():
    held = {MIG_3G: [Process(5, 30 * GB, "python"), Process(77, GB, "ours")]}
    nvml = Recorded(MIG_CARDS, held)
    assert users_text(nvml, Sought(H100_BARE, 0, MIG_3G), {77}) == (
        "also in use by process 5 (python, 30 GB)"
    )


def test_a_card_that_nvml_does_not_show():
    assert bus_id_of(Recorded([]), Sought(H100_BARE, 0)) == ""


# Through pynvml itself.


@pytest.fixture
def pynvml(monkeypatch):
    """The real module with recorded answers in place of the driver's library."""
    module = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")

    def error(name):
        raise module.NVMLError(getattr(module, f"NVML_ERROR_{name}"))

    def instance(handle, index):
        return (handle, index) if index == 1 else error("NOT_FOUND")

    def uuid(handle):
        known = {"gpu0": H100, "gpu1": OTHER, ("gpu0", 1): MIG_3G}
        return known[handle] if handle in known else error("NO_PERMISSION")

    by_uuid = {H100.encode(): "gpu0", OTHER.encode(): "gpu1", MIG_3G.encode(): ("gpu0", 1)}
    held = {"gpu1": [SimpleNamespace(pid=9, usedGpuMemory=3 * GB)]}
    names = {9: "/usr/bin/trainer"}
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda index: f"gpu{index}",
        "nvmlDeviceGetUUID": uuid,
        "nvmlDeviceGetMigMode": lambda h: [1, 1] if h == "gpu0" else error("NOT_SUPPORTED"),
        "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
        "nvmlDeviceGetMigDeviceHandleByIndex": instance,
        "nvmlDeviceGetHandleByUUID": lambda text: by_uuid.get(text) or error("NOT_FOUND"),
        "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=b"00000000:65:00.0"),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: held.get(handle, []),
        "nvmlDeviceGetGraphicsRunningProcesses": lambda handle: [
            SimpleNamespace(pid=10, usedGpuMemory=None)
        ],
        "nvmlSystemGetProcessName": lambda pid: names.get(pid) or error("NOT_FOUND"),
    }
    for name, answer in answers.items():
        assert hasattr(module, name)
        monkeypatch.setattr(module, name, answer)
    return SimpleNamespace(module=module, error=error, set=monkeypatch.setattr)


def test_cards_and_processes_through_pynvml(pynvml):
    with open_nvml() as nvml:
        # The third GPU is kept from this container.
        assert nvml.cards() == [Card(H100), Card(MIG_3G, H100), Card(OTHER)]
        assert nvml.bus_id(H100) == "00000000:65:00.0"
        assert nvml.processes(OTHER) == [
            Process(9, 3 * GB, "/usr/bin/trainer"),
            Process(10, None, ""),
        ]
        with pytest.raises(NvmlError, match=r"NVML: Not Found"):
            nvml.processes("GPU-none")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("LIB_RM_VERSION_MISMATCH", "RM has detected an NVML/RM version mismatch"),
        ("DRIVER_NOT_LOADED", "Driver Not Loaded"),
        ("NO_PERMISSION", "Insufficient Permissions"),
        ("LIBRARY_NOT_FOUND", "NVML Shared Library Not Found"),
    ],
)
def test_a_driver_that_does_not_answer(pynvml, monkeypatch, name, words):
    # What the module asks the library for the text of is not to be had without one.
    monkeypatch.setattr(pynvml.module.NVMLError, "__str__", lambda self: words)
    pynvml.set(pynvml.module, "nvmlInit", lambda: pynvml.error(name))
    with pytest.raises(NvmlError, match=f"NVML: {words}"), open_nvml():
        pass


def test_an_older_module_without_the_names(pynvml, monkeypatch):
    monkeypatch.delattr(pynvml.module, "nvmlDeviceGetMigMode")
    with open_nvml() as nvml:
        assert nvml.cards() == [Card(H100), Card(OTHER)]
        monkeypatch.delattr(pynvml.module, "nvmlDeviceGetCount")
        with pytest.raises(NvmlError, match="nvmlDeviceGetCount"):
            nvml.cards()


def test_no_module_at_all(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlError, match="install nvidia-ml-py"), open_nvml():
        pass


def test_nvml_that_fails_is_no_failure(monkeypatch):
    """As a rank asks: a text that says so, and no cores to keep to."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(device_memory, "_properties", lambda device: SimpleNamespace(uuid=H100))
    device = SimpleNamespace(type="cuda", index=0)
    assert device_memory.device_users(device, {1}) == (
        "who else uses it is not known (install nvidia-ml-py to be told who else uses the card)"
    )
    assert device_memory.device_cpus(device) == frozenset()


def test_a_rank_asks_for_its_own_card(pynvml, monkeypatch):
    properties = SimpleNamespace(uuid=OTHER.removeprefix("GPU-"))
    monkeypatch.setattr(device_memory, "_properties", lambda device: properties)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    device = SimpleNamespace(type="cuda", index=0)
    assert device_memory.device_users(device, {10}) == (
        "also in use by process 9 (/usr/bin/trainer, 3 GB)"
    )
    asked = []
    monkeypatch.setattr(device_memory, "cpus_near", lambda bus: asked.append(bus) or frozenset())
    device_memory.device_cpus(device)
    properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id = 0, 0xC1, 0
    device_memory.device_cpus(device)
    assert asked == ["00000000:65:00.0", "0000:c1:00.0"]
    assert device_memory.device_users(SimpleNamespace(type="xpu", index=0), set()) == ""


@pytest.mark.parametrize(
    ("visible", "uuids", "same"),
    [
        # Each rank sees one card only, as its first: the UUID tells them apart.
        (("0", "1"), (H100_BARE, OTHER), False),
        (("", "0"), (H100_BARE, H100_BARE), True),
        ((MIG_3G, MIG_1G), (H100_BARE, H100_BARE), False),
        ((MIG_3G, MIG_3G), (H100_BARE, H100_BARE), True),
        # Some virtual cards have no UUID: then the ordinal has to do.
        (("", ""), ("0000-0000", "0000-0000"), True),
    ],
)
def test_ranks_that_share_a_card_know_it(monkeypatch, visible, uuids, same):
    module = SimpleNamespace(mem_get_info=lambda device: (3 * GB, 80 * GB))
    monkeypatch.setattr(device_memory.torch, "get_device_module", lambda device: module)
    rooms = []
    for listed, uuid in zip(visible, uuids, strict=True):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        found = SimpleNamespace(uuid=uuid, name="NVIDIA H100 80GB HBM3")
        monkeypatch.setattr(device_memory, "_properties", lambda device, found=found: found)
        rooms.append(device_memory.device_room(SimpleNamespace(type="cuda", index=0), "boot"))
    assert (rooms[0].key == rooms[1].key) == same
    assert (rooms[0].free_bytes, rooms[0].limit_bytes) == (3 * GB, 80 * GB)
    assert rooms[0].source.startswith("NVIDIA H100 80GB HBM3 ")
