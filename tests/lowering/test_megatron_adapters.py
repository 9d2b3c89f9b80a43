"""Adapters as Megatron's libraries attach them: in the base's type, with one first factor for a
linear that is several of transformers'."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP32, DType
from napkinmath.base.expr import Bindings
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.config.train_config import AdapterConfig, Precision, TrainConfig
from napkinmath.inputs.options import train_config
from napkinmath.ir.step import Step
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.models.families import read_config

RANK, H, FF, KV = 8, 64, 160, 32
LLAMA = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": FF,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def step_of(stack: str) -> Step:
    config = TrainConfig(
        micro_batch_size=2,
        sequence_length=128,
        precision=Precision.BF16,
        adapter=AdapterConfig(rank=RANK),
    )
    return build_step(read_config(LLAMA), Policy(config, find_stack(stack)))


def adapters(stack: str) -> tuple[int, set[DType]]:
    """(elements of the adapters of one layer, their types)."""
    step = step_of(stack)
    sizes = Bindings(dict(step.spec.symbols))
    layer = next(run for run in step.runs if "layers" in run.path).block
    found = [weight for weight in layer.weights if weight.kind == "adapter"]
    return sum(int(sizes(w.elements)) for w in found), {w.tensor.dtype for w in found}


# Megatron-Bridge peft/lora.py: linear_qkv, linear_proj, linear_fc1 (gate and up), linear_fc2
JOINED = RANK * ((H + H + 2 * KV) + (H + H) + (H + 2 * FF) + (FF + H))
# peft: q, k, v, gate and up have a first factor each
APART = JOINED + RANK * (2 * H + H)


def test_a_joined_linear_has_one_first_factor_in_the_base_s_type() -> None:
    assert adapters("nemo") == (JOINED, {BF16})
    assert adapters("hf-bare") == (APART, {FP32})


def test_products_of_the_first_factor_run_once_for_a_joined_linear() -> None:
    def products(stack: str) -> int:
        layer = next(run for run in step_of(stack).runs if "layers" in run.path).block
        return sum(any(out.tensor.name == "A x" for out in op.outputs) for op in layer.ops)

    assert products("nemo") == len(("qkv", "proj", "fc1", "fc2"))
    assert products("hf-bare") == len(("q", "k", "v", "o", "gate", "up", "down"))


def test_nothing_is_cast_around_adapters_of_the_base_s_type() -> None:
    def casts(stack: str) -> int:
        layer = next(run for run in step_of(stack).runs if "layers" in run.path).block
        made = [out.tensor for op in layer.ops for out in op.outputs]
        return sum(x.name.endswith(" in fp32") and "_proj" in x.module for x in made)

    assert casts("torchtune") == 0 < casts("hf-bare")


def test_nemo_shares_out_the_optimizer_of_full_training_alone() -> None:
    def strategy(**options: object) -> DataParallel:
        parallel: ParallelConfig = train_config({"gpus": "8", **options}).parallel
        return parallel.data_parallel

    assert strategy(stack="nemo") is DataParallel.ZERO1
    assert strategy(stack="nemo", method="lora") is DataParallel.DDP
    assert strategy(stack="nemo", data_parallel=["ddp"]) is DataParallel.DDP
    assert strategy() is DataParallel.DDP
