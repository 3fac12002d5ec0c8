"""Of what is wrong with the arguments one rank of a host speaks, whichever has been given them."""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from dist_consolidate.errors import UsageError, printable
from dist_consolidate.runtime.launched import Launched, meeting_place
from dist_consolidate.runtime.voice import Voice

_T = TypeVar("_T")

# What stands in front of every error message, as argparse writes it.
SAID = "dist-consolidate: error: "
# How long a rank that has told of wrong arguments stays, for those that start later to hear of it.
_LINGER_SEC = 1.0


def parsed(parse: Callable[[], _T], launched: Launched) -> _T:
    """Parse the arguments, and say what is wrong with them.

    Args:
        parse: Does it; argparse writes for itself.
        launched: This rank.

    Returns:
        What was parsed.

    Raises:
        UsageError: If they are wrong; it has been told.
        SystemExit: From argparse.
    """
    if launched.size == 1:
        return _loudly(parse)
    out, err = io.StringIO(), io.StringIO()
    voice = Voice(f"arguments {meeting_place(launched)}")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            found = _loudly(parse)
    except (UsageError, SystemExit) as error:
        if launched.rank == 0:
            sys.stdout.write(out.getvalue())
        is_wrong = isinstance(error, UsageError) or error.code
        if is_wrong and not voice.is_taken():
            who = f"rank {launched.rank} (on {socket.gethostname()}): " if launched.rank else ""
            sys.stderr.write(err.getvalue().replace(SAID, f"{SAID}{who}"))
            sys.stderr.flush()
            time.sleep(_LINGER_SEC)
        raise
    voice.close()
    return found


def _loudly(parse: Callable[[], _T]) -> _T:
    try:
        return parse()
    except UsageError as error:
        sys.stderr.write(printable(f"{SAID}{error}") + "\n")
        raise
