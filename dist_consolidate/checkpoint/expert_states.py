"""What files record about experts, and the optimizer states that lie beside them without ZeRO.

Sources: DeepSpeed's ``engine._save_moe_checkpoint``, ``moe/utils.py`` (param groups of experts
carry ``moe`` and the name ``ep_size_N``) and ``stage_1_and_2.py`` (``param_slice_mappings``, since
0.7.4).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from dist_consolidate.checkpoint.expert_fused import IN_SHARDS, odd_placement
from dist_consolidate.checkpoint.unpickle import Inert

_SIZE = re.compile(r"ep_size_(\d+)")
_RELEASE = re.compile(r"(\d+)\.(\d+)\.")
Slices = dict[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertShard:
    """Which experts of a layer one rank holds (AutoEP under ZeRO-3).

    Attributes:
        prefix: Name of the layer's experts, without the fused tensors' own.
        num_experts: Experts of the layer.
        start: The first expert that the rank holds.
        stop: Behind the last one.
    """

    prefix: str
    num_experts: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Folding:
    """Where one rank stands, if experts are spread over tensor ranks, too (AutoEP and AutoTP).

    Attributes:
        tp_size: Tensor-parallel ranks.
        tp_rank: Which of them it is.
        ep_size: Expert-parallel ranks.
        ep_rank: Which of them it is.
    """

    tp_size: int
    tp_rank: int
    ep_size: int
    ep_rank: int

    def __str__(self) -> str:
        """Say it in a message."""
        return (
            f"tensor rank {self.tp_rank} of {self.tp_size} and expert-parallel rank {self.ep_rank} "
            f"of {self.ep_size}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertFacts:
    """What one file says about experts; ``None`` where it says nothing.

    Attributes:
        sizes: For each param group the ranks that share out its experts; 0 for a group of no
            experts, ``None`` where a group of experts names no number.
        num_experts: Experts of each MoE layer.
        odd_auto: What is not as usual about experts that DeepSpeed itself made (AutoEP).
        data_first: Whether neighbouring ranks hold the same experts, rather than different ones.
        slices: For each param group the parameters in this rank's part: first element in the part
            and number of elements.
        round_robin: Whether parameters were dealt out to the ranks in turn, as the configuration
            says; the slices do not show it.
        shards: The experts that this rank holds in its ZeRO-3 shards.
        zero_groups: For each sub-group of ZeRO-3 the ranks that share it out.
        folding: Where this rank stands beside tensor parallelism.
    """

    sizes: tuple[int | None, ...] | None = None
    num_experts: tuple[int, ...] | None = None
    odd_auto: str | None = None
    data_first: bool | None = None
    slices: tuple[Slices, ...] | None = None
    round_robin: bool = False
    shards: tuple[ExpertShard, ...] = ()
    zero_groups: tuple[tuple[int, ...], ...] | None = None
    folding: Folding | None = None

    @property
    def has_groups(self) -> bool:
        """Whether a param group belongs to experts."""
        return any(size != 0 for size in self.sizes or ())


def facts_of_optim(tree: Mapping[str, Any], state: Mapping[str, Any]) -> ExpertFacts:
    """Read what an optimizer states file records.

    Args:
        tree: The whole file.
        state: Its ``optimizer_state_dict``.

    Returns:
        The facts.
    """
    return ExpertFacts(
        sizes=group_sizes(state.get("base_optimizer_state")),
        zero_groups=_zero_groups(state.get("ds_zero_partition_groups")),
        folding=_folding(tree.get("folding")),
        data_first=_data_first(tree.get("ds_config")),
        slices=_slices(state.get("param_slice_mappings")),
        round_robin=_round_robin(tree),
    )


def facts_of_model(tree: Mapping[str, Any]) -> ExpertFacts:
    """Read what a model states file records.

    Args:
        tree: The whole file.

    Returns:
        The facts.
    """
    # A single number (0.5) may as well be something the user saved.
    counts = tree.get("num_experts")
    layers = tree.get("ds_autoep_layers") or tree.get("autoep_layers")
    good = isinstance(counts, list | tuple) and all(
        type(count) is int and count > 0 for count in counts
    )
    shards, odd = _shards(layers), odd_placement(layers) if layers else None
    if shards is None and odd is None:
        odd = f"its experts are saved as {IN_SHARDS}, without a word on which each rank holds"
    return ExpertFacts(
        num_experts=tuple(counts) if good and counts else None,
        odd_auto=odd,
        data_first=_data_first(tree.get("ds_config")),
        shards=shards or (),
        folding=_folding(tree.get("folding")),
    )


def _shards(layers: Any) -> tuple[ExpertShard, ...] | None:  # noqa: ANN401 - as pickled
    """Read which experts lie in this rank's ZeRO-3 shards; ``None`` if that is not understood."""
    found = []
    for layer in layers if isinstance(layers, list) else ():
        if not isinstance(layer, Mapping) or layer.get("checkpoint_format") != IN_SHARDS:
            continue
        prefix = layer.get("expert_key_prefix")
        fields = ("num_experts", "global_expert_start", "global_expert_end")
        numbers = [layer.get(field) for field in fields]
        total, start, stop = (n if type(n) is int else -1 for n in numbers)
        if not isinstance(prefix, str) or not 0 <= start < stop <= total:
            return None
        found.append(ExpertShard(prefix, total, start, stop))
    return tuple(found)


def _folding(value: Any) -> Folding | None:  # noqa: ANN401 - as pickled
    fields = ("tp_size", "tp_rank", "ep_size", "ep_rank")
    numbers = [value.get(field) for field in fields] if isinstance(value, Mapping) else []
    known = [number for number in numbers if type(number) is int]
    # Without tensor parallelism it says nothing new.
    good = len(known) == len(fields) and known[0] > 1 and known[2] > 0
    return Folding(*known) if good else None


def _zero_groups(value: Any) -> tuple[tuple[int, ...], ...] | None:  # noqa: ANN401 - as pickled
    """Read the ranks that share out each sub-group; ``None`` if that is not understood."""
    if not isinstance(value, list):
        return None
    groups = []
    for index, group in enumerate(value):
        ranks = group.get("partition_ranks") if isinstance(group, Mapping) else None
        is_good = isinstance(ranks, list) and all(type(rank) is int for rank in ranks)
        if not is_good or not ranks or group.get("sub_group") != index:
            return None
        groups.append(tuple(ranks))
    return tuple(groups)


def group_sizes(optimizer: Any) -> tuple[int | None, ...] | None:  # noqa: ANN401 - as pickled
    """Tell which param groups of a torch optimizer's state dict belong to experts.

    Args:
        optimizer: The state dict; elastic checkpoints hold something else in its place.

    Returns:
        See :class:`ExpertFacts`.
    """
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    if not isinstance(groups, list):
        return None
    return tuple(_size(group) for group in groups)


def _size(group: Any) -> int | None:  # noqa: ANN401 - as pickled
    if not isinstance(group, Mapping) or group.get("moe") is not True:
        return 0
    match = _SIZE.fullmatch(str(group.get("name")))
    return int(match[1]) if match else None


def _data_first(config: Any) -> bool | None:  # noqa: ANN401 - a dict, or where it was read from
    if not isinstance(config, Mapping):
        return None
    return config.get("use_data_before_expert_parallelism") is True


def _round_robin(tree: Mapping[str, Any]) -> bool:
    """Tell whether parameters were dealt out in turn; stage 1 ignored the option before 0.13."""
    config = tree.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    if not isinstance(zero, Mapping) or zero.get("round_robin_gradients") is not True:
        return False
    release = _RELEASE.match(str(tree.get("ds_version")))
    is_old = release is not None and (int(release[1]), int(release[2])) < (0, 13)
    return not (is_old and zero.get("stage") == 1)


def _slices(value: Any) -> tuple[Slices, ...] | None:  # noqa: ANN401 - as pickled
    if not isinstance(value, list | tuple):
        return None
    groups = []
    for group in value:
        if not isinstance(group, Mapping):
            return None
        slices = {name: _slice(address) for name, address in group.items()}
        if None in slices.values():
            return None
        groups.append({name: found for name, found in slices.items() if found is not None})
    return tuple(groups)


def _slice(address: Any) -> tuple[int, int] | None:  # noqa: ANN401 - as pickled
    if not isinstance(address, Inert):
        return None
    start, numel = address.attribute("start"), address.attribute("numel")
    return (start, numel) if type(start) is int and type(numel) is int else None
