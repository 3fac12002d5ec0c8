"""How ranks find each other: rank 0 holds a store (or torchrun's agent does), all others reach it.

Nobody is waited for without an end, and every rank learns who has not come: each leaves its name
in the store; the first one whose time is up says so there, which sets all others free with the
same words. One rank of a host speaks.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from dist_consolidate.errors import Caught, NoPortError, RendezvousError
from dist_consolidate.runtime.hints import advice
from dist_consolidate.runtime.interfaces import interface_problem
from dist_consolidate.runtime.launched import Launched, meeting_place, run_id
from dist_consolidate.runtime.voice import Voice
from dist_consolidate.units import format_duration, ranks_text

_T = TypeVar("_T")

TIMEOUT_SEC = 300.0
# A name may become known a little later than the process that it stands for.
_NAME_GRACE_SEC = 30.0
_MIN_PAUSE_SEC, _MAX_PAUSE_SEC = 0.05, 1.0
# What rank 0 gives others to read why it gives up, before its store is gone.
_LINGER_SEC = 5.0
_COUNT, _PROBLEM, _READ = "count", "problem", "read"


def _open_store(port: int, timeout_sec: float, listening: socket.socket | None) -> Any:  # noqa: ANN401
    """Open a store on rank 0; it is reached under every address of this host."""
    options: dict[str, Any] = {"is_master": True, "multi_tenant": listening is None}
    if listening is not None:
        options["master_listen_fd"] = listening.detach()
    try:
        # Rank 0 reaches itself whatever its host's name leads to.
        return _tcp_store("127.0.0.1", port, timeout_sec, **options)
    except RuntimeError as error:
        if "EADDRINUSE" not in str(error) and os.strerror(errno.EADDRINUSE) not in str(error):
            raise NoPortError(f"rank 0 cannot listen on port {port}: {_line(error)}") from error
        raise NoPortError(
            f"rank 0 cannot listen on port {port} of host {socket.gethostname()}: another program "
            "or another run has it already; set MASTER_PORT to a free one (in a SLURM step "
            "together with MASTER_ADDR)"
        ) from error


def meet(
    launched: Launched,
    timeout_sec: float = TIMEOUT_SEC,
    listening: socket.socket | None = None,
    *,
    with_nccl: bool = False,
) -> Any:  # noqa: ANN401
    """Wait until all ranks are there.

    Args:
        launched: This rank, and where rank 0 can be met.
        timeout_sec: How long ranks wait for each other.
        listening: On rank 0, a socket that listens on the port already.
        with_nccl: Whether NCCL's choice of interfaces matters.

    Returns:
        The store, for process groups to be made with.

    Raises:
        RendezvousError: If not all came, or this rank cannot reach the store.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    deadline = time.monotonic() + timeout_sec
    voice = Voice(meeting_place(launched))
    try:
        found = _find_store(launched, timeout_sec, deadline, listening)
        # Steps of one job may be told one port, and an agent's store outlives a restart: neither
        # may take what others have left.
        store = PrefixStore(f"dist_consolidate/{run_id(launched)}", found)
        problem = interface_problem(with_nccl=with_nccl)
        _gather(store, launched, timeout_sec, deadline, problem)
    except NoPortError:
        voice.speak()
        raise
    except RendezvousError as error:
        error.silent = voice.is_taken()
        raise
    return store


def _find_store(
    launched: Launched, timeout_sec: float, deadline: float, listening: socket.socket | None
) -> Any:  # noqa: ANN401
    address, port = str(launched.address), int(launched.port or 0)
    if launched.rank == 0 and not _has_agent(launched):
        return _open_store(port, timeout_sec, listening)
    left_sec = _reach(launched, address, port, timeout_sec, deadline)
    # A program that is no store, and takes connections, would be waited for without an end.
    caught, made = _within(left_sec, lambda: _tcp_store(address, port, timeout_sec))
    if made is None:
        why = f"something answers there, but as no rank 0 does ({_line(caught)})"
        raise RendezvousError(_unreachable(launched, timeout_sec, why))
    return made


def _has_agent(launched: Launched, environ: Mapping[str, str] = os.environ) -> bool:
    """Tell whether torchrun's agent holds the store, as it tells its workers."""
    use = environ.get("TORCHELASTIC_USE_AGENT_STORE")
    return launched.launcher == "torchrun" and use == str(True)


def _tcp_store(address: str, port: int, timeout_sec: float, **options: Any) -> Any:  # noqa: ANN401
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = datetime.timedelta(seconds=timeout_sec)
    return TCPStore(address, port, timeout=timeout, wait_for_workers=False, **options)


def _reach(
    launched: Launched, address: str, port: int, timeout_sec: float, deadline: float
) -> float:
    """Wait until something takes connections at a place; give the seconds that are left.

    torch would try as well, but with pages of warnings, and without telling names that do not
    resolve from ports that are closed.
    """
    pause_sec, named_by = _MIN_PAUSE_SEC, min(deadline, time.monotonic() + _NAME_GRACE_SEC)
    while True:
        try:
            limit_sec = max(min(deadline - time.monotonic(), 10.0), 0.1)
            socket.create_connection((address, port), limit_sec).close()
            return max(deadline - time.monotonic(), 1.0)
        except (OSError, UnicodeError) as error:
            unnamed = isinstance(error, socket.gaierror | UnicodeError)
            left_sec = (named_by if unnamed else deadline) - time.monotonic()
            if left_sec <= 0:
                why = _reason(launched, error, unnamed=unnamed)
                raise RendezvousError(_unreachable(launched, timeout_sec, why)) from error
        time.sleep(min(pause_sec, left_sec))
        pause_sec = min(2 * pause_sec, _MAX_PAUSE_SEC)


def _reason(launched: Launched, error: Exception, *, unnamed: bool) -> str:
    if unnamed:
        said = "MASTER_ADDR" if "MASTER_ADDR" in launched.variables else "the name of rank 0's host"
        why = getattr(error, "strerror", None) or error
        return f"{said}, {launched.address!r}, does not resolve ({why})"
    if isinstance(error, TimeoutError):
        return "no answer: a firewall, or an address that does not lead there from here"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused: rank 0 has not started or has ended, or listens elsewhere"
    return getattr(error, "strerror", None) or str(error)


def _unreachable(launched: Launched, timeout_sec: float, why: str) -> str:
    return advice(
        f"rank {launched.rank} of {launched.size} on host {socket.gethostname()} could not reach "
        f"rank 0 at {_place(launched)} within {format_duration(timeout_sec)}: {why}",
        launched,
    )


def _within(limit_sec: float, make: Callable[[], _T]) -> tuple[Exception | None, _T | None]:
    """Call something that may never return; it is left behind in its thread then."""
    caught, made = Caught(), []

    def call() -> None:
        with caught:
            made.append(make())

    thread = threading.Thread(target=call, name="consolidate-meet", daemon=True)
    thread.start()
    thread.join(limit_sec)
    return caught.error, made[0] if made else None


def _gather(
    store: Any,  # noqa: ANN401
    launched: Launched,
    timeout_sec: float,
    deadline: float,
    problem: str | None,
) -> None:
    """Leave this rank's name, and wait for those of all others."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    here = PrefixStore("ranks", store)
    ranks = range(launched.size)
    try:
        if problem is not None:
            here.compare_set(_PROBLEM, "", f"2 {problem}")
        here.set(str(launched.rank), socket.gethostname())
        if not _all_there(here, launched.size, deadline):
            missing = [rank for rank in ranks if not here.check([str(rank)])]
            here.compare_set(_PROBLEM, "", f"1 {_who_came(here, launched, timeout_sec, missing)}")
            here.add(_COUNT, launched.size)  # so that nobody waits any longer
        if not here.check([_PROBLEM]):
            return
        code, _, text = here.get(_PROBLEM).decode().partition(" ")
        _let_read(here, launched, sum(here.check([str(rank)]) for rank in ranks))
    except RuntimeError as error:
        lost = f"the store at {_place(launched)} was lost ({_line(error)}): rank 0 has ended"
        raise RendezvousError(advice(lost, launched)) from error
    raise RendezvousError(text, int(code))


def _all_there(here: Any, size: int, deadline: float) -> bool:  # noqa: ANN401
    """Wait for all ranks. The store could wait for us, but torch warns of waits that end."""
    started, count = time.monotonic(), here.add(_COUNT, 1)
    while count < size:
        now = time.monotonic()
        if now > deadline:
            return False
        # Short waits must end soon, and long ones need few questions.
        time.sleep(min((now - started) / 16 + 0.005, _MAX_PAUSE_SEC, deadline - now + 0.001))
        count = here.add(_COUNT, 0)
    return True


def _who_came(
    here: Any,  # noqa: ANN401
    launched: Launched,
    timeout_sec: float,
    missing: Sequence[int],
) -> str:
    by_host: dict[str, list[int]] = {}
    for rank in sorted(set(range(launched.size)) - set(missing)):
        by_host.setdefault(here.get(str(rank)).decode(), []).append(rank)
    came = ", ".join(f"{ranks_text(ranks)} on host {host}" for host, ranks in by_host.items())
    return advice(
        f"{launched.size - len(missing)} of {launched.size} ranks came to {_place(launched)} "
        f"within {format_duration(timeout_sec)}: {came}; {ranks_text(missing)} did not",
        launched,
    )


def _let_read(here: Any, launched: Launched, num_readers: int) -> None:  # noqa: ANN401
    """Keep rank 0, which may hold the store, until all that have come know why it ends."""
    here.add(_READ, 1)
    until = time.monotonic() + _LINGER_SEC
    while launched.rank == 0 and time.monotonic() < until and here.add(_READ, 0) < num_readers:
        time.sleep(_MIN_PAUSE_SEC)


@contextlib.contextmanager
def connecting(launched: Launched) -> Iterator[None]:
    """Put into words what torch says when ranks that have met cannot connect to each other.

    Args:
        launched: This rank.

    Raises:
        RendezvousError: In place of torch's errors.
    """
    try:
        yield
    except RuntimeError as error:
        text = (
            f"rank {launched.rank} of {launched.size} on host {socket.gethostname()} has met the "
            f"others, but cannot connect to them: {_line(error)}"
        )
        raise RendezvousError(advice(text, launched)) from error


def _place(launched: Launched) -> str:
    address = str(launched.address)
    return f"[{address}]:{launched.port}" if ":" in address else f"{address}:{launched.port}"


def _line(error: Exception | None) -> str:
    text = str(error or "").strip().split("\n", 1)[0]
    # What torch puts in front of it says where in torch.
    return text.rpartition("] ")[2][:300] if text.startswith("[") else text[:300] or "no answer"
