"""Element types by name, without importing torch.

Every room needs to know how wide an element is and whether it is a floating one long before torch
is imported (planning takes milliseconds, the import seconds), so the table stands here.

Sources: torch's legacy storage classes (``torch/storage.py``) and the ``Dtype`` enum of the
safetensors format.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: torch's name without the prefix, such as ``float32``.
        itemsize_bytes: Width of one element.
        kind: ``float``, ``complex``, ``int`` or ``bool``.
        safetensors: The format's code, or ``None`` where safetensors has none.
        storage_class: The class name torch pickles for it, or ``None`` for types that only travel
            as ``UntypedStorage``.
    """

    name: str
    itemsize_bytes: int
    kind: str
    safetensors: str | None
    storage_class: str | None

    @property
    def is_floating(self) -> bool:
        """Whether ``--dtype`` applies to it; integers, bools and complex numbers never change."""
        return self.kind == "float"


_ALL = (
    DType("float64", 8, "float", "F64", "DoubleStorage"),
    DType("float32", 4, "float", "F32", "FloatStorage"),
    DType("float16", 2, "float", "F16", "HalfStorage"),
    DType("bfloat16", 2, "float", "BF16", "BFloat16Storage"),
    DType("float8_e4m3fn", 1, "float", "F8_E4M3", None),
    DType("float8_e5m2", 1, "float", "F8_E5M2", None),
    DType("int64", 8, "int", "I64", "LongStorage"),
    DType("int32", 4, "int", "I32", "IntStorage"),
    DType("int16", 2, "int", "I16", "ShortStorage"),
    DType("int8", 1, "int", "I8", "CharStorage"),
    DType("uint8", 1, "int", "U8", "ByteStorage"),
    DType("uint16", 2, "int", "U16", None),
    DType("uint32", 4, "int", "U32", None),
    DType("uint64", 8, "int", "U64", None),
    DType("bool", 1, "bool", "BOOL", "BoolStorage"),
    DType("complex64", 8, "complex", "C64", "ComplexFloatStorage"),
    DType("complex128", 16, "complex", None, "ComplexDoubleStorage"),
)
BY_NAME = {dtype.name: dtype for dtype in _ALL}
BY_STORAGE_CLASS = {dtype.storage_class: dtype for dtype in _ALL if dtype.storage_class}
FLOAT32, FLOAT16, BFLOAT16 = BY_NAME["float32"], BY_NAME["float16"], BY_NAME["bfloat16"]
UINT8 = BY_NAME["uint8"]
