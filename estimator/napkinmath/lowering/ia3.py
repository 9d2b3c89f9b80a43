"""IA3: learned vectors that scale keys, values and the input of the feed-forward's last linear.

Source: peft 0.21 tuners/ia3/layer.py Linear.forward (dense base), tuners/ia3/bnb.py
Linear4bit.forward and Linear8bitLt.forward, utils/constants.py for the modules of each family.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.lowering.adapters import lora_weight
from napkinmath.lowering.mixed_products import mul_mixed
from napkinmath.ops.elementwise import cast, copy, scale

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.base.expr import Size
    from napkinmath.ir.ledger import Value
    from napkinmath.ir.tape import Tape

# Where nothing is named: the modules of each family
# (TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING). A family that is not listed takes the row of
# the models it descends from by the names of its projections.
QUERY_VALUE_DOWN = ("q_proj", "v_proj", "down_proj")
KEY_VALUE_DOWN = ("k_proj", "v_proj", "down_proj")
TARGETS: dict[str, tuple[str, ...]] = {
    "t5": ("k", "v", "wo"),
    "mt5": ("k", "v", "wi_1"),
    "gpt2": ("c_attn", "mlp.c_proj"),
    "bloom": ("query_key_value", "mlp.dense_4h_to_h"),
    "roberta": ("key", "value", "output.dense"),
    "bert": ("key", "value", "output.dense"),
    "opt": ("q_proj", "k_proj", "fc2"),
    "gptj": ("q_proj", "v_proj", "fc_out"),
    "gpt_neox": ("query_key_value", "dense_4h_to_h"),
    "gpt_neo": ("q_proj", "v_proj", "c_proj"),
    "bart": ("q_proj", "v_proj", "fc2"),
    "gpt_bigcode": ("c_attn", "mlp.c_proj"),
    "llama": KEY_VALUE_DOWN,
    "mistral": KEY_VALUE_DOWN,
    "mixtral": ("k_proj", "v_proj", "w2"),
    "falcon": ("query_key_value", "dense_4h_to_h"),
    "phi": ("q_proj", "v_proj", "fc2"),
    "llama4": QUERY_VALUE_DOWN,
    "gemma": QUERY_VALUE_DOWN,
    "gemma2": QUERY_VALUE_DOWN,
    "gemma3_text": QUERY_VALUE_DOWN,
    "qwen2": QUERY_VALUE_DOWN,
    "qwen3": QUERY_VALUE_DOWN,
}
FEEDFORWARD = (
    "wo",
    "mlp.c_proj",
    "dense_4h_to_h",
    "output.dense",
    "fc2",
    "fc_out",
    "w2",
    "down_proj",
)


def default_targets(family: str) -> tuple[str, ...]:
    """The modules that IA3 scales in a family where none are named; names shared by today's
    decoders where PEFT has no row."""
    return TARGETS.get(family, KEY_VALUE_DOWN)


def ia3_linear(
    t: Tape, x: Value, outputs: Size, base: Callable[[Value], Value], *, quantized: bool
) -> Value:
    """The linear with its vector: on the input of a feed-forward module, on the output of any
    other.

    The product is made in the vector's type and cast back over a dense base; over a quantized one x
    is made fp32 first, the result is copied and stays as the product made it.
    """
    feedforward = any(t.module == name or t.module.endswith("." + name) for name in FEEDFORWARD)
    size = x.axes[-1] if feedforward else outputs
    with t.scope() as frame:
        frame.local(x)
        with t.scope("ia3"):
            weight = lora_weight(t, "ia3_l", (1, size) if feedforward else (size, 1))
        vector = scale(t, t.view(weight, (size,)))  # 1 * vector, which makes a copy
        frame.local(vector)
        if quantized:
            return _over_quantized(t, x, base, vector, feedforward)
        if feedforward:
            wide = cast(t, x, vector.dtype)
            frame.local(wide)
            scaled = cast(t, mul_mixed(t, wide, vector), x.dtype)
            frame.local(scaled)
            return base(scaled)
        result = base(x)
        frame.local(result)
        return cast(t, mul_mixed(t, result, vector), result.dtype)


def _over_quantized(
    t: Tape, x: Value, base: Callable[[Value], Value], vector: Value, feedforward: bool
) -> Value:
    with t.scope() as frame:
        if t.policy.autocast is None:
            x = cast(t, x, FP32)
            frame.local(x)
        result = base(mul_mixed(t, x, vector)) if feedforward else mul_mixed(t, base(x), vector)
        return copy(t, result, name="clone")
