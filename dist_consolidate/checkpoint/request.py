"""What the user asks of the reader."""

from __future__ import annotations

import dataclasses

from dist_consolidate.checkpoint.tensor_settle import Merging


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be read, and what is known of it that no file records.

    Attributes:
        claims: Ties, as pairs of alias and source.
        trust_masters: Take fp32 masters although ``module`` holds other values.
        allow_16bit: Take the 16-bit weights where all optimizer states are gone.
        include_optimizer: Locate the optimizer's states, too.
        merging: What is said about tensor parallelism.
        salvage: Read what is intact of a damaged checkpoint.
        pipeline_names: How a pipeline's tied layers are named: ``module`` or ``layer``.
    """

    claims: tuple[tuple[str, str], ...] = ()
    trust_masters: bool = False
    allow_16bit: bool = False
    include_optimizer: bool = False
    salvage: bool = False
    pipeline_names: str = "module"
    merging: Merging = Merging()  # noqa: RUF009 - frozen
