"""The command line's arguments, in groups as ``--help`` shows them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dist_consolidate._version import __version__
from dist_consolidate.config_file import as_toml, combine
from dist_consolidate.options import CHOICES, INCLUDES, Options

_DESCRIPTION = """\
Consolidate the ZeRO shards of a DeepSpeed run into safetensors or .bin files with every key of
the model. Start one process, or one per GPU with torchrun, srun or mpirun:

    torchrun --nproc_per_node=4 -m dist_consolidate CKPT_DIR [OUTPUT_DIR]
    srun --ntasks-per-node=4 --gpus-per-task=1 python -m dist_consolidate CKPT_DIR [OUTPUT_DIR]

To verify a result: dist-consolidate verify OUTPUT_DIR [CKPT_DIR] (see verify --help).
"""
_EPILOG = """\
exit codes: 0 done, 2 usage, 3 checkpoint incomplete or unreadable, 4 not enough disk or memory,
5 the result differs (verify), 130 and 143 stopped by SIGINT and SIGTERM, 1 anything else
"""


def make_parser() -> argparse.ArgumentParser:
    """Make the parser; each option that it knows is a field of :class:`Options`."""
    parser = argparse.ArgumentParser(
        prog="dist-consolidate",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "ckpt_dir",
        metavar="CKPT_DIR",
        nargs="?",
        help="folder DeepSpeed saved into, or a tag folder",
    )
    add("output_dir", metavar="OUTPUT_DIR", nargs="?", help="default: CKPT_DIR/consolidated/TAG")
    add(
        "--config",
        metavar="FILE.toml",
        action="append",
        help="options from a file; the command line wins, and a later file (repeatable)",
    )
    add(
        "--print-config",
        action="store_true",
        help="print the options in force, and where each came from, as such a file; do nothing",
    )
    add("--version", action="version", version=f"%(prog)s {__version__}")
    _add_reading(parser.add_argument_group("what is read"))
    _add_result(parser.add_argument_group("what is written"))
    _add_names(parser.add_argument_group("names"))
    _add_moving(parser.add_argument_group("how it is done"))
    _add_meeting(parser.add_argument_group("how the ranks meet"))
    return parser


def _add_reading(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("-t", "--tag", metavar="TAG", help="default: what `latest` names, else the newest step")
    add(
        "--search-dir",
        metavar="DIR",
        action="append",
        help="look for the tag's shards here, too: a run folder with the tag in it, or a tag "
        "folder, such as another node's copy (repeatable)",
    )
    add(
        "--trust-masters",
        action="store_true",
        help="take the fp32 masters although the 16-bit weights hold other values",
    )
    add(
        "--allow-16bit",
        action="store_true",
        help="where all optimizer states of ZeRO-1 or 2 are gone, take the 16-bit weights",
    )
    add(
        "--check-crc",
        choices=CHOICES["check_crc"],
        help="hold what is read against the checksums (CRC-32) that the shards hold: of records "
        "that are read whole or nearly (auto), of all that anything is read of (always), or never",
    )
    add(
        "--salvage",
        action="store_true",
        help="write what is intact of a damaged checkpoint, list what is not, and end with 3",
    )
    add(
        "--tp-rules",
        metavar="FILE.toml",
        help="how tensor-parallel shards go together, where the checkpoint does not record it",
    )
    add(
        "--hf-config",
        metavar="PATH",
        help="config.json of a tensor-parallel Hugging Face model, or its folder, for the same "
        "purpose (default: the one in CKPT_DIR, if it is needed)",
    )
    add("--tie", metavar="NAME=SOURCE", action="append", help="a tie to add (repeatable)")
    add(
        "--allow-missing",
        metavar="GLOB",
        action="append",
        help="keys that may be left out if they have no data (repeatable)",
    )


def _add_result(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--format", choices=CHOICES["format"], help="default: safetensors")
    add(
        "--dtype",
        choices=CHOICES["dtype"],
        help="element type of floating tensors; keep: that of the most precise copy in the "
        "checkpoint (default: fp32)",
    )
    add("--max-shard-size", metavar="SIZE", help="upper bound of a file, or none (default: 5GB)")
    add(
        "--ties",
        choices=CHOICES["ties"],
        help="tied names: copy (in full; default for safetensors), drop (keep one name), alias "
        "(share a storage; bin only, its default)",
    )
    add(
        "--exclude-frozen",
        "--exclude-frozen-parameters",
        action="store_true",
        help="leave frozen parameters out",
    )
    add(
        "--include",
        choices=INCLUDES,
        action="append",
        help="write the optimizer's states (Adam's moments), too, into `optimizer_states`",
    )
    add(
        "--digest",
        choices=CHOICES["digest"],
        help="xxh3: note a digest (XXH3, 128 bits) of every tensor in consolidation.json, computed "
        "beside the writing (default: xxh3)",
    )
    add(
        "--sha256",
        action="store_true",
        help="note the SHA-256 of every file there, too, as the Hugging Face Hub shows it; reads "
        "the result once more",
    )
    add(
        "--verify",
        action="store_true",
        help="in the end, compare the result with consolidation.json and, bit for bit, with the "
        "shards; exit code 5 if anything differs (the result stays)",
    )
    add("--overwrite", action="store_true", help="replace weight files in OUTPUT_DIR")
    add(
        "--resume",
        action="store_true",
        help="go on from what an earlier run with --resume has left in its work folder, where "
        "checkpoint and options are the same; should this run be stopped or fail, leave it there",
    )
    add("--dry-run", action="store_true", help="say what would be written; write nothing")


def _add_names(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--pipeline-names",
        choices=CHOICES["pipeline_names"],
        help="tied layers of a pipeline: module (once, as PipelineModule names them), layer (under "
        "each layer that has a file) (default: module)",
    )
    add(
        "--strip-prefix",
        metavar="PREFIX",
        action="append",
        help="take this off the names that begin with it (repeatable)",
    )
    add(
        "--rename",
        metavar="REGEX=REPL",
        action="append",
        help="change names as Python's re.sub does, after --strip-prefix; the last = parts the "
        "two (repeatable)",
    )


def _add_moving(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--transport",
        choices=CHOICES["transport"],
        help="default: allgather on GPUs; on CPUs direct where every rank sees every shard, else "
        "gather",
    )
    add("--writers", metavar="N|all", help="ranks that write (default: 1; with direct: all)")
    add(
        "--output-node",
        metavar="RANK|HOST",
        help="on whose node the result is written: that rank's, or that host's (default: rank 0's)",
    )
    add(
        "--bucket-size",
        metavar="auto|SIZE",
        help="what one round moves, all ranks together (default: auto)",
    )
    add(
        "--device-memory",
        metavar="auto|SIZE|PERCENT",
        help="device memory that each rank may take, such as 20GB (bytes for each rank), or such "
        "as 40%% of what is free for it (default: auto, half of that)",
    )
    add(
        "--host-memory",
        metavar="auto|SIZE|PERCENT",
        help="host memory that each rank's buffers may take, such as 2GB (bytes for each rank), or "
        "such as 40%% of what is free for it under the limits of cgroups, the machine and ulimit "
        "(default: auto, half of that at most)",
    )
    add("--device", choices=CHOICES["device"], help="default: auto")
    add(
        "--io",
        choices=CHOICES["io"],
        help="direct transport: buffered (through the page cache), direct (past it), auto: "
        "buffered, copied by the kernel where it can, or as the first part of a large result "
        "turns out (default: auto)",
    )
    add(
        "--timeout",
        metavar="TIME",
        help="how long (30min, or seconds) a rank may get nothing done, until all ranks end with a "
        "message that names it and the file it works on (default: 30min)",
    )


def _add_meeting(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--launcher",
        choices=CHOICES["launcher"],
        help="whose variables say which rank this is; none: a process on its own (default: auto, "
        "the first found of torchrun's, MPI's and SLURM's)",
    )
    add(
        "--rendezvous-timeout",
        metavar="TIME",
        help="how long ranks wait for each other at the start (default: 5min)",
    )


def _hyphenated(argument: str) -> str:
    """Accept ``--max_shard_size`` for ``--max-shard-size``; values are left alone."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def parse(arguments: Sequence[str]) -> tuple[str, str | None, Options]:
    """Parse a command line.

    Args:
        arguments: Without the program's name.

    Returns:
        Checkpoint folder, output folder (``None`` for the default) and options.

    Raises:
        UsageError: If a value is wrong, or the configuration file is.
        SystemExit: From argparse, for ``--help`` and unknown options; for ``--print-config``.
    """
    parser = make_parser()
    given: dict[str, Any] = vars(parser.parse_intermixed_args([_hyphenated(a) for a in arguments]))
    ckpt_dir, output_dir = given.pop("ckpt_dir", None), given.pop("output_dir", None)
    prints = given.pop("print_config", False)
    in_force = combine([Path(path) for path in given.pop("config", ())], given)
    if prints:
        sys.stdout.write(as_toml(in_force))
        parser.exit()
    if ckpt_dir is None:
        parser.error("the following arguments are required: CKPT_DIR")
    return ckpt_dir, output_dir, in_force.options
