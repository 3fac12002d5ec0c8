"""Whether ranks have a device each: told by the hardware, not by how many devices they see."""

from types import SimpleNamespace

import pytest
import torch

from dist_consolidate.runtime import sharing
from dist_consolidate.runtime.sharing import Hardware, each_has_its_own, hardware_of


def gpu(number: int, machine: str = "m1", *, crowded: bool = True) -> Hardware:
    return Hardware("cuda", (f"pci {machine} 0 {number} 0", f"uuid {machine}{number}"), crowded)


def test_one_visible_device_each_is_no_sharing() -> None:
    """srun --gpus-per-task=1: four ranks of a host see one device each, and each another one."""
    assert each_has_its_own([gpu(number) for number in range(4)])


def test_the_same_address_on_two_machines_is_no_sharing() -> None:
    assert each_has_its_own([gpu(0), gpu(1), gpu(0, "m2"), gpu(1, "m2")])


def test_one_pair_that_shares_counts_for_all() -> None:
    assert not each_has_its_own([gpu(0), gpu(1), gpu(2), gpu(1)])


def test_slices_of_one_gpu_share_it() -> None:
    slices = [Hardware("cuda", ("pci m1 0 7 0", f"uuid {name}")) for name in "ab"]
    assert not each_has_its_own(slices)


def test_a_rank_without_an_accelerator_or_with_another_kind() -> None:
    assert not each_has_its_own([gpu(0), Hardware("cpu")])
    assert not each_has_its_own([Hardware("cpu"), Hardware("cpu")])
    assert not each_has_its_own([gpu(0), Hardware("xpu", ("uuid x",))])


def test_devices_that_do_not_say_who_they_are_are_counted() -> None:
    silent, crowded = Hardware("cuda"), Hardware("cuda", (), True)
    assert each_has_its_own([silent, silent])
    assert not each_has_its_own([silent, crowded])
    assert not each_has_its_own([gpu(0), crowded])


def test_words_for_other_ranks_come_back() -> None:
    for one in (gpu(3), Hardware("cpu"), Hardware("cuda", (), True)):
        assert Hardware.from_json(one.to_json()) == one


def test_a_cpu_is_no_hardware_to_share() -> None:
    assert hardware_of(torch.device("cpu"), 4) == Hardware("cpu")


@pytest.mark.parametrize(
    ("properties", "visible", "want"),
    [
        (
            {"pci_domain_id": 0, "pci_bus_id": 23, "pci_device_id": 0, "uuid": "GPU-1"},
            "0",
            ("pci here 0 23 0", "uuid GPU-1"),
        ),
        # Releases of torch that do not tell the address,
        ({"uuid": "GPU-1"}, "0", ("uuid GPU-1",)),
        # for which a slice's UUID hides what it shares,
        ({"uuid": "MIG-1"}, "MIG-1", ()),
        # and those that tell nothing.
        ({}, "", ()),
    ],
)
def test_what_a_device_says_of_itself(
    properties: dict[str, object],
    visible: str,
    want: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The properties stand in for a GPU, which is not here; the address of one is read the same."""
    monkeypatch.setattr(sharing, "_machine", lambda: "here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    told = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(**properties))
    monkeypatch.setattr(torch, "get_device_module", lambda _: told)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    found = hardware_of(torch.device("cuda", 0), 4)
    assert found == Hardware("cuda", want, is_crowded=True)
    assert not hardware_of(torch.device("cuda", 0), 1).is_crowded


def test_a_machine_has_one_name() -> None:
    assert sharing._machine() == sharing._machine() != ""
