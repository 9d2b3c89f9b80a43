"""One linear of the model as it runs on a rank: dense or quantized, patched, with its adapter; and
which are packed and adapted."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.errors import InputError
from napkinmath.catalog.quantization import find_format
from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.train_config import AdapterKind
from napkinmath.ir.ledger import Role, Value, Weight
from napkinmath.lowering.adapters import fused_adapted_linear, lora_update
from napkinmath.lowering.quantized import quantized_linear
from napkinmath.lowering.target_names import is_named, is_parameter
from napkinmath.ops.elementwise import add, add_bias, cast, copy
from napkinmath.ops.matmul import dense_linear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.base.dtypes import DType
    from napkinmath.base.expr import Size
    from napkinmath.config.train_config import AdapterConfig, QuantizationConfig
    from napkinmath.ir.recording import RecordingPolicy
    from napkinmath.ir.tape import Tape
    from napkinmath.ir.weight_format import WeightFormat
    from napkinmath.lowering.policy import Policy

# What quantizers pack and what all-linear adapts: both every nn.Linear, but for projections whose
# names PEFT moves to the experts, and for classifiers and subclasses of nn.Linear (some routers),
# which bitsandbytes leaves whole.
QUANTIZED_KINDS = ("linear", "linear without adapter", "token head")
# A subclass of nn.Linear that multiplies and then adds its bias, in its own type under autocast.
ADDS_BIAS = "linear that adds its bias"
SUBCLASSES = ("linear subclass", ADDS_BIAS)
ADAPTED_KINDS = ("linear", "unquantized linear", *SUBCLASSES, "token head")


# Kinds of linears that score. PEFT trains them whole beside the adapters, under the task_type that
# its guides give (peft 0.21 peft_model.py PeftModelForSequenceClassification and its kin). With
# all-linear it leaves out the head of sequences alone (tuners_utils.py
# _maybe_include_all_linear_layers) and then refuses to train a module that it adapts: heads of
# tokens go without a task_type there, and are adapted as other linears are.
TASK_HEAD, TOKEN_HEAD = "task head", "token head"


def is_trained_head(adapter: AdapterConfig | None, kind: str) -> bool:
    """Whether PEFT trains the linear of that kind, or its bias, whole beside an adapter."""
    if adapter is None:
        return False
    kind = kind.removesuffix(" bias")
    return kind == TASK_HEAD or (kind == TOKEN_HEAD and adapter.targets != ("all-linear",))


def bias_kind(kind: str) -> str:
    """Kind of the bias of a linear of that kind."""
    return f"{kind} bias" if kind in (TASK_HEAD, TOKEN_HEAD) else "bias"


def is_target(adapter: AdapterConfig, path: str, kind: str) -> bool:
    """Whether an adapter sits on the linear, or embedding, at `path`."""
    if adapter.kind in (AdapterKind.PROMPT, AdapterKind.PREFIX):
        return False
    if adapter.targets == ("all-linear",):
        return kind in ADAPTED_KINDS
    return any(is_named(path, name) for name in adapter.targets)


def parameter_ranks(adapter: AdapterConfig | None, names: tuple[str, ...], path: str) -> int:
    """How many times its rank LoRA has on the parameter at `path`: once where targets name it, once
    for each module of these names that it replaced (peft utils/transformers_weight_conversion.py);
    0 without."""
    if adapter is None or adapter.kind is not AdapterKind.LORA:
        return 0
    if any(is_parameter(name) and is_named(path, name) for name in adapter.targets):
        return 1
    every = adapter.targets == ("all-linear",)
    return len(names) if every or all(name in adapter.targets for name in names) else 0


def packing(path: str, kind: str, policy: Policy) -> WeightFormat | None:
    """What the quantizer packs the frozen weight at `path` into: that of a linear, of experts where
    the format has them, outside the modules that are kept; None: it stays whole. transformers 5
    packs modules of exactly nn.Linear, 4 subclasses too (integrations/bitsandbytes.py
    replace_with_bnb_linear)."""
    quantization, form = policy.config.quantization, policy.format
    if quantization is None or form is None:
        return None
    if kind == "embedding" and quantization.embeddings == "int8":
        return find_format("int8")
    experts = kind == "experts" and form.packs_experts
    if kind == "experts" and form.multiplies_fp8:
        raise InputError(
            f"experts in {form.name} are not priced in training ({path}): use --quant nf4 or none"
        )
    subclass = kind in SUBCLASSES and policy.stack.model.is_transformers_before((5, 0))
    known = experts or subclass or kind in QUANTIZED_KINDS
    return form if known and not _is_kept(path, quantization) else None


def _is_kept(path: str, quantization: QuantizationConfig) -> bool:
    outer, module = path.split(".")[:-2], path.split(".")[-2:][0]
    # lm_head is the product with the vocabulary; the layers of a head of that name
    # (RobertaLMHead.dense) are packed
    return module in quantization.keep or any(
        part in quantization.keep and part != "lm_head" for part in outer
    )


def whole_linear(
    t: Tape,
    x: Value,
    outputs: Size,
    *,
    bias: bool,
    kind: str,
    role: Role,
    weight: Weight | None,
) -> Value:
    """x·W^T + b with the adapter around it, in one node where a patch fuses them."""
    policy = t.policy
    if policy.patches("o") and kind != "head":
        from napkinmath.lowering.patched_linears import single_linear

        out = single_linear(t, x, outputs, bias=bias, kind=kind, weight=weight)
        if out is not None:
            return out
    w = weight or t.weight("weight", (outputs, x.axes[-1]), kind=kind)
    b = None
    if bias:  # Linear4bit.forward casts it for good
        stored = policy.product_dtype if w.constants else None
        b = t.weight("bias", (outputs,), kind=bias_kind(kind), dtype=stored).value

    def base(source: Value) -> Value:
        return _product(t, source, w, b, kind=kind, role=role)

    if policy.adapter is not None and policy.targets(t.module, kind):
        return adapted_linear(t, x, outputs, base, policy.adapter, role=role, weight=w, bias=b)
    return base(x)


def _product(t: Tape, x: Value, w: Weight, bias: Value | None, *, kind: str, role: Role) -> Value:
    """The linear itself, by the format of its weight and the precision of products."""
    policy = t.policy
    if w.constants and policy.format is not None:
        return quantized_linear(t, policy.format, x, w, bias, role=role)
    if policy.keeps_fp8(kind):
        from napkinmath.lowering.transformer_engine import cached_fp8_linear

        return cached_fp8_linear(t, x, w, bias, role=role)
    if policy.rule.fp8_block is not None and kind in ADAPTED_KINDS + QUANTIZED_KINDS:
        from napkinmath.lowering.fp8_products import fp8_linear

        return fp8_linear(t, x, w, bias, role=role, block=policy.rule.fp8_block)
    if kind == ADDS_BIAS and bias is not None and policy.autocast is not None:
        return add_bias(t, dense_linear(t, x, w.value, None, role=role), bias)
    return dense_linear(t, x, w.value, bias, role=role)


def adapted_linear(
    t: Tape,
    x: Value,
    outputs: Size,
    base: Callable[[Value], Value],
    config: AdapterConfig,
    *,
    role: Role,
    weight: Weight,
    bias: Value | None = None,
) -> Value:
    """The linear with its adapter: base output plus scaling · B(A(dropout(x))), or what the
    adapter's kind makes of it.

    Whether the weight is quantized says which of PEFT's two forwards runs.
    """
    fmt = t.policy.format
    quantized = bool(weight.constants) and not (fmt is not None and fmt.multiplies_fp8)
    if config.kind is AdapterKind.IA3:
        from napkinmath.lowering.ia3 import ia3_linear

        return ia3_linear(t, x, outputs, base, quantized=quantized)
    if t.policy.stack.quantizer.fused_adapters and quantized:
        return fused_adapted_linear(t, x, outputs, base, config)
    with t.scope() as frame:
        frame.local(x)
        result, source = _base_output(t, x, base, quantized=quantized), x
        dtype, narrows = result.dtype, quantized and t.policy.autocast is None
        bare = t.policy.stack.model.bare_adapters and t.policy.autocast is not None
        if (not quantized or narrows) and not bare:
            # _cast_input_dtype; the caller's arguments hold the original
            source = cast(t, source, _input_dtype(t.policy))
            frame.local(source)
        if config.kind is AdapterKind.DORA:
            from napkinmath.lowering.dora import dora_update

            return cast(t, dora_update(t, result, source, weight, bias, outputs, config), dtype)
        update = lora_update(t, source, outputs, config, role)
        return cast(t, add(t, result, cast(t, update, dtype) if narrows else update), dtype)


def _input_dtype(policy: RecordingPolicy) -> DType:
    """Type that PEFT casts an adapter's input to: that of its weight, which a unit of FSDP1 has not
    gathered yet where it is the adapter's own. The shard is fp32 under mixed precision.

    Source: peft tuners/lora/layer.py Linear.forward, utils/other.py fsdp_auto_wrap_policy; torch
    distributed/fsdp/_flat_param.py _use_sharded_views (use_orig_params, accelerate's default).
    """
    own_units = not policy.stack.engine.flat_adapters
    fsdp1 = policy.config.parallel.data_parallel is DataParallel.FSDP1
    is_sharded = fsdp1 and own_units and policy.loaded_rule.autocast is not None
    return FP32 if is_sharded else policy.adapter_dtype


def _base_output(t: Tape, x: Value, base: Callable[[Value], Value], *, quantized: bool) -> Value:
    """The base product; of 4-bit weights a copy, PEFT's guard against backward through views."""
    out, fmt = base(x), t.policy.format
    cloned = quantized and fmt is not None and fmt.output_is_cloned
    return copy(t, out, name="clone") if cloned else out
