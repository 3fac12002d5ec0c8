"""The fault matrix and random kills, in short; ``tests.long.fault_matrix`` has all of it.

The cases run a few at a time, because most of a case with a stopped rank is waiting.
"""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.fault_matrix import VALUES, Case, Matrix, Outcome, all_cases, pairwise
from tests.long import IS_LONG
from tests.random_kills import Kills, Survival
from tests.zygote import Zygote

pytestmark = pytest.mark.dist

CASES = {str(case): case for case in (all_cases() if IS_LONG else pairwise())}
SEEDS = range(200 if IS_LONG else 8)
KINDS = [("z3", "safetensors"), ("z3", "bin"), ("z2", "bf16"), ("z3", "optimizer")]
NUM_JOBS = 3
# Also with the faulty run's ranks started, each in an interpreter of its own.
STARTED = [
    Case("kill", "middle", "gather", "all", 1, True, False, 2, "safetensors"),
    Case("term", "last", "direct", "all", 0, True, True, 2, "bin"),
    Case("raise", "first", "allgather", "1", 1, False, True, 2, "safetensors"),
]


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def matrix(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"), zygote.started)


Waiting = Mapping[str, concurrent.futures.Future[Outcome]]


@pytest.fixture(scope="module")
def outcomes(
    matrix: Matrix, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Waiting]:
    """What becomes of each case that is to be tested, under way already."""
    folder = tmp_path_factory.mktemp("cases")
    wanted = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_a_case"
    ]
    pool = concurrent.futures.ThreadPoolExecutor(NUM_JOBS)
    yield {name: pool.submit(matrix.carry_out, CASES[name], folder / name) for name in wanted}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", CASES)
def test_a_case(name: str, outcomes: Waiting) -> None:
    outcome = outcomes[name].result()
    assert outcome.state in ("none", "old", "new", "cut off")


def test_every_two_values_meet() -> None:
    seen = set()
    for case in pairwise():
        values = [(name, getattr(case, name)) for name in VALUES]
        seen |= set(itertools.combinations(values, 2))
    possible = {
        pair
        for values in itertools.product(*VALUES.values())
        if Case(*values).is_possible  # type: ignore[arg-type]
        for pair in itertools.combinations(zip(VALUES, values, strict=True), 2)
    }
    assert seen == possible


@pytest.mark.parametrize("case", STARTED, ids=str)
def test_a_started_rank_does_as_a_forked_one(case: Case, matrix: Matrix, tmp_path: Path) -> None:
    forked = matrix.carry_out(case, tmp_path / "forked")
    started = matrix.carry_out(case, tmp_path / "started", is_started=True)
    assert (started.state, started.codes) == (forked.state, forked.codes)
    assert len(started.left) == len(forked.left)


@pytest.fixture(scope="module")
def survivals(
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[int, concurrent.futures.Future[Survival]]]:
    """Runs that are killed at random and gone on from, under way already."""
    folder = tmp_path_factory.mktemp("kills")
    kills = Kills(folder, zygote.started, () if IS_LONG else KINDS)
    pool = concurrent.futures.ThreadPoolExecutor(NUM_JOBS)
    yield {seed: pool.submit(kills.survive, seed, folder / str(seed)) for seed in SEEDS}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_random_the_next_run_goes_on(
    seed: int, survivals: Mapping[int, concurrent.futures.Future[Survival]]
) -> None:
    assert survivals[seed].result().states
