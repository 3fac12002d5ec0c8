"""Finding out who is gone, once the ranks cannot talk any more.

A process group says that a message did not come, not whose. So each rank keeps a socket open that
it never serves: the system accepts connections to it as long as the process lives, busy or not,
and no longer. Whoever loses contact rings at all others, tells those that are still there who is
not, and the others, when they notice, find that word in their own sockets and need not say it
again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Iterator, Sequence

from dist_consolidate.errors import LostError
from dist_consolidate.runtime.control import Control

# How long one waits for an answer to a bell, and for the word of one who has rung.
_ANSWER_SEC = 4.0
_WORD_SEC = 8.0
# So long at least, so that two that ring at once hear of each other.
_PAUSE_SEC = 0.5
_MAX_WORD_BYTES = 1 << 16
_LOST = "contact with another rank was lost"
_NOTHING: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Door:
    """Where a rank is found.

    Attributes:
        host: Its host's name.
        addresses: Addresses of that host, in digits: nobody asks a name server when the network
            is gone.
        port: The port of its socket.
    """

    host: str
    addresses: tuple[str, ...]
    port: int


class Doorbell:
    """This rank's socket, and where those of the others are.

    Attributes:
        hosts: The host of each rank.
    """

    def __init__(self, control: Control, listener: socket.socket, doors: Sequence[Door]) -> None:
        """Remember the doors; see :func:`opened`."""
        self._rank, self._listener, self._doors = control.rank, listener, doors
        self.hosts = tuple(door.host for door in doors)
        self._token = ""
        self._visitors: list[_Visitor] = []

    def agree_on_token(self, control: Control) -> None:
        """Let rank 0 choose what tells this run's words from anybody else's."""
        self._token = control.broadcast(secrets.token_hex(8))

    def explained(self, error: LostError) -> LostError:
        """Find out which ranks are gone.

        Args:
            error: What was noticed here.

        Returns:
            An error that names them; one of the ranks that found out is to tell it, and of the
            others' it is said that it has been told.
        """
        word = self._word_of_others()
        if word is None:
            with contextlib.ExitStack() as stack:
                answered = self._ring(stack)
                self._let_in()
                first = any(visitor.rank < self._rank for visitor in self._visitors)
                word = self._word_of_others() if first else None
                if word is None:
                    return LostError(self._tell(answered, error), error.exit_code)
        told = LostError(word, error.exit_code)
        told.told_elsewhere = True
        return told

    def close(self) -> None:
        """Close the door."""
        self._listener.close()
        for visitor in self._visitors:
            visitor.connection.close()

    def _word_of_others(self) -> str | None:
        """Give what another rank has found out; if one is about to, wait for that."""
        self._let_in()
        deadline = time.monotonic() + _WORD_SEC
        while self._visitors and time.monotonic() < deadline:
            for visitor in self._visitors:
                visitor.read()
                if visitor.word is not None:
                    return visitor.word
            if all(visitor.is_gone for visitor in self._visitors):
                return None
            time.sleep(0.05)
            self._let_in()
        return None

    def _let_in(self) -> None:
        """Accept who has rung, and hear who it is."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                break
            connection.setblocking(False)
            self._visitors.append(_Visitor(connection, self._token))
        for visitor in self._visitors:
            visitor.read()
        self._visitors = [visitor for visitor in self._visitors if not visitor.is_stranger]

    def _ring(self, stack: contextlib.ExitStack) -> dict[int, socket.socket]:
        """Ring at all other doors; give those that answered."""
        started, answered = time.monotonic(), dict[int, socket.socket]()
        bells = stack.enter_context(selectors.DefaultSelector())
        for rank, door in enumerate(self._doors):
            if rank != self._rank:
                for bell in self._bells(door):
                    stack.callback(bell.close)
                    bells.register(bell, selectors.EVENT_WRITE, rank)
        while bells.get_map() and (left := started + _ANSWER_SEC - time.monotonic()) > 0:
            for key, _ in bells.select(left):
                answering = key.fileobj
                assert isinstance(answering, socket.socket)
                bells.unregister(answering)
                if key.data not in answered and self._say(answering, "ring", self._rank):
                    answered[key.data] = answering
        time.sleep(max(started + _PAUSE_SEC - time.monotonic(), 0))
        return answered

    def _bells(self, door: Door) -> Iterator[socket.socket]:
        """Begin to connect to a door, at every address that it has."""
        seen = set()
        near = door.host == self.hosts[self._rank]
        for address in door.addresses:
            with contextlib.suppress(OSError, UnicodeError):
                for family, _, _, _, place in socket.getaddrinfo(
                    address, door.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
                ):
                    loopback = str(place[0]).startswith("127.") or place[0] == "::1"
                    if place in seen or (loopback and not near):
                        continue
                    seen.add(place)
                    bell = socket.socket(family, socket.SOCK_STREAM)
                    bell.setblocking(False)
                    bell.connect_ex(place)
                    yield bell

    def _say(self, bell: socket.socket, what: str, value: object) -> bool:
        """Say something at a door; tell whether anyone is there."""
        if bell.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return False
        try:
            bell.sendall(json.dumps([self._token, what, value]).encode() + b"\n")
        except OSError:
            return False
        return True

    def _tell(self, answered: dict[int, socket.socket], error: LostError) -> str:
        """Put into words who is gone, and say that to all others."""
        others = [rank for rank in range(len(self._doors)) if rank != self._rank]
        gone = [rank for rank in others if rank not in answered]
        word = _in_words(gone, self.hosts, self._rank, error)
        for bell in answered.values():
            self._say(bell, "word", word)
        return word


def _in_words(gone: Sequence[int], hosts: Sequence[str], rank: int, error: LostError) -> str:
    if not gone:
        return f"{error}; the processes of all other ranks are still there"
    if len(gone) == len(hosts) - 1 and len(set(hosts)) > 1 and len(gone) > 1:
        return (
            f"{_LOST}: none answers rank {rank} on {hosts[rank]} any more: that node lost its "
            f"network, or all others were killed ({error.cause})"
        )
    by_host: dict[str, list[int]] = {}
    for other in gone:
        by_host.setdefault(hosts[other], []).append(other)
    named = " and ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} on {host}"
        for host, ranks in by_host.items()
    )
    verb = "does not answer any more: it was" if len(gone) == 1 else "do not answer: they were"
    where = "its node or network is" if len(by_host) == 1 else "their nodes or networks are"
    return f"{_LOST}: {named} {verb} killed, or {where} gone ({error.cause})"


class _Visitor:
    """A connection to this rank's door.

    Attributes:
        connection: The connection.
        rank: Who it is, once it has said so.
        word: What it has found out, once it has said so.
        is_gone: It has left.
        is_stranger: It is no rank of this run.
    """

    def __init__(self, connection: socket.socket, token: str) -> None:
        self.connection, self._token = connection, token
        self._heard = b""
        self.rank, self.word = sys.maxsize, _NOTHING
        self.is_gone = self.is_stranger = False

    def read(self) -> None:
        """Take in what has been said by now."""
        while not self.is_gone and len(self._heard) < _MAX_WORD_BYTES:
            try:
                data = self.connection.recv(_MAX_WORD_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.is_gone = not data
            self._heard += data
        *lines, _ = self._heard.split(b"\n")
        for line in lines:
            self._understand(line)

    def _understand(self, line: bytes) -> None:
        try:
            token, what, value = json.loads(line)
        except ValueError:
            token = what = value = None
        if token != self._token:
            self.is_stranger = True
        elif what == "ring" and isinstance(value, int):
            self.rank = value
        elif what == "word" and isinstance(value, str):
            self.word = value


@contextlib.contextmanager
def opened(control: Control, towards: str | None) -> Iterator[Doorbell]:
    """Open a door on every rank; what is lost inside is explained.

    Args:
        control: The control plane.
        towards: A host that is reached by the network the ranks use, such as where they met.

    Yields:
        The doorbell.

    Raises:
        LostError: As the block did, naming the ranks that are gone.
    """
    with _listener() as listener:
        host = socket.gethostname()
        addresses = (*_address_towards(towards), *_addresses_of(host))
        door = Door(host, tuple(dict.fromkeys(addresses)), listener.getsockname()[1])
        first, *others = control.exchange(door)
        # Rank 0's host may know itself by a loopback address only.
        met = (*first.addresses, *_addresses_of(towards))
        doors = [dataclasses.replace(first, addresses=tuple(dict.fromkeys(met))), *others]
        bell = Doorbell(control, listener, doors)
        bell.agree_on_token(control)
        try:
            yield bell
        except LostError as error:
            raise bell.explained(error) from error
        finally:
            bell.close()


def _listener() -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
    except OSError:  # a kernel that knows IPv6 and has it turned off
        listener = socket.create_server(("", 0), backlog=1024)
    listener.setblocking(False)
    return listener


def _addresses_of(host: str | None) -> list[str]:
    """Look a host up."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM) if host else []
        return [str(place[0]) for *_, place in found]
    return []


def _address_towards(host: str | None) -> list[str]:
    """Give this host's own address on the way to another; nothing is sent."""
    if host is None:
        return []
    with contextlib.suppress(OSError, UnicodeError):
        family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            return [str(probe.getsockname()[0])]
    return []
