"""A thread that sees to it that this process ends when it has to, whatever its main thread does.

The main thread may wait in a collective for a rank that is gone, or in a call to a file system that
never answers: neither a signal's handler nor an exception reaches it there. So signals wake this
thread, too; it hears from rank 0 when the run is over (:mod:`dist_consolidate.runtime.hub`), and it
looks after this process's own calls to file systems. It asks the main thread to stop, and where
that does not help, it clears up and ends the process.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from dist_consolidate import doing
from dist_consolidate.errors import ConsolidateError, LostError, RankError
from dist_consolidate.runtime.control import Control, describe, exit_code
from dist_consolidate.runtime.hub import Hub, Line
from dist_consolidate.runtime.roll import (
    KILLED,
    Verdict,
    named_ranks,
    silent_text,
    stuck_text,
    unconnected_text,
)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# mpirun kills one second after SIGTERM. Renaming the files of a result gets longer.
_GRACE_SEC, _PUBLISHING_GRACE_SEC = 0.6, 8.0
# For the peers' last words, when this rank has failed; for clearing up.
_LEAVING_SEC, _CLEAN_UP_SEC = 10.0, 5.0
# How long a rank that lost contact waits for the reason, and one that was stopped.
_REASON_SEC, _STOPPED_SEC = 3.0, 0.5
_CONNECT_SEC = 5.0
# Characters of a failure's text: a line of the hub's holds them, however they are escaped.
_MAX_TEXT = 8000


class Stopped(BaseException):
    """The main thread is to end now: by a signal, or because the run is over."""


class Watch:
    """Watches over one process of the command line.

    Attributes:
        clean_up: What removes everything half-made, once there is something.
        advice: What says, should the run fail, what people can do with what it leaves.
        verdict: Why the run ends, once it does.
        code: What this process ends with, once that is told.
    """

    def __init__(
        self, rank: int, timeout_sec: float, tell: Callable[[Exception], None] | None = None
    ) -> None:
        """Set up; ``with`` starts it.

        Args:
            rank: This process.
            timeout_sec: How long a rank may get nothing done.
            tell: Says what went wrong.
        """
        self._rank, self._timeout_sec, self._say = rank, timeout_sec, tell
        self.beat_sec = min(5.0, timeout_sec / 8)
        self.clean_up: Callable[[], None] | None = None
        self.advice: Callable[[], str] | None = None
        self.verdict: Verdict | None = None
        self._stopped: Verdict | None = None
        self.code = 0
        self._arrived = threading.Event()
        self._telling = threading.Lock()
        self._told = self._leaving = self._raised = self._ended = self._finished = False
        self._clearing = False
        self._connecting_sec: float | None = None
        self._may_connect_sec = 0.0
        self._deadline: tuple[float, int] | None = None
        self._line: Line | None = None
        self._hub: Hub | None = None
        self._hosts: list[str] = []
        self._token, self._hub_silent_sec = "", 0.0
        self._claim: socket.socket | None = None
        self._before: dict[int, Any] = {}
        self._asleep, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="consolidate-watch", daemon=True)

    def __enter__(self) -> Watch:
        """Take over the signals, and start to watch."""
        for end in (self._asleep, self._waker):
            end.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
            self._fd_before = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        """Give everything back."""
        self._leaving = self._ended = True
        if self._before:
            signal.set_wakeup_fd(self._fd_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
        self._wake()
        self._thread.join()
        self.part()
        for end in (self._asleep, self._waker, self._claim):
            if end is not None:
                end.close()

    # The main thread's side.

    def connect_within(self, timeout_sec: float) -> None:
        """Give the ranks, which have met, some time until all have joined.

        A rank that is killed right then is waited for by the others inside gloo, each of whose
        connections takes its own time, and nobody can tell yet who it is.

        Args:
            timeout_sec: How long.
        """
        self._may_connect_sec, self._connecting_sec = timeout_sec, 0.0

    def join(self, control: Control, address: str | None) -> bool:
        """Connect to rank 0's hub; every rank does.

        Args:
            control: The control plane.
            address: Where the launcher says that rank 0 is.

        Returns:
            Whether all ranks are connected; if not, none stays so.
        """
        where = None
        if control.rank == 0:
            with contextlib.suppress(OSError):
                self._hub = Hub(control.hosts, self._timeout_sec, self.beat_sec)
                names = [name for name in (address, socket.gethostname()) if name]
                where = (names, self._hub.port, self._hub.token)
        where = control.broadcast(where)
        line = None
        if where is not None:
            # By the address that this rank has just met rank 0 under, before rank 0's own.
            names = list(dict.fromkeys([*([address] if address else ()), *where[0]]))
            line = _connect(control.rank, names, *where[1:])
        connected = control.exchange(line is not None)
        if not all(connected) or where is None or line is None:
            if line is not None:
                line.close()
            self._stop_hub()
            self._connecting_sec = None
            return False
        self._connecting_sec = None
        self._hosts, self._token, self._line = control.hosts, where[2], line
        self._wake()
        return True

    def part(self) -> None:
        """Leave the hub in order."""
        line, self._line = self._line, None
        if line is not None:
            line.send({"bye": True})
            line.close()
        self._stop_hub()

    def settle(self, error: BaseException) -> Exception:
        """Find out why the run ends, from what this rank has met.

        Args:
            error: What was raised here.

        Returns:
            What to tell.
        """
        self._leaving = True  # the main thread is leaving already
        if isinstance(error, ConsolidateError) and error.agreed:
            return error
        if isinstance(error, Stopped):
            self._arrived.wait(_STOPPED_SEC)
            return self._as_error(self.verdict or self._stopped or Verdict("stopped", 1))
        assert isinstance(error, Exception)
        if self._line is None and self.verdict is None:
            return error
        if isinstance(error, LostError):
            self._arrived.wait(_REASON_SEC)
        if self.verdict is None:
            self._send_failure("failed", describe(error), exit_code(error))
            self._arrived.wait(_REASON_SEC)
        return error if self.verdict is None else self._as_error(self.verdict)

    def tell(self, error: Exception) -> None:
        """Say once why the run ends; from now on this process has some seconds to leave."""
        self._leaving = True
        with self._telling:
            if not self._told:
                self._told, self.code = True, exit_code(error)
                if self._say is not None:
                    self._say(error)
        self._deadline = self._deadline or (time.monotonic() + _LEAVING_SEC, self.code)
        self._wake()

    def _as_error(self, verdict: Verdict) -> RankError:
        error = RankError(verdict.text, verdict.code)
        error.silent = not verdict.is_mine_to_tell
        return error

    def _stop_hub(self) -> None:
        hub, self._hub = self._hub, None
        if hub is not None:
            hub.stop()

    def clear_up(self) -> None:
        """Note that the main thread clears up: it must not be asked to stop in the middle of it."""
        self._clearing = True

    def finish(self) -> None:
        """Note that the result is in place: from now on nobody's end undoes that."""
        self._finished = self._leaving = True

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        # Half of the files renamed would be neither the old result nor the new one.
        if doing.is_publishing(self._timeout_sec):
            return
        if not (self._raised or self._leaving or self._clearing):
            self._raised = True
            raise Stopped

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    # The thread's side.

    def _run(self) -> None:
        last = time.monotonic()
        beaten = 0.0
        while not self._ended:
            step = 0.05 if self._deadline else min(self.beat_sec, 1.0)
            line = self._line
            heard = self._listen(line, step)
            now = time.monotonic()
            # Where this process was stopped, time did not pass for it.
            elapsed, last = min(now - last, 2 * step), now
            if line is not None and line is self._line:
                self._take(heard)
                self._look_after_hub(elapsed)
                beaten += elapsed
                if beaten >= self.beat_sec:
                    beaten = 0.0
                    line.send({"doing": _longest()})
            self._look_after_files(elapsed)
            self._look_after_connecting(elapsed)
            if self._deadline and now > self._deadline[0] and not self._ended:
                self._end(self._deadline[1])

    def _listen(self, line: Line | None, step: float) -> list[dict[str, Any]] | None:
        """Wait for a signal or a message; give the messages, ``None`` if the hub is gone."""
        poll = select.poll()
        ends = [self._asleep.fileno(), line.socket.fileno() if line else -1]
        for end in ends:
            if end >= 0:  # the main thread may have closed it meanwhile
                poll.register(end, select.POLLIN)
        readable = {end for end, _ in poll.poll(step * 1000)}
        if ends[0] in readable:
            with contextlib.suppress(OSError):
                for number in self._asleep.recv(64):
                    if number in _SIGNALS:
                        self._signalled(signal.Signals(number))
        if line is None or ends[1] not in readable:
            return []
        return line.receive()

    def _signalled(self, number: signal.Signals) -> None:
        if self.verdict is not None:
            return
        text, code = f"stopped by {number.name}", 128 + number
        self._send_failure("stopped", text, code)
        self._stopped = Verdict(f"this process was {text}", code, self._rank == 0)
        if self._line is None:
            self._decide(self._stopped)
        self._hasten(code)

    def _take(self, heard: list[dict[str, Any]] | None) -> None:
        if heard is None:
            self._lose_hub(KILLED)
            return
        for message in heard:
            self._hub_silent_sec = 0.0
            if "end" in message:
                self._line = None
            elif "verdict" in message:
                text, code = str(message["verdict"]), int(message["code"])
                is_mine = self._rank == 0 and not message.get("told")
                self._decide(Verdict(text, code, is_mine))

    def _look_after_hub(self, elapsed: float) -> None:
        self._hub_silent_sec += elapsed
        if self._hub_silent_sec > self._timeout_sec + 2 * self.beat_sec:
            self._lose_hub(silent_text(self._timeout_sec, ""))

    def _lose_hub(self, text: str) -> None:
        """Rank 0 is gone, and cannot tell anybody: on each host one rank does."""
        text = f"{named_ranks([0], self._hosts)}: {text}"
        line = self._line
        if line is not None:
            # Should it wake up, it finds out that the others did not end for no reason.
            line.send({"deserts": text})
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0dist-consolidate-{self._token}")
            self._claim, is_mine = claim, True
        except OSError:
            claim.close()
            is_mine = False
        # In this order: who finds no line finds the verdict.
        self._decide(Verdict(text, 1, is_mine))
        self._line = None

    def _look_after_files(self, elapsed: float) -> None:
        for item in doing.under_way():
            item.waited_sec += elapsed
            if item.waited_sec > self._timeout_sec and not self.verdict and not self._leaving:
                text = stuck_text(self._timeout_sec, str(item))
                self._send_failure("stuck", text, 1)
                if self._line is None:
                    self._decide(Verdict(text, 1, is_mine_to_tell=True))

    def _look_after_connecting(self, elapsed: float) -> None:
        if self._connecting_sec is None or self._leaving:
            return
        self._connecting_sec += elapsed
        if self._connecting_sec > self._may_connect_sec:
            self._connecting_sec = None
            text = unconnected_text(self._rank, socket.gethostname(), self._may_connect_sec)
            self._decide(Verdict(text, 1, is_mine_to_tell=True))

    def _send_failure(self, kind: str, text: str, code: int) -> None:
        line = self._line
        if line is not None:
            cut = "" if len(text) <= _MAX_TEXT else " [cut]"
            line.send({"failed": kind, "text": text[:_MAX_TEXT] + cut, "code": code})

    def _decide(self, verdict: Verdict) -> None:
        """The run is over: ask the main thread to stop."""
        if self.verdict is not None:
            return
        self.verdict = verdict
        self._arrived.set()
        if not (self._leaving or self._clearing or self._raised) and self._before:
            _thread.interrupt_main(signal.SIGTERM)
        self._hasten(verdict.code)

    def _hasten(self, code: int) -> None:
        soon = time.monotonic() + _GRACE_SEC
        if self._deadline is None or soon < self._deadline[0]:
            self._deadline = (soon, code)

    def _end(self, code: int) -> None:
        """End this process from here, as cleanly as that can be."""
        assert self._deadline is not None
        last = self._deadline[0] + _PUBLISHING_GRACE_SEC
        if doing.is_publishing(self._timeout_sec) and time.monotonic() < last:
            return
        if self._finished:
            # The main thread has some seconds to leave the others.
            if time.monotonic() > self._deadline[0] + _LEAVING_SEC:
                if self.verdict is not None:
                    self._say_at_last(f"the result is in place, but then: {self.verdict.text}")
                os._exit(0)
            return
        helper = threading.Thread(target=self._last_things, daemon=True)
        helper.start()
        helper.join(_CLEAN_UP_SEC)
        os._exit(self.code if self._told else code)

    def _last_things(self) -> None:
        if self.verdict is not None and self._telling.acquire(timeout=1):
            if not self._told and self._say is not None:
                self._told, self.code = True, self.verdict.code
                self._say(self._as_error(self.verdict))
            self._telling.release()
        if self.clean_up is not None:
            self.clean_up()

    def _say_at_last(self, text: str) -> None:
        if self._telling.acquire(timeout=1):
            if not self._told and self._say is not None:
                self._told = True
                self._say(RankError(text, 0))
            self._telling.release()


def _longest() -> str:
    """Say what has been under way for longest."""
    return str(max(doing.under_way(), key=lambda item: item.waited_sec, default=""))


def _connect(rank: int, names: list[str], port: int, token: str) -> Line | None:
    """Connect to the hub under the first of its names that leads there."""
    for name in ["127.0.0.1", *names] if rank == 0 else names:
        with contextlib.suppress(OSError, ValueError):
            connection = socket.create_connection((name, port), timeout=_CONNECT_SEC)
            line = Line(connection)
            line.send({"rank": rank, "token": token, "doing": ""})
            until = time.monotonic() + _CONNECT_SEC
            while time.monotonic() < until:
                poll = select.poll()
                poll.register(connection, select.POLLIN)
                poll.poll(500)
                heard = line.receive()
                if heard is None:
                    break
                if any("welcome" in message for message in heard):
                    return line
            line.close()
    return None
