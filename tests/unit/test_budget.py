"""Sizes of buckets, and how many, from what devices and hosts have free."""

import dataclasses

import pytest
import torch

from dist_consolidate.errors import ResourceError
from dist_consolidate.plan.direct import step_bytes
from dist_consolidate.plan.owners import Owned
from dist_consolidate.runtime import budget as budget_module
from dist_consolidate.runtime import device_memory
from dist_consolidate.runtime.budget import OVERHEAD_BYTES, Wanted, make_budget
from dist_consolidate.runtime.control import Control
from dist_consolidate.runtime.direct_budget import DirectNeeds, settle_direct
from dist_consolidate.runtime.host_memory import read_host
from dist_consolidate.runtime.rooms import Reading, Room
from dist_consolidate.runtime.world import World
from dist_consolidate.units import parse_amount

USERS = "also in use by process 7 (79 GB)"
GB, MB, MIB = 10**9, 10**6, 2**20
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def reading(host_bytes, device_bytes=None, host="node1", cores=8):
    card = None
    if device_bytes is not None:
        card = Room("H100 GPU-1", f"GPU of {host}", 80 * GB, device_bytes)
    return Reading(host, host, 1, cores, (Room("/limit", host, 64 * GB, host_bytes),), card)


class Ranks(Control):
    """The control plane as rank 0 sees it, the other ranks saying nothing."""

    def exchange(self, value):
        return [value, *([""] * (self.size - 1))]


@pytest.fixture
def settle(monkeypatch):
    monkeypatch.setattr(device_memory, "device_users", lambda device, pids: USERS)

    def call(readings, wanted=None, *, device=None, table=lambda size: size, **values):
        monkeypatch.setattr(budget_module, "read_all", lambda world, with_device: readings)
        control = Ranks(0, len(readings))
        world = World(0, len(readings), device or CPU, control, **values)
        return make_budget(world, wanted or Wanted(), table)

    return call


def held(settled, table_bytes):
    return settled.budget.held_bytes(table_bytes, 1000)


# Buckets that are exchanged.


def test_with_room_enough_nothing_changes(settle):
    settled = settle([reading(20 * GB)])
    budget = settled.budget
    assert (budget.bucket_bytes, budget.staging_bytes, budget.device_bytes) == (
        16 * MB,
        4 * MIB,
        None,
    )
    assert budget.num_tables(16 * MB, 1000) == 5
    assert held(settled, 16 * MB) == 5 * 16 * MB + 4 * 4 * MIB
    assert settled.notes == ()
    assert settled.limits[0][0].text().startswith("20 GB of host memory (20 GB free of 64 GB")


@pytest.mark.parametrize("free", [100 * MB, 80 * MB, 60 * MB, 40 * MB, 23 * MB])
def test_little_host_memory_makes_small_buckets(settle, free):
    settled = settle([reading(free)])
    bucket = settled.budget.bucket_bytes
    assert MB <= bucket < 16 * MB
    assert held(settled, bucket) + OVERHEAD_BYTES <= free
    (note,) = settled.notes
    assert note.startswith("memory is short: buckets of ")
    assert "instead of 16 MB; rank 0 on node1 can have" in note


def test_the_poorest_host_decides_for_all(settle):
    rich, poor = reading(20 * GB), reading(50 * MB, host="node2")
    both = settle([rich, poor])
    assert both.budget.bucket_bytes == settle([poor]).budget.bucket_bytes < 16 * MB
    assert "rank 1 on node2" in both.notes[0]


def test_ranks_of_one_host_share_it(settle):
    alone, four = settle([reading(400 * MB)]), settle([reading(400 * MB)] * 4)
    assert four.budget.bucket_bytes < alone.budget.bucket_bytes == 16 * MB
    assert all("shared by 4 ranks" in limits[0].text() for limits in four.limits)


def test_tables_that_are_wider_than_the_bucket_count_as_they_are(settle):
    """Where ranks see different shards, one may hold room for rows that it never has."""
    settled = settle([reading(400 * MB)], table=lambda size: 4 * size)
    assert settled.budget.bucket_bytes < 16 * MB
    assert held(settled, 4 * settled.budget.bucket_bytes) < 400 * MB


def test_too_little_for_the_smallest(settle):
    with pytest.raises(ResourceError) as caught:
        settle([reading(20 * GB), reading(9 * MB, host="node2")])
    text = str(caught.value)
    assert "rank 1 on node2: needs " in text
    assert "can have 9 MB of host memory (9 MB free of 64 GB: /limit)" in text
    assert "rank 0" not in text
    assert text.endswith("run where more host memory is free")
    assert caught.value.agreed


def test_a_size_that_was_asked_for_is_not_made_smaller(settle):
    wanted = Wanted(bucket_bytes=50 * MB)
    assert settle([reading(400 * MB)], wanted).budget.bucket_bytes == 50 * MB
    with pytest.raises(ResourceError, match="use a smaller --bucket-size"):
        settle([reading(200 * MB)], wanted)


def test_an_amount_takes_the_place_of_what_is_free(settle):
    small = settle([reading(20 * GB)], Wanted(host=parse_amount("60MB")))
    assert held(small, small.budget.bucket_bytes) + OVERHEAD_BYTES <= 60 * MB
    large = settle([reading(30 * MB)], Wanted(host=parse_amount("1GB")))
    assert large.budget.bucket_bytes == 16 * MB
    assert "taken at its word" in large.notes[0]


# On devices.


def test_a_free_device_holds_large_buckets_and_many(settle):
    settled = settle([reading(90 * GB, 70 * GB)], device=CUDA)
    budget = settled.budget
    assert (budget.bucket_bytes, budget.staging_bytes) == (256 * MIB, 16 * MIB)
    assert budget.device_bytes == 35 * GB
    tables = budget.num_tables(256 * MIB, 1000)
    assert 100 < tables <= 35 * GB // (256 * MIB)
    assert budget.num_tables(256 * MIB, 7) == 7
    assert settled.notes == ()
    assert [limit.kind for limit in settled.limits[0]] == ["device", "host"]


def test_a_device_that_is_nearly_full_is_used_sparingly_and_said(settle):
    settled = settle([reading(90 * GB, 200 * MB)], device=CUDA)
    budget = settled.budget
    assert budget.bucket_bytes < 16 * MIB
    assert budget.need_bytes("device", budget.bucket_bytes) <= 200 * MB
    assert (
        "instead of 16.8 MB; rank 0 on node1 can have 200 MB of device memory" in (settled.notes[0])
    )
    assert settled.notes[1] == (
        "little device memory is free: rank 0 on node1 can have 200 MB of device memory (200 MB "
        f"free of 80 GB: H100 GPU-1); {USERS}"
    )


def test_a_device_that_is_full(settle):
    with pytest.raises(ResourceError) as caught:
        settle([reading(90 * GB, 9 * MB)], device=CUDA)
    text = str(caught.value)
    assert f"can have 9 MB of device memory (9 MB free of 80 GB: H100 GPU-1); {USERS}" in text
    assert text.endswith("run where more device memory is free")


def test_page_locked_memory_has_to_fit_the_host(settle):
    settled = settle([reading(100 * MB, 70 * GB)], device=CUDA)
    budget = settled.budget
    assert budget.staging_bytes < 16 * MIB
    assert budget.need_bytes("host", budget.bucket_bytes) <= 100 * MB
    with pytest.raises(ResourceError, match="host memory"):
        settle([reading(40 * MB, 70 * GB)], device=CUDA)


def test_a_shared_device_needs_a_bucket_on_the_host_too(settle):
    ways = [
        settle([reading(GB, 70 * GB)], device=CUDA, data_group_carries_device=carries).budget
        for carries in (True, False)
    ]
    assert [way.is_via_host for way in ways] == [False, True]
    assert ways[1].bucket_bytes == 16 * MIB
    assert ways[1].need_bytes("host", 5 * MB) == ways[0].need_bytes("host", 0) + 5 * MB


def test_device_memory_that_was_asked_for(settle):
    half = settle(
        [reading(90 * GB, 70 * GB)], Wanted(device=parse_amount("50%")), device=CUDA
    ).budget
    assert half.device_bytes == 35 * GB
    some = settle(
        [reading(90 * GB, 70 * GB)], Wanted(device=parse_amount("2GB")), device=CUDA
    ).budget
    assert (some.device_bytes, some.bucket_bytes) == (2 * GB, 250 * MB)
    tables = some.num_tables(some.bucket_bytes, 1000) * some.bucket_bytes
    assert tables + some.num_staging * some.staging_bytes <= 2 * GB
    with pytest.raises(ResourceError) as caught:
        settle([reading(90 * GB, 70 * GB)], Wanted(device=parse_amount("75GB")), device=CUDA)
    assert "needs 75 GB for --device-memory 75GB, but can have 70 GB of device" in str(caught.value)
    assert "ask for less by --device-memory" in str(caught.value)


# Direct work.

WHOLE = Owned(0, 0, 10 * GB)


def direct(readings, wanted=None, owned=((WHOLE,),), ratio=0.0, io="buffered", threads=4):
    needs = DirectNeeds(owned, ratio, io)
    return settle_direct(needs, wanted or Wanted(), readings, [threads] * len(readings))


def test_four_threads_of_eight_mebibytes():
    settled = direct([reading(20 * GB)])
    assert settled.crews == ((8 * MIB, 4, 32 * MIB),)
    assert settled.notes == ()


@pytest.mark.parametrize("ratio", [0, 0.5, 2, 4])
@pytest.mark.parametrize("io", ["buffered", "auto", "direct"])
@pytest.mark.parametrize("free", [13.7, 15, 20, 30, 60, 200])
def test_fewer_and_smaller_buckets_where_memory_is_short(free, io, ratio):
    free_bytes = int(free * MB)
    try:
        settled = direct([reading(free_bytes)], ratio=ratio, io=io)
    except ResourceError:
        # Only if one thread with the smallest bucket is too much.
        each = MIB * (1 + ratio) + (0 if io == "buffered" else MIB * max(ratio, 1) + 8192)
        assert OVERHEAD_BYTES + each > free_bytes
        return
    (crew,) = settled.crews
    assert crew.memory_bytes + OVERHEAD_BYTES <= free_bytes
    assert bool(settled.notes) == (crew.bucket_bytes < int(8 * MIB / max(ratio, 1)))


def test_every_rank_by_its_own_host():
    readings = [reading(20 * GB), reading(18 * MB, host="node2"), reading(1, host="node3")]
    owned = ((Owned(0, 0, GB),), (Owned(0, GB, 2 * GB),))
    settled = direct(readings, owned=owned)
    assert settled.crews[0].bucket_bytes == 8 * MIB > settled.crews[1].bucket_bytes
    (note,) = settled.notes
    assert note.startswith("host memory is short: rank 1 on node2 works with ")
    with pytest.raises(ResourceError, match="rank 2 on node3: needs 13"):
        direct(readings, owned=(*owned, (Owned(0, 2 * GB, 3 * GB),)))


def test_a_bucket_size_that_does_not_fit_is_refused():
    ok = direct([reading(200 * MB)], Wanted(bucket_bytes=160 * MB))
    assert sum(crew.memory_bytes for crew in ok.crews) <= 160 * MB
    with pytest.raises(ResourceError) as caught:
        direct([reading(100 * MB)], Wanted(bucket_bytes=160 * MB))
    assert "needs 173 MB for 4 buckets of 40 MB and what goes with it" in str(caught.value)
    assert "use a smaller --bucket-size" in str(caught.value)


def test_a_small_result_fits_whatever_the_bucket_size():
    settled = direct(
        [reading(20 * MB)], Wanted(bucket_bytes=100 * GB), owned=((Owned(0, 0, 5000),),)
    )
    assert settled.crews[0].memory_bytes == 5000


def test_ranks_that_write_nothing_need_nothing():
    readings = [reading(60 * MB)] * 4
    alone = direct(readings)
    all_four = direct(readings, owned=[(WHOLE,)] * 4, threads=1)
    assert alone.limits[1:] == ((), (), ())
    assert alone.limits[0][0].num_sharing == 1
    assert all_four.limits[0][0].num_sharing == 4


def test_windows_are_cut_as_the_work_cuts_them():
    step = step_bytes(10_000)
    assert step == 8192
    needs = DirectNeeds([(Owned(0, 100, 8192), Owned(1, 8000, 20_000))], 0, "buffered")
    # One, and three: up to 8192, up to 16384, and the rest.
    assert needs.crew(0, 10_000, 9) == (10_000, 4, 4 * 8192)


def test_what_is_read_here_can_be_sent():
    control = Control(0, 1)
    (mine,) = budget_module.read_all(World(0, 1, None, control), with_device=False)
    assert dataclasses.replace(mine, host_rooms=()) == dataclasses.replace(
        read_host(), host_rooms=()
    )
