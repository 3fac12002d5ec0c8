"""Every fault, in every phase, on every rank, with every way to move the bytes: what must hold.

A :class:`Case` is one run with one fault. :func:`carry_out` lets it happen, and a second run after
it, and checks what the README promises of exit codes, messages, files and processes.
:func:`pairwise` chooses a few cases in which every two values meet.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dist_consolidate import cli
from tests.faults import Fault
from tests.synthetic import Param, Spec, write
from tests.torchrun import Ended, Running, Start, messages, running_ranks, show
from tests.zygote import session_of

PARAMS = [Param(f"layer.{number}.weight", (100, 161)) for number in range(12)]
SHAPING = ["--max-shard-size", "200KB"]
OLD_SHAPING = ["--max-shard-size", "400KB"]
BUCKET = ["--bucket-size", "25KB"]
# A stopped rank is noticed after this; a machine that is busy otherwise must not look like one.
STOP_SEC, PATIENCE = 5.0, "60s"
BOUND_SEC = 90.0
HOST = socket.gethostname()
FOREIGN = {"config.json": b"{}\n", "tokenizer.txt": b"a b\n"}

VALUES: Mapping[str, Sequence[object]] = {
    "fault": ("kill", "term", "stop", "pause", "raise"),
    "phase": ("planning", "first", "middle", "last", "publishing", "placed"),
    "transport": ("direct", "allgather", "gather"),
    "writers": ("1", "all"),
    "victim": (0, 1),
    "resume": (False, True),
    "old": (False, True),
    "num_ranks": (2, 3),
    "format": ("safetensors", "bin"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One run with a fault.

    Attributes:
        fault: ``kill`` (SIGKILL), ``term`` (SIGTERM), ``stop`` (SIGSTOP until all others have
            ended, then SIGKILL), ``pause`` (the same with SIGCONT) or ``raise`` (an EIO).
        phase: ``planning``, the ``first``, ``middle`` or ``last`` bucket, ``publishing`` (before
            the first file is renamed into place) or ``placed`` (after the last).
        transport: As the option.
        writers: As the option.
        victim: The rank.
        resume: With ``--resume``.
        old: Over an older result of the same checkpoint in other files, beside foreign files.
        num_ranks: Ranks.
        format: As the option.
    """

    fault: str
    phase: str
    transport: str
    writers: str
    victim: int
    resume: bool
    old: bool
    num_ranks: int
    format: str

    def __str__(self) -> str:
        """Name it."""
        words = [self.fault, self.phase, self.transport, f"w{self.writers}"]
        words += [f"rank{self.victim}of{self.num_ranks}", self.format]
        words += ["resume"] * self.resume + ["old"] * self.old
        return "-".join(words)

    @property
    def writes(self) -> bool:
        """Whether the victim writes."""
        return self.writers == "all" or self.victim == 0

    @property
    def is_possible(self) -> bool:
        """Whether there is such a case: where a rank calls nothing, no call of it can fail."""
        if self.fault != "raise" or self.phase == "planning" or self.victim == 0:
            return True
        if self.phase == "placed":
            return False
        if self.phase == "publishing" or self.transport == "direct":
            return self.writes
        return True

    def arguments(self, ckpt: Path, out: Path) -> list[str | Path]:
        """Give the command line."""
        timeout = f"{STOP_SEC}s" if self.fault in ("stop", "pause") else PATIENCE
        found = [ckpt, out, "--transport", self.transport, "--writers", self.writers, *SHAPING]
        found += [*BUCKET, "--format", self.format, "--timeout", timeout]
        return found + ["--resume"] * self.resume + ["--overwrite"] * self.old


def all_cases() -> Iterator[Case]:
    """Give every case with two ranks; older results, three ranks and formats take turns."""
    names = ("fault", "phase", "transport", "writers", "victim", "resume")
    for number, values in enumerate(itertools.product(*(VALUES[name] for name in names))):
        # Turns of lengths that the others' numbers do not share.
        case = Case(
            *values,  # type: ignore[arg-type]
            old=number * 5 % 7 < 3,
            num_ranks=3 if number % 11 == 3 else 2,
            format="bin" if number % 13 % 3 == 1 else "safetensors",
        )
        if case.is_possible:
            yield case


def pairwise() -> list[Case]:
    """Choose cases so that every two values that can meet do so in one of them; always the same."""
    names = list(VALUES)
    everything = [
        case
        for values in itertools.product(*VALUES.values())
        if (case := Case(*values)).is_possible  # type: ignore[arg-type]
    ]

    def pairs(case: Case) -> set[tuple[object, ...]]:
        found = [(name, getattr(case, name)) for name in names]
        return set(itertools.combinations(found, 2))

    by_case = {case: pairs(case) for case in everything}
    missing = set().union(*by_case.values())
    chosen = []
    while missing:
        best = max(everything, key=lambda case: len(by_case[case] & missing))
        chosen.append(best)
        missing -= by_case[best]
    return chosen


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
        state: What was there after the first run: ``none``, ``old``, ``new``, or ``cut off`` (half
            renamed over an older result, with no index or manifest, for the next run to end).
        codes: Exit codes, by rank.
        left: Hidden names that the first run has left.
        num_resumed_bytes: What the second run has taken over.
        messages: What the first run said.
    """

    state: str
    codes: tuple[int, ...]
    left: tuple[str, ...]
    num_resumed_bytes: float
    messages: tuple[str, ...]


class Matrix:
    """A checkpoint, what has to come out of it, and where calls are made on the way."""

    def __init__(self, folder: Path, start: Start) -> None:
        """Make the checkpoint and an older result.

        Args:
            folder: For all of it.
            start: How ranks are started.
        """
        self.folder, self.start = folder, start
        self.ckpt = write(folder / "ckpt", Spec(stage=3, world=3, params=PARAMS)).tag_dir.parent
        self._lock, self._calls = threading.Lock(), dict[tuple[str, str, int], list[list[int]]]()
        self.olds, self.news = dict[str, dict[str, bytes]](), dict[str, dict[str, bytes]]()
        for form in ("safetensors", "bin"):
            for results, shaping in ((self.olds, OLD_SHAPING), (self.news, SHAPING)):
                out = folder / f"reference-{form}-{len(shaping)}-{shaping[-1]}"
                line = [self.ckpt, out, *shaping, "--format", form]
                assert cli.main([str(word) for word in line]) == 0
                results[form] = contents(out)

    def calls(self, case: Case) -> list[list[int]]:
        """Count the reads and writes of an unbroken run, by rank; its result is checked."""
        key = (case.transport, case.writers, case.num_ranks)
        with self._lock:
            if key not in self._calls:
                folder = self.folder / f"unbroken-{'-'.join(map(str, key))}"
                folder.mkdir()
                plain = dataclasses.replace(
                    case, fault="none", resume=False, old=False, format="safetensors"
                )
                fault = Fault("none", folder=str(folder))
                arguments = plain.arguments(self.ckpt, folder / "out")
                ended = self.run(case.num_ranks, arguments, fault)
                assert [rank.returncode for rank in ended] == [0] * case.num_ranks, show(ended)
                assert contents(folder / "out") == self.news["safetensors"], key
                paths = [fault.counts(rank) for rank in range(case.num_ranks)]
                self._calls[key] = [json.loads(path.read_text()) for path in paths]
        return self._calls[key]

    def run(
        self, num_ranks: int, arguments: Sequence[str | Path], fault: Fault | None = None
    ) -> list[Ended]:
        """Run to the end, and see that nothing of it lives on."""
        env = {} if fault is None else fault.to_env()
        with running_ranks(
            num_ranks, arguments, module="tests.faults", env=env, start=self.start
        ) as ranks:
            deadline = time.monotonic() + BOUND_SEC
            done = [rank.ends_before(deadline) for rank in ranks]
            ended = end_all(ranks)
        assert all(done), f"took too long: {show(ended)}"
        return ended

    def fault(self, case: Case, folder: Path) -> Fault:
        """Find the place where a case's fault strikes."""
        kind = {"pause": "stop"}.get(case.fault, case.fault)
        fault = Fault(kind, victim=case.victim, pacer=case.victim, folder=str(folder))
        if case.phase == "planning":
            return dataclasses.replace(fault, place="planning")
        if case.phase in ("publishing", "placed"):
            if case.fault == "raise" and case.victim:
                return dataclasses.replace(fault, place="sync")
            place = "rename" if case.phase == "publishing" else "placed"
            return dataclasses.replace(fault, place=place, pacer=0)
        calls = self.calls(case)
        # A rank that does nothing itself waits for rank 0.
        pacer = case.victim if any(calls[case.victim]) else 0
        num_reads, num_writes = calls[pacer]
        if case.phase == "last" and num_writes:
            return dataclasses.replace(fault, place="write", count=num_writes - 1, pacer=pacer)
        count = {"first": 0, "middle": num_reads // 2, "last": num_reads - 1}[case.phase]
        return dataclasses.replace(fault, place="read", count=count, pacer=pacer)

    def break_down(
        self, case: Case, folder: Path, out: Path, *, is_started: bool = False
    ) -> list[Ended]:
        """Run with the fault; give how all ranks ended."""
        fault = self.fault(case, folder)
        with running_ranks(
            case.num_ranks,
            case.arguments(self.ckpt, out),
            module="tests.faults",
            env=fault.to_env(),
            start=None if is_started else self.start,
        ) as ranks:
            deadline = time.monotonic() + BOUND_SEC
            awaited = [
                rank
                for number, rank in enumerate(ranks)
                if number != case.victim or case.fault not in ("stop", "pause")
            ]
            done = [rank.ends_before(deadline) for rank in awaited]
            if case.fault == "pause":
                ranks[case.victim].send_signal(signal.SIGCONT)
                done.append(ranks[case.victim].ends_before(deadline))
            elif case.fault == "stop":
                ranks[case.victim].send_signal(signal.SIGKILL)
            ended = end_all(ranks)
        assert all(done), f"took too long: {show(ended)}"
        assert fault.struck.exists(), f"nothing happened: {show(ended)}"
        return ended

    def carry_out(self, case: Case, folder: Path, *, is_started: bool = False) -> Outcome:
        """Let a case happen, and a second run; fail unless all is as it should be.

        Args:
            case: The case.
            folder: Holds nothing yet.
            is_started: Start the ranks of the first run, each in an interpreter of its own.

        Returns:
            What became of it.
        """
        place = folder / "place"
        out, old = place / "out", self.olds[case.format]
        place.mkdir(parents=True)
        if case.old:
            put(out, {**old, **FOREIGN})
        ended = self.break_down(case, folder, out, is_started=is_started)
        state = self._state(case, place, ended)
        self._check_codes(case, state, ended)
        self._check_message(case, state, ended)
        left = hidden(place)
        self._check_left(case, state, left, ended)
        num_resumed_bytes = self._go_on(case, place, state)
        return Outcome(
            state,
            tuple(rank.returncode for rank in ended),
            tuple(left),
            num_resumed_bytes,
            tuple(messages(ended)),
        )

    def _state(self, case: Case, place: Path, ended: Sequence[Ended]) -> str:
        found, out = contents(place / "out"), place / "out"
        visible = {path.name for path in place.iterdir() if not path.name.startswith(".")}
        assert visible <= {"out"}, visible
        if case.old:
            kept = {name: found.pop(name, None) for name in FOREIGN}
            assert kept == FOREIGN, show(ended)
        if found == self.news[case.format]:
            return "new"
        if case.old and found == self.olds[case.format]:
            return "old"
        if not case.old and not found:
            assert not out.exists(), show(ended)
            return "none"
        may_be_cut_off = case.phase == "publishing" and case.victim == 0
        may_be_cut_off &= case.old and case.fault in ("kill", "stop")
        assert may_be_cut_off, f"{sorted(found)}\n{show(ended)}"
        entries = [name for name in found if name.endswith(".json")]
        assert not entries, f"{sorted(found)}\n{show(ended)}"
        return "cut off"

    def _check_codes(self, case: Case, state: str, ended: Sequence[Ended]) -> None:
        codes = [rank.returncode for rank in ended]
        others = codes[: case.victim] + codes[case.victim + 1 :]
        mine = codes[case.victim]
        if case.fault in ("kill", "stop"):
            assert mine == -signal.SIGKILL, show(ended)
        if state == "new" and case.phase in ("publishing", "placed"):
            # In place in spite of all: each rank may have heard of that, or of the fault.
            assert set(others) <= {0, 1, 143}, show(ended)
            return
        assert state != "new", show(ended)
        want = {"kill": {1}, "stop": {1}, "pause": {1}, "term": {143}, "raise": {1, 2, 3}}
        assert set(others) <= want[case.fault], show(ended)
        assert len(set(others)) == 1, show(ended)
        if case.fault not in ("kill", "stop"):
            assert mine == others[0], show(ended)

    def _check_message(self, case: Case, state: str, ended: Sequence[Ended]) -> None:
        assert "Traceback" not in show(ended), show(ended)
        found = messages(ended)
        if state == "new":
            # What happened then is a note of the run that came through; a rank that was told to
            # end, or slept, while it put its own result in place has nothing to say.
            found += re.findall("^note: with the result in place, (.*)", ended[0].stdout, re.M)
            if not found and case.victim == 0 and case.fault in ("term", "stop", "pause"):
                return
            found = sorted({text.split("\ndist-consolidate: note: ")[0] for text in found})
        assert len(found) == 1, show(ended)
        words = {
            "kill": "ended without a word",
            "stop": "not heard of for 5 s",
            "pause": "not heard of for 5 s",
            "term": "stopped by SIGTERM",
            "raise": os.strerror(5),
        }
        assert words[case.fault] in found[0], show(ended)
        where = f"rank {case.victim} (on {HOST})"
        if case.fault == "raise" and case.phase == "planning":
            where = "optim_states.pt: cannot be read"  # wherever that was
        elif case.fault == "raise" and case.phase in ("publishing", "placed") and not case.victim:
            where = "/place/out"
        assert where in found[0], show(ended)

    def _check_left(
        self, case: Case, state: str, left: Sequence[str], ended: Sequence[Ended]
    ) -> None:
        words = "the same command with --resume goes on from there"
        if case.fault in ("kill", "stop") and case.victim == 0:
            return
        assert case.resume or not left, f"{left}\n{show(ended)}"
        assert not any(".lock" in name for name in left), f"{left}\n{show(ended)}"
        if state != "new" and not (case.fault == "pause" and case.victim == 0):
            assert (words in show(ended)) == bool(left), f"{left}\n{show(ended)}"

    def _go_on(self, case: Case, place: Path, state: str) -> float:
        """Run again: with the same options, but another way to move the bytes."""
        ways = list(itertools.product(VALUES["transport"], VALUES["writers"]))
        number = ways.index((case.transport, case.writers))
        transport, writers = ways[(number * 5 + case.victim + 2 * case.resume) % len(ways)]
        again = dataclasses.replace(
            case, fault="kill", transport=str(transport), writers=str(writers)
        )
        arguments, new = again.arguments(self.ckpt, place / "out"), self.news[case.format]
        ended = self.run(2, arguments)
        codes = [rank.returncode for rank in ended]
        if state == "new" and not case.old and codes == [2, 2]:
            # It is there, and nobody has asked for another one in its place.
            assert "holds weight files already" in show(ended), show(ended)
            assert contents(place / "out") == new
            assert hidden(place) == [], hidden(place)
            return 0.0
        assert codes == [0, 0], show(ended)
        want = {**new, **FOREIGN} if case.old else new
        found = contents(place / "out")
        assert found == want, f"{sorted(found)}, not {sorted(want)}\n{show(ended)}"
        assert hidden(place) == [], hidden(place)
        return resumed_bytes(ended)


def end_all(ranks: Sequence[Running]) -> list[Ended]:
    """Wait a little for ranks that have no reason to live on; fail if they leave anything behind.

    Ports and locks go with the processes that hold them; shared memory would stay.
    """
    deadline = time.monotonic() + 10.0
    for rank in ranks:
        if not rank.ends_before(deadline):
            rank.kill()
    left = {rank.pid: session_of(rank.pid) for rank in ranks}
    ended = [rank.ended() for rank in ranks]
    assert not any(left.values()), f"processes live on: {left}\n{show(ended)}"
    pids = {str(rank.pid) for rank in ranks}
    shared = [
        path for path in Path("/dev/shm").iterdir() if pids & set(re.split(r"\D+", path.name))
    ]
    assert not shared, f"left in /dev/shm: {shared}\n{show(ended)}"
    return ended


def contents(out: Path) -> dict[str, bytes]:
    """Give every file of a folder that is not hidden, with what is in it."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and not any(n.startswith(".") for n in path.relative_to(out).parts)
    }


def hidden(place: Path) -> list[str]:
    """Name what is hidden in a folder, or in its folder ``out``; fail if it is not the tool's."""
    names = [path.name for at in (place, place / "out") if at.is_dir() for path in at.glob(".*")]
    for name in names:
        assert re.fullmatch(r"\.out\.consolidating(-[\w-]+|\.lock(-[0-9a-f]+)?)", name), name
    return sorted(names)


def put(out: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a new folder."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for name, content in files.items():
        (out / name).write_bytes(content)


def resumed_bytes(ended: Sequence[Ended]) -> float:
    """Find what a run says that it has taken over."""
    units = {"B": 1, "bytes": 1, "kB": 1e3, "KB": 1e3, "MB": 1e6}
    match = re.search(r"resumed: ([\d.]+) (\w+) of", ended[0].stdout)
    return float(match[1]) * units[match[2]] if match else 0.0
