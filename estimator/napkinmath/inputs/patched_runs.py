"""What becomes of a job file's training by the kernels that it asks for, and by unsloth, which loads
and prepares a model whether its kernels know the family or not.

Sources: unsloth 2026.10 models/loader.py, models/vision.py, models/rl.py; unsloth_zoo 2026.10
model_lists.py FORCE_FLOAT32, training_utils.py prepare_model_for_training,
fused_losses/cross_entropy_loss.py, compiler.py.
"""

from __future__ import annotations

from napkinmath.base.units import format_bytes
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.job_keys import Difference, JobKey, JobKeys, KeyUse, MoreBytes
from napkinmath.config.train_config import Kernels, Loss, Precision
from napkinmath.ir.ledger import Phase
from napkinmath.lowering.precision import computes, in_fp16

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.config.hardware import Gpu
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec

# Types of models that lose their gradients in fp16: parts of their names, and whole names.
_WIDE = ("gemma3n", "gemma4", "glm4_moe", "gpt_oss", "qwen3_5", "qwen3_moe")
_WIDE_ALONE = ("gemma3", "gemma3_text")
# How the names begin of which unsloth has a copy in 4 bits with some linears in 16 (models/mapper.py,
# the keys in "-unsloth-bnb-4bit"; models/loader_utils.py leaves out those of Qwen3 32B and 30B).
_DYNAMIC = (
    *("gemma-3-", "gemma-3n-", "gemma-4-31b", "gemma-4-e", "medgemma-", "functiongemma-"),
    *("llama-3.1-8b", "meta-llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b", "llama-3.2-11b"),
    *("llama-3.3-70b", "magistral-small-", "devstral-small-2", "ministral-3-", "pixtral-12b"),
    *("mistral-small-24b", "mistral-small-3", "mixtral-8x7b", "phi-4", "granite-3.2-"),
    *("granite-4.0-1b", "granite-4.0-350m", "granite-4.0-h-", "granite-4.0-micro", "olmo-3-"),
    *("olmo-2-0325-32b", "qwen2-vl-2b", "qwen2-vl-7b", "qwen2.5-0.5b", "qwen2.5-1.5b"),
    *("qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-vl-", "qwen3-0.6b", "qwen3-1.7b"),
    *("qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-vl-2b", "qwen3-vl-4b", "qwen3-vl-8b"),
    *("qwen3-vl-32b", "qwq-32b", "orpheus-3b", "deepseek-r1-0528", "deepseek-r1-distill-llama-8b"),
    *("deepseek-r1-distill-qwen-1", "deepseek-r1-distill-qwen-7b"),
)
_DYNAMIC_SHARE = 0.3
"""What such a copy adds at most to a model after loading: 1 to 29% in the outputs of unsloth's own
notebooks (Magistral 24B 3%, Gemma 3 27B 22%, Qwen3 14B 24%, Llama 3.2 1B 29%)."""


def known_kernels(
    spec: ModelSpec, config: TrainConfig, keys: JobKeys
) -> tuple[TrainConfig, JobKeys]:
    """A job file's kernels where they know the model; else without them, which its tool does too,
    or without what they would save."""
    if config.kernels is Kernels.HF:
        return (_unsloths(spec, config, keys) if keys.by_unsloth else config), keys
    from napkinmath.catalog.kernels import KERNEL_SETS

    row = KERNEL_SETS[config.kernels.value]
    own = find_stack(config.stack).runs_own_modules
    if spec.family in row.families and not own:
        return config, keys
    of_whom = f"the modules of {config.stack}" if own else f"{spec.family} models"
    left_out = JobKey(
        name=f"kernels {row.name}",
        use=KeyUse.NOT_PRICED,
        why=f"they are not modelled for {of_whom}",
        memory=Difference.LESS,
        time=Difference.LESS,
        of_activations="loss" not in (config.kernel_parts or row.parts),
    )
    config = config.replace(kernels=Kernels.HF, kernel_parts=())
    if keys.by_unsloth:
        config = _unsloths(spec, config, keys)
    return config, keys.replace(keys=(*keys.keys, left_out))


def _unsloths(spec: ModelSpec, config: TrainConfig, keys: JobKeys) -> TrainConfig:
    """What unsloth does without kernels of its own: it widens nothing of a quantized model, and its
    loss makes a part of the logits at a time. Experts that transformers 4 holds as linears are packed
    like others, so a pinned release counts."""
    if config.workload.is_plain and config.loss is Loss.HF:
        config = config.replace(loss=Loss.CHUNKED)
    packed = config.quantization
    if packed is None:
        return config
    config = config.replace(quantization=packed.replace(kbit_preparation=False))
    has_experts, pin = bool(dict(spec.symbols).get("e")), keys.transformers
    newest = find_stack(config.stack) is find_stack("hf")
    if has_experts and not packed.experts and newest and pin.startswith("4."):
        return config.replace(stack=find_stack(f"transformers-{pin}").name)
    return config


def in_its_halves(
    spec: ModelSpec, config: TrainConfig, keys: JobKeys, gpu: Gpu, notes: list[str]
) -> tuple[TrainConfig, JobKeys]:
    """The training in fp16 where the GPU has no units for bf16, and what is not priced of it then.
    unsloth asks for compute capability 8, not for torch's answer, which counts emulation too."""
    in_bf16 = (Precision.BF16, Precision.BF16_AMP, Precision.BF16_AUTOCAST)
    if config.precision not in in_bf16 or computes(gpu, "bf16"):
        return config, keys
    config = in_fp16(config)
    kind = config.precision.value
    notes.append(f"precision {kind}: unsloth takes fp16 on {gpu.name}, which has no bf16")
    if not (spec.family in _WIDE_ALONE or any(part in spec.family for part in _WIDE)):
        return config, keys
    wide = JobKey(
        name="fp32 activations",
        use=KeyUse.NOT_PRICED,
        why=(
            f"unsloth computes norms, rotations and gates of {spec.family} models in fp32 on a GPU"
            " without bf16; fp16 is priced"
        ),
        memory=Difference.MORE,
        time=Difference.MORE,
        option="precision",
    )
    return config, keys.replace(keys=(*keys.keys, wide))


_OLDER_LOGITS, _OLDER_TIMES = 1 << 32, 1.5
"""Bytes of fp32 logits that a chunk of releases up to August 2026 had at most, and how many times they
came on top: 1.2 and 1.4 in the outputs of notebooks (CodeGemma 7B, FunctionGemma 270M)."""


def name_unseen(e: Estimate, model: str, keys: JobKeys) -> JobKeys:
    """Names what a file's text does not decide: the linears that unsloth's own copy of the model keeps
    in 16 bits, which only that copy lists, and the loss of its older releases."""
    if not keys.by_unsloth:
        return keys
    unseen: list[JobKey] = []
    if _may_be_dynamic(e, model):
        most = MoreBytes(fixed=int(_DYNAMIC_SHARE * e.phase_peaks[Phase.LOAD].nbytes))
        why = "unsloth loads its own copy, some linears of which stay in 16 bits"
        unseen.append(_unseen(e, "4-bit copy", why, most))
    chunked = e.config.loss is Loss.CHUNKED or e.config.kernels is Kernels.UNSLOTH
    vocabulary = dict(e.spec.symbols).get("v")
    if chunked and e.config.workload.is_plain and vocabulary:
        most = MoreBytes(
            a_token=4 * vocabulary * _OLDER_TIMES, most=int(_OLDER_LOGITS * _OLDER_TIMES)
        )
        why = "up to August 2026 unsloth cut it by the GPU's free memory"
        unseen.append(_unseen(e, "loss of older releases", why, most))
    return keys.replace(keys=(*keys.keys, *unseen))


def _may_be_dynamic(e: Estimate, model: str) -> bool:
    packed, name = e.config.quantization, model.rpartition("/")[2].lower()
    plain = name.endswith("-bnb-4bit") and not name.endswith("-unsloth-bnb-4bit")
    return packed is not None and packed.format == "nf4" and not plain and name.startswith(_DYNAMIC)


def _unseen(e: Estimate, name: str, why: str, more: MoreBytes) -> JobKey:
    tokens = e.config.micro_batch_size * e.config.sequence_length
    most = format_bytes(more.of(tokens)) if isinstance(tokens, int) else "gigabytes"
    return JobKey(name=name, use=KeyUse.NOT_PRICED, why=f"{why}: up to {most} more", more=more)
