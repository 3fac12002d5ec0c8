"""Control groups as kernels, batch systems and container runtimes lay them out."""

from pathlib import Path

import pytest

from dist_consolidate.runtime.cgroups import cgroup_rooms

MIB = 2**20
NO_LIMIT_V1 = 9223372036854771712
V2_MOUNT = "35 24 0:30 {root} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "39 30 0:34 {root} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory"


class Tree:
    """A root folder with ``proc`` and the mounted hierarchies."""

    def __init__(self, root):
        self.root = root
        (root / "proc/self").mkdir(parents=True)

    def own(self, *lines):
        (self.root / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))
        return self

    def mounts(self, *lines):
        other = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw"
        text = "".join(f"{line}\n" for line in (other, *lines, "", "not a line of mountinfo"))
        (self.root / "proc/self/mountinfo").write_text(text)
        return self

    def group(self, path, **files):
        """Make a group; underscores in names of files become dots."""
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")
        return self

    def found(self):
        return {r.source: (r.limit_bytes, r.free_bytes) for r in cgroup_rooms(self.root)}


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def v2(tree, path, limit, usage, stat="", high="max"):
    return tree.group(
        f"sys/fs/cgroup/{path}".rstrip("/"),
        memory_max=limit,
        memory_current=usage,
        memory_stat=stat,
        memory_high=high,
    )


def v1(tree, path, limit, usage, stat=""):
    return tree.group(
        f"sys/fs/cgroup/memory/{path}".rstrip("/"),
        memory_limit_in_bytes=limit,
        memory_usage_in_bytes=usage,
        memory_stat=stat,
    )


def test_every_ancestor_of_a_slurm_task_counts(tree):
    """SLURM limits the job and the step; the task's own group has no limit."""
    job = "system.slice/slurmstepd.scope/job_7"
    step = f"{job}/step_0"
    tree.own(f"0::/{step}/user/task_0").mounts(V2_MOUNT.format(root="/"))
    v2(tree, f"{step}/user/task_0", "max", 50 * MIB)
    v2(tree, f"{step}/user", "max", 90 * MIB)
    v2(tree, step, 4000 * MIB, 100 * MIB)
    v2(tree, job, 2000 * MIB, 300 * MIB, f"anon 5\ninactive_file {80 * MIB}\nactive_file {MIB}")
    # The true root has no such files.
    (tree.root / "sys/fs/cgroup/cgroup.controllers").write_text("memory\n")
    assert tree.found() == {
        f"/sys/fs/cgroup/{step}/memory.max": (4000 * MIB, 3900 * MIB),
        # Page cache that nobody looks at is given back for the asking.
        f"/sys/fs/cgroup/{job}/memory.max": (2000 * MIB, 1780 * MIB),
    }


def test_a_group_that_is_slowed_down_before_it_is_full(tree):
    tree.own("0::/job").mounts(V2_MOUNT.format(root="/"))
    v2(tree, "job", 1000 * MIB, 100 * MIB, high=400 * MIB)
    assert tree.found() == {
        "/sys/fs/cgroup/job/memory.max": (1000 * MIB, 900 * MIB),
        "/sys/fs/cgroup/job/memory.high": (400 * MIB, 300 * MIB),
    }


@pytest.mark.parametrize(
    ("own", "mounted"),
    [
        ("/", "/"),  # a namespace of its own: both are seen from inside
        ("/docker/0123", "/docker/0123"),  # the host's namespace, the container's group mounted
        ("/docker/0123", "/"),  # a file system in a namespace, names from outside of it
        ("/../../job", "/"),  # moved out of the namespace that the mount belongs to
        ("/kubepods/a", "/kubepods/b"),  # nothing fits: what is mounted is what there is
    ],
)
def test_in_a_container_the_mount_is_what_there_is(tree, own, mounted):
    tree.own(f"0::{own}").mounts(V2_MOUNT.format(root=mounted))
    v2(tree, "", 512 * MIB, 12 * MIB)
    assert tree.found() == {"/sys/fs/cgroup/memory.max": (512 * MIB, 500 * MIB)}


def test_below_a_containers_root(tree):
    tree.own("0::/docker/0123/inner").mounts(V2_MOUNT.format(root="/docker/0123"))
    v2(tree, "inner", 100 * MIB, 10 * MIB)
    v2(tree, "", 512 * MIB, 12 * MIB)
    assert tree.found() == {
        "/sys/fs/cgroup/inner/memory.max": (100 * MIB, 90 * MIB),
        "/sys/fs/cgroup/memory.max": (512 * MIB, 500 * MIB),
    }


def test_version_1_beside_an_empty_version_2(tree):
    """As systemd's hybrid layout has it."""
    tree.own("9:name=systemd:/", "4:cpu,memory:/slurm/uid_0/job_7", "0::/init.scope")
    unified = "40 30 0:35 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    tree.mounts(V1_MOUNT.format(root="/"), unified)
    (tree.root / "sys/fs/cgroup/unified/init.scope").mkdir(parents=True)
    stat = f"inactive_file 4096\ntotal_inactive_file {30 * MIB}"
    v1(tree, "slurm/uid_0/job_7", 200 * MIB, 130 * MIB, stat)
    v1(tree, "slurm/uid_0", NO_LIMIT_V1, 130 * MIB)
    v1(tree, "slurm", 150 * MIB, 140 * MIB)
    v1(tree, "", NO_LIMIT_V1, 5000 * MIB)
    base = "/sys/fs/cgroup/memory/slurm"
    assert tree.found() == {
        f"{base}/uid_0/job_7/memory.limit_in_bytes": (200 * MIB, 100 * MIB),
        f"{base}/memory.limit_in_bytes": (150 * MIB, 10 * MIB),
    }


def test_version_1_in_a_container(tree):
    tree.own("4:memory:/docker/0123").mounts(V1_MOUNT.format(root="/docker/0123"))
    v1(tree, "", 64 * MIB, 80 * MIB)  # more in use than there may be, for a moment
    path = "/sys/fs/cgroup/memory/memory.limit_in_bytes"
    assert tree.found() == {path: (64 * MIB, 0)}


def test_a_mount_point_with_a_space(tree):
    tree.own("0::/job").mounts(r"35 24 0:30 / /my\040groups rw - cgroup2 cgroup2 rw")
    tree.group("my groups/job", memory_max=100, memory_current=1)
    assert tree.found() == {"/my groups/job/memory.max": (100, 99)}


def test_what_cannot_be_read_sets_no_limit(tree):
    assert tree.found() == {}
    tree.own("0::/gone (deleted)", "rubbish", "").mounts(V2_MOUNT.format(root="/"))
    assert tree.found() == {}
    v2(tree, "", "-1", 10)
    assert tree.found() == {}
    v2(tree, "", 100, "many")
    assert tree.found() == {}
    v2(tree, "", 100, 10, "inactive_file\ninactive_file x\nfile 3")
    assert tree.found() == {"/sys/fs/cgroup/memory.max": (100, 90)}


def test_groups_are_told_apart_by_more_than_the_name_a_container_gives_them(tmp_path):
    keys = []
    for name in ("one", "other"):
        tree = Tree(tmp_path / name).own("0::/").mounts(V2_MOUNT.format(root="/"))
        v2(tree, "", 100, 10, high=50)
        keys += [room.key for room in cgroup_rooms(tree.root)]
    assert len(set(keys)) == 4


def test_on_this_machine():
    for room in cgroup_rooms():
        assert Path(room.source).is_file()
        assert 0 <= room.free_bytes <= room.limit_bytes
