"""Runs that a library refuses: priced all the same, and said so with the library's reason and the
way out."""

from __future__ import annotations

from napkinmath.answers.figures import Finding
from napkinmath.answers.images import images_of
from napkinmath.base.dtypes import FP16, FP32
from napkinmath.catalog.attention_support import FLASH_ATTENTION, SDPA
from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.train_config import Attention, Precision
from napkinmath.lowering.choices import refused_attention
from napkinmath.lowering.linears import TASK_HEAD, bias_kind, is_trained_head
from napkinmath.lowering.target_names import is_named
from napkinmath.ops.whole_scores import MATH_PATH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from napkinmath.answers.estimate import Estimate
    from napkinmath.ir.ledger import Weight

QKV = 3
"""What attention reads without a mask or a bias."""
SDP_BACKENDS = {Attention.FLASH: "FLASH_ATTENTION", Attention.CUDNN: "CUDNN_ATTENTION"}
CLAMPED = ("prediction_coefs", "correction_coefs")


def refused_runs(e: Estimate) -> list[Finding]:
    """What a library would raise, one finding for each rule that is broken."""
    rules = (
        _attention,
        _another_kernel,
        _too_many_images,
        _pads_nothing,
        _tuple_of_patches,
        _four_bit_head,
        _widened_fp8,
        _takes_no_adapters,
        _name_in_another,
        _dropped_experts,
        _router_of_llama4,
        _clippable_linear,
        _clamped_in_four_bits,
        _leaf_of_a_mixture,
        _unscaled,
        _no_such_mesh,
    )
    return [Finding(text=text) for rule in rules if (text := rule(e))]


def _weights(e: Estimate) -> Iterator[Weight]:
    return (weight for run in e.step.runs for weight in run.block.weights)


def _attention(e: Estimate) -> str:
    """transformers 5.23 modeling_utils.py get_correct_attn_implementation."""
    word = refused_attention(e.spec, e.config)
    if not word:
        return ""
    refused = e.spec.refused_attention
    way = "eager" if SDPA in refused else SDPA
    other = "" if FLASH_ATTENTION in refused else " or flash2"
    return (
        f"transformers' class of {e.spec.family} refuses attn_implementation={word}, so a run fails:"
        f" --attention {way}{other}"
    )


def _another_kernel(e: Estimate) -> str:
    """torch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp select_sdp_backend: what the only
    enabled kernel refuses is an error, not a choice."""
    wanted = e.config.attention
    if wanted not in SDP_BACKENDS:
        return ""
    for op in (op for run in e.step.runs for op in run.block.ops):
        kernel = "math" if op.name.startswith(MATH_PATH) else op.name.removeprefix("sdpa ")
        if kernel == op.name or kernel.endswith(wanted.value):
            continue
        taken = {"fp32": op.inputs[0].dtype is FP32, "masks or biases": len(op.inputs) > QKV}
        why = next((what for what, found in taken.items() if found), "such heads")
        return (
            f"torch's {wanted.value} kernel takes no {why}, which attention of {e.spec.family} has:"
            f" priced with the {kernel} one, which torch picks by itself; a run under"
            f" sdpa_kernel(SDPBackend.{SDP_BACKENDS[wanted]}) alone fails"
        )
    return ""


def _too_many_images(e: Estimate) -> str:
    """Every model's get_placeholder_mask compares placeholders with features."""
    images = images_of(e)
    if images is None or images.places <= images.length:
        return ""
    return (
        f"{images.described} take{images.verb} {images.places:,} tokens and a sequence has {images.length:,}: a"
        " run fails as features find no places"
    )


def _pads_nothing(e: Estimate) -> str:
    """transformers 5.23 modeling_layers.py GenericForSequenceClassification.forward."""
    part = e.spec.stages[-1].part
    if e.config.micro_batch_size == 1 or getattr(part, "pads", True):
        return ""
    return (
        "transformers refuses more than one sequence where the config has no pad_token_id, as here:"
        " set it, as the tokenizer's pad_token_id"
    )


def _tuple_of_patches(e: Estimate) -> str:
    """transformers 5.23 modeling_utils.py enable_input_require_grads: its hook asks what the input
    embedding returns for a gradient, and Swin's returns the patches and their grid."""
    path = getattr(e.spec.stages[0].part, "embeds_a_tuple", "")
    if not path or not e.step.policy.pixels_require_grad:
        return ""
    return (
        f"transformers fails under adapters and checkpointing together: the hook of"
        f" enable_input_require_grads takes no tuple, which {path} returns: --checkpointing none"
    )


def _four_bit_head(e: Estimate) -> str:
    """transformers 5.23 quantizers/base.py get_keys_to_not_convert leaves the module of the last
    parameter whole by its `.weight`, and a classifier's is its bias; PEFT then asks packed bytes
    for a gradient."""
    form = e.step.policy.format
    if form is None or not form.of_bitsandbytes:
        return ""
    adapter, quantization = e.config.adapter, e.config.quantization
    kept = () if quantization is None else quantization.keep
    for weight in _weights(e):
        module = weight.path.rpartition(".")[0]
        biased = weight.kind.endswith(" bias") and is_trained_head(adapter, weight.kind)
        if biased and not set(module.split(".")) & set(kept):
            return (
                f"loading packs {module} into 4 bits and PEFT fails to train it: --keep-modules"
                f" {module.rpartition('.')[2] or module} (llm_int8_skip_modules)"
            )
    return ""


def _widened_fp8(e: Estimate) -> str:
    """transformers 5.23 quantizers/quantizer_finegrained_fp8.py validate_environment: below compute
    capability 8.9 it loads the weights in bf16."""
    form, gpu = e.step.policy.format, e.hardware.gpu if e.hardware is not None else None
    if form is None or not form.multiplies_fp8 or gpu is None or not gpu.dense_flops:
        return ""
    if gpu.supports("fp8"):
        return ""
    return (
        f"transformers loads FP8 weights in bf16 on {gpu.name}, which has no FP8: this run takes more"
        " memory than priced; --quant none prices it, --quant nf4 is smaller"
    )


def _takes_no_adapters(e: Estimate) -> str:
    """transformers 5.23 trainer_utils.py validate_quantization_for_training."""
    form = e.step.policy.format
    if form is None or form.takes_adapters or e.step.policy.stack.attention.own:
        return ""
    return (
        f"transformers' Trainer refuses to train over {form.name} weights, so a run fails: --quant none"
        " has them in 16 bits, --quant nf4 packs them by bitsandbytes"
    )


def _name_in_another(e: Estimate) -> str:
    """peft 0.21 tuners/tuners_utils.py: modules_to_save go by the end of a name, and `classifier`
    ends that of DistilBERT's pre_classifier, which all-linear adapts."""
    adapter = e.config.adapter
    if adapter is None or adapter.targets != ("all-linear",):
        return ""
    for weight in _weights(e):
        name = weight.path.rpartition(".")[0].rpartition(".")[2]
        if weight.kind in (TASK_HEAD, bias_kind(TASK_HEAD)) and name == "pre_classifier":
            return (
                f"PEFT refuses all-linear here: it both adapts {name} and trains it whole; name the"
                " modules, such as --targets q_lin,v_lin"
            )
    return ""


def _dropped_experts(e: Estimate) -> str:
    """peft 0.21 tuners/lora/layer.py ParamWrapper.__init__."""
    adapter = e.config.adapter
    if adapter is None or not adapter.dropout:
        return ""
    for weight in _weights(e):
        module = weight.path.rpartition(".lora_")[0]
        if weight.kind == "adapter" and ".experts." in module:
            return (
                f"PEFT refuses dropout on the parameters of experts ({module}): --dropout 0, or"
                " --targets without them"
            )
    return ""


def _router_of_llama4(e: Estimate) -> str:
    """peft 0.21 tuners/lora/layer.py Linear.forward reads the type of what the layer inside it
    returns; transformers 5.23 models/llama4 Llama4Router, an nn.Linear, returns two tensors."""
    adapter = e.config.adapter
    if adapter is None or adapter.targets != ("all-linear",) or "llama4" not in e.spec.family:
        return ""
    if not any(weight.kind == "router" for weight in _weights(e)):
        return ""
    return (
        "PEFT fails with all-linear on Llama 4's routers, linears that return two tensors: name the"
        " modules, such as --targets q_proj,k_proj,v_proj,o_proj"
    )


def _clippable_linear(e: Estimate) -> str:
    """peft 0.21 tuners/lora/model.py _create_new_module takes a linear, and no module around one:
    transformers 5.23 models/gemma4 Gemma4ClippableLinear, in the towers."""
    adapter = e.config.adapter
    if adapter is None or "gemma4" not in e.spec.family:
        return ""
    outer = {
        module.removesuffix(".linear")
        for weight in _weights(e)
        if (module := weight.path.rpartition(".")[0]).endswith(".linear")
    }
    for name in adapter.targets:
        if (found := next((one for one in sorted(outer) if is_named(one, name)), "")) != "":
            return (
                f"PEFT refuses {name} here: it also names {found}, a Gemma4ClippableLinear around a"
                " linear; priced is the text alone, which a pattern means:"
                f" --targets '.*language_model.*{name}' (all-linear adapts the towers too)"
            )
    return ""


def _clamped_in_four_bits(e: Estimate) -> str:
    """transformers 5.23 models/gemma3n Gemma3nTextAltUp clamps the weights of its coefficients in
    training, and packed bytes take no bound that is a float."""
    form = e.step.policy.format
    if form is None or not form.of_bitsandbytes or e.step.policy.stack.attention.own:
        return ""
    packed = {
        module
        for weight in _weights(e)
        if (module := weight.path.split(".")[-2:][0]) in CLAMPED
        and weight.kind == "linear"
        and not weight.tensor.dtype.floating
    }
    if not packed:
        return ""
    return (
        f"transformers fails to train this model in {form.name}: AltUp clamps {' and '.join(sorted(packed))},"
        f" which loading packs: --keep-modules {','.join(CLAMPED)} (llm_int8_skip_modules)"
    )


def _leaf_of_a_mixture(e: Estimate) -> str:
    """peft 0.21 utils/transformers_weight_conversion.py _resolve_string_target_modules goes by the
    last word of each linear's path where a type's experts are one tensor; a linear of a Sequential
    is called by its number, as layers are."""
    adapter, stack = e.config.adapter, e.step.policy.stack
    if adapter is None or adapter.targets != ("all-linear",):
        return ""
    if stack.model.is_transformers_before((5, 0)) or stack.attention.own:
        return ""
    weights = list(_weights(e))
    if not any(weight.kind == "experts" for weight in weights):
        return ""
    for weight in weights:
        module = weight.path.rpartition(".")[0]
        if weight.kind == "linear" and (leaf := module.rpartition(".")[2]).isdecimal():
            return (
                f"PEFT refuses all-linear on this mixture: it takes {module} by its last word"
                f" {leaf!r}, which a layer has too: name the modules, such as --targets"
                " q_proj,k_proj,v_proj,o_proj"
            )
    return ""


def _unscaled(e: Estimate) -> str:
    """torch 2.13 amp/grad_scaler.py _unscale_grads_; FSDP's scaler takes fp16 gradients, and
    DeepSpeed and Megatron have their own."""
    alone = e.config.parallel.data_parallel in (DataParallel.NONE, DataParallel.DDP)
    if e.config.precision is not Precision.FP16_AUTOCAST or not alone:
        return ""
    trained = [weight for run in e.step.runs for weight in run.trained]
    halves = [weight for weight in trained if weight.tensor.dtype is FP16]
    if not halves or e.step.policy.stack.optimizer.master_weights:
        return ""
    way = "--precision fp16-amp, over fp32 weights"
    if all(weight.kind == "adapter" for weight in halves):
        way = "--adapter-dtype fp32"
    return f'the GradScaler fails ("Attempting to unscale FP16 gradients"): {way}'


def _no_such_mesh(e: Estimate) -> str:
    """The sources of each trainer's row. A file names its own trainer, which runs what it says."""
    if e.config.parallel.world_size == 1 or e.job_keys is not None:
        return ""
    from napkinmath.catalog.trainer_meshes import not_run, stacks_that_run

    lacking = list(not_run(e.config))
    if not lacking:
        return ""
    others = ", ".join(f"--stack {name}" for name in stacks_that_run(e.config)[:3])
    return (
        f"{lacking[0].trainer} does not run {', nor '.join(n.what for n in lacking)}: priced as a"
        f" loop of one's own over its code; {others or 'no trainer known here'}"
        f" run{'s' if not others else ''} such a mesh"
    )
