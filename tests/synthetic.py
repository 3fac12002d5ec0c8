"""Synthetic ZeRO checkpoints: the files DeepSpeed writes, made without DeepSpeed.

A :class:`Spec` says which parameters a model has and how they were trained; :func:`write` puts
the checkpoint on disk and returns the :class:`Truth`, what a right consolidation must give.
:func:`write_large` does the same for a GPT-like model of hundreds of millions of parameters, in
a few megabytes of memory. The files follow the real ones in the details that matter to a reader:
16-bit weights are views of one flat storage per group, fp32 partitions are trimmed views of longer
storages, ties share a storage record, and DeepSpeed's own classes are named in the pickles.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, BinaryIO, Literal, Protocol, cast
from zipfile import ZipFile

import torch
from torch import Tensor

Kind = Literal["trained", "frozen", "unoptimized"]
Era = Literal["0.5", "0.6", "0.9.2", "now"]
Trimming = Literal["exact", "last_rank", "none"]
Moments = Literal["real", "holes", "none"]
Home = Literal["group", "fragment", "module", "nowhere", "excluded"]

_VERSIONS: Mapping[str, str] = MappingProxyType(
    {"0.5": "0.5.4", "0.6": "0.6.1", "0.9.2": "0.9.2", "now": "0.19.8"}
)
_CHUNK_NUMEL = 1 << 22
_CENTRAL_ENTRY = b"PK\x01\x02"


@dataclass(frozen=True)
class Param:
    """One parameter name of the model.

    Attributes:
        name: The key in the model's state dict.
        shape: Full shape; an alias has the shape of the parameter it stands for.
        group: Optimizer param group; groups left without a trained parameter are dropped.
        kind: Trained, frozen (requires no gradient), or in no optimizer group at all.
        tie_of: An earlier name that is the same parameter object.
        record_tie: Whether ``shared_params`` lists this alias (where the era lists any).
        storage_tie: Whether the pickled ``module`` keeps the shared storage of this alias.
    """

    name: str
    shape: tuple[int, ...]
    group: int = 0
    kind: Kind = "trained"
    tie_of: str | None = None
    record_tie: bool = True
    storage_tie: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Buffer:
    """One persistent buffer; ``tie_of`` names an earlier buffer that is the same tensor."""

    name: str
    tensor: Tensor
    tie_of: str | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Spec:
    """A model, how it was trained, and which DeepSpeed wrote it.

    Attributes:
        stage: ZeRO stage.
        world: Data-parallel ranks.
        params: Parameters in module order; a tied name follows the one it stands for.
        buffers: Buffers; in ``module`` they follow the first ``buffers_after`` parameters.
        buffers_after: Number of parameters before the buffers; None puts the buffers last.
        model_dtype: Of the weights in ``module``.
        master_dtype: Of the flat groups (bf16 and fp16 masters exist).
        sub_group_numel: Elements at which a stage-3 sub-group is closed.
        bf16_prefix: Whether optimizer files are named ``bf16_zero_...``; None follows the era.
        bf16_optimizer: Write stage 1 as DeepSpeed's BF16_Optimizer does (never trimmed).
        stage0_fused: Whether 16-bit stage-0 masters are one flat tensor for each group.
        trimming: How the padding of stages 1 and 2 is cut: on every rank (0.16.4 and later), on
            the last one (before), or not at all.
        alignment_padding: Start each stage 1/2 parameter on a 16-byte boundary of the model dtype.
        round_robin: Reorder the parameters of stages 1 and 2 over the ranks.
        padding_fill: Value of all fp32 padding; NaN shows a leak.
        era: Which release's form of metadata to write.
        tuple_shapes: Shapes as plain tuples.
        single_dict_shapes: ``param_shapes`` as one dict (needs a single flat group).
        packed_fragments: Stage-3 frozen slices of a rank are views of one storage.
        exclude_frozen: As saved with ``exclude_frozen_parameters``.
        extra_shared: Entries to add to ``shared_params``, right or wrong.
        client_state: Entries merged into the top level of the model states.
        tag: Tag folder; None is ``global_step{global_step}``.
        save_latest: Whether to write ``latest``.
        seed: Of all random values.
        global_step: Training steps done.
        moments: Adam moments with values, as holes in a sparse file, or absent.
    """

    stage: Literal[0, 1, 2, 3]
    params: Sequence[Param]
    world: int = 2
    buffers: Sequence[Buffer] = ()
    buffers_after: int | None = None
    model_dtype: torch.dtype = torch.bfloat16
    master_dtype: torch.dtype = torch.float32
    sub_group_numel: int = 1_000_000_000
    bf16_prefix: bool | None = None
    bf16_optimizer: bool = False
    stage0_fused: bool = False
    trimming: Trimming = "exact"
    alignment_padding: bool = False
    round_robin: bool = False
    padding_fill: float = math.nan
    era: Era = "now"
    tuple_shapes: bool = False
    single_dict_shapes: bool = False
    packed_fragments: bool = False
    exclude_frozen: bool = False
    extra_shared: Mapping[str, str] = field(default_factory=dict)
    client_state: Mapping[str, Any] = field(default_factory=dict)
    tag: str | None = None
    save_latest: bool = True
    seed: int = 0
    global_step: int = 3
    moments: Moments = "real"

    def __post_init__(self) -> None:
        """Refuse what no DeepSpeed could have written."""
        _check_names(self)
        later = self.era == "now"
        rules = [
            (self.world >= 1, "world must be at least 1"),
            (not self.bf16_optimizer or self.stage == 1, "bf16_optimizer is a form of stage 1"),
            (not self.bf16_optimizer or self.era in ("0.9.2", "now"), "bf16_optimizer is newer"),
            (not self.alignment_padding or later, "alignment padding exists since 0.19.7"),
            (not self.alignment_padding or self.stage in (1, 2), "alignment is for stages 1 and 2"),
            (not self.alignment_padding or not self.bf16_optimizer, "BF16_Optimizer has none"),
            (self.stage > 0 or later, "stage 0 is written in its present form only"),
            (not self.exclude_frozen or later, "exclude_frozen exists since 0.10.1"),
            (not self.single_dict_shapes or len(_layout(self)) <= 1, "one dict names one group"),
        ]
        for right, message in rules:
            if not right:
                raise ValueError(message)

    @property
    def tag_name(self) -> str:
        """Name of the tag folder."""
        return self.tag if self.tag is not None else f"global_step{self.global_step}"

    def root_of(self, name: str) -> Param:
        """The parameter whose data stands behind a name."""
        by_name = {param.name: param for param in self.params}
        param = by_name[name]
        while param.tie_of is not None:
            param = by_name[param.tie_of]
        return param


@dataclass(frozen=True, kw_only=True, eq=False)
class Truth:
    """What a right consolidation of a synthetic checkpoint gives.

    Attributes:
        fp32: Every key the result must have: floats as fp32, other dtypes unchanged. For a lost
            name the value the model had. An alias that no file links to its parameter has the
            bits of its own 16-bit copy.
        native: Dtype of the most precise copy on disk (of what was lost: the model's dtype).
        ties: Groups of names that are one parameter or one buffer in the model.
        frozen: Names of frozen parameters, aliases included.
        unoptimized: Names of parameters that are in no optimizer group, aliases included.
        buffers: Names of buffers.
        lost: Names whose values are in no file.
        tag: Name of the tag folder.
        tag_dir: Its path.
    """

    fp32: Mapping[str, Tensor]
    native: Mapping[str, torch.dtype]
    ties: Sequence[tuple[str, ...]]
    frozen: Sequence[str]
    unoptimized: Sequence[str]
    buffers: Sequence[str]
    lost: Sequence[str]
    tag: str
    tag_dir: Path


def write(root: Path, spec: Spec) -> Truth:
    """Write a checkpoint under a run folder.

    Args:
        root: The run folder (created); gets ``latest`` and the tag folder.
        spec: What to write.

    Returns:
        What a consolidation must give.
    """
    return _Writer(root, spec, _RandomValues(spec)).write()


def write_large(
    root: Path,
    stage: Literal[0, 1, 2, 3],
    world: int,
    *,
    layers: int = 24,
    width: int = 1024,
    vocab: int = 50257,
    positions: int = 1024,
    model_dtype: torch.dtype = torch.bfloat16,
    sub_group_numel: int = 100_000_000,
    moments: Moments = "holes",
) -> Truth:
    """Write a GPT-like checkpoint with a tied head; the defaults make 355 million parameters.

    Each value is a function of parameter and element, so nothing is kept in memory, neither here
    nor in the truth, whose ``fp32`` computes a tensor when asked for it.

    Args:
        root: The run folder.
        stage: ZeRO stage.
        world: Data-parallel ranks.
        layers: Transformer blocks.
        width: Hidden size.
        vocab: Rows of the embedding.
        positions: Rows of the position embedding.
        model_dtype: Of the weights in ``module``.
        sub_group_numel: Elements at which a stage-3 sub-group is closed.
        moments: As in :class:`Spec`.

    Returns:
        The truth; look tensors up one by one.
    """
    params = gpt_params(layers, width, vocab, positions)
    spec = Spec(
        stage=stage,
        world=world,
        params=params,
        model_dtype=model_dtype,
        sub_group_numel=sub_group_numel,
        moments=moments,
    )
    return _Writer(root, spec, _CountedValues(spec)).write()


def gpt_params(layers: int, width: int, vocab: int, positions: int) -> list[Param]:
    """Name and shape the parameters of GPT-2, the head tied to the embedding."""
    params = [
        Param("transformer.wte.weight", (vocab, width)),
        Param("transformer.wpe.weight", (positions, width)),
    ]
    block = (
        ("ln_1.weight", (width,)),
        ("ln_1.bias", (width,)),
        ("attn.c_attn.weight", (width, 3 * width)),
        ("attn.c_attn.bias", (3 * width,)),
        ("attn.c_proj.weight", (width, width)),
        ("attn.c_proj.bias", (width,)),
        ("ln_2.weight", (width,)),
        ("ln_2.bias", (width,)),
        ("mlp.c_fc.weight", (width, 4 * width)),
        ("mlp.c_fc.bias", (4 * width,)),
        ("mlp.c_proj.weight", (4 * width, width)),
        ("mlp.c_proj.bias", (width,)),
    )
    for layer in range(layers):
        params += [Param(f"transformer.h.{layer}.{name}", shape) for name, shape in block]
    params += [Param(f"transformer.ln_f.{name}", (width,)) for name in ("weight", "bias")]
    return [*params, Param("lm_head.weight", (vocab, width), tie_of="transformer.wte.weight")]


# Where values come from.


class _Values(Protocol):
    """The fp32 values of the parameters that have data of their own."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements start to stop of a flattened parameter, as 1-D fp32."""
        ...


class _RandomValues:
    """Random bits, kept in memory; what has no fp32 copy is rounded to what has one."""

    def __init__(self, spec: Spec) -> None:
        """Draw every value."""
        generator = torch.Generator().manual_seed(spec.seed)
        self._flat: dict[str, Tensor] = {}
        for param in spec.params:
            if param.tie_of is None:
                values = _random_fp32(param.numel, generator, spec.model_dtype)
                precise = spec.master_dtype if _home(spec, param) == "group" else spec.model_dtype
                self._flat[param.name] = values.to(precise).float()

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See :class:`_Values`."""
        return self._flat[name][start:stop]


class _CountedValues:
    """Each value is computed from the parameter's index and the element's."""

    def __init__(self, spec: Spec) -> None:
        """Number the parameters."""
        self._index = {param.name: index for index, param in enumerate(spec.params)}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See :class:`_Values`."""
        bits = torch.arange(start, stop, dtype=torch.int64)
        bits = bits.mul_(2_654_435_761).add_(self._index[name] * 40_503_007)
        return _finite(bits.to(torch.int32))


def _random_fp32(numel: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    bits = torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator, dtype=torch.int64)
    if dtype == torch.float16:
        bits |= 0x38000000  # at least 2**-15, so that fp16 does not round nearly all to zero
    return _finite(bits.to(torch.int32))


def _finite(bits: Tensor) -> Tensor:
    """Turn 32-bit patterns into fp32 numbers below 2 in size, which no dtype overflows."""
    return bits.bitwise_and_(~(1 << 30)).view(torch.float32)


# Which parameter lives where, in which order.


@dataclass(frozen=True)
class _Piece:
    """A run of elements of a parameter, or of padding if it has no name."""

    name: str | None
    start: int
    numel: int


class _Flat:
    """A 1-D buffer described by its pieces."""

    def __init__(self, pieces: Iterable[_Piece] = ()) -> None:
        self.pieces = [piece for piece in pieces if piece.numel]

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    def cut(self, start: int, stop: int) -> _Flat:
        """The elements from start to stop."""
        pieces, position = [], 0
        for piece in self.pieces:
            low, high = max(start - position, 0), min(stop - position, piece.numel)
            if low < high:
                pieces.append(_Piece(piece.name, piece.start + low, high - low))
            position += piece.numel
        return _Flat(pieces)

    def chunks(self, values: _Values, dtype: torch.dtype, fill: float) -> Iterator[Tensor]:
        """The elements, in chunks of bounded size."""
        for piece in self.pieces:
            for start in range(0, piece.numel, _CHUNK_NUMEL):
                numel = min(_CHUNK_NUMEL, piece.numel - start)
                if piece.name is None:
                    yield torch.full((numel,), fill, dtype=dtype)
                else:
                    first = piece.start + start
                    yield values.read(piece.name, first, first + numel).to(dtype)


@dataclass(frozen=True)
class _Group:
    """A flat group of stages 0 to 2 or a sub-group of stage 3."""

    params: list[Param]
    gaps_numel: list[int]
    before_reordering: list[Param]

    @property
    def offsets(self) -> dict[str, int]:
        """Element offset of each parameter in the flat group."""
        offsets, position = {}, 0
        for param, gap in zip(self.params, self.gaps_numel, strict=True):
            offsets[param.name] = position
            position += param.numel + gap
        return offsets

    @property
    def numel(self) -> int:
        """Elements up to the end of the last parameter."""
        return sum(param.numel for param in self.params) + sum(self.gaps_numel)

    def flat(self, alignment: int) -> _Flat:
        """The whole group, padded to a multiple of alignment."""
        pieces = []
        for param, gap in zip(self.params, self.gaps_numel, strict=True):
            pieces += [_Piece(param.name, 0, param.numel), _Piece(None, 0, gap)]
        return _Flat([*pieces, _Piece(None, 0, -self.numel % alignment)])


def _check_names(spec: Spec) -> None:
    params: dict[str, Param] = {}
    for param in spec.params:
        tied = params.get(param.tie_of) if param.tie_of is not None else param
        if param.name in params or tied is None:
            raise ValueError(f"{param.name}: a name is given twice or tied to a later one")
        if (tied.shape, tied.kind) != (param.shape, param.kind):
            raise ValueError(f"{param.name}: differs from {tied.name}, to which it is tied")
        params[param.name] = param
    seen = set(params)
    for buffer in spec.buffers:
        if buffer.name in seen or (buffer.tie_of is not None and buffer.tie_of not in seen):
            raise ValueError(f"{buffer.name}: a name is given twice or tied to a later one")
        seen.add(buffer.name)


def _home(spec: Spec, root: Param) -> Home:
    """Where the best copy of an untied parameter is."""
    dropped = root.numel == 0 and spec.era == "now" and spec.stage > 0
    if root.kind == "trained" and not dropped:
        return "group"
    if root.kind == "frozen" and spec.exclude_frozen:
        return "excluded"
    if spec.stage < 3:
        return "module"
    has_fragments = spec.era in ("0.9.2", "now") and not spec.exclude_frozen
    return "fragment" if root.kind != "unoptimized" and has_fragments else "nowhere"


def _roots(spec: Spec, *homes: Home) -> list[Param]:
    return [p for p in spec.params if p.tie_of is None and _home(spec, p) in homes]


def _layout(spec: Spec) -> list[_Group]:
    """The flat groups, in the order in which the optimizer holds them."""
    trained = _roots(spec, "group")
    groups = []
    for number in sorted({param.group for param in trained}):
        params = [param for param in trained if param.group == number]
        for part in _sub_groups(params, spec.sub_group_numel) if spec.stage == 3 else [params]:
            order = _reordered(part, spec.world) if _shuffles(spec) else part
            groups.append(_Group(order, _gaps(spec, order), part))
    return groups


def _shuffles(spec: Spec) -> bool:
    return spec.round_robin and spec.stage in (1, 2)


def _sub_groups(params: Sequence[Param], limit_numel: int) -> list[list[Param]]:
    parts: list[list[Param]] = [[]]
    for param in params:
        if sum(other.numel for other in parts[-1]) >= limit_numel and parts[-1]:
            parts.append([])
        parts[-1].append(param)
    return parts


def _reordered(params: Sequence[Param], world: int) -> list[Param]:
    return [param for first in range(world) for param in params[first::world]]


def _gaps(spec: Spec, params: Sequence[Param]) -> list[int]:
    if not spec.alignment_padding:
        return [0] * len(params)
    step = 16 // spec.model_dtype.itemsize
    return [*(-param.numel % step for param in params[:-1]), 0]


# Stand-ins for DeepSpeed's classes.


class _ZeroStage(int, Enum):
    """Pickles as DeepSpeed's enum of stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


def _stand_in(cls: type, module: str, name: str) -> type:
    cls.__module__, cls.__qualname__, cls.__name__ = module, name, name
    return cls


_STAND_INS = {
    name: _stand_in(cls, module, name)
    for cls, module, name in (
        (_ZeroStage, "deepspeed.runtime.zero.config", "ZeroStageEnum"),
        (type("LossScaler", (), {}), "deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        (type("Scaler", (), {}), "deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
        (type("Address", (), {}), "deepspeed.utils.tensor_fragment", "fragment_address"),
    )
}


def _instance(name: str, **state: Any) -> Any:
    made = _STAND_INS[name]()
    made.__dict__.update(state)
    return made


@contextmanager
def _deepspeed_names() -> Iterator[None]:
    """Let pickle find the stand-ins under DeepSpeed's module names, and nothing else."""
    fakes: dict[str, ModuleType] = {}
    for name, cls in _STAND_INS.items():
        parts = cls.__module__.split(".")
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            fakes.setdefault(path, ModuleType(path))
        setattr(fakes[cls.__module__], name, cls)
    real = {path: sys.modules[path] for path in fakes if path in sys.modules}
    sys.modules.update(fakes)
    try:
        yield
    finally:
        for path in fakes:
            del sys.modules[path]
        sys.modules.update(real)


# Writing one file.


class _Shard:
    """One file in the making: the tensors it will hold, with their values or without yet.

    With moments as holes nothing is held in memory: storages stay untouched virtual memory, the
    file is laid out first, and values are then written to where they belong.
    """

    def __init__(self, spec: Spec, values: _Values) -> None:
        self._spec, self._values = spec, values
        self._late: dict[int, Callable[[], Iterator[Tensor]]] = {}

    def flat(self, flat: _Flat, dtype: torch.dtype, fill: float) -> Tensor:
        """A tensor with the elements of a flat buffer and a storage of its own."""
        tensor = torch.empty(flat.numel, dtype=dtype)
        if self._spec.moments == "holes":
            self._late[_key(tensor)] = lambda: flat.chunks(self._values, dtype, fill)
        else:
            torch.cat([tensor[:0], *flat.chunks(self._values, dtype, fill)], out=tensor)
        return tensor

    def moments(self, shape: Sequence[int]) -> dict[str, Any]:
        """Adam's state of one optimizer parameter."""
        spec = self._spec
        if spec.moments == "none":
            return {}
        step = spec.global_step if spec.era in ("0.5", "0.6") else torch.tensor(3.0)
        make = torch.empty if spec.moments == "holes" else torch.rand
        names = ("exp_avg", "exp_avg_sq")
        state = {name: make(tuple(shape), dtype=torch.float32) for name in names}
        if spec.moments == "holes":
            self._late |= {_key(tensor): lambda: iter(()) for tensor in state.values()}
        return {"step": step, **state}

    def save(self, path: Path, payload: Mapping[str, Any]) -> None:
        """Write the file."""
        with _deepspeed_names():
            if self._spec.moments != "holes":
                torch.save(payload, path)
                return
            with torch.serialization.skip_data():
                torch.save(payload, path)
            storages = _storages(payload)
        self._fill(path, storages)

    def _fill(self, path: Path, storages: Sequence[torch.UntypedStorage]) -> None:
        """Write the values of all storages that are not to be holes into the laid-out file."""
        with ZipFile(path) as archive:
            directory = archive.start_dir
            headers = {info.filename: info.header_offset for info in archive.infolist()}
        sums = {}
        with path.open("r+b") as file:
            for number, storage in enumerate(storages):
                if storage.nbytes():
                    name = f"{path.stem}/data/{number}"
                    file.seek(_data_offset(file, headers[name]))
                    sums[name] = self._fill_one(file, storage)
            _set_sums(file, directory, sums)

    def _fill_one(self, file: BinaryIO, storage: torch.UntypedStorage) -> int:
        late = self._late.get(storage._cdata)
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        checksum = 0
        for chunk in late() if late else [whole]:
            data = chunk.view(torch.uint8).numpy().data
            checksum = zlib.crc32(data, checksum)
            file.write(data)
        return checksum


def _key(tensor: Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)


def _storages(payload: Mapping[str, Any]) -> list[torch.UntypedStorage]:
    """The storages of a payload in the order in which torch.save numbers them."""
    found: dict[int, torch.UntypedStorage] = {}

    class Finder(pickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            if not isinstance(obj, torch.storage.TypedStorage):
                return None
            storage = obj._untyped_storage
            found.setdefault(storage._cdata, storage)
            return "storage"

    Finder(io.BytesIO(), protocol=2).dump(payload)
    return list(found.values())


def _data_offset(file: BinaryIO, header_offset: int) -> int:
    file.seek(header_offset + 26)
    name_bytes, extra_bytes = (int.from_bytes(file.read(2), "little") for _ in range(2))
    return header_offset + 30 + name_bytes + extra_bytes


def _set_sums(file: BinaryIO, directory: int, sums: Mapping[str, int]) -> None:
    """Set the checksums of the named records in the central directory."""
    file.seek(directory)
    entries = bytearray(file.read())
    position = 0
    while entries[position : position + 4] == _CENTRAL_ENTRY:
        sizes = [int.from_bytes(entries[position + at :][:2], "little") for at in (28, 30, 32)]
        name = entries[position + 46 : position + 46 + sizes[0]].decode()
        if sums.get(name):
            entries[position + 16 : position + 20] = sums[name].to_bytes(4, "little")
        position += 46 + sum(sizes)
    file.seek(directory)
    file.write(entries)


# Writing the checkpoint.


class _Writer:
    """Writes all files of one checkpoint."""

    def __init__(self, root: Path, spec: Spec, values: _Values) -> None:
        self._root, self._spec, self._values = root, spec, values
        self._groups = _layout(spec)
        self._recent = spec.era in ("0.9.2", "now")
        self._folder = root / spec.tag_name

    def write(self) -> Truth:
        """Write the files and say what they hold."""
        spec = self._spec
        self._folder.mkdir(parents=True, exist_ok=True)
        for rank in range(spec.world if spec.stage == 3 else 1):
            self._write_model(rank)
        for rank in range(spec.world if spec.stage > 0 else 0):
            self._write_optimizer(rank)
        if spec.save_latest:
            (self._root / "latest").write_text(spec.tag_name)
        return self._truth()

    # Model states.

    def _write_model(self, rank: int) -> None:
        spec = self._spec
        stem = f"zero_pp_rank_{rank}_mp_rank_00" if spec.stage == 3 else "mp_rank_00"
        shard = _Shard(spec, self._values)
        module = self._module(shard)
        fragments, fragment_shapes = self._fragments(shard, rank, module)
        if spec.exclude_frozen:
            for param in _roots(spec, "excluded"):
                del module[param.name]
        state: dict[str, Any] = {
            "module": module,
            "buffer_names": [b.name for b in spec.buffers if b.tie_of is None],
            "optimizer": self._stage0_masters(shard) if spec.stage == 0 else None,
        }
        if spec.era != "0.5":
            state["param_shapes"] = self._param_shapes() if spec.stage > 0 else None
        if self._recent:
            state["frozen_param_shapes"] = fragment_shapes
            state["shared_params"] = self._shared_params(rank) if spec.stage > 0 else None
            state["frozen_param_fragments"] = fragments
        state |= {**self._counters(), **spec.client_state}
        shard.save(self._folder / f"{stem}_model_states.pt", state)

    def _counters(self) -> dict[str, Any]:
        spec = self._spec
        state: dict[str, Any] = {"lr_scheduler": None}
        if self._recent:
            state |= {"data_sampler": None, "random_ltd": None}
        if spec.era != "now":
            key = "csr_tensor_module_names" if spec.era == "0.5" else "sparse_tensor_module_names"
            state[key] = set()
        state |= {
            "skipped_steps": 0,
            "global_steps": spec.global_step,
            "global_samples": spec.global_step * 2 * spec.world,
            "dp_world_size": spec.world,
            "mp_world_size": 1,
        }
        if spec.era == "now":
            state["checkpoint_parallel_dimensions"] = {"pp_degree": 1, "tp_degree": 1}
        return state | self._origin()

    def _origin(self) -> dict[str, Any]:
        spec = self._spec
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": spec.stage, "sub_group_size": spec.sub_group_numel},
        }
        if spec.model_dtype != torch.float32:
            config["bf16" if spec.model_dtype == torch.bfloat16 else "fp16"] = {"enabled": True}
        return {"ds_config": config, "ds_version": _VERSIONS[spec.era]}

    def _module(self, shard: _Shard) -> OrderedDict[str, Tensor]:
        spec = self._spec
        views = self._group_views(shard) if self._shares_flat_storage else {}
        entries: list[tuple[str, Tensor]] = []
        made: dict[str, Tensor] = {}
        for param in spec.params:
            root = spec.root_of(param.name)
            if param.tie_of is not None and param.storage_tie:
                tensor = made[root.name].detach()
            elif spec.stage == 3:
                tensor = self._placeholder()
            elif param.name in views:
                tensor = views[param.name]
            else:
                tensor = self._whole(shard, root, spec.model_dtype)
            made[param.name] = tensor
            entries.append((param.name, tensor))
        count = len(spec.params) if spec.buffers_after is None else spec.buffers_after
        module = OrderedDict([*entries[:count], *self._buffers(), *entries[count:]])
        module._metadata = OrderedDict([("", {"version": 1})])  # type: ignore[attr-defined]
        return module

    @property
    def _shares_flat_storage(self) -> bool:
        """Whether ``module`` holds views of flat groups."""
        stage, half = self._spec.stage, self._spec.model_dtype != torch.float32
        return stage in (1, 2) or (stage == 0 and half and self._spec.stage0_fused)

    def _group_views(self, shard: _Shard) -> dict[str, Tensor]:
        spec = self._spec
        alignment = 2 * spec.world if spec.stage > 0 else 1
        views = {}
        for group in self._groups:
            flat = shard.flat(group.flat(alignment), spec.model_dtype, 0.0)
            for param in group.params:
                start = group.offsets[param.name]
                views[param.name] = flat[start : start + param.numel].view(param.shape)
        return views

    def _placeholder(self) -> Tensor:
        if self._spec.era == "0.5":
            return torch.ones(1, dtype=self._spec.model_dtype)
        return torch.empty(0, dtype=self._spec.model_dtype)

    def _whole(self, shard: _Shard, root: Param, dtype: torch.dtype) -> Tensor:
        flat = _Flat([_Piece(root.name, 0, root.numel)])
        return shard.flat(flat, dtype, 0.0).view(root.shape)

    def _buffers(self) -> list[tuple[str, Tensor]]:
        made: dict[str, Tensor] = {}
        for buffer in self._spec.buffers:
            tied = buffer.tie_of
            made[buffer.name] = buffer.tensor.clone() if tied is None else made[tied].detach()
        return list(made.items())

    def _fragments(
        self, shard: _Shard, rank: int, module: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor] | None, dict[str, Any] | None]:
        """The frozen sections: whole tensors in stage 2, this rank's slices in stage 3."""
        spec = self._spec
        if spec.stage < 2 or spec.exclude_frozen:
            return None, None
        params = [p for p in _roots(spec, "module", "fragment") if p.kind != "unoptimized"]
        shapes = OrderedDict((p.name, self._shape(p)) for p in params)
        if spec.stage == 2:
            return OrderedDict((p.name, module[p.name]) for p in params), shapes
        slices = {p.name: _partition(p, rank, spec.world) for p in params}
        if not spec.packed_fragments:
            made = [shard.flat(s, spec.model_dtype, spec.padding_fill) for s in slices.values()]
        else:
            joined = _Flat(piece for s in slices.values() for piece in s.pieces)
            flat = shard.flat(joined, spec.model_dtype, spec.padding_fill)
            made = list(torch.split(flat, [s.numel for s in slices.values()])) if slices else []
        return OrderedDict(zip(slices, made, strict=True)), shapes

    def _shape(self, param: Param) -> tuple[int, ...]:
        return param.shape if self._spec.tuple_shapes else torch.Size(param.shape)

    def _param_shapes(self) -> Any:
        shapes = [OrderedDict((p.name, self._shape(p)) for p in g.params) for g in self._groups]
        if self._spec.single_dict_shapes:
            return shapes[0] if shapes else OrderedDict()
        return shapes

    def _shared_params(self, rank: int) -> dict[str, str]:
        spec = self._spec
        if rank > 0:
            return {}
        shared = {}
        if spec.era == "now" or spec.stage == 3:
            tied = [p for p in spec.params if p.tie_of is not None and p.record_tie]
            shared = {p.name: spec.root_of(p.name).name for p in tied}
        if spec.era == "now" and spec.stage < 3:
            empty = [p.name for p in spec.params if p.tie_of is None and p.numel == 0]
            shared |= dict.fromkeys(empty[1:], empty[0] if empty else "")
        return shared | dict(spec.extra_shared)

    def _stage0_masters(self, shard: _Shard) -> dict[str, Any]:
        spec = self._spec
        groups, names = [], iter(range(len(spec.params)))
        states: dict[int, Any] = {}
        for group in self._groups:
            numbers = [next(names) for _ in group.params]
            states |= {
                n: shard.moments(p.shape) for n, p in zip(numbers, group.params, strict=True)
            }
            groups.append({"lr": 0.01, "params": numbers})
        adam = {"state": states, "param_groups": groups}
        if spec.model_dtype == torch.float32:
            return adam
        scaler = {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": spec.global_step}
        return {**scaler, "optimizer_state_dict": adam, **self._masters(shard)}

    def _masters(self, shard: _Shard) -> dict[str, Any]:
        dtype = self._spec.master_dtype
        if self._spec.stage0_fused:
            return {"fp32_groups_flat": [shard.flat(g.flat(1), dtype, 0.0) for g in self._groups]}
        return {
            "fp32_groups": [[self._whole(shard, p, dtype) for p in g.params] for g in self._groups]
        }

    # Optimizer states.

    def _write_optimizer(self, rank: int) -> None:
        spec = self._spec
        shard = _Shard(spec, self._values)
        sections = self._stage3_state if spec.stage == 3 else self._stage12_state
        state: dict[str, Any] = {"optimizer_state_dict": sections(shard, rank)}
        if spec.era == "0.5":
            state["param_shapes"] = self._param_shapes()
        prefixed = spec.bf16_prefix
        if prefixed is None:
            prefixed = self._recent and spec.model_dtype == torch.bfloat16
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        path = self._folder / (f"bf16_{name}" if prefixed else name)
        shard.save(path, state | self._origin())

    def _scaler(self) -> dict[str, Any]:
        dynamic = self._spec.model_dtype == torch.float16
        name = "DynamicLossScaler" if dynamic else "LossScaler"
        scaler = _instance(name, cur_scale=16.0 if dynamic else 1.0, dynamic=dynamic)
        return {"loss_scaler": scaler, "dynamic_loss_scale": dynamic, "overflow": False}

    def _zero_stage(self) -> Any:
        stage = self._spec.stage
        return _ZeroStage(stage) if self._recent else max(stage, 2)

    def _stage12_state(self, shard: _Shard, rank: int) -> dict[str, Any]:
        spec = self._spec
        parts, paddings, moments = [], [], []
        for group in self._groups:
            flat = group.flat(2 * spec.world)
            part_numel = flat.numel // spec.world
            part = flat.cut(rank * part_numel, (rank + 1) * part_numel)
            kept, padding = self._trimmed(group.numel, part_numel, rank)
            parts.append(shard.flat(part, spec.master_dtype, spec.padding_fill)[:kept])
            paddings.append(padding)
            moments.append(shard.moments([part_numel]))
        state: dict[str, Any] = {} if spec.bf16_optimizer else self._scaler()
        if self._recent:
            state["clip_grad"] = 1.0
        state["base_optimizer_state"] = moments if spec.era == "0.5" else _adam(moments)
        state["single_partition_of_fp32_groups"] = parts
        if not spec.bf16_optimizer:
            state["zero_stage"] = self._zero_stage()
        if self._recent:
            state["group_paddings"] = paddings
        if spec.era == "now" and not spec.bf16_optimizer:
            state["param_alignment_paddings"] = [group.gaps_numel for group in self._groups]
        state["partition_count"] = [spec.world] * len(self._groups)
        state["ds_version"] = _VERSIONS[spec.era]
        if self._recent:
            state["param_slice_mappings"] = [self._mapping(g, rank) for g in self._groups]
        return state

    def _trimmed(self, group_numel: int, part_numel: int, rank: int) -> tuple[int, int]:
        """Elements of a rank's partition that are kept, and the padding recorded for it."""
        spec = self._spec
        last = rank == spec.world - 1
        exact = min(max(group_numel - rank * part_numel, 0), part_numel)
        padding = spec.world * part_numel - group_numel if last else 0
        if spec.bf16_optimizer or spec.trimming == "none":
            return part_numel, padding
        if spec.trimming == "exact":
            return exact, part_numel - exact
        if not self._recent:
            padding = -group_numel % spec.world if last else 0
        return len(range(part_numel)[: part_numel - padding]), padding

    def _mapping(self, group: _Group, rank: int) -> OrderedDict[str, Any]:
        """Where DeepSpeed believes each parameter's fragment is (wrong under round robin)."""
        believed = _Group(group.before_reordering, group.gaps_numel, [])
        flat = believed.flat(2 * self._spec.world)
        part_numel = flat.numel // self._spec.world
        mapping, start = OrderedDict(), 0
        for piece in flat.cut(rank * part_numel, (rank + 1) * part_numel).pieces:
            if piece.name is not None:
                mapping[piece.name] = _instance("fragment_address", numel=piece.numel, start=start)
            start += piece.numel
        return mapping

    def _stage3_state(self, shard: _Shard, rank: int) -> dict[str, Any]:
        spec = self._spec
        flats, moments = [], []
        numbers = {param.name: number for number, param in enumerate(_roots(spec, "group"))}
        for group in self._groups:
            slices = [_partition(param, rank, spec.world) for param in group.params]
            whole = _Flat(piece for part in slices for piece in part.pieces)
            flat = shard.flat(whole, spec.master_dtype, spec.padding_fill)
            if spec.era == "now":
                first, last = (numbers[group.params[at].name] for at in (0, -1))
                flat.ds_id = f"{first}_{last}"  # type: ignore[attr-defined]
            flats.append(flat)
            moments.append(shard.moments([whole.numel]))
        return {
            "zero_stage": self._zero_stage(),
            **self._scaler(),
            "partition_count": spec.world,
            "optimizer_state_dict": _adam(moments),
            "fp32_flat_groups": flats,
        }

    # The truth.

    def _truth(self) -> Truth:
        spec = self._spec
        roots = {p.name: spec.root_of(p.name) for p in spec.params}
        homes = {name: _home(spec, root) for name, root in roots.items()}
        linked = {p.name for p in spec.params if self._is_linked(p)}
        names = [name for name, home in homes.items() if home != "excluded"]
        lost = [n for n in names if homes[n] == "nowhere" or (spec.stage == 3 and n not in linked)]
        precise = {n for n in names if homes[n] == "group" and n in linked}
        keys = {name: (roots[name], name in precise or name in lost) for name in names}
        natives = {n: spec.master_dtype if n in precise else spec.model_dtype for n in names}
        buffers = {buffer.name: buffer.tensor for buffer in spec.buffers}
        return Truth(
            fp32=_Expected(keys, self._values, spec.model_dtype, buffers),
            native={**natives, **{name: tensor.dtype for name, tensor in buffers.items()}},
            ties=_ties(spec),
            frozen=[name for name, root in roots.items() if root.kind == "frozen"],
            unoptimized=[name for name, root in roots.items() if root.kind == "unoptimized"],
            buffers=list(buffers),
            lost=lost,
            tag=spec.tag_name,
            tag_dir=self._folder,
        )

    def _is_linked(self, param: Param) -> bool:
        """Whether some file says which parameter a name stands for."""
        if param.tie_of is None or param.storage_tie:
            return True
        records = self._spec.era == "now" or (self._recent and self._spec.stage == 3)
        return param.record_tie and records and self._spec.stage > 0


class _Expected(Mapping[str, Tensor]):
    """The expected tensors; each parameter's is made when it is looked up."""

    def __init__(
        self,
        params: Mapping[str, tuple[Param, bool]],
        values: _Values,
        model_dtype: torch.dtype,
        buffers: Mapping[str, Tensor],
    ) -> None:
        self._params, self._values = params, values
        self._model_dtype, self._buffers = model_dtype, buffers

    def __getitem__(self, name: str) -> Tensor:
        if name in self._buffers:
            tensor = self._buffers[name]
            return tensor.float() if tensor.is_floating_point() else tensor
        root, precise = self._params[name]
        flat = self._values.read(root.name, 0, root.numel)
        return (flat if precise else flat.to(self._model_dtype).float()).view(root.shape)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._params, *self._buffers])

    def __len__(self) -> int:
        return len(self._params) + len(self._buffers)


def _ties(spec: Spec) -> list[tuple[str, ...]]:
    groups: dict[str, list[str]] = {}
    for param in spec.params:
        groups.setdefault(spec.root_of(param.name).name, []).append(param.name)
    owner: dict[str, str] = {}
    for buffer in spec.buffers:
        owner[buffer.name] = owner[buffer.tie_of] if buffer.tie_of is not None else buffer.name
        groups.setdefault(owner[buffer.name], []).append(buffer.name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def _partition(param: Param, rank: int, world: int) -> _Flat:
    """A rank's slice of a stage-3 parameter, padded to the size all ranks have."""
    part_numel = -(-param.numel // world)
    padded = _Flat([_Piece(param.name, 0, param.numel), _Piece(None, 0, world * part_numel)])
    return padded.cut(rank * part_numel, (rank + 1) * part_numel)


def _adam(moments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    groups = [{"lr": 0.01, "betas": (0.9, 0.999), "params": [n]} for n in range(len(moments))]
    return {"state": {n: m for n, m in enumerate(moments) if m}, "param_groups": groups}
