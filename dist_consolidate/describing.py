"""What the manifest says of a result: its tensors, files and options, and what is not in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from dist_consolidate._version import __version__
from dist_consolidate.digesting import DIGEST_KEY
from dist_consolidate.options import Options
from dist_consolidate.output.manifest import manifest_json
from dist_consolidate.plan.plan import Plan, PlannedTensor
from dist_consolidate.planning import Planned
from dist_consolidate.runtime.digests import EMPTY_DIGEST, Digest

_Facts = dict[str, object]


def describe_result(
    planned: Planned,
    options: Options,
    digests: Sequence[Digest],
    files: Mapping[str, Mapping[str, object]],
    notes: Sequence[str],
) -> bytes:
    """Write the manifest.

    Args:
        planned: What was carried out.
        options: The options.
        digests: Of every stored tensor that was digested; none where nobody wants any.
        files: What is said of each file.
        notes: What was assumed, cast, dropped or inferred.

    Returns:
        The manifest's bytes, the same for the same checkpoint and options.
    """
    plan, described = planned.plan, _Tensors(planned.plan, options, digests)
    return manifest_json(
        version=__version__,
        checkpoint={k: v for k, v in planned.facts.items() if k != "tag_chosen"},
        options=options.shaping,
        plan_digest=plan.digest,
        tensors=described.weights(),
        left_out={name: _why_left_out(plan, name) for name in plan.left_out},
        notes=notes,
        files=files,
        optimizer=described.optimizer(),
        with_digest=options.digest != "none",
        salvage={name: dataclasses.asdict(loss) for name, loss in planned.lost.items()},
    )


def written_names(plan: Plan) -> dict[str, str]:
    """Give each weight's name in the result its file; dropped ties are not among them."""
    return {
        name: file.name
        for file in plan.files
        if not file.state
        for stored in file.tensors
        for name in stored.names
    }


def _why_left_out(plan: Plan, name: str) -> str:
    reason, old = plan.left_out[name], plan.renamed.get(name)
    return reason if old is None else f"{reason} (in the checkpoint: {old})"


class _Tensors:
    """Describes the tensors of a plan."""

    def __init__(self, plan: Plan, options: Options, digests: Sequence[Digest]) -> None:
        self._plan, self._with_digest = plan, options.digest != "none"
        self._digests = {(digest.file, digest.tensor): digest.text for digest in digests}

    def weights(self) -> dict[str, _Facts]:
        """Describe every weight, tied names and those that are dropped included."""
        plan = self._plan
        facts = {tensor.name: self._facts(tensor) for tensor in plan.tensors if not tensor.state}
        files = written_names(plan)
        for alias, tie in plan.ties.items():
            tied = {"tied_to": tie.holder, "tie_found": tie.found}
            file = files.get(alias, facts[tie.holder]["file"])
            facts[alias] = {**facts[tie.holder], "file": file, **tied}
        for name, old in plan.renamed.items():
            if name in facts:
                facts[name]["name_in_checkpoint"] = old
        return facts

    def optimizer(self) -> _Facts | None:
        """Describe the optimizer and its states; ``None`` where nobody asked."""
        if self._plan.optimizer is None:
            return None
        tensors: dict[str, dict[str, _Facts]] = {}
        for tensor in self._plan.tensors:
            if tensor.state:
                tensors.setdefault(tensor.state, {})[tensor.name] = self._facts(tensor)
        return {**self._plan.optimizer, "tensors": tensors}

    def _facts(self, tensor: PlannedTensor) -> _Facts:
        facts: _Facts = {
            "dtype": tensor.dtype.name,
            "shape": list(tensor.source.shape),
            "file": self._plan.files[tensor.targets[0][0]].name,
            "source": tensor.source.origin,
            "source_dtype": tensor.source.dtype.name,
        }
        if self._with_digest:
            empty = not tensor.source.num_numel
            facts[DIGEST_KEY] = EMPTY_DIGEST if empty else self._digests[tensor.targets[0]]
        return facts
