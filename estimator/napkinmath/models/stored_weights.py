"""How a config.json says that its weights are stored: its `dtype` and its `quantization_config`."""

from __future__ import annotations

from napkinmath.base.dtypes import dtype_name
from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_WIDENED = ("fp8", "fbgemm_fp8", "mxfp4")
"""Methods whose linears cannot be trained over (transformers 5.23 quantizers/, is_trainable):
trainers widen the weights as they load them (dequantize=True)."""
_BITS = {
    ("gptq", 4): "gptq-int4",
    ("gptq", 8): "gptq-int8",
    ("awq", 4): "awq-int4",
    ("hqq", 4): "hqq-int4",
}
_ALGORITHMS = {"nvfp4": "nvfp4", "fp8": "", "nvfp4-pack-quantized": "nvfp4", "float-quantized": ""}
"""quant_algo of ModelOpt and format of compressed-tensors."""

_FP32_TYPES = frozenset(
    [
        "albert",
        "audio-spectrogram-transformer",
        "bart",
        "beit",
        "bert",
        "big_bird",
        "biogpt",
        "bit",
        "camembert",
        "canine",
        "clip",
        "convbert",
        "convnext",
        "convnextv2",
        "ctrl",
        "data2vec-audio",
        "data2vec-text",
        "data2vec-vision",
        "deberta",
        "deberta-v2",
        "deit",
        "dinov2",
        "dinov2_with_registers",
        "distilbert",
        "electra",
        "ernie",
        "esm",
        "fsmt",
        "gpt2",
        "gpt_neo",
        "gptj",
        "hubert",
        "layoutlm",
        "layoutlmv3",
        "lilt",
        "m2m_100",
        "mamba",
        "mbart",
        "mobilebert",
        "mobilenet_v1",
        "mobilevitv2",
        "modernbert",
        "mpnet",
        "mt5",
        "mvp",
        "nomic_bert",
        "nystromformer",
        "openai-gpt",
        "pegasus",
        "poolformer",
        "prophetnet",
        "regnet",
        "rembert",
        "resnet",
        "roberta",
        "roformer",
        "segformer",
        "siglip",
        "swiftformer",
        "swin",
        "t5",
        "tapas",
        "videomae",
        "vit",
        "vit_msn",
        "wav2vec2",
        "wavlm",
        "whisper",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xlnet",
    ]
)
"""Model types whose published checkpoints have 4 bytes a parameter, and mostly no dtype in their
config: their authors trained in fp32, and transformers' conversion scripts keep it."""


def stored_type(config: Mapping[str, object]) -> str:
    """The type in which from_pretrained of transformers 5 makes a model of this config, whose
    default is dtype="auto": its `dtype`, or that of the checkpoint (modeling_utils.py _get_dtype).
    '' where neither is known."""
    text = _mapping(config.get("text_config"))
    for given in (config, text):
        said = given.get("dtype") or given.get("torch_dtype")
        if isinstance(said, str):
            return dtype_name(said)
    return "fp32" if config.get("model_type") in _FP32_TYPES else ""


class StoredWeights(Record):
    """`format`: a row of catalog/quantization, '' for weights that are plain once they are loaded;
    `double_quant` is None where the config says nothing of it; `widened` names what loading
    widens."""

    format: str = ""
    double_quant: bool | None = None
    widened: str = ""
    blocks: bool = False
    """Every block of weights has a scale of its own (DeepSeek's FP8)."""


def stored_weights(config: Mapping[str, object]) -> StoredWeights:
    """What a config says of its weights; raises InputError for a method that is not priced."""
    given = _mapping(config.get("quantization_config")) or _mapping(
        _mapping(config.get("text_config")).get("quantization_config")
    )
    if not given:
        return StoredWeights()
    method = str(given.get("quant_method") or ("modelopt" if "quant_algo" in given else "")).lower()
    if not method and (given.get("load_in_4bit") or given.get("load_in_8bit")):
        method = "bitsandbytes"
    if method == "bitsandbytes":
        return _of_bitsandbytes(given)
    algorithm = str(given.get("quant_algo") or "").lower()
    if method in _WIDENED and algorithm in ("", "fp8"):
        return StoredWeights(
            widened="MXFP4" if method == "mxfp4" else "FP8",
            blocks=bool(given.get("weight_block_size")),
        )
    format_ = _BITS.get((method, _bits(given)))
    if method in ("modelopt", "compressed-tensors"):
        format_ = _ALGORITHMS.get(algorithm or str(given.get("format")).lower())
    if format_ is None:
        said = f"{method or 'no method'} {algorithm or given.get('format') or ''}".strip()
        raise InputError(
            f"config stores its weights by {shown(said)} (quantization_config), which is not"
            " priced; leave that field out to price plain weights"
        )
    return StoredWeights(format=format_, widened="" if format_ else "FP8")


def _of_bitsandbytes(given: Mapping[str, Any]) -> StoredWeights:
    """transformers 5.23 utils/quantization_config.py BitsAndBytesConfig and its defaults."""
    if given.get("load_in_8bit") or given.get("_load_in_8bit"):
        return StoredWeights(format="int8")
    return StoredWeights(
        format=str(given.get("bnb_4bit_quant_type") or "fp4"),
        double_quant=bool(given.get("bnb_4bit_use_double_quant", False)),
    )


def _bits(given: Mapping[str, Any]) -> int:
    bits = given.get("bits", given.get("nbits", 0))
    return bits if isinstance(bits, int) else 0


def _mapping(value: object) -> Mapping[str, Any]:
    """A nested mapping, empty where there is none."""
    return value if isinstance(value, dict) else {}  # pyright: ignore[reportUnknownVariableType]
