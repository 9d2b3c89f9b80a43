"""Which frozen weights a quantizer packs."""

from __future__ import annotations

from napkinmath.catalog.quantization import weight_format
from napkinmath.lowering.linears import QUANTIZED_KINDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.train_config import QuantizationConfig


def is_packed(path: str, kind: str, quantization: QuantizationConfig | None) -> bool:
    """Whether the quantizer packs the frozen weight at `path`: of a linear, or of experts where the
    format has them, outside the modules that are kept."""
    form = weight_format(quantization)
    if quantization is None or form is None:
        return False
    experts = kind == "experts" and form.packs_experts
    return (experts or kind in QUANTIZED_KINDS) and not _is_kept(path, quantization)


def _is_kept(path: str, quantization: QuantizationConfig) -> bool:
    outer, module = path.split(".")[:-2], path.split(".")[-2:][0]
    # lm_head is the product with the vocabulary; the layers of a head of that name
    # (RobertaLMHead.dense) are packed
    return module in quantization.keep or any(
        part in quantization.keep and part != "lm_head" for part in outer
    )
