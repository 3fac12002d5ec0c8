"""All limits of a host's memory, as a process under them reads them."""

import os
import resource
import subprocess
import sys

from dist_consolidate.runtime.host_memory import read_host

MEMINFO = "MemTotal:  8000 kB\nMemFree:  100 kB\nMemAvailable:  6000 kB\nHugePages_Total:  0\n"


def test_the_machines_own_memory(tmp_path):
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("1234-5678\n")
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    reading = read_host(tmp_path)
    (room,) = reading.host_rooms
    assert (room.limit_bytes, room.free_bytes) == (8000 * 1024, 6000 * 1024)
    assert room.source == "MemAvailable in /proc/meminfo"
    assert reading.machine == "1234-5678"
    assert room.key.startswith("1234-5678 ")
    assert (reading.pid, reading.num_cores) == (os.getpid(), len(os.sched_getaffinity(0)))


def test_nothing_to_read(tmp_path):
    reading = read_host(tmp_path)
    assert reading.host_rooms == ()
    assert reading.machine == reading.host


def test_what_stands_in_meminfo_is_not_trusted_to_be_there(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8000 kB\nMemAvailable: lots\nrubbish\n")
    assert read_host(tmp_path).host_rooms == ()


def test_limits_of_the_process():
    code = (
        "import resource; from dist_consolidate.runtime.host_memory import read_host\n"
        "for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA):\n"
        "    resource.setrlimit(which, (3 * 10**9, 3 * 10**9))\n"
        "for room in read_host().host_rooms: print(room.source, room.limit_bytes, room.free_bytes)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {line.split(" ")[0]: line.split(" ")[-2:] for line in told.stdout.splitlines()}
    for name in ("RLIMIT_AS", "RLIMIT_DATA"):
        limit, free = map(int, found[name])
        assert limit == 3 * 10**9
        assert 10**9 < free < limit


def test_this_machine():
    reading = read_host()
    assert reading.host_rooms, "a Linux machine says how much memory is free"
    unlimited = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert unlimited != any(room.source.startswith("RLIMIT_AS") for room in reading.host_rooms)
    assert len({room.key for room in reading.host_rooms}) == len(reading.host_rooms)


def test_torch_is_not_imported():
    code = (
        "import sys\n"
        "from dist_consolidate.runtime import "
        "budget, cgroups, direct_budget, host_memory, numa, nvml, rooms\n"
        "host_memory.read_host(); print('torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"
