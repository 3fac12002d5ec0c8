"""Verifying with options: a folder on request, and a result right after it was written."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dist_consolidate.errors import Caught, ConsolidateError
from dist_consolidate.options import Options
from dist_consolidate.report import Report
from dist_consolidate.runtime.control import Control
from dist_consolidate.verifying.against_shards import Asked
from dist_consolidate.verifying.findings import VerifyReport
from dist_consolidate.verifying.run import run_verify


def verify_folder(
    output_dir: Path, checkpoint_dir: Path | None, options: Options, control: Control
) -> VerifyReport:
    """Verify a result.

    Args:
        output_dir: The result.
        checkpoint_dir: The checkpoint to compare with, if any.
        options: Where its shards and rules are, as far as the manifest does not say.
        control: The control plane; every rank calls this.

    Returns:
        What was found, the same on every rank.

    Raises:
        ConsolidateError: If it could not be verified; every rank raises.
    """
    asked = None
    if checkpoint_dir is not None:
        asked = Asked(
            checkpoint_dir, options.tag, options.search_dir, options.tp_rules, options.hf_config
        )
    return run_verify(output_dir, asked, control)


def verify_result(
    checkpoint_dir: Path, report: Report, options: Options, control: Control
) -> Report:
    """Verify what has just been written, with the ranks that wrote it.

    Args:
        checkpoint_dir: The checkpoint.
        report: What was done.
        options: The options of the run.
        control: The control plane; every rank calls this.

    Returns:
        The report, with what verifying found.

    Raises:
        ConsolidateError: If something differs, or could not be verified; the result stays.
    """
    place = f"the result is in place at {report.output_dir}"
    # The tag is the one that was taken, whatever `latest` names by now.
    chosen = dataclasses.replace(options, tag=str(report.facts["tag"]))
    with (caught := Caught()):
        found = verify_folder(report.output_dir, checkpoint_dir, chosen, control)
    if caught.error is not None:
        if isinstance(caught.error, ConsolidateError):
            caught.error.args = (f"{place}, but could not be verified: {caught.error}",)
        raise caught.error
    found.raise_if_different(f"{place}, but it is not what it must be")
    control.finish()
    return dataclasses.replace(report, verified=tuple(found.lines()))
