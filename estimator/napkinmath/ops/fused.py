"""Operations that a compiler or a hand-written kernel runs as one: what only the chain in between
would have kept is recomputed.

What inductor keeps was read off torch's min-cut partitioner on a decoder layer: inputs of matrix
products and of attention, gate and up, one fp32 statistic a row of each norm, and neither the fp32
copies nor the activation's output.
"""

from __future__ import annotations

from napkinmath.ir.costs import Move, traffic
from napkinmath.ir.ledger import Value
from napkinmath.ir.tape import LIKE, Tape
from napkinmath.ops.elementwise import promote


def gated_activation(t: Tape, gate: Value, up: Value) -> Value:
    """act(gate) * up in one kernel; keeps gate and up."""
    dtype = promote(gate.dtype, up.dtype)
    moved = traffic(gate, up)
    return t.op(
        "gated activation",
        (gate, up),
        gate.axes,
        dtype,
        saves=(gate, up),
        gradients=(LIKE, LIKE),
        costs=(Move(3 * moved // 2),),
        backward_costs=(Move(5 * moved // 2),),
    )


def rotary_fused(t: Tape, x: Value) -> Value:
    """The rotated heads in one kernel; keeps nothing but the tables."""
    return t.op(
        "rotary",
        (x,),
        x.axes,
        x.dtype,
        gradients=(LIKE,),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(2 * traffic(x)),),
    )
