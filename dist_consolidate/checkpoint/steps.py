"""Whether the optimizer states are of the step that the model states count.

DeepSpeed counts the steps it asked for and those it skipped for an overflow; the optimizer counts
the steps it took, one more in releases that began with an empty step. An optimizer that knows of
fewer steps was started anew while DeepSpeed's counters were not, or its file is older. In stages 1
and 2 values tell which (``witness``); under ZeRO-3 no weight is in two files.

Sources: DeepSpeed's ``engine._take_model_step``; ``stage_1_and_2.initialize_optimizer_states``;
``stage3._optimizer_step``, which older fused optimizers count once for each sub-group.
"""

from __future__ import annotations

from collections.abc import Sequence

from dist_consolidate.checkpoint.layout import TagFolder
from dist_consolidate.checkpoint.states import ModelState, OptimState
from dist_consolidate.errors import Problems


def check(
    folder: TagFolder,
    model: ModelState,
    optims: Sequence[OptimState],
    problems: Problems,
    *,
    trust_masters: bool,
) -> list[str]:
    """Hold the optimizer's own step against the counters of the model states.

    Args:
        folder: The shards.
        model: The model states of rank 0.
        optims: The optimizer states; that they agree with each other is checked elsewhere.
        problems: Takes optimizer states of ZeRO-3 that are of another step.
        trust_masters: Take them nevertheless.

    Returns:
        What to say of it.
    """
    state = next((state for state in optims if state.step is not None), None)
    taken = model.steps_taken
    if state is None or state.step is None or taken is None or model.zenflow:
        return []
    counts = (taken, taken + 1)
    is_multiple = state.striped and any(n and not state.step % n for n in counts)
    if state.step in counts or (is_multiple and state.step > taken):
        return []
    found = (
        f"{folder.file(state.shard.name)}: its optimizer has taken {state.step} steps, but "
        f"{model.shard.name} counts {taken}"
    )
    lawful = "a run that resumed without its optimizer states counts so"
    if state.striped and not trust_masters:
        problems.add(
            f"{found}; the files are of different saves. If you know that they are of one ({lawful}"
            "), pass --trust-masters"
        )
        return []
    why = "the masters were taken (--trust-masters)" if state.striped else "the values agree"
    return [f"{found} ({lawful}); {why}"]
