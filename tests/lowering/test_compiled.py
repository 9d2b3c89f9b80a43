"""Chains that a compiler fuses: what they read and write once, and that nothing else changes."""

from __future__ import annotations

import pytest
from napkinmath import TrainConfig, estimate
from napkinmath.base.expr import Bindings
from napkinmath.catalog.stacks import find_stack
from napkinmath.config.train_config import Loss, Precision
from napkinmath.ir.costs import Gemm, Move
from napkinmath.ir.ledger import Op
from napkinmath.ir.step import Step
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.models.families import read_config

ROWS, HIDDEN, WIDTH = 2 * 64, 64, 256
BERT = {
    "model_type": "bert",
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "intermediate_size": WIDTH,
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": HIDDEN,
    "n_head": 4,
    "n_layer": 2,
    "vocab_size": 100,
    "n_positions": 64,
    "resid_pdrop": 0.1,
}


def step_of(config: dict[str, object], *, compiles: bool) -> Step:
    made = TrainConfig(
        micro_batch_size=2, sequence_length=64, precision=Precision.BF16, compile=compiles
    )
    return build_step(read_config(config), Policy(made, find_stack("hf-bare")))


def layer(step: Step) -> list[Op]:
    return next(run for run in step.runs if run.stage.checkpointed).block.ops


def moved(step: Step, *, backward: bool) -> tuple[int, int]:
    """(bytes, launches) of what only moves bytes in a layer."""
    bind = Bindings(step.symbols)
    found = [
        cost
        for op in layer(step)
        for cost in (op.backward_costs if backward else op.costs)
        if isinstance(cost, Move)
    ]
    return sum(bind(c.moved) for c in found), sum(bind(c.launches) for c in found)


@pytest.mark.parametrize("config", [BERT, GPT2], ids=["bert", "gpt2"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_compiled_layer_moves_less_in_fewer_kernels(
    config: dict[str, object], backward: bool
) -> None:
    eager, fused = (moved(step_of(config, compiles=c), backward=backward) for c in (False, True))
    assert fused[0] < eager[0]
    assert fused[1] < eager[1]


@pytest.mark.parametrize("config", [BERT, GPT2], ids=["bert", "gpt2"])
def test_products_are_as_before(config: dict[str, object]) -> None:
    def products(step: Step) -> list[tuple[object, ...]]:
        return [
            (c.m, c.n, c.k)
            for op in layer(step)
            for c in (*op.costs, *op.backward_costs)
            if isinstance(c, Gemm)
        ]

    assert products(step_of(config, compiles=True)) == products(step_of(config, compiles=False))


def test_dropout_sum_and_norm_are_one_kernel() -> None:
    """BERT's output: the product and the residual come in, the mask, the sum and the norm's
    output go out, with weight, bias and statistics of the norm."""
    bind = Bindings(step_of(BERT, compiles=True).symbols)
    chain = next(op for op in layer(step_of(BERT, compiles=True)) if op.name == "layer_norm")
    read, written = 2 * 2 * ROWS * HIDDEN, (1 + 2 + 2) * ROWS * HIDDEN
    small = 2 * 2 * HIDDEN + 2 * 4 * ROWS
    (cost,) = chain.costs
    assert read + written <= bind(cost.moved) <= read + written + small
    assert cost.launches == 1


def test_gpt2_keeps_the_input_of_its_activation_and_what_the_next_product_reads() -> None:
    """torch's min-cut partitioner keeps addmm's output of this width, and neither the cube nor the
    tanh."""

    def kept(step: Step) -> int:
        bind = Bindings(step.symbols)
        own = {tensor for op in layer(step) for tensor in op.saves}
        return sum(bind(t.axes[-1]) == WIDTH and "weight" not in t.name for t in own)

    assert kept(step_of(GPT2, compiles=True)) == 2
    assert kept(step_of(GPT2, compiles=False)) > 4


@pytest.mark.parametrize("name", ["gpt2", "bert-base-uncased", "vit-base"])
def test_compile_is_no_longer_idle(name: str) -> None:
    length = {} if name == "vit-base" else {"ctx": 256}  # whose images have one of their own
    eager, fused = (estimate(name, bs=8, gpu="A100-80", compile=c, **length) for c in (False, True))
    assert eager.time is not None
    assert fused.time is not None
    assert fused.time.seconds < eager.time.seconds


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_a_compiled_loss_keeps_what_the_compiler_keeps() -> None:
    """The logits in their own type and two numbers a row: read off AOTAutograd's partition."""
    torch = pytest.importorskip("torch")
    rows, vocabulary = 64, 512

    def loss(logits: object, labels: object) -> object:
        return torch.nn.functional.cross_entropy(logits.float(), labels)

    kept: list[tuple[tuple[int, ...], str]] = []

    def pack(tensor: object) -> object:
        kept.append((tuple(tensor.shape), str(tensor.dtype)))
        return tensor

    torch._dynamo.reset()
    logits = torch.randn(rows, vocabulary, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(loss, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made = compiled(logits, torch.randint(0, vocabulary, (rows,)))
    made.backward()
    whole = [dtype for shape, dtype in kept if shape == (rows, vocabulary)]
    assert whole == ["torch.bfloat16"] and logits.grad.dtype is torch.bfloat16
    ours = next(
        op
        for run in step_of(GPT2, compiles=True).runs
        for op in run.block.ops
        if op.name == "compiled cross_entropy"
    )
    assert [t.dtype.name for t in ours.saves] == ["bf16", "fp32", "fp32"]


def test_a_stack_that_compiles_layers_alone_has_an_eager_loss() -> None:
    def names(stack: str) -> set[str]:
        made = TrainConfig(
            micro_batch_size=2, sequence_length=64, precision=Precision.BF16, compile=True
        )
        step = build_step(read_config(GPT2), Policy(made, find_stack(stack)))
        return {op.name for run in step.runs for op in run.block.ops}

    assert "log_softmax" in names("hf-bare-layers") and "log_softmax" not in names("hf-bare")


def test_tiles_of_logits_without_a_kernel_move_more_than_ten_times_as_much() -> None:
    def read(stack: str, *, backward: bool) -> int:
        made = TrainConfig(
            micro_batch_size=2, sequence_length=64, precision=Precision.BF16, loss=Loss.CHUNKED
        )
        step = build_step(read_config(GPT2), Policy(made, find_stack(stack)))
        ops = [op for run in step.runs for op in run.block.ops]
        (head,) = (op for op in ops if op.name == "chunked_log_probabilities")
        bind = Bindings(step.symbols)
        costs = head.backward_costs if backward else head.costs
        return sum(bind(c.moved) for c in costs if isinstance(c, Move))

    logits = 2 * 63 * 100  # all but each sequence's last position
    assert [read("hf-bare", backward=b) for b in (False, True)] == [2 * logits, 4 * logits]
    assert [read("hf-bare-layers", backward=b) for b in (False, True)] == [54 * logits, 58 * logits]
