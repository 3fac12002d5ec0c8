"""The tensor-parallel layout that a checkpoint records: ``universal_checkpoint_info``.

An affine map says of a tensor where every element lies and is believed first. Lists of patterns
name replicated, averaged, fused and row-parallel tensors and vocabularies; they are matched as
DeepSpeed's ``ds_to_universal.py`` does, with ``re.match``. What no list names is split along its
first dimension - but only where the lists are complete. Those of AutoTP before 0.19.6 leave out
what AutoTP did not touch, or fused biases, so that there a tensor in no list is left open.

AutoTP never pads a vocabulary, while Megatron does: its rows beyond ``original_vocab_size`` are
padding. AutoTP splits parameters only, so that buffers are replicated there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dist_consolidate.checkpoint.tensor_pieces import Piece, Shape
from dist_consolidate.checkpoint.tensor_rules import Mapped, Replicated, Rule, Split
from dist_consolidate.errors import CheckpointError

_MAP_VERSION = 1
_WIDTHS_SINCE = 0.4
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_AVERAGE = "parameter_to_average_patterns"
_TWO_PARTS = "parameter_with_2_sub_params_cat_dim_0"
_PARTS = "parameter_with_sub_params"
_REPLICATED = "tp_replicated_parameter_patterns"
_ROWS = "parameter_with_row_parallelism_patterns"
_VOCABULARY = "vocabulary_parameter_patterns"
# Written by Megatron-DeepSpeed and never by AutoTP.
_MEGATRON = ("pipeline_replicated_parameter_patterns", _AVERAGE, _TWO_PARTS)
_LISTS = (_REPLICATED, _AVERAGE, _TWO_PARTS, _ROWS, _VOCABULARY)


class RecordedRules:
    """Looks tensors up in the record of one checkpoint.

    Attributes:
        is_recorded: Whether there is a record of tensor parallelism at all.
        is_autotp: Whether AutoTP wrote it.
    """

    def __init__(self, file: str, info: Mapping[str, Any] | None) -> None:
        """Read the record.

        Args:
            file: Where it stands, for messages.
            info: ``universal_checkpoint_info`` in plain values.

        Raises:
            CheckpointError: If it is damaged or newer than this program.
        """
        self._file, self._info = file, info or {}
        try:
            self._read()
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, re.error) as error:
            raise CheckpointError(
                f"{file}: universal_checkpoint_info is not as DeepSpeed writes it "
                f"({type(error).__name__}: {error}); give the layout with --tp-rules FILE after "
                "removing the record, or repair it"
            ) from error

    def _read(self) -> None:
        info = self._info
        self._lists = {key: _compiled(info.get(key) or ()) for key in _LISTS}
        self._unsupported = _compiled(info.get(_UNSUPPORTED) or {})
        self._parts = [
            (_compiled(entry["patterns"]), entry) for entry in info.get(_PARTS) or () if entry
        ]
        recorded = info.get("affine_map") or {}
        version = recorded.get("version", _MAP_VERSION)
        if version > _MAP_VERSION:
            raise CheckpointError(
                f"{self._file}: records its layout in affine_map version {version}, but this "
                f"program reads version {_MAP_VERSION}; use a newer release of it"
            )
        maps = recorded.get("params") or {}
        self._maps = dict(zip(_compiled(maps), maps.values(), strict=True))
        megatron = any(key in info for key in _MEGATRON)
        self.is_recorded = bool(self._maps) or any(key in info for key in (*_LISTS, _PARTS))
        self.is_autotp = not megatron and (_UNSUPPORTED in info or self._names_each())
        self._is_complete = megatron or _UNSUPPORTED in info

    def _names_each(self) -> bool:
        """Whether every pattern is one name from beginning to end, as only AutoTP writes them."""
        patterns = [p.pattern for listed in self._lists.values() for p in listed]
        patterns += [p.pattern for listed, _ in self._parts for p in listed]
        return bool(patterns) and all(p.startswith("^") and p.endswith("$") for p in patterns)

    def refusal(self, name: str) -> str | None:
        """Say why DeepSpeed itself declares a tensor's layout unknown; ``None`` if it does not."""
        found = _matching(self._unsupported, name)
        reasons = self._info.get(_UNSUPPORTED)
        if found is None:
            return None
        reason = reasons.get(found.pattern) if isinstance(reasons, Mapping) else None
        return f"{name}: {self._file} records that its layout cannot be told ({reason})"

    def explicit(self, name: str, shapes: Sequence[Shape]) -> Rule | None:
        """Look a tensor up by name.

        Args:
            name: The tensor.
            shapes: Of its shards, in rank order.

        Returns:
            The recorded rule; ``None`` if nothing names the tensor.

        Raises:
            CheckpointError: If two entries name it, or its entry cannot be followed.
        """
        try:
            return self._mapped(name, shapes) or self._listed(name)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"{name}: {self._file} records its layout in a form that DeepSpeed does not write "
                f"({type(error).__name__}: {error})"
            ) from error

    def default(self, name: str, *, is_buffer: bool) -> Rule | None:
        """Give the rule for a tensor that nothing names, where there is one."""
        if not self.is_recorded:
            return None
        if is_buffer:
            said_by = "AutoTP, which splits no buffers"
            return Rule(Replicated(), said_by) if self.is_autotp else None
        # With maps, AutoTP names every parameter there is; this one came, or was renamed, later.
        if not self._is_complete or (self.is_autotp and self._maps):
            return None
        rows = self._vocabulary_rows(name)
        return Rule(Split(0, num_rows=rows), f"{self._file} (in no list: first dimension)")

    def _mapped(self, name: str, shapes: Sequence[Shape]) -> Rule | None:
        pattern = self._only(self._maps, name, "affine maps")
        if pattern is None:
            return None
        entry = self._maps[pattern]
        ranks = {int(rank): value for rank, value in entry["ranks"].items()}
        if sorted(ranks) != list(range(len(shapes))):
            raise CheckpointError(
                f"{name}: {self._file} records its layout for the ranks {sorted(ranks)}, but "
                f"{len(shapes)} are there"
            )
        shard_shapes = tuple(_shape(ranks[rank]["shard_shape"]) for rank in range(len(shapes)))
        if any(0 in shape for shape in shard_shapes) and not any(0 in s for s in shapes):
            # A model made under zero.Init was mapped while its parameters were empty.
            return None
        pieces = tuple(
            piece for rank in range(len(shapes)) for piece in _pieces(name, rank, ranks[rank])
        )
        mapped = Mapped(_shape(entry["logical_shape"]), shard_shapes, pieces)
        return Rule(mapped, f"{self._file} (affine_map)")

    def _listed(self, name: str) -> Rule | None:
        found = {key: self._only(patterns, name, key) for key, patterns in self._lists.items()}
        rows = self._vocabulary_rows(name) if found[_VOCABULARY] else None
        if found[_REPLICATED]:
            return self._rule(Replicated(num_rows=rows), _REPLICATED)
        if found[_AVERAGE]:
            return self._rule(Replicated(average=True, num_rows=rows), _AVERAGE)
        if found[_TWO_PARTS]:
            return self._rule(Split(0, num_parts=2, num_rows=rows), _TWO_PARTS)
        for patterns, entry in self._parts:
            pattern = _matching(patterns, name)
            if pattern is not None:
                return self._rule(self._with_parts(name, pattern.pattern, entry), _PARTS)
        if found[_ROWS]:
            return self._rule(Split(1, num_rows=rows), _ROWS)
        if found[_VOCABULARY] and self._is_complete:
            return self._rule(Split(0, num_rows=rows), _VOCABULARY)
        return None

    def _only(
        self, patterns: Iterable[re.Pattern[str]], name: str, what: str
    ) -> re.Pattern[str] | None:
        found = [pattern for pattern in patterns if pattern.match(name)]
        if len(found) > 1:
            listed = " and ".join(pattern.pattern for pattern in found)
            raise CheckpointError(
                f"{name}: is matched by several {what} of {self._file}, {listed}; settle it with "
                "--tp-rules FILE"
            )
        return found[0] if found else None

    def _rule(self, layout: Replicated | Split, key: str) -> Rule:
        return Rule(layout, f"{self._file} ({key})")

    def _with_parts(self, name: str, pattern: str, entry: Mapping[str, Any]) -> Split:
        dim = int(entry["partition_dim"])
        sizes = entry["shape"][dim]
        view = tuple(-1 if size is None else _total(size) for size in entry["shape"])
        version = self._info.get("universal_checkpoint_version", 0.0)
        if version >= _WIDTHS_SINCE:
            widths = (self._info.get("sub_param_shard_widths") or {}).get(pattern)
            if widths is None:
                raise CheckpointError(
                    f"{name}: {self._file} records fused parts but not their widths on the ranks "
                    "(sub_param_shard_widths)"
                )
            return Split(dim, part_widths=tuple(tuple(map(int, w)) for w in widths), view=view)
        if isinstance(sizes, tuple | list):
            return Split(dim, part_sizes=tuple(map(int, sizes)), view=view)
        if sizes < 1:
            raise ValueError(f"{sizes} parts")
        return Split(dim, num_parts=int(sizes), view=view)

    def _vocabulary_rows(self, name: str) -> int | None:
        if self.is_autotp or self._only(self._lists[_VOCABULARY], name, _VOCABULARY) is None:
            return None
        rows = self._info.get("original_vocab_size")
        if rows is None:
            raise CheckpointError(
                f"{name}: {self._file} lists it as a vocabulary, whose padded rows are to be cut, "
                "but records no original_vocab_size; give `vocab_size` with --tp-rules FILE"
            )
        return int(rows)


def _compiled(patterns: Any) -> list[re.Pattern[str]]:  # noqa: ANN401 - a list, or a mapping's keys
    return [re.compile(pattern) for pattern in patterns]


def _matching(patterns: Sequence[re.Pattern[str]], name: str) -> re.Pattern[str] | None:
    return next((pattern for pattern in patterns if pattern.match(name)), None)


def _shape(value: Any) -> Shape:  # noqa: ANN401
    shape = tuple(int(size) for size in value)
    if any(size < 0 for size in shape):
        raise ValueError(f"shape {value}")
    return shape


def _total(size: Any) -> int:  # noqa: ANN401
    return sum(map(int, size)) if isinstance(size, tuple | list) else int(size)


def _pieces(name: str, rank: int, entry: Mapping[str, Any]) -> Iterator[Piece]:
    for piece in entry["pieces"]:
        scale = piece.get("scale", 1.0)
        if scale != 1.0:
            raise CheckpointError(
                f"{name}: tensor rank {rank} holds it scaled by {scale}; undoing that is "
                "arithmetic, which is not done here. Convert the checkpoint with DeepSpeed's "
                "ds_to_universal.py"
            )
        (to_numel, to_steps), (from_numel, from_steps) = piece["source"], piece["dest"]
        shape = _shape(piece["shape"])
        to, own = _shape(to_steps), _shape(from_steps)
        if not len(shape) == len(to) == len(own) or min(to_numel, from_numel) < 0:
            raise ValueError(f"piece {piece}")
        if 0 not in shape:
            yield Piece(rank, shape, int(to_numel), to, int(from_numel), own)
