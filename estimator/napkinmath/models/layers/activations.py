"""Activation functions by the names that configs give them, as transformers 5.23 activations.py
runs them."""

from __future__ import annotations

from napkinmath.base.dtypes import BOOL, FP32
from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Value
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.ops import elementwise
from napkinmath.ops.elementwise import add, cast, cube, mul, scale, shift, tanh
from napkinmath.ops.index import constant

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def activate(t: Tape, x: Value, name: str) -> Value:
    """The activation function of a config's `hidden_act`."""
    with t.scope() as frame:
        frame.local(x)
        if (name in _CHAINS and t.compiles) or (name in _GELUS and t.policy.stack.model.fused_gelu):
            return elementwise.unary(t, name, x)
        return ACTIVATIONS[name](t, x)


def gated(t: Tape, gate: Value, up: Callable[[], Value], name: str) -> Value:
    """act(gate) * up, where `up` is recorded after the activation; one kernel under a compiler."""
    if t.compiles:
        from napkinmath.ops.fused import gated_activation

        return gated_activation(t, gate, up())
    made = activate(t, gate, name)
    return mul(t, made, up())


def gelu_new(t: Tape, x: Value) -> Value:
    """0.5 x (1 + tanh(c (x + 0.044715 x³))), eight operations (NewGELUActivation)."""
    with t.scope():
        half = scale(t, x)
        inner = add(t, x, scale(t, cube(t, x)))
        return mul(t, half, shift(t, tanh(t, scale(t, inner))))


def gelu_fast(t: Tape, x: Value) -> Value:
    """0.5 x (1 + tanh(c x (1 + 0.044715 x x))) (FastGELUActivation)."""
    with t.scope():
        half, scaled = scale(t, x), scale(t, x)
        inner = mul(t, scaled, shift(t, mul(t, scale(t, x), x)))
        return mul(t, half, shift(t, tanh(t, inner)))


def quick_gelu(t: Tape, x: Value) -> Value:
    """x · sigmoid(1.702 x) (QuickGELUActivation)."""
    with t.scope():
        return mul(t, x, elementwise.sigmoid(t, scale(t, x)))


def bloom_gelu(t: Tape, x: Value) -> Value:
    """GELU by tanh in an autograd function of its own, which keeps x and computes both ways in
    small steps (models/bloom GeLUFunction)."""
    made = [t.tensor(f"step {number}", x.axes, x.dtype, Role.WORKSPACE) for number in range(8)]
    out = Value(t.tensor("gelu", x.axes, x.dtype), x.axes, x.dtype, x.requires_grad)
    half, scaled, cubed, inner, product, squashed, plus_one, _ = made
    forward = (
        (ALLOC, half),
        (ALLOC, scaled),
        (ALLOC, cubed),
        (ALLOC, inner),
        (FREE, cubed),
        (ALLOC, product),
        (FREE, scaled),
        (FREE, inner),
        (ALLOC, squashed),
        (FREE, product),
        (ALLOC, plus_one),
        (FREE, squashed),
        (ALLOC, out.tensor),
        (FREE, half),
        (FREE, plus_one),
    )
    cost = (Move(20 * traffic(x), 9),)
    if not x.requires_grad:
        t.append("bloom gelu", (x,), (out,), forward=forward, costs=cost)
        return out
    gradient = t.gradient_of(x)
    tanh_out, first, second, third, fourth, factor = (
        t.tensor(f"backward step {number}", x.axes, x.dtype, Role.WORKSPACE) for number in range(6)
    )
    backward = (
        (ALLOC, first),
        (ALLOC, second),
        (ALLOC, third),
        (FREE, first),
        (FREE, second),
        (ALLOC, tanh_out),
        (FREE, third),
        (ALLOC, first),
        (ALLOC, second),
        (ALLOC, third),
        (ALLOC, fourth),
        (FREE, third),
        (ALLOC, third),
        (FREE, second),
        (FREE, fourth),
        (ALLOC, second),
        (FREE, first),
        (FREE, third),
        (ALLOC, fourth),
        (ALLOC, factor),
        (FREE, second),
        (FREE, fourth),
        (ALLOC, gradient),
        (FREE, factor),
        (FREE, tanh_out),
    )
    t.append(
        "bloom gelu",
        (x,),
        (out,),
        forward=forward,
        saves=(x.tensor,),
        costs=cost,
        backward=backward,
        gradients=(Gradient(x, gradient),),
        backward_costs=(Move(50 * traffic(x), 20),),
    )
    return out


def relu2(t: Tape, x: Value) -> Value:
    """relu(x)² (ReLUSquaredActivation)."""
    with t.scope() as frame:
        positive = elementwise.relu(t, x)
        frame.local(positive)
        return elementwise.square(t, positive)


def xielu(t: Tape, x: Value) -> Value:
    """xIELU in Python: two trained numbers a layer, and every step a tensor as large as x
    (XIELUActivation._xielu_python). Their softplus is fp32 under autocast, and so is every step
    that they multiply; beta and eps have no dimension and widen nothing."""
    from napkinmath.ops.rotary import subtract

    with t.scope("act_fn") as frame:
        positive, negative = (t.weight(name, (1,)).value for name in ("alpha_p", "alpha_n"))
        if t.policy.autocast is not None:
            positive, negative = (cast(t, one, FP32) for one in (positive, negative))
        t.weight("beta", (1,), buffer=True)
        least = t.weight("eps", (1,), buffer=True).value
        condition = constant(t, "x > 0", x.axes, BOOL)
        frame.local(condition)
        above = add(t, mul(t, mul(t, positive, x), x), scale(t, x))
        frame.local(above)
        below = subtract(t, expm1(t, minimum_of(t, x, least)), x)
        below = add(t, mul(t, below, negative), scale(t, x))
        return t.op(
            "where",
            (above, below),
            x.axes,
            above.dtype,
            saves=(condition,),
            gradients=(LIKE, LIKE),
            costs=(Move(3 * traffic(x)),),
            backward_costs=(Move(4 * traffic(x), 2),),
        )


def expm1(t: Tape, x: Value) -> Value:
    """exp(x) - 1, in fp32 under autocast; keeps its output, to which its backward adds one."""
    if t.policy.autocast is not None:
        x = cast(t, x, FP32)
    plus_one = t.tensor("output + 1", x.axes, x.dtype, Role.WORKSPACE)
    out = t.op(
        "expm1",
        (x,),
        x.axes,
        x.dtype,
        gradients=(LIKE,),
        backward_temporaries=(plus_one,),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(5 * traffic(x), 2),),
    )
    if out.requires_grad:
        t.ops[-1].saves = (out.tensor,)
    return out


def minimum_of(t: Tape, x: Value, least: Value) -> Value:
    """min(x, a number held in a tensor); keeps x; its backward compares twice and halves where
    equal."""
    halves = (
        *(t.tensor(n, x.axes, BOOL, Role.WORKSPACE) for n in ("x == least", "x > least")),
        t.tensor("half of the gradient", x.axes, x.dtype, Role.WORKSPACE),
    )
    return t.op(
        "minimum",
        (x, least),
        x.axes,
        x.dtype,
        saves=(x,),
        gradients=(LIKE, None),
        backward_temporaries=halves,
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(6 * traffic(x), 4),),
    )


ACTIVATIONS = {
    "silu": elementwise.silu,
    "swish": elementwise.silu,
    "gelu": elementwise.gelu,
    "gelu_pytorch_tanh": elementwise.gelu,
    "gelu_python_tanh": gelu_new,
    "gelu_new": gelu_new,
    "gelu_fast": gelu_fast,
    "bloom_gelu": bloom_gelu,
    "relu": elementwise.relu,
    "relu2": relu2,
    "xielu": xielu,
    "quick_gelu": quick_gelu,
}
# Those of several operations in eager mode; compiled they are one, which keeps its input alone
# (torch's min-cut partitioner on a layer of GPT-2: addmm's output of the width of its feed-forward).
_GELUS = ("gelu_python_tanh", "gelu_new", "gelu_fast")
_CHAINS = (*_GELUS, "bloom_gelu", "relu2", "quick_gelu")
