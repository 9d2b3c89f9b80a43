"""What the kernels should reach on an H200, at which sizes, and the least time that its memory and
its tensor cores allow.

The benchmark takes its goals from here, and so does the table of docs/kernels.md
(benchmarks/kernels/kernel_table.py): one list. Importing needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from napkinmath_kernels import costs

# : Measured on an H200 before this project had kernels: a device copy (bytes read plus written) and
# a square bf16 product.
H200_COPY_BYTES_PER_S = 4.3e12
H200_MATMUL_FLOPS_PER_S = 790e12

BITSANDBYTES, PEFT, UNSLOTH, LIGER, COPY = (
    "bitsandbytes",
    "peft + bitsandbytes",
    "unsloth's algorithm",
    "liger",
    "copy",
)
FLASH_2, CUDNN, FLASH_ATTN, EAGER, CUT = (
    "sdpa flash",
    "sdpa cudnn",
    "flash-attn",
    "eager",
    "cut-cross-entropy",
)

PEFT_EXPERTS = "peft's algorithm"
TRL = "trl"

LOST = "broke the GPU's context"
"""The status of what did it: only a new process can go on, and it does not try that again."""

DEQUANTIZE_SHAPES = ((11008, 4096), (4096, 4096), (14336, 4096), (28672, 8192))
QLORA_SHAPE, QLORA_RANK = (14336, 4096), 16
QLORA_FACTORS = {8192: 1.4, 2048: 1.5, 512: 1.6}
QLORA, QLORA_GRAPHED = "qlora linear fwd+bwd", "qlora linear fwd+bwd, CUDA graph"
#: Up to here launching from Python takes longer than an H200 does, so these sizes are timed as a CUDA
#: graph too.
HOST_BOUND_TOKENS = 2048
#: (experts, visited by a token, tokens, in, out): gate and up of Qwen3-30B-A3B.
EXPERTS_SHAPE = (128, 8, 2048, 2048, 1536)
#: (batch, tokens, query heads, K/V heads, head size), causal.
ATTENTION_SHAPES = (
    (2, 8192, 32, 8, 128),
    (8, 2048, 32, 8, 128),
    (1, 16384, 32, 8, 128),
    (4, 4096, 32, 8, 64),
)
LOSS_SHAPE = (8192, 4096, 128256)
NORM_ROWS, NORM_HIDDEN, GATED_WIDTH = 8192, 4096, 14336
#: (batch, tokens, query heads, K/V heads, head size).
ROPE_SHAPE = (4, 2048, 32, 8, 128)
STEP_LAYERS, STEP_TOKENS = 4, (8192, 2048)


@dataclass(frozen=True)
class Goal:
    """What a ratio should reach; `at_most` turns it around."""

    text: str
    value: float
    at_most: bool = False

    def is_met(self, value: float) -> bool:
        """True if the measured value is on the right side."""
        return value <= self.value if self.at_most else value >= self.value


def _attention(factor: float, cudnn: float) -> dict[str, Goal]:
    return {
        FLASH_2: Goal(f">= {factor:.2f}x FlashAttention-2 (SDPA)", factor),
        CUDNN: Goal(f">= {cudnn:.2f}x cuDNN", cudnn),
        FLASH_ATTN: Goal(f">= {factor:.2f}x flash-attn, where installed", factor),
    }


def _of_copy(share: float) -> Goal:
    return Goal(f">= {share:.2f} of copy bandwidth", share)


_ELEMENTWISE = {COPY: _of_copy(0.80), LIGER: Goal(">= 1.0x Liger", 1.0)}
DEQUANTIZE = {COPY: _of_copy(0.75), BITSANDBYTES: Goal(">= 1.5x bitsandbytes", 1.5)}
# PEFT's sum W + BA and its gradient pass through memory in fp32 and in bf16: 20 GB at this size, and
# the products here take 0.3 ms of an H200's tensor cores.
EXPERTS = {
    PEFT_EXPERTS: Goal(">= 3x PEFT's algorithm", 3.0),
    f"memory:{PEFT_EXPERTS}": Goal("peak <= 1/10 of PEFT's", 0.1, at_most=True),
}
ATTENTION_FORWARD, ATTENTION_BOTH = _attention(1.05, 0.70), _attention(0.95, 0.60)
LOSS = {
    EAGER: Goal("time <= 1.1x eager (speed >= 0.909x)", 1 / 1.1),
    f"memory:{EAGER}": Goal("peak <= 1/10 of eager", 0.1, at_most=True),
    # Both make two products of a frozen head, 23.6 ms at the 730 TFLOP/s that an H200 measured.
    # Liger took 31.0 ms there: no order of the same products can be 1.5 times as fast.
    LIGER: Goal(">= 1.1x Liger's default", 1.1),
    CUT: Goal(">= 1.3x cut-cross-entropy", 1.3),
}
#: (tokens, in, width) of an 8B's MLP at a long context, and its tiles.
TILES_SHAPE, NUM_TILES = (32768, 4096, 14336), 8
WHOLE = "the MLP at once"
# A frozen MLP's three products forward and three back become nine.
TILES = {
    WHOLE: Goal("time <= 1.6x the whole MLP's (speed >= 0.625x)", 1 / 1.6),
    f"memory:{WHOLE}": Goal("peak <= 1/2 of the whole MLP's", 0.5, at_most=True),
}
# Three products where TRL's chunked divergence makes five, two of them again in its backward.
DIVERGENCE = {
    TRL: Goal(">= 1.3x TRL's chunked function", 1.3),
    f"memory:{EAGER}": Goal("peak <= 1/10 of eager", 0.1, at_most=True),
}
# Two products where TRL's chunked function makes three.
LIKELIHOODS = {
    TRL: Goal(">= 1.3x TRL's chunked function", 1.3),
    f"memory:{EAGER}": Goal("peak <= 1/10 of eager", 0.1, at_most=True),
}
ELEMENTWISE = {
    "rms_norm": _ELEMENTWISE,
    "layer_norm": {COPY: _of_copy(0.80)},
    "swiglu": _ELEMENTWISE,
    "rope": _ELEMENTWISE,
}
FULL_RECOMPUTE = "full recompute"


def qlora_goals(tokens: int) -> dict[str, Goal]:
    """The linear's goals by the tokens in a step: the fewer, the more there is to gain beside the
    GEMM."""
    factor = QLORA_FACTORS.get(tokens, min(QLORA_FACTORS.values()))
    return {
        PEFT: Goal(f">= {factor}x PEFT + bitsandbytes", factor),
        UNSLOTH: Goal(">= 1.03x unsloth's algorithm", 1.03),
    }


def step_goals(peer: str = PEFT) -> dict[str, Goal]:
    """Of a whole QLoRA step beside `peer`."""
    return {
        peer: Goal(">= 1.3x tokens/s", 1.3),
        f"memory:{peer}": Goal("activations <= 0.5x", 0.5, at_most=True),
        FULL_RECOMPUTE: Goal("offloaded <= 1.03x its time", 1.03, at_most=True),
    }


def attention_name(batch: int, tokens: int, heads: int, kv_heads: int, size: int) -> str:
    """The shape as rows name it."""
    return f"{batch}x{tokens} {heads}/{kv_heads} heads of {size}"


def qlora_name(tokens: int, out_features: int, in_features: int) -> str:
    """The shape as rows name it."""
    return f"{tokens} tokens, {in_features} -> {out_features}, rank {QLORA_RANK}"


def tiles_name(tokens: int, hidden: int, width: int) -> str:
    """The size as the table has it."""
    return f"{tokens} tokens, {hidden} -> {width}, {NUM_TILES} tiles, frozen"


def tiles_flops(tokens: int, hidden: int, width: int) -> int:
    """Nine products: forward, forward again, and to x."""
    return 9 * 2 * tokens * hidden * width


def experts_name(experts: int, visited: int, tokens: int, inputs: int, outputs: int) -> str:
    """The shape as rows name it."""
    sizes = f"{experts} experts, {visited} of a token, {inputs} -> {outputs}"
    return f"{tokens} tokens, {sizes}, rank {QLORA_RANK}"


def loss_name(tokens: int, hidden: int, vocabulary: int) -> str:
    """The shape as rows name it."""
    return f"{tokens}x{hidden}, vocabulary {vocabulary}, frozen head"


def rope_name(batch: int, tokens: int, q_heads: int, k_heads: int) -> str:
    """The shape as rows name it."""
    return f"{batch}x{tokens} {q_heads}+{k_heads} heads"


def step_op(layers: int = STEP_LAYERS) -> str:
    """The whole step as rows name it."""
    return f"qlora step, 8B shape, {layers} layers"


@dataclass(frozen=True)
class Aim:
    """One line of the table: an operation at a size, its goals, and its floor in seconds (0: none
    is stated)."""

    op: str
    shape: str
    goals: dict[str, Goal]
    floor_s: float


def floor_seconds(traffic_bytes: int, flops: int = 0) -> float:
    """The least time on an H200: what must cross the memory bus, or what its tensor cores must
    multiply, whichever takes longer."""
    return max(traffic_bytes / H200_COPY_BYTES_PER_S, flops / H200_MATMUL_FLOPS_PER_S)


def aims() -> Iterator[Aim]:
    """Every goal, the size that the issue of an operation names first."""
    for rows, columns in DEQUANTIZE_SHAPES:
        linear = costs.LinearSize(rows, columns, 0, costs.four_bit_storage(rows, columns))
        yield Aim(
            "nf4 dequantize",
            f"{rows}x{columns}",
            DEQUANTIZE,
            floor_seconds(costs.dequantize(linear, "bf16").forward_traffic_bytes),
        )
    linear = costs.LinearSize(*QLORA_SHAPE, QLORA_RANK, costs.four_bit_storage(*QLORA_SHAPE))
    for tokens in QLORA_FACTORS:
        cost = costs.qlora_linears(tokens, [linear], "bf16")
        products = floor_seconds(0, cost.forward_flops + cost.backward_flops)
        decoding = 2 * floor_seconds(costs.dequantize(linear, "bf16").forward_traffic_bytes)
        for op in (QLORA, QLORA_GRAPHED) if tokens <= HOST_BOUND_TOKENS else (QLORA,):
            name, aimed = qlora_name(tokens, *QLORA_SHAPE), qlora_goals(tokens)
            yield Aim(op, name, aimed, products + decoding)
    experts, visited, tokens, inputs, outputs = EXPERTS_SHAPE
    size = costs.LinearSize(outputs, inputs, QLORA_RANK)
    cost = costs.expert_linear(tokens * visited, experts, size, "bf16")
    yield Aim(
        "expert linear fwd+bwd",
        experts_name(*EXPERTS_SHAPE),
        EXPERTS,
        floor_seconds(cost.forward_traffic_bytes, cost.forward_flops)
        + floor_seconds(cost.backward_traffic_bytes, cost.backward_flops),
    )
    for shape in ATTENTION_SHAPES:
        batch, tokens, heads, kv_heads, size = shape
        cost = costs.flash_attention(
            batch, heads, kv_heads, tokens, tokens, size, "bf16", visible_share=0.5
        )
        forward = floor_seconds(cost.forward_traffic_bytes, cost.forward_flops)
        yield Aim("attention forward", attention_name(*shape), ATTENTION_FORWARD, forward)
        backward = floor_seconds(
            cost.backward_traffic_bytes, cost.forward_flops * 5 // 2
        )  # five products where the forward has two
        yield Aim("attention fwd+bwd", attention_name(*shape), ATTENTION_BOTH, forward + backward)
    cost = costs.linear_cross_entropy(*LOSS_SHAPE, "bf16")
    yield Aim(
        "linear cross-entropy", loss_name(*LOSS_SHAPE), LOSS, floor_seconds(0, cost.forward_flops)
    )
    cost = costs.linear_log_probabilities(*LOSS_SHAPE, "bf16")
    yield Aim(
        "log-probabilities",
        loss_name(*LOSS_SHAPE),
        LIKELIHOODS,
        floor_seconds(0, cost.forward_flops),
    )
    tokens, hidden, vocabulary = LOSS_SHAPE
    cost = costs.linear_divergence(tokens, hidden, hidden, vocabulary, "bf16")
    yield Aim(
        "divergence from a teacher",
        loss_name(*LOSS_SHAPE),
        DIVERGENCE,
        floor_seconds(0, cost.forward_flops),
    )
    for op, columns, cost in (
        (
            "rms_norm",
            NORM_HIDDEN,
            costs.rms_norm(NORM_ROWS, NORM_HIDDEN, "bf16", trains_weight=False),
        ),
        (
            "layer_norm",
            NORM_HIDDEN,
            costs.layer_norm(NORM_ROWS, NORM_HIDDEN, "bf16", trains_parameters=False),
        ),
        ("swiglu", GATED_WIDTH, costs.gated(NORM_ROWS, GATED_WIDTH, "bf16")),
    ):
        both = cost.forward_traffic_bytes + cost.backward_traffic_bytes
        yield Aim(
            f"{op} forward",
            f"{NORM_ROWS}x{columns}",
            ELEMENTWISE[op],
            floor_seconds(cost.forward_traffic_bytes),
        )
        yield Aim(f"{op} fwd+bwd", f"{NORM_ROWS}x{columns}", ELEMENTWISE[op], floor_seconds(both))
    batch, tokens, q_heads, k_heads, size = ROPE_SHAPE
    cost = costs.rope(batch, q_heads, k_heads, tokens, size, "bf16")
    yield Aim(
        "rope",
        rope_name(batch, tokens, q_heads, k_heads),
        ELEMENTWISE["rope"],
        floor_seconds(cost.forward_traffic_bytes),
    )
    tiled = floor_seconds(0, tiles_flops(*TILES_SHAPE))
    yield Aim("mlp in tiles fwd+bwd", tiles_name(*TILES_SHAPE), TILES, tiled)
    for tokens in STEP_TOKENS:
        yield Aim(step_op(), f"{tokens} tokens", step_goals(), 0.0)
