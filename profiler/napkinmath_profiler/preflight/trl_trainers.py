"""TRL's trainers by their settings: what runs beside the step, how the loss is computed, and how
long a sequence can get.

Source: trl 1.16 trainer/{sft,dpo,kto,reward,grpo,rloo}_trainer.py and their configs.
"""

from __future__ import annotations

from typing import Any

from napkinmath.config.train_config import Loss
from napkinmath.config.workload_config import RULES, Workload, WorkloadKind

from napkinmath_profiler.preflight.batch_shape import BatchShape
from napkinmath_profiler.tracing.trace_errors import TraceError

# Sequences of a micro-batch for each row of the dataset: the chosen and the rejected answer run
# together.
ROWS_A_SAMPLE = {"DPOConfig": 2, "RewardConfig": 2, "ORPOConfig": 2, "CPOConfig": 2}
ROLLOUTS = frozenset(("GRPOConfig", "RLOOConfig"))
FUSED_HEADS = frozenset(("SFTConfig", "DPOConfig", "KTOConfig")) | ROLLOUTS
PROMPTS_TOKENIZED = 32  # of those with most characters


# What a trainer's settings are of; CPO with SimPO's loss computes as CPO does.
KINDS = {
    "DPOConfig": WorkloadKind.DPO,
    "KTOConfig": WorkloadKind.KTO,
    "ORPOConfig": WorkloadKind.ORPO,
    "CPOConfig": WorkloadKind.SIMPO,
    "RewardConfig": WorkloadKind.REWARD,
    "PRMConfig": WorkloadKind.PRM,
    "GRPOConfig": WorkloadKind.GRPO,
    "RLOOConfig": WorkloadKind.RLOO,
}


def workload_of(args: Any) -> Workload:
    """What a trainer's settings add to the step; the plain step for those of no known trainer."""
    name = type(args).__name__
    kind = KINDS.get(name)
    if kind is None:
        return Workload()
    if name not in ROLLOUTS:
        computed = not getattr(args, "precompute_ref_log_probs", False)
        return Workload(kind=kind, reference=computed and bool(RULES[kind].reference))
    if not getattr(args, "use_vllm", False):
        return Workload(
            kind=kind, reference=bool(args.beta), completion_tokens=args.max_completion_length
        )
    # vLLM generates; the reference's forward stays
    return Workload(kind=WorkloadKind.DPO) if args.beta else Workload()


def loss_of(args: Any) -> Loss:
    """How the trainer computes its loss."""
    if getattr(args, "use_liger_kernel", False):
        return Loss.FUSED
    return Loss.CHUNKED if type(args).__name__ in FUSED_HEADS and has_fused_heads() else Loss.HF


def has_fused_heads() -> bool:
    """TRL since its trainers put a fused head on every model (trl/trainer/utils.py
    add_fused_lm_head)."""
    try:
        from trl.trainer import utils
    except ImportError:
        return False
    return hasattr(utils, "add_fused_lm_head")


def rollout_shape(args: Any, dataset: Any, tokenizer: Any) -> BatchShape:
    """Completions of a micro-batch, as long as the longest prompt and all that may be generated;
    TraceError without prompts."""
    prompt = getattr(args, "max_prompt_length", None) or _longest_prompt(dataset, tokenizer)
    return BatchShape(args.per_device_train_batch_size, prompt + args.max_completion_length)


def _longest_prompt(dataset: Any, tokenizer: Any) -> int:
    if tokenizer is None or "prompt" not in (getattr(dataset, "column_names", None) or ()):
        raise TraceError(
            "the dataset has no prompts that could be measured; call preflight(batch=(completions,"
            " longest sequence))"
        )
    prompts = sorted(dataset["prompt"], key=lambda p: len(str(p)))[-PROMPTS_TOKENIZED:]
    return max(_num_tokens(prompt, tokenizer) for prompt in prompts)


def _num_tokens(prompt: Any, tokenizer: Any) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return len(tokenizer(rendered)["input_ids"])
