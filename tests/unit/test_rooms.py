"""What each rank may take: limits that are shared, and those that are not."""

from dist_consolidate.runtime.rooms import (
    Lack,
    Reading,
    Room,
    allowances,
    beyond_notes,
    lack_error,
    rank_texts,
)
from dist_consolidate.units import parse_amount

GB, MB = 10**9, 10**6


def reading(*rooms, host="node1", device=None):
    return Reading(host, f"boot of {host}", 1, 8, rooms, device)


def room(key, free, limit=None, source=None):
    return Room(source or f"/{key}", key, limit or free, free)


def most(readings, kind="host", asked=None, num_active=None):
    amount = None if asked is None else parse_amount(asked)
    found = allowances(readings, kind, amount, num_active or len(readings))
    return [None if one is None else one.most_bytes for one in found]


def test_ranks_share_what_they_have_in_common():
    step, machine = room("step", 9 * GB), room("machine", 90 * GB)
    tasks = [room(f"task{n}", 5 * GB) for n in range(3)]
    readings = [reading(tasks[0], step, machine), reading(tasks[1], step, machine)]
    readings.append(reading(tasks[2], room("other step", 3 * GB), room("m2", GB), host="node2"))
    assert most(readings) == [4500 * MB, 4500 * MB, GB]
    # Ranks that take nothing share nothing.
    assert most(readings, num_active=1) == [5 * GB, None, None]


def test_the_least_that_any_of_them_read_counts_for_all():
    readings = [reading(room("step", free * MB)) for free in (900, 700, 800)]
    assert most(readings) == [700 * MB // 3] * 3


def test_half_is_taken_unless_more_is_needed():
    (found,) = allowances([reading(room("a", 8 * GB, 10 * GB))], "host", None, 1)
    assert (found.usual_bytes, found.most_bytes) == (4 * GB, 8 * GB)
    assert found.text() == "8 GB of host memory (8 GB free of 10 GB: /a)"


def test_what_the_user_says_counts():
    readings = [reading(room("a", 8 * GB)), reading(room("a", 8 * GB))]
    assert most(readings, asked="40GB") == [40 * GB, 40 * GB]
    assert most(readings, asked="25%") == [GB, GB]
    size, part = (allowances(readings, "host", parse_amount(text), 2)[0] for text in ("4GB", "25%"))
    assert size.text() == "4 GB of host memory (--host-memory 4GB)"
    assert part.text() == (
        "1 GB of host memory (--host-memory 25% of 8 GB free of 8 GB, shared by 2 ranks: /a)"
    )
    assert (part.usual_bytes, part.most_bytes) == (GB, GB)


def test_where_no_limit_can_be_read():
    assert most([reading()]) == [None]
    assert most([reading()], asked="1GB") == [GB]
    assert most([reading()], kind="device") == [None]
    assert most([reading()], asked="50%") == [None]


def test_devices_are_shared_by_uuid():
    cards = [room("uuid-a", 80 * GB), room("uuid-a", 78 * GB), room("uuid-b", 50 * GB)]
    readings = [reading(device=card) for card in cards]
    assert most(readings, kind="device") == [39 * GB, 39 * GB, 50 * GB]


def test_names_of_ranks():
    readings = [reading(host=f"node{rank // 4}") for rank in range(8)]
    assert rank_texts([2], readings) == "rank 2 on node0"
    assert rank_texts([1, 0], readings) == "ranks 0, 1 on node0"
    assert rank_texts([4, 5, 6, 7], readings) == "ranks 4 to 7 on node1"
    assert rank_texts([0, 2, 5], readings) == "ranks 0, 2, 5 on node0, node1"


def test_the_error_has_who_what_and_what_to_do():
    readings = [reading(room("s", 4 * MB, GB)), reading(room("s", 4 * MB, GB))]
    card = reading(room("h", GB), host="node2", device=room("gpu", 8 * MB, 80 * GB, "H100 GPU-1"))
    readings.append(card)
    host = allowances(readings, "host", None, 3)
    device = allowances(readings, "device", None, 3)
    lacks = [Lack(rank, 30 * MB, "buckets", host[rank]) for rank in (0, 1)]
    lacks.append(Lack(2, 90 * MB, "buckets", device[2], "also in use by process 7 (79 GB)"))
    error = lack_error(lacks, readings, given=True)
    assert error.exit_code == 4 and error.agreed
    assert str(error).splitlines() == [
        "not enough memory:",
        "  - ranks 0, 1 on node1: each needs 30 MB for buckets, but can have 2 MB of host memory "
        "(4 MB free of 1 GB, shared by 2 ranks: /s)",
        "  - rank 2 on node2: needs 90 MB for buckets, but can have 8 MB of device memory "
        "(8 MB free of 80 GB: H100 GPU-1); also in use by process 7 (79 GB)",
        "use a smaller --bucket-size, start fewer ranks on a node or run where more device and "
        "host memory is free",
    ]


def test_more_than_is_free_is_taken_at_its_word_and_said():
    readings = [reading(room("a", 3 * GB)), reading(room("a", 3 * GB))]
    (note,) = beyond_notes(readings, parse_amount("2GB"), 2)
    assert note == (
        "--host-memory 2GB is taken at its word, but ranks 0, 1 on node1 each can have 1.5 GB of "
        "host memory (3 GB free of 3 GB, shared by 2 ranks: /a)"
    )
    assert list(beyond_notes(readings, parse_amount("2GB"), 1)) == []
    assert list(beyond_notes(readings, parse_amount("100%"), 2)) == []
    assert list(beyond_notes(readings, None, 2)) == []


def test_the_advice_fits_what_was_asked():
    readings = [reading(room("a", GB), device=room("gpu", GB))]
    (few,) = allowances(readings, "host", parse_amount("1MB"), 1)
    assert str(lack_error([Lack(0, GB, "x", few)], readings, given=False)).splitlines()[-1] == (
        "allow more by --host-memory"
    )
    (real,) = allowances(readings, "device", None, 1)
    lack = Lack(0, 2 * GB, "--device-memory 2GB", real, is_option=True)
    assert str(lack_error([lack], readings, given=False)).splitlines()[-1] == (
        "ask for less by --device-memory or run where more device memory is free"
    )
