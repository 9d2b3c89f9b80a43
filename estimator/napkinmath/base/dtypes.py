"""Element types by their size in bits; a new storage format is one row."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record


class DType(Record):
    """A storage type of `bits` bits per element; `floating` says whether autograd differentiates
    through it."""

    name: str
    bits: int
    floating: bool = True

    def __str__(self) -> str:
        return self.name

    # Rows are singletons, compared on every recorded operation.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


FP64 = DType(name="fp64", bits=64)
FP32 = DType(name="fp32", bits=32)
BF16 = DType(name="bf16", bits=16)
FP16 = DType(name="fp16", bits=16)
FP8_E4M3 = DType(name="fp8_e4m3", bits=8)
FP8_E5M2 = DType(name="fp8_e5m2", bits=8)
INT64 = DType(name="int64", bits=64, floating=False)
INT32 = DType(name="int32", bits=32, floating=False)
INT8 = DType(name="int8", bits=8, floating=False)
UINT8 = DType(name="uint8", bits=8, floating=False)
BOOL = DType(name="bool", bits=8, floating=False)
INT4 = DType(name="int4", bits=4, floating=False)

DTYPES = {
    d.name: d
    for d in (FP64, FP32, BF16, FP16, FP8_E4M3, FP8_E5M2, INT64, INT32, INT8, UINT8, BOOL, INT4)
}
_ALIASES = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float64": "fp64",
    "double": "fp64",
    "torch.float32": "fp32",
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
}


def find_dtype(name: str) -> DType:
    """The row of a dtype by our name or torch's."""
    row = DTYPES.get(_ALIASES.get(name.lower(), name.lower()))
    if row is None:
        raise InputError(f"dtype {shown(name)} is unknown; use one of {', '.join(DTYPES)}")
    return row
