"""The public functions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dist_consolidate.errors import ConsolidateError, UsageError
from dist_consolidate.options import Options, make_options

if TYPE_CHECKING:
    from dist_consolidate.lazy import LazyCheckpoint
    from dist_consolidate.report import Report
    from dist_consolidate.runtime.watch import Watch
    from dist_consolidate.runtime.world import World
    from dist_consolidate.verifying.findings import VerifyReport

StrPath = str | os.PathLike[str]
_T = TypeVar("_T")


def consolidate(
    ckpt_dir: StrPath,
    output_dir: StrPath | None = None,
    *,
    tag: str | None = None,
    format: str = "safetensors",
    dtype: str = "fp32",
    max_shard_size: str | int | None = "5GB",
    ties: str | None = None,
    tie: Sequence[str] = (),
    allow_missing: Sequence[str] = (),
    exclude_frozen: bool = False,
    trust_masters: bool = False,
    strip_prefix: Sequence[str] = (),
    rename: Sequence[str] = (),
    search_dir: StrPath | Sequence[StrPath] = (),
    include: Sequence[str] = (),
    pipeline_names: str = "module",
    tp_rules: StrPath | None = None,
    tensor_parallel: Mapping[str, Any] | None = None,
    hf_config: StrPath | None = None,
    allow_16bit: bool = False,
    check_crc: str = "auto",
    salvage: bool = False,
    transport: str = "auto",
    writers: str | int | None = None,
    output_node: str | int | None = None,
    bucket_size: str | int = "auto",
    device_memory: str | int = "auto",
    host_memory: str | int = "auto",
    device: str = "auto",
    io: str = "auto",
    launcher: str = "auto",
    rendezvous_timeout: str | float = "5min",
    timeout: str | float = "30min",
    digest: str = "xxh3",
    sha256: bool = False,
    verify: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    dry_run: bool = False,
) -> Report:
    """Turn a ZeRO checkpoint into weight files with every key of the model.

    Call it in one plain process, or in every rank of an initialized process group, with the same
    arguments. The group is left as it was. Nothing is launched or joined here: in a program that
    torchrun, srun or mpirun started, initialize ``torch.distributed`` first, or each process
    consolidates on its own. MPI is neither started nor ended.

    Args:
        ckpt_dir: The folder DeepSpeed saved into, or a tag folder inside it.
        output_dir: Where the result goes; by default ``ckpt_dir/consolidated/TAG``.
        tag: Tag to read; by default what ``latest`` names, else the newest step.
        format: ``safetensors`` or ``bin``.
        dtype: ``fp32``, ``bf16``, ``fp16``, or ``keep`` for the most precise copy's. Integers,
            bools and complex numbers never change.
        max_shard_size: Upper bound of a file in bytes or as text; ``None`` for a single file.
        ties: ``copy`` (every name in full), ``drop`` (one name kept) or ``alias`` (names share a
            storage, ``bin`` only); by default ``copy`` for safetensors and ``alias`` for bin.
        tie: Further ties, each ``"NAME=SOURCE"``.
        allow_missing: Globs of keys that may be left out if they have no data.
        exclude_frozen: Leave frozen parameters out.
        trust_masters: Take fp32 masters although the 16-bit weights in the model states hold
            other values.
        strip_prefix: Prefixes to take off the names that begin with them, one after another.
        rename: Changes of names for :func:`re.sub`, each ``"REGEX=REPL"`` (the last ``=`` parts
            them), applied in order after ``strip_prefix``. ``tie`` and ``allow_missing`` speak of
            names in the checkpoint.
        search_dir: Further folders that hold shards of the tag: run folders with the tag in them,
            or tag folders, such as the copies of several nodes' local storage.
        include: ``["optimizer"]`` writes the optimizer's states (Adam's moments), too: files in the
            folder ``optimizer_states`` of the result, one state each, in the element type on disk.
        pipeline_names: Names of a pipeline's tied layers: ``module`` (once, as ``PipelineModule``
            names them) or ``layer`` (under each layer that has a file).
        tp_rules: A TOML file that says how tensor-parallel shards go together, if need be.
        tensor_parallel: The same rules themselves: ``{"rule": [{"match": GLOB, ...}, ...]}``.
        hf_config: A tensor-parallel model's ``config.json`` or its folder, for the same purpose.
        allow_16bit: Take the 16-bit weights where all optimizer states of ZeRO-1 or 2 are gone.
        check_crc: Whether to hold what is read against the CRC-32 of the shards' records: ``auto``
            (records that are read whole, or nearly), ``always`` or ``never``.
        salvage: Write what is intact of a damaged checkpoint; the report's ``lost`` lists the rest.
        transport: ``auto``, ``allgather``, ``gather`` or ``direct``.
        writers: How many ranks write, or ``all``.
        output_node: The rank, or the host, on whose node the result is written; by default rank
            0's. Matters where nodes share no disk.
        bucket_size: Bytes that one round moves, all ranks together, or ``auto``.
        device_memory: Device memory that each rank may take, in bytes, as text such as ``20GB``, as
            a part of what is free for it such as ``40%``, or ``auto``.
        host_memory: Host memory that each rank's buffers may take, the same way.
        device: ``auto``, ``cpu`` or ``cuda``.
        io: ``auto``, ``buffered`` or ``direct``: whether ``direct`` transport reads and writes
            through the page cache.
        launcher: Whose variables say which device of its host is this rank's, where the group
            does not: ``auto``, ``torchrun``, ``slurm``, ``mpi`` or ``none``.
        rendezvous_timeout: How long the command line's ranks wait for each other at the start.
        timeout: How long ranks wait for one that gets nothing done: seconds, or as ``"30min"``.
        digest: ``xxh3`` for a digest of every tensor in ``consolidation.json``, or ``none``.
        sha256: Note the SHA-256 of every file there, too; the result is read once more for it.
        verify: In the end, compare the result with its manifest and with the checkpoint (see
            :func:`verify`); what differs is raised as an error, and the result stays.
        overwrite: Replace an earlier result.
        resume: Go on from what an earlier run, also with ``resume``, has left in its work folder,
            where checkpoint and options are the same; should this run fail, leave it there.
        dry_run: Plan only; nothing is written, and the report says what would be.

    Returns:
        The report, on every rank.

    Raises:
        ConsolidateError: If anything is wrong; nothing has been published then.
    """
    given = dict(locals())  # so far, the arguments
    del given["ckpt_dir"], given["output_dir"]
    given |= {"search_dir": _paths(search_dir), "tp_rules": _path(tp_rules)}
    given["hf_config"] = _path(hf_config)
    options = make_options(given)
    return run(ckpt_dir, output_dir, options, launch=False)


def _path(given: StrPath | None) -> str | None:
    return None if given is None else os.fspath(given)


def _paths(given: StrPath | Sequence[StrPath]) -> list[str]:
    several = [given] if isinstance(given, str | os.PathLike) else given
    try:
        return [os.fspath(path) for path in several]
    except TypeError as error:
        raise UsageError(f"--search-dir {given!r}: must be paths") from error


def run(
    ckpt_dir: StrPath,
    output_dir: StrPath | None,
    options: Options,
    *,
    launch: bool,
    watch: Watch | None = None,
) -> Report:
    """Consolidate with options made already.

    Args:
        ckpt_dir: As :func:`consolidate`.
        output_dir: As :func:`consolidate`.
        options: The options.
        launch: Join the other processes that the launcher started.
        watch: Who ends this process where the main thread cannot. It is told of what goes wrong, on
            each rank, before any rank leaves: a launcher stops all processes as soon as one has
            ended, and must not stop the one that says why.

    Returns:
        The report.

    Raises:
        ConsolidateError: As :func:`consolidate`.
    """
    from dist_consolidate.consolidation import run_consolidation
    from dist_consolidate.verifying.after import verify_result

    target = None if output_dir is None else Path(output_dir)

    def action(world: World) -> Report:
        report = run_consolidation(Path(ckpt_dir), target, options, world)
        if options.verify and not report.is_dry_run:
            report = verify_result(Path(ckpt_dir), report, options, world.control)
        return report

    return _in_world(action, options, launch=launch, watch=watch)


def _in_world(
    action: Callable[[World], _T], options: Options, *, launch: bool, watch: Watch | None
) -> _T:
    """Do something with all ranks; what goes wrong is told before any rank leaves."""
    from dist_consolidate.runtime.world import join_world

    lean = options.device != "cuda" and options.transport in ("auto", "direct")
    with join_world(
        options.device,
        launch=launch,
        lean=lean,
        launcher=options.launcher,
        rendezvous_timeout_sec=options.rendezvous_timeout_sec,
        timeout_sec=options.timeout_sec,
        watch=watch,
    ) as world:
        try:
            return action(world)
        except BaseException as error:
            if watch is not None:
                watch.tell(watch.settle(error))
                if watch.clean_up is not None:
                    # It may have been asked to stop just when it was about to do that.
                    watch.clean_up()
            if isinstance(error, ConsolidateError) and error.agreed:
                world.control.part()
            raise


def verify(
    output_dir: StrPath,
    ckpt_dir: StrPath | None = None,
    *,
    tag: str | None = None,
    search_dir: StrPath | Sequence[StrPath] = (),
    tp_rules: StrPath | None = None,
    hf_config: StrPath | None = None,
    timeout: str | float = "30min",
) -> VerifyReport:
    """Verify a result: against its manifest, and bit for bit against the checkpoint.

    As with :func:`consolidate`, call it in one plain process or in every rank of an initialized
    process group. Which options shaped the result is in its manifest.

    Args:
        output_dir: The folder of a result.
        ckpt_dir: The checkpoint to compare with; by default only the manifest is.
        tag: Tag to read; by default the one that the manifest names.
        search_dir: As :func:`consolidate`.
        tp_rules: By default the file that the manifest names.
        hf_config: By default the one that the manifest names.
        timeout: As :func:`consolidate`.

    Returns:
        What was found, on every rank. If ``differences`` is empty, all is as it must be;
        ``raise_if_different()`` raises a :class:`DifferenceError` otherwise.

    Raises:
        ConsolidateError: If it could not be verified.
    """
    values = {
        "tag": tag,
        "search_dir": _paths(search_dir),
        "tp_rules": None if tp_rules is None else os.fspath(tp_rules),
        "hf_config": None if hf_config is None else os.fspath(hf_config),
        "timeout": timeout,
    }
    options = make_options({"device": "cpu", **values})
    return run_verify(output_dir, ckpt_dir, options, launch=False)


def run_verify(
    output_dir: StrPath,
    ckpt_dir: StrPath | None,
    options: Options,
    *,
    launch: bool,
    watch: Watch | None = None,
) -> VerifyReport:
    """Verify with options made already.

    Args:
        output_dir: As :func:`verify`.
        ckpt_dir: As :func:`verify`.
        options: Tag, search folders and rules, and how the ranks meet.
        launch: As :func:`run`.
        watch: As :func:`run`.

    Returns:
        What was found.

    Raises:
        ConsolidateError: As :func:`verify`.
        DifferenceError: If something differs, where the ranks were started by a launcher.
    """
    from dist_consolidate.verifying.after import verify_folder

    checkpoint_dir = None if ckpt_dir is None else Path(ckpt_dir)

    def action(world: World) -> VerifyReport:
        report = verify_folder(Path(output_dir), checkpoint_dir, options, world.control)
        if launch:
            report.raise_if_different()
        return report

    return _in_world(action, options, launch=launch, watch=watch)


def open_checkpoint(
    ckpt_dir: StrPath,
    tag: str | None = None,
    *,
    trust_masters: bool = False,
    tp_rules: StrPath | None = None,
    tensor_parallel: Mapping[str, Any] | None = None,
    hf_config: StrPath | None = None,
) -> LazyCheckpoint:
    """Open a ZeRO checkpoint without reading a weight.

    Args:
        ckpt_dir: The folder DeepSpeed saved into, or a tag folder inside it.
        tag: Tag to read; by default what ``latest`` names, else the newest step.
        trust_masters: As :func:`consolidate`.
        tp_rules: As :func:`consolidate`.
        tensor_parallel: As :func:`consolidate`.
        hf_config: As :func:`consolidate`.

    Returns:
        A mapping of the model's keys to lazy tensors. Keys without data are not in it but in its
        ``missing``.

    Raises:
        ConsolidateError: If the checkpoint is incomplete or unreadable.
    """
    from dist_consolidate.checkpoint.request import Request
    from dist_consolidate.checkpoint.tensor_settle import merging_from
    from dist_consolidate.lazy import open_lazily

    merging = merging_from(tp_rules, hf_config, tensor_parallel)
    request = Request(trust_masters=trust_masters, merging=merging)
    return open_lazily(Path(ckpt_dir), tag, request)
