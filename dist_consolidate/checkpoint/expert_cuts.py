"""Flat groups of experts whose parameters are recorded in part only: the rest is found by value.

Releases 0.7.4 to 0.14.4 compute ``param_slice_mappings`` of experts as if all ranks shared them:
only the first of as many parts as there are expert-parallel ranks is named. Behind it the fp32
masters lie one behind the other, without names. They are held, rounded, against the expert files
of every expert-parallel rank at once, which fixes what lies where. What comes out is taken only if
every other cut would give each tensor the same bits.

Source: DeepSpeed 0.12.6's ``stage_1_and_2.py`` (``_link_all_hp_params``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dist_consolidate.checkpoint.experts import Experts, parse
from dist_consolidate.checkpoint.layout import is_seen
from dist_consolidate.checkpoint.rounding import Fingerprints
from dist_consolidate.checkpoint.states import ModelState, Shapes
from dist_consolidate.checkpoint.value_cuts import Partial, Tensor, ValueCuts, may_be_master
from dist_consolidate.errors import Problems, listed

_TOLD = "param_slice_mappings of this release names a part of the experts only"


def complete(
    folder: Path | Sequence[Path],
    model: ModelState,
    experts: Experts,
    groups: Mapping[int, Partial],
    known: Mapping[str, tuple[int, int]],
    problems: Problems,
) -> dict[int, Shapes]:
    """Find the parameters of param groups that are recorded in part.

    Args:
        folder: The tag folder; the ends of tensors are read from it to compare.
        model: The model states of rank 0, with the experts put in.
        experts: The experts.
        groups: What is known of each, by the index of the param group.
        known: Of every parameter that is recorded its param group, and how many expert-parallel
            ranks that has.
        problems: Takes groups that cannot be cut, and tensors whose place is not certain.

    Returns:
        All parameters of each group, in flat order, as a rank names them.
    """
    files = {part.file for g in groups.values() for flat in g.flats for part in flat.parts}
    files |= {entry.span.file for entry in experts.entries.values()}
    unseen = sorted(file for file in files if not is_seen(folder, file))
    if unseen:
        problems.add(
            f"{_TOLD}, so that values must tell the rest, but rank 0 does not see "
            f"{listed(unseen)}; run it where all shards are seen"
        )
        return {}
    flats = tuple(flat for group in groups.values() for flat in group.flats)
    prints = Fingerprints(folder, flats)
    try:
        found: dict[int, Shapes] = {}
        for size in sorted({len(group.flats) for group in groups.values()}):
            mine = {index: group for index, group in groups.items() if len(group.flats) == size}
            tensors = list(_tensors(model, experts, size, known, mine))
            cuts = ValueCuts(prints, flats, mine, tensors, problems, told=_TOLD, needs_names=True)
            found |= cuts.shapes()
        return found
    finally:
        prints.close()


def _tensors(
    model: ModelState,
    experts: Experts,
    size: int,
    known: Mapping[str, tuple[int, int]],
    groups: Mapping[int, Partial],
) -> Iterator[Tensor]:
    """Give the tensors of experts that may be parameters of these groups."""
    layers = {p.layer: of for text, (_, of) in known.items() if (p := parse(text)) is not None}
    for text in experts.entries:
        name = parse(text)
        assert name is not None
        each, rest = divmod(experts.num_by_layer[name.layer], size)
        # A layer is shared out in one way only.
        if rest or name.number >= each or layers.get(name.layer, size) != size:
            continue
        home = known[text][0] if text in known else None
        if home is not None and (home not in groups or text not in groups[home].named):
            continue
        numbers = (rank * each + name.number for rank in range(size))
        copies = [experts.entries.get(str(name.numbered(number))) for number in numbers]
        whole = [copy for copy in copies if copy is not None]
        spans = [copy.span for copy in whole]
        if len(whole) == size and all(may_be_master(span) for span in spans):
            yield Tensor(text, home, tuple(whole))
