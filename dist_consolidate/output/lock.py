"""One run at a time for one output, also where the file system cannot lock.

A run holds a small hidden file of a name that every run for the same output knows. It says who
holds it, and its time of change is renewed every few seconds. It appears whole, by link(2), so that
of two runs that begin at once exactly one has it. A run that finds it there looks, in this order:

1. whether it is locked by flock(2): then another run lives, on whichever host;
2. if it was made on this machine, whether that process still runs, which needs no flock;
3. otherwise (another host's, or another container's) it watches whether the time of change is
   renewed. No clocks are compared: they may differ.

A holder that is dead is followed; nobody has to clear up. What this cannot see is a holder on
another host, on a file system without flock between hosts (some NFS mounts), that was stopped for
longer than is watched. Should it wake up, it finds that the file is no longer its own, and does not
publish.

Sources: flock(2) for NFS; open(2), O_EXCL, for link(2) as the atomic way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from dist_consolidate.errors import UsageError

# A file system may keep its attributes to itself for seconds; link(2) is not everywhere.
_BEAT_SEC, _WATCH_SEC, _SETTLE_SEC = 5.0, 30.0, 1.0
_TRIES = 10
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES, errno.EXDEV)
_MAX_TEXT_BYTES = 4096


class HeldError(UsageError):
    """Another run lives that writes into the same output."""


class _Held(Exception):
    """What the file says of its holder; told as a :class:`HeldError`."""


class OutputLock:
    """A lock that this process holds, until it is released.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, descriptor: int, text: bytes) -> None:
        """Take over a file that says this process's name, and renew it from now on."""
        self.path, self._descriptor, self._text = path, descriptor, text
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="consolidate-lock", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(_BEAT_SEC):
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)

    def is_held(self) -> bool:
        """Tell whether the file is still this process's."""
        with contextlib.suppress(OSError):
            return _is_same(self._descriptor, self.path) and _read(self._descriptor) == self._text
        return False

    def release(self) -> None:
        """Remove the file, if it is still this process's."""
        if self._over.is_set():
            return
        held = self.is_held()
        self._over.set()
        if held:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._thread.join(_BEAT_SEC)
        if not self._thread.is_alive():  # or else the file system hangs
            os.close(self._descriptor)


def take(path: Path, output_dir: Path) -> OutputLock:
    """Take a lock.

    Args:
        path: The file; it is made in a folder that exists.
        output_dir: The output that it stands for.

    Returns:
        The lock.

    Raises:
        HeldError: If a run that lives holds it.
        OSError: If the file cannot be made.
    """
    text = _me()
    for _ in range(_TRIES):
        descriptor = _create(path, text)
        if descriptor is None:
            with _told(path, output_dir):
                descriptor = _follow(path, text)
        if descriptor is not None:
            return OutputLock(path, descriptor, text)
    raise HeldError(f"{output_dir}: other runs take and leave {path} all the time; try again")


def refuse_if_held(path: Path, output_dir: Path) -> None:
    """Look at a lock that is not to be taken; one that a dead run has left is removed.

    Args:
        path: The file, which need not be there.
        output_dir: The output that it stands for.

    Raises:
        HeldError: If a run that lives holds it.
    """
    if path.is_file() and not path.is_symlink():
        with contextlib.suppress(OSError):
            take(path, output_dir).release()


def _me() -> bytes:
    facts = {**_machine(), "pid": os.getpid(), "started": _started(os.getpid())}
    facts |= {"since": time.strftime("%Y-%m-%d %H:%M:%S"), "token": uuid.uuid4().hex}
    return json.dumps(facts, sort_keys=True).encode()


def _machine() -> dict[str, str]:
    """Name what process numbers belong to: a boot of a host, and a container's own numbers."""
    boot = pids = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        pids = str(Path("/proc/self/ns/pid").readlink())
    return {"host": socket.gethostname(), "boot": boot, "pids": pids}


def _started(pid: int) -> str:
    """Give a process's start, in ticks since boot; empty if there is none (proc_pid_stat(5))."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    # The name in parentheses may hold anything.
    fields = stat.rpartition(b")")[2].split()
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def _create(path: Path, text: bytes) -> int | None:
    """Make the file whole, locked where possible; ``None`` if it is there already."""
    temporary = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(temporary, flags, 0o644)
    made: bool | None = False
    try:
        os.write(descriptor, text)
        _flock(descriptor)
        made = _link(temporary, path, descriptor)
    finally:
        temporary.unlink(missing_ok=True)
        if not made:
            os.close(descriptor)
    if made is None:
        return _create_plainly(path, text)
    return descriptor if made else None


def _link(temporary: Path, path: Path, descriptor: int) -> bool | None:
    """Give a file its second name, if nobody has that; ``None`` where there are no links."""
    try:
        os.link(temporary, path)
    except OSError as error:
        # Over a network the answer may have been lost, and the question repeated.
        if os.fstat(descriptor).st_nlink == 2:
            return True
        if isinstance(error, FileExistsError | FileNotFoundError):
            # Somebody has it; who has it may even have cleared up here already.
            return False
        if error.errno not in _NO_LINKS:
            raise
        return None
    return True


def _create_plainly(path: Path, text: bytes) -> int | None:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o644)
    except FileExistsError:
        return None
    _flock(descriptor)
    os.write(descriptor, text)
    return descriptor


def _follow(path: Path, text: bytes) -> int | None:
    """Take the file from a holder that is dead; ``None`` if it has just gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise _Held(b"") from error
    try:
        can_lock = _flock(descriptor)
        found = _read(descriptor)
        if can_lock is False or (_is_same(descriptor, path) and _lives(path, found)):
            raise _Held(found)
        if not _is_same(descriptor, path) or _read(descriptor) != found:
            os.close(descriptor)
            return None
        os.pwrite(descriptor, text, 0)
        os.ftruncate(descriptor, len(text))
        if can_lock is None:
            # Another that follows the same holder may write the same; the last one has it.
            os.fsync(descriptor)
            time.sleep(_SETTLE_SEC)
            if _read(descriptor) != text:
                raise _Held(_read(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _flock(descriptor: int) -> bool | None:
    """Lock a file: whether it is now; ``None`` where the file system cannot."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, _MAX_TEXT_BYTES, 0)


def _facts(text: bytes) -> dict[str, object]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # whatever somebody has put there
        return {}
    return found if isinstance(found, dict) else {}


def _lives(path: Path, text: bytes) -> bool:
    """Tell whether a holder lives, from what it wrote and what it does."""
    facts, machine = _facts(text), _machine()
    pid = facts.get("pid")
    if machine["boot"] and isinstance(pid, int) and machine.items() <= facts.items():
        return _runs(pid, facts.get("started"))
    before, until = _state(path), time.monotonic() + _WATCH_SEC
    while time.monotonic() < until:
        time.sleep(min(_BEAT_SEC, _WATCH_SEC) / 5)
        if _state(path) != before:
            return True
    return False


def _runs(pid: int, started: object) -> bool:
    """Tell whether a process of this machine still runs, and is the one that is meant."""
    found = _started(pid)
    if not found:
        try:
            os.kill(pid, 0)
        except PermissionError:  # another user's, and /proc shows nothing of those (hidepid)
            return True
        except (OSError, OverflowError):
            return False
    return found != "" and found == started


def _state(path: Path) -> tuple[int, bytes]:
    # Opening a file makes a network file system forget what it remembers of it.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return 0, b""
    try:
        return os.fstat(descriptor).st_mtime_ns, _read(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _told(path: Path, output_dir: Path) -> Iterator[None]:
    try:
        yield
    except _Held as held:
        facts = _facts(held.args[0])
        who = f": process {facts.get('pid')} on {facts.get('host')}, since {facts.get('since')}"
        where = f"{path}{who if facts else ''}"
        raise HeldError(
            f"{output_dir}: another run is writing its result there ({where}); "
            "wait for it, or choose another output folder"
        ) from held
