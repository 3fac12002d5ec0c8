"""Cores near a card, from sysfs, and threads that are kept on them."""

import os
import threading

import pytest

from dist_consolidate.runtime import numa
from dist_consolidate.runtime.numa import cpus_near, kept_near


def card(sysfs, name="0000:65:00.0", node="1", cpus="4-6,12"):
    folder = sysfs / "bus/pci/devices" / name
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{node}\n")
    (folder / "local_cpulist").write_text(f"{cpus}\n")


@pytest.mark.parametrize("bus_id", ["0000:65:00.0", "00000000:65:00.0"])
def test_both_ways_to_write_a_bus_id(tmp_path, bus_id):
    card(tmp_path)
    assert cpus_near(bus_id, tmp_path) == {4, 5, 6, 12}


def test_sysfs_writes_small_letters_and_domains_of_four_digits_or_more(tmp_path):
    card(tmp_path, "000a:c1:00.0", cpus="3")
    card(tmp_path, "10000:01:00.0", cpus="7")
    assert cpus_near("0000000A:C1:00.0", tmp_path) == {3}
    assert cpus_near("00010000:01:00.0", tmp_path) == {7}


@pytest.mark.parametrize("bus_id", ["", "65:00.0", "../../etc", "0000:65:00", "0000:66:00.0"])
def test_no_such_card(tmp_path, bus_id):
    card(tmp_path)
    assert cpus_near(bus_id, tmp_path) == frozenset()


@pytest.mark.parametrize("text", [{"node": "-1"}, {"node": "?"}, {"cpus": ""}, {"cpus": "a-b"}])
def test_a_machine_that_does_not_say(tmp_path, text):
    card(tmp_path, **text)
    assert cpus_near("0000:65:00.0", tmp_path) == frozenset()


@pytest.fixture
def allowed():
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


@pytest.mark.parametrize("fails", [False, True])
def test_threads_are_kept_near_and_all_is_as_before(allowed, monkeypatch, fails):
    monkeypatch.setattr(numa, "_MIN_CPUS", 1)
    if len(allowed) < 2:
        pytest.skip("this process may run on one core only")
    one = min(allowed)
    inside = []

    def look():
        inside.append(os.sched_getaffinity(0))

    def work():
        # What the job did not give is not taken, whether or not the machine has it.
        with kept_near(frozenset({one, 100_000})):
            look()
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
            if fails:
                raise ValueError

    if fails:
        with pytest.raises(ValueError):
            work()
    else:
        work()
    assert inside == [{one}, {one}]
    assert os.sched_getaffinity(0) == allowed


def test_too_few_cores_near_are_not_worth_it(allowed):
    for cpus in (frozenset(), frozenset({min(allowed)}), frozenset({100_000, 100_001})):
        with kept_near(cpus):
            assert os.sched_getaffinity(0) == allowed


def test_cores_that_are_gone_meanwhile(allowed, monkeypatch):
    def refuse(pid, cpus):
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(numa, "_MIN_CPUS", 1)
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with kept_near(frozenset({min(allowed)})):
        assert os.sched_getaffinity(0) == allowed
    monkeypatch.undo()
