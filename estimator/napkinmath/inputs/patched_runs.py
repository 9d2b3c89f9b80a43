"""What becomes of a job file's training by the kernels that it asks for, and by unsloth, which loads
and prepares a model whether its kernels know the family or not.

Sources: unsloth 2026.10 models/loader.py, models/vision.py, models/rl.py; unsloth_zoo 2026.10
model_lists.py FORCE_FLOAT32, training_utils.py prepare_model_for_training,
fused_losses/cross_entropy_loss.py, compiler.py.
"""

from __future__ import annotations

from napkinmath.catalog.stacks import find_stack
from napkinmath.config.job_keys import Difference, JobKey, JobKeys, KeyUse
from napkinmath.config.train_config import Kernels, Loss, Precision

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.hardware import Gpu
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec

_IN_FP16 = {
    Precision.BF16: Precision.FP16,
    Precision.BF16_AMP: Precision.FP16_AMP,
    Precision.BF16_AUTOCAST: Precision.FP16_AUTOCAST,
}
# Types of models that lose their gradients in fp16: parts of their names, and whole names.
_WIDE = ("gemma3n", "gemma4", "glm4_moe", "gpt_oss", "qwen3_5", "qwen3_moe")
_WIDE_ALONE = ("gemma3", "gemma3_text")


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
    )
    config = config.replace(kernels=Kernels.HF)
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
    if has_experts and pin.startswith("4.") and config.stack == "hf":
        return config.replace(stack=find_stack(f"transformers-{pin}").name)
    return config


def in_its_halves(
    spec: ModelSpec, config: TrainConfig, keys: JobKeys, gpu: Gpu, notes: list[str]
) -> tuple[TrainConfig, JobKeys]:
    """The training in fp16 where the GPU has no units for bf16, and what is not priced of it then.
    unsloth asks for compute capability 8, not for torch's answer, which counts emulation too."""
    kind = _IN_FP16.get(config.precision)
    if kind is None or not gpu.dense_flops or gpu.supports("bf16"):
        return config, keys
    notes.append(f"precision {kind.value}: unsloth takes fp16 on {gpu.name}, which has no bf16")
    config = config.replace(precision=kind)
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
