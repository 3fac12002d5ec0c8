"""The arguments of ``dist-consolidate verify``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from dist_consolidate.options import CHOICES, Options, make_options

# The word in front of the other arguments.
COMMAND = "verify"
_DESCRIPTION = """\
Verify a result of dist-consolidate: its files against the manifest in it (consolidation.json), and
with CKPT_DIR every tensor bit for bit against the shards. Start one process, or several:

    dist-consolidate verify OUTPUT_DIR [CKPT_DIR]
    torchrun --nproc_per_node=4 -m dist_consolidate verify OUTPUT_DIR [CKPT_DIR]
"""
_EPILOG = """\
exit codes: 0 all is as it must be, 5 something differs, 2 usage, 3 checkpoint incomplete or
unreadable, 130 and 143 stopped by SIGINT and SIGTERM, 1 anything else
"""


class VerifyArguments(NamedTuple):
    """What the user asks for.

    Attributes:
        output_dir: The result.
        checkpoint_dir: The checkpoint, or ``None``.
        options: Tag, search folders and rules, and how the ranks meet; other options are the
            manifest's to say.
    """

    output_dir: str
    checkpoint_dir: str | None
    options: Options


def parse_verify(arguments: Sequence[str]) -> VerifyArguments:
    """Parse what stands behind ``verify``.

    Args:
        arguments: Without the program's name and the word.

    Returns:
        What is asked for.

    Raises:
        UsageError: If a value is wrong.
        SystemExit: From argparse, for ``--help`` and unknown options.
    """
    given: dict[str, Any] = vars(_parser().parse_args(arguments))
    output_dir, checkpoint_dir = given.pop("output_dir"), given.pop("ckpt_dir", None)
    return VerifyArguments(output_dir, checkpoint_dir, make_options({"device": "cpu", **given}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"dist-consolidate {COMMAND}",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("output_dir", metavar="OUTPUT_DIR", help="folder of the result")
    add("ckpt_dir", metavar="CKPT_DIR", nargs="?", help="folder DeepSpeed saved into, or a tag's")
    add("-t", "--tag", metavar="TAG", help="default: the tag that the manifest names")
    add("--search-dir", metavar="DIR", action="append", help="look for shards here, too")
    add("--tp-rules", metavar="FILE.toml", help="default: the file that the manifest names")
    add("--hf-config", metavar="PATH", help="default: the one that the manifest names")
    add("--launcher", choices=CHOICES["launcher"], help="default: auto")
    add("--rendezvous-timeout", metavar="TIME", help="default: 5min")
    add("--timeout", metavar="TIME", help="default: 30min")
    return parser
