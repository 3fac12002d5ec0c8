"""What SLURM's variables say of a process.

The environments are what srun and sbatch 22.05 set on a cluster of two nodes.
"""

import itertools
from collections.abc import Mapping

import pytest

from dist_consolidate.errors import UsageError
from dist_consolidate.runtime.launched import Launched, find_launched

JOB = {"SLURM_JOB_ID": "2718", "SLURM_JOB_NODELIST": "gpu[01-02]", "SLURM_NTASKS": "4"}
# sbatch -n4 -N2: the script itself.
BATCH = {
    **JOB,
    "SLURMD_NODENAME": "gpu01",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_TASKS_PER_NODE": "3,1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9",
}
STEP = {
    **BATCH,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_GTIDS": "0,1,2",
    "SLURM_DISTRIBUTION": "block",
}
LAST = {
    "SLURMD_NODENAME": "gpu02",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "3",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu01",
    "MASTER_PORT": "29500",
}
DECIDED = ("SLURM_STEP_NODELIST", "SLURM_STEP_ID")
MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
ALONE = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}


def step(**changes: str | None) -> dict[str, str]:
    """The environment of the step's first task, changed; ``None`` takes a variable away."""
    found: dict[str, str | None] = {**STEP, **changes}
    return {name: value for name, value in found.items() if value is not None}


def refused(environ: Mapping[str, str]) -> str:
    with pytest.raises(UsageError) as error:
        find_launched(environ)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_task_of_the_first_node_and_one_of_another() -> None:
    first, last = find_launched(STEP), find_launched({**STEP, **LAST})
    assert first == Launched("slurm", 0, 4, 0, 3, "127.0.0.1", first.port, DECIDED)
    # Not SLURM_LAUNCH_NODE_IPADDR: that is where srun runs.
    assert last == Launched("slurm", 3, 4, 0, 1, "gpu01", first.port, DECIDED)


def test_a_step_smaller_than_its_job() -> None:
    """srun --preserve-env -n2 -w gpu02 in a job of four tasks."""
    found = find_launched(
        step(
            SLURM_PROCID="1",
            SLURM_LOCALID="1",
            SLURM_STEP_NUM_TASKS="2",
            SLURM_STEP_NODELIST="gpu02",
            SLURM_STEP_TASKS_PER_NODE="2",
            SLURMD_NODENAME="gpu02",
            SLURM_GTIDS="0,1",
        )
    )
    assert (found.rank, found.size, found.local_rank, found.local_size) == (1, 2, 1, 2)
    assert found.address == "127.0.0.1"


def test_what_is_no_step_is_a_process_on_its_own() -> None:
    salloc = {**JOB, "SLURM_TASKS_PER_NODE": "3,1"}
    for environ in ({}, salloc, BATCH):
        assert find_launched(environ) == Launched()


def test_a_step_of_one_task_is_one_process() -> None:
    """srun --pty bash; also the shell of salloc where it is a step (its id has ten digits)."""
    shell = step(**ALONE, SLURM_GTIDS="0", SLURM_STEP_NODELIST="gpu01")
    interactive = {**shell, "SLURM_STEP_ID": "4294967290"}
    for environ in (shell, interactive):
        found = find_launched(environ)
        assert (found.rank, found.size, found.address) == (0, 1, None)


@pytest.mark.parametrize(
    "left_over",
    [
        # Of a step with three tasks on its first node,
        {},
        # and of one with one task on each of other nodes.
        {
            "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
            "SLURM_STEP_NODELIST": "train[1-4]",
        },
    ],
)
def test_variables_left_over_from_the_step_that_submitted_a_script(
    left_over: dict[str, str],
) -> None:
    assert find_launched(step(SLURM_GTIDS="0", **left_over)) == Launched()


def test_torchrun_in_a_step_wins() -> None:
    found = find_launched({**STEP, **LAST, **TORCHRUN})
    assert (found.launcher, found.rank, found.size) == ("torchrun", 1, 2)


@pytest.mark.parametrize("size", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_a_world_of_one_that_several_tasks_inherited_is_refused(size: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", size: "4"}
    with pytest.raises(UsageError, match=f"WORLD_SIZE is 1, but {size} is 4: unset RANK"):
        find_launched(environ)
    assert find_launched(environ, "torchrun").size == 1
    # torchrun itself, started by each of the tasks.
    assert find_launched({**environ, "TORCHELASTIC_RUN_ID": "x"}).size == 1
    assert find_launched({**environ, size: "1"}).size == 1


@pytest.mark.parametrize("more", [{"PMI_RANK": "0", "PMI_SIZE": "4"}, {"PMIX_RANK": "0"}])
def test_a_task_that_srun_started_for_mpi_is_slurms(more: dict[str, str]) -> None:
    assert find_launched({**STEP, **more}).launcher == "slurm"


def test_the_meeting_point_of_a_script_counts_if_it_is_whole() -> None:
    for task in (STEP, {**STEP, **LAST}):
        found = find_launched({**task, **MEETING})
        assert (found.address, found.port) == ("10.0.0.1", 29500)
    plain = find_launched(STEP)
    for name, value in MEETING.items():
        assert find_launched({**STEP, name: value}) == plain
    assert "MASTER_PORT must be a number" in refused({**STEP, **MEETING, "MASTER_PORT": "x"})


def test_ports_of_steps_and_jobs_are_apart() -> None:
    def port(job: int, number: int) -> int:
        found = find_launched(step(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(number)))
        assert found.port is not None
        return found.port

    ports = [port(job, number) for job in range(4_000_000, 4_000_040) for number in range(40)]
    assert len(set(ports)) == len(ports)
    # Above the privileged ones, below those that Linux gives to outgoing connections.
    largest = 2**32 - 1
    ports += [port(*ids) for ids in itertools.product((1, largest), (0, 70_000, largest))]
    assert min(ports) > 10_000
    assert max(ports) < 32_768


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_STEP_ID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NODELIST",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_JOB_ID",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
    ],
)
def test_a_missing_variable_is_named(name: str) -> None:
    text = refused(step(**{name: None}))
    assert f"but {name} not set" in text


def test_a_task_that_lost_its_step_is_no_process_on_its_own() -> None:
    text = refused({**BATCH, "SLURM_PROCID": "2"})
    assert "SLURM_PROCID is '2'" in text
    assert "SLURM_STEP_ID" in text


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SLURM_PROCID", "-1", "SLURM_PROCID must be a number; found '-1'"),
        ("SLURM_PROCID", "4", "SLURM_PROCID=4 and SLURM_STEP_NUM_TASKS=4 contradict"),
        ("SLURM_STEP_NUM_TASKS", "four", "SLURM_STEP_NUM_TASKS must be a number; found 'four'"),
        ("SLURM_STEP_NUM_TASKS", "5", "SLURM_STEP_TASKS_PER_NODE=3,1 and SLURM_STEP_NUM_TASKS=5"),
        ("SLURM_STEP_NODELIST", "gpu[01-", "SLURM_STEP_NODELIST cannot be read"),
        ("SLURM_STEP_NODELIST", "gpu01", "SLURM_STEP_NODELIST=gpu01 and SLURM_STEP_TASKS_PER"),
        ("SLURM_STEP_TASKS_PER_NODE", "3(x", "SLURM_STEP_TASKS_PER_NODE cannot be read"),
        ("SLURM_NODEID", "2", "SLURM_NODEID=2 and SLURM_STEP_NODELIST=gpu[01-02] contradict"),
        ("SLURM_JOB_ID", "12a", "SLURM_JOB_ID must be a number; found '12a'"),
        ("SLURM_STEP_ID", "batch", "SLURM_STEP_ID must be a number; found 'batch'"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str, words: str) -> None:
    assert words in refused(step(**{name: value}))


# Where the first task is not on the first host.


def test_an_arbitrary_distribution_needs_a_meeting_point() -> None:
    environ = step(SLURM_DISTRIBUTION="arbitrary", SLURM_NODEID="1", SLURMD_NODENAME="gpu02")
    assert "set MASTER_ADDR" in refused(environ)
    assert find_launched({**environ, **MEETING}).address == "10.0.0.1"
    one_host = step(
        SLURM_DISTRIBUTION="arbitrary",
        SLURM_STEP_NODELIST="gpu01",
        SLURM_STEP_TASKS_PER_NODE="4",
        SLURM_GTIDS="0,1,2,3",
    )
    assert find_launched(one_host).address == "127.0.0.1"


def test_a_first_task_that_is_elsewhere_is_noticed() -> None:
    # Two tasks on each node, and the first of all on the second one.
    elsewhere = step(
        SLURM_NODEID="1",
        SLURMD_NODENAME="gpu02",
        SLURM_STEP_TASKS_PER_NODE="2,2",
        SLURM_GTIDS="0,2",
    )
    assert "task 0 is on node 1" in refused(elsewhere)
    assert "SLURMD_NODENAME is gpu02, but node 0" in refused(step(SLURMD_NODENAME="gpu02"))


HETEROGENEOUS = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu02",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu01",
}


def test_a_step_over_components_of_a_heterogeneous_job_is_refused() -> None:
    """srun -n2 -w gpu02 : -n1 -w gpu01: the list is sorted, what else there is follows gpu02."""
    for task in (STEP, {**STEP, **LAST}):
        text = refused({**task, **HETEROGENEOUS})
        assert "SLURM_HET_SIZE=2" in text
        assert "--het-group" in text


@pytest.mark.parametrize("word", ["HET", "PACK"])
def test_a_step_in_one_component_is_a_step(word: str) -> None:
    job = {
        "SLURM_HET_SIZE": "2",
        f"SLURM_JOB_NODELIST_{word}_GROUP_0": "big1",
        f"SLURM_JOB_NODELIST_{word}_GROUP_1": "gpu[01-08]",
    }
    assert find_launched({**STEP, **LAST, **job}) == find_launched({**STEP, **LAST})
