"""Which meshes a trainer runs: the strategies of its data-parallel ranks, and beside which of them
it has tensor ranks, pipeline stages, context and expert ranks; a row for each trainer.

Plans search what the trainer of a stack runs, and answers name what it does not. A stack without
a row is a loop of one's own, which may wire anything.
"""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.config.parallel_config import ContextParallel, DataParallel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from napkinmath.config.train_config import TrainConfig

DP, DDP, FSDP1, FSDP2 = (
    DataParallel.DP,
    DataParallel.DDP,
    DataParallel.FSDP1,
    DataParallel.FSDP2,
)
ZERO1, ZERO2, ZERO3 = DataParallel.ZERO1, DataParallel.ZERO2, DataParallel.ZERO3
ALONE = DataParallel.NONE
_ZERO = (ZERO1, ZERO2, ZERO3)


class NotRun(Record):
    """What of a mesh its trainer does not run: the option that asks for it, in words, and the
    strategies beside which it would."""

    option: str
    what: str
    trainer: str
    beside: tuple[DataParallel, ...] = ()


class TrainerMeshes(Record):
    """The meshes of one trainer. Of an axis: the strategies beside which it runs (ALONE: with one
    data-parallel rank, which goes with any of them too); () is never."""

    trainer: str
    stacks: tuple[str, ...]
    source: str
    strategies: tuple[DataParallel, ...]
    tensor: tuple[DataParallel, ...] = ()
    pipeline: tuple[DataParallel, ...] = ()
    ring: tuple[DataParallel, ...] = ()
    ulysses: tuple[DataParallel, ...] = ()
    expert: tuple[DataParallel, ...] = ()
    adapters_in_parts: bool = True
    """Adapters have tensor and context ranks too."""


_OLD_TRAINER = TrainerMeshes(
    trainer="this release of transformers' Trainer",
    stacks=(
        *("hf-2022", "hf-2023", "hf-2024", "hf-4.45", "hf-4.48"),
        *("trl-0.11", "trl-0.14", "trl-0.15"),
    ),
    source="transformers 4.49 trainer.py, training_args.py; accelerate before 1.6 has FSDP 1 alone",
    strategies=(DP, DDP, *_ZERO, FSDP1),
)
_TRAINER = TrainerMeshes(
    trainer="transformers' Trainer",
    stacks=("hf", "trl-1.9", "accelerate-loop"),
    source=(
        "accelerate 1.15 parallelism_config.py __post_init__ (tp or cp beside replicas is refused),"
        " _validate_accelerator; accelerator.py maybe_context_parallel, _prepare_deepspeed (sp);"
        " transformers 5.23 trainer.py create_accelerator_and_postprocess,"
        " distributed/configuration_utils.py (fsdp_size, ep_size; its stages do not train)"
    ),
    strategies=(DP, DDP, *_ZERO, FSDP1, FSDP2),
    tensor=(FSDP2,),
    ring=(FSDP2,),
    ulysses=_ZERO,
    expert=(FSDP2,),
)
_MEGATRON = TrainerMeshes(
    trainer="Megatron-LM",
    stacks=(
        *("megatron", "megatron-unfused", "megatron-2025", "megatron-2024"),
        *("nemo", "nemo-rl", "nemo-rl-0.3", "slime", "slime-unfused", "slime-2025"),
    ),
    source="Megatron-LM training/arguments.py validate_args (use_torch_fsdp2), training/training.py",
    strategies=(DDP, ZERO1, FSDP2),
    tensor=(DDP, ZERO1, FSDP2),
    pipeline=(DDP, ZERO1),
    ring=(DDP, ZERO1, FSDP2),
    ulysses=(DDP, ZERO1),
    expert=(DDP, ZERO1),
)
_TITAN = TrainerMeshes(
    trainer="torchtitan",
    stacks=("torchtitan",),
    source=(
        "torchtitan distributed/parallel_dims.py; models/llama3/infra/parallelize.py"
        " parallelize_llama (DDP has not supported > 1D parallelism)"
    ),
    strategies=(DDP, FSDP2),
    tensor=(FSDP2,),
    pipeline=(FSDP2,),
    ring=(FSDP2,),
    expert=(FSDP2,),
)

TRAINER_MESHES: tuple[TrainerMeshes, ...] = (
    _TRAINER,
    _TRAINER.replace(
        trainer="transformers 4's Trainer",
        stacks=("hf-4.57", "trl-0.29"),
        source=(
            "transformers 4.57 training_args.py parallelism_config; accelerate 1.10"
            " parallelism_config.py"
        ),
        ulysses=(),
        expert=(),
    ),
    _OLD_TRAINER.replace(
        stacks=("trl-0.18", "trl-0.21"),
        source="transformers 4.51 trainer.py; accelerate 1.6 utils/dataclasses.py fsdp_version",
        strategies=(DP, DDP, *_ZERO, FSDP1, FSDP2),
    ),
    _OLD_TRAINER,
    _TRAINER.replace(
        trainer="LLaMA-Factory",
        stacks=("llama-factory",),
        source="LLaMA-Factory ff6d4d12 hparams/parser.py, train/tuner.py",
        tensor=(),
        ring=(),
        ulysses=(),
        expert=(),
    ),
    TrainerMeshes(
        trainer="verl's FSDP engine",
        stacks=("verl-engine",),
        source="verl 0.7 workers/engine/fsdp/transformer_impl.py (ulysses_sequence_parallel_size)",
        strategies=(FSDP1, FSDP2),
        ulysses=(FSDP1, FSDP2),
    ),
    _TITAN,
    _TITAN.replace(
        trainer="NeMo AutoModel",
        stacks=("automodel",),
        source="NeMo AutoModel components/distributed/parallelizer.py, ddp.py",
    ),
    _TITAN.replace(
        trainer="NeMo-RL's DTensor worker",
        stacks=("nemo-rl-dtensor", "nemo-rl-dtensor-0.3"),
        source="NeMo-RL v0.6.0 models/automodel/setup.py; v0.2.1 models/dtensor/parallelize.py",
        strategies=(FSDP2,),
        pipeline=(),
    ),
    _TITAN.replace(
        trainer="prime-rl",
        stacks=("hf-bare-layers", "prime-rl-rollouts-2025"),
        source="prime-rl trainer/parallel_dims.py get_parallel_dims (no tensor ranks, pp is 1)",
        strategies=(FSDP2,),
        tensor=(),
        pipeline=(),
        ulysses=(FSDP2,),
    ),
    TrainerMeshes(
        trainer="torchtune",
        stacks=("torchtune",),
        source=(
            "torchtune 0.7 recipes/full_finetune_distributed.py (tensor_parallel_dim,"
            " context_parallel_dim); lora_finetune_distributed.py: DDP is not supported"
        ),
        strategies=(FSDP2,),
        tensor=(FSDP2,),
        ring=(FSDP2,),
        adapters_in_parts=False,
    ),
    _MEGATRON,
    TrainerMeshes(
        trainer="Megatron-DeepSpeed",
        stacks=("megatron-deepspeed", "megatron-deepspeed-engine"),
        source="Megatron-DeepSpeed megatron/arguments.py; DeepSpeed runtime/pipe/engine.py (ZeRO 1)",
        strategies=(DDP, *_ZERO),
        tensor=(DDP, *_ZERO),
        pipeline=(DDP, ZERO1),
        ulysses=_ZERO,
    ),
    TrainerMeshes(
        trainer="DeepSpeed",
        stacks=("deepspeed",),
        source="DeepSpeed runtime/engine.py, runtime/pipe/engine.py (ZeRO 1), sequence/layer.py",
        strategies=(DDP, *_ZERO),
        pipeline=(DDP, ZERO1),
        ulysses=_ZERO,
    ),
    TrainerMeshes(
        trainer="nanotron",
        stacks=("nanotron", "nanotron-2024"),
        source="nanotron config/parallelism_config.py ParallelismArgs, optim/zero.py",
        strategies=(DDP, ZERO1),
        tensor=(DDP, ZERO1),
        pipeline=(DDP, ZERO1),
        ring=(DDP, ZERO1),
        expert=(DDP, ZERO1),
    ),
    TrainerMeshes(
        trainer="litgpt",
        stacks=("litgpt",),
        source="litgpt 0.4 finetune/lora.py, finetune/full.py setup (FSDPStrategy)",
        strategies=(FSDP1, FSDP2),
    ),
)
_BY_STACK = {stack: row for row in TRAINER_MESHES for stack in row.stacks}


def has_trainer(stack: str) -> bool:
    """Whether a known trainer runs under the stack, and no loop of one's own."""
    return stack in _BY_STACK


def strategies_of(stack: str, among: tuple[str, ...]) -> tuple[str, ...]:
    """Of some strategies those that the stack's trainer has, FSDP 1 for FSDP 2 where it is the only
    one; where it has none of them, the one of its own that shares most."""
    row = _BY_STACK.get(stack)
    if row is None:
        return among
    known = [strategy.value for strategy in row.strategies]
    named = (
        FSDP1.value if name == FSDP2.value and FSDP2.value not in known else name for name in among
    )
    return tuple(dict.fromkeys(name for name in named if name in known)) or (known[-1],)


def not_run(config: TrainConfig) -> Iterator[NotRun]:
    """What of a configuration's mesh the trainer of its stack does not run, an axis each."""
    parallel, row = config.parallel, _BY_STACK.get(config.stack)
    if row is None or parallel.world_size == 1:
        return
    strategy = parallel.data_parallel
    whole = config.adapter is not None and not row.adapters_in_parts
    ring = parallel.context_parallel is ContextParallel.RING
    around = row.ring if ring else row.ulysses
    axes = (
        ("tp", parallel.tensor_parallel_size, () if whole else row.tensor),
        ("pp", parallel.pipeline_parallel_size, row.pipeline),
        ("cp", parallel.context_parallel_size, () if whole else around),
        ("ep", parallel.expert_parallel_size, row.expert),
    )
    for option, degree, beside in axes:
        if degree > 1 and not (beside and strategy in (*beside, ALONE)):
            words = f"--{option}"
            if option == "cp" and not ring:
                words += " --cp-kind ulysses"
            if whole and (row.tensor if option == "tp" else option == "cp" and around):
                words += " with adapters"
            if beside:
                words += f" without {' or '.join(s.value for s in beside)}"
            yield NotRun(option=option, what=words, trainer=row.trainer, beside=beside)
    if strategy not in (*row.strategies, ALONE):
        words = f"--data-parallel {strategy.value}"
        yield NotRun(option="data_parallel", what=words, trainer=row.trainer)


def stacks_that_run(config: TrainConfig) -> tuple[str, ...]:
    """The first stack of every trainer that runs a configuration's mesh."""
    return tuple(
        row.stacks[0]
        for row in TRAINER_MESHES
        if not any(not_run(config.replace(stack=row.stacks[0])))
    )
