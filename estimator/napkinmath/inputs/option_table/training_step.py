"""Options of the batch, of the training step, and of what happens beside it."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.dtypes import ALIASES, BF16_CHECKPOINT, CHECKPOINT, CHECKPOINT_TF32
from napkinmath.catalog.optimizers import OPTIMIZERS, find_optimizer
from napkinmath.catalog.stacks import STACKS, find_stack
from napkinmath.config.train_config import (
    AUTO_TILES,
    Attention,
    Kernels,
    Loss,
    Precision,
    RecomputeKind,
)
from napkinmath.config.workload_config import Placement, WorkloadKind
from napkinmath.inputs.option_table.option import (
    CHOICE,
    COUNT,
    NAMES,
    NUMBER,
    ON,
    SWITCH,
    Option,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

OFFLOADED = ("optimizer", "parameters", "activations", "checkpoints", "embeddings")


def _optimizer(value: object, what: str) -> str:
    name = values.text(value, what)
    return name if name == "auto" else find_optimizer(name).name


def _stack(value: object, what: str) -> str:
    return find_stack(values.text(value, what)).name


def _tiles(value: object, what: str) -> int:
    return AUTO_TILES if value == "auto" else values.count(value, what, high=1 << 20)


def _style(value: object, what: str) -> str:
    from napkinmath.lowering.saved_offload import find_style

    return find_style(values.text(value, what).lower().replace("-", "_")).name


def _styles() -> Iterable[str]:
    from napkinmath.lowering.saved_offload import STYLES

    return STYLES


def _checkpointing() -> Iterable[str]:
    stepped = (RecomputeKind.EVERY, RecomputeKind.INTERLEAVED)
    return (*(k.value + (":K" if k in stepped else "") for k in RecomputeKind), "offload")


RUN = (
    Option(
        key="samples",
        help="rows of the dataset: steps, hours and money of the whole run",
        kind=COUNT,
        metavar="N",
        sets="run.samples",
    ),
    Option(
        key="epochs",
        help="passes over the samples [1]",
        kind=NUMBER,
        metavar="N",
        sets="run.epochs",
        aliases=("num_train_epochs", "num_epochs"),
        low=1e-6,
        high=1e6,
    ),
    Option(
        key="max_steps",
        help="optimizer steps of the run, instead of --samples",
        kind=COUNT,
        metavar="N",
        sets="run.max_steps",
    ),
)
STEP = (
    Option(
        key="precision",
        help=(
            "{choices} [bf16-checkpoint, the Trainer's bf16=True: bf16-autocast, or bf16-amp over a"
            " checkpoint in fp32; fp16 where the GPU has no bf16; checkpoint: its type, no autocast]"
        ),
        kind=CHOICE,
        metavar="NAME",
        sets="precision",
        members=Precision,
        spellings={
            **ALIASES,
            BF16_CHECKPOINT: "bf16-autocast",
            CHECKPOINT: "bf16",
            CHECKPOINT_TF32: "bf16",
            "amp": "bf16-amp",
            "bf16-mixed": "bf16-amp",
            "fp16-mixed": "fp16-amp",
            "bf16-true": "bf16",
            "fp16-true": "fp16",
            "fp32-true": "fp32",
            "float8": "fp8",
        },
    ),
    Option(
        key="optimizer",
        help="{choices} [auto: the stack's]",
        kind=CHOICE,
        metavar="NAME",
        sets="optimizer",
        choices=lambda: ("auto", *OPTIMIZERS),
        reader=_optimizer,
    ),
    Option(
        key="optimizer_in_backward",
        help="update each parameter as its gradient is ready",
        kind=SWITCH,
        sets="optimizer_in_backward",
    ),
    Option(
        key="clip",
        help="clip gradients by their norm [on]",
        kind=SWITCH,
        sets="clip_gradients",
        aliases=("gradient_clipping",),
    ),
    Option(
        key="checkpointing",
        help="{choices} [QLoRA: full, else none]",
        kind=CHOICE,
        metavar="NAME",
        sets="recompute.kind",
        aliases=("gradient_checkpointing", "recompute"),
        choices=_checkpointing,
        joint=True,
    ),
    Option(
        key="reentrant",
        help="the reentrant form of checkpointing",
        kind=SWITCH,
        sets="recompute.reentrant",
    ),
    Option(
        key="offload",
        help="what is kept in host memory, comma-separated: {choices}",
        kind=NAMES,
        metavar="NAMES",
        sets="offload.optimizer",
        choices=OFFLOADED,
        spellings={
            "optim": "optimizer",
            "params": "parameters",
            "param": "parameters",
            "weights": "parameters",
        },
        joint=True,
    ),
    Option(
        key="pinned",
        help="page-locked host memory for offloading [on]",
        kind=SWITCH,
        sets="offload.pinned",
    ),
    Option(
        key="blocks_to_swap",
        help="blocks of a denoiser whose linears wait in host memory [none]",
        kind=COUNT,
        metavar="N",
        sets="offload.blocks",
        low=0,
        high=1 << 10,
    ),
    Option(
        key="offload_style",
        help="whose activation offloading: {choices} [trl]",
        kind=CHOICE,
        metavar="NAME",
        sets="offload.style",
        choices=_styles,
        reader=_style,
    ),
    Option(
        key="prefetch",
        help="layers whose offloaded weights are on their way ahead [1]",
        kind=COUNT,
        metavar="N",
        sets="offload.prefetch",
        low=0,
        high=1 << 16,
    ),
    Option(
        key="attention",
        help="{choices} [auto]",
        kind=CHOICE,
        metavar="NAME",
        sets="attention",
        members=Attention,
        spellings={
            "flash-attention-2": "flash2",
            "flash-attn": "flash2",
            "fa2": "flash2",
            "flash-attention": "flash2",
            "flash-attention-3": "flash3",
            "fa3": "flash3",
            "flex-attention": "flex",
            "mem-efficient": "efficient",
            "xformers": "efficient",
        },
    ),
    Option(
        key="loss",
        help="{choices} [hf; chunked where TRL scores labels: dpo, kto, grpo, rloo]",
        kind=CHOICE,
        metavar="NAME",
        sets="loss",
        members=Loss,
        spellings={"cut-cross-entropy": "fused", "cce": "fused"},
    ),
    Option(
        key="kernels",
        help="{choices} [hf]",
        kind=CHOICE,
        metavar="NAME",
        sets="kernels",
        members=Kernels,
    ),
    Option(
        key="kernel_parts",
        help="which of norm, rope, gate, loss (liger), qkv, o, mlp (axolotl) run",
        kind=NAMES,
        metavar="NAMES",
        sets="kernel_parts",
    ),
    Option(
        key="mlp_tiles",
        help="MLPs run over N tiles of the tokens, made again; auto: of about hidden-size tokens",
        metavar="N|auto",
        sets="mlp_tiles",
        reader=_tiles,
    ),
    Option(
        key="stack",
        help="library and era that is priced, or a trainer that runs one: {choices} [hf]",
        kind=CHOICE,
        metavar="NAME",
        sets="stack",
        choices=lambda: STACKS,
        reader=_stack,
    ),
    Option(
        key="eval",
        help=(
            "price a model left in eval mode, as loading leaves it: checkpointing inactive, no"
            " dropout but the adapters'"
        ),
        kind=ON,
        sets="training_mode",
        joint=True,
    ),
    Option(
        key="train_mode",
        help="the model is in training mode (the default)",
        kind=ON,
        sets="training_mode",
        joint=True,
    ),
    Option(key="compile", help="torch.compile", kind=SWITCH, sets="compile"),
)
WORKLOAD = (
    Option(
        key="workload",
        help=(
            "{choices}; --bs counts pairs of dpo, orpo, simpo and reward, anchors of contrastive,"
            " texts of a mini-batch of contrastive-cached [sft]"
        ),
        kind=CHOICE,
        metavar="NAME",
        sets="workload.kind",
        members=WorkloadKind,
        spellings={
            "rm": "reward",
            "distillation": "distill",
            "gkd": "distill",
            "kd": "distill",
            "cpo": "simpo",
            **dict.fromkeys(("pretraining", "pretrain", "pt", "finetune", "fine-tuning"), "sft"),
        },
    ),
    Option(
        key="columns",
        help="texts of one sample of a contrastive loss: anchor, positive, each negative [2]",
        kind=COUNT,
        sets="workload.columns",
    ),
    Option(
        key="teacher",
        help="the model that teaches (distill) or scores rollouts (grpo and its kin, rloo, ppo)",
        metavar="MODEL",
        sets="workload.teacher",
    ),
    Option(
        key="reference",
        help=(
            "the reference's forward in the step (dpo, kto, grpo, rloo, ppo)"
            " [on; of rollouts as the rollout trainer has it by itself]; off: precomputed, or beta 0"
        ),
        kind=SWITCH,
        sets="workload.reference",
    ),
    Option(
        key="old_logprobs",
        help=(
            "the policy scores its rollouts before the update (old log-probabilities of the ratio)"
            " [on for rloo; else the rollout trainer's, off without an engine]"
        ),
        kind=SWITCH,
        sets="workload.old_logprobs",
    ),
    Option(
        key="score_bs",
        aliases=("micro_rollout_batch_size", "log_prob_micro_batch_size_per_gpu"),
        help=(
            "rollouts that are scored at a time (old log-probabilities, reference, values), and"
            " generated at a time without an engine [scored: a micro-batch; generated: all]"
        ),
        kind=COUNT,
        metavar="N",
        sets="workload.scored_rows",
    ),
    Option(
        key="entropy_loss",
        help=(
            "the update's loss has the entropy of every token in it (an entropy coefficient other"
            " than 0; verl, openrlhf) [off]"
        ),
        kind=SWITCH,
        sets="workload.entropy_loss",
    ),
    Option(
        key="reference_at",
        help=(
            "where the reference's weights are: {choices}; apart is on GPUs of its own"
            " [auto: as TRL has it]"
        ),
        kind=CHOICE,
        metavar="PLACE",
        sets="workload.reference_at",
        members=Placement,
    ),
    Option(
        key="teacher_at",
        help="where the weights of --teacher are: {choices} [auto]",
        kind=CHOICE,
        metavar="PLACE",
        sets="workload.teacher_at",
        members=Placement,
    ),
    Option(
        key="teacher_topk",
        help=(
            "distill from the N largest logits of each token: the teacher takes the whole batch first,"
            " and the student waits on the host (NeMo-RL: 64) [all logits, at each micro-batch]"
        ),
        kind=COUNT,
        metavar="N",
        sets="workload.teacher_topk",
    ),
    Option(
        key="completion",
        help="tokens that a rollout generates [half the sequence]",
        kind=COUNT,
        metavar="N",
        sets="workload.completion_tokens",
    ),
    Option(
        key="eval_bs",
        help="evaluate so many sequences at once in the middle of training [no evaluation]",
        kind=COUNT,
        metavar="B",
        sets="workload.eval_batch",
    ),
    Option(
        key="generate",
        help="generate N tokens for a batch in the middle of training [none]",
        kind=COUNT,
        metavar="N",
        sets="workload.generate_tokens",
    ),
)
