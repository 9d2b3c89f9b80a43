"""Element types by their size in bits; a new storage format is one row."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record


class DType(Record):
    """A storage type of `bits` bits per element; `floating` says whether autograd differentiates
    through it, `torch` is its name there."""

    name: str
    bits: int
    torch: str
    floating: bool = True

    def __str__(self) -> str:
        return self.name

    # Rows are singletons, compared on every recorded operation.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


FP64 = DType(name="fp64", bits=64, torch="float64")
FP32 = DType(name="fp32", bits=32, torch="float32")
BF16 = DType(name="bf16", bits=16, torch="bfloat16")
FP16 = DType(name="fp16", bits=16, torch="float16")
FP8_E4M3 = DType(name="fp8_e4m3", bits=8, torch="float8_e4m3fn")
FP8_E5M2 = DType(name="fp8_e5m2", bits=8, torch="float8_e5m2")
INT64 = DType(name="int64", bits=64, torch="int64", floating=False)
INT32 = DType(name="int32", bits=32, torch="int32", floating=False)
INT16 = DType(name="int16", bits=16, torch="int16", floating=False)
INT8 = DType(name="int8", bits=8, torch="int8", floating=False)
UINT8 = DType(name="uint8", bits=8, torch="uint8", floating=False)
BOOL = DType(name="bool", bits=8, torch="bool", floating=False)
INT4 = DType(name="int4", bits=4, torch="int4", floating=False)

DTYPES = {
    d.name: d
    for d in (
        FP64,
        FP32,
        BF16,
        FP16,
        FP8_E4M3,
        FP8_E5M2,
        INT64,
        INT32,
        INT16,
        INT8,
        UINT8,
        BOOL,
        INT4,
    )
}
ALIASES = {"float": "fp32", "half": "fp16", "double": "fp64"} | {
    d.torch: d.name for d in DTYPES.values()
}

BF16_CHECKPOINT = "bf16-checkpoint"
"""What options call bf16 autocast over weights in the checkpoint's type (lowering/choices.py)."""
CHECKPOINT = "checkpoint"
"""What options call weights in the checkpoint's type without autocast."""
CHECKPOINT_TF32 = "checkpoint-tf32"
"""The same, whose products are in TF32 where that type is fp32."""


def dtype_name(text: str) -> str:
    """Our name of a type in a user's or a library's words ('torch.bfloat16' is 'bf16'); other words
    in lower case as they are."""
    word = text.lower().removeprefix("torch.")
    return ALIASES.get(word, word)


def find_dtype(name: str) -> DType:
    """The row of a dtype by our name or torch's."""
    row = DTYPES.get(dtype_name(name))
    if row is None:
        raise InputError(f"dtype {shown(name)} is unknown; use one of {', '.join(DTYPES)}")
    return row
