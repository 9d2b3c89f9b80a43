"""The steps of optimizers whose library is not installed here, op by op as its source has them.

Each takes a matrix, its gradient and the states of its row, flat where a state is not of the
matrix's shape. A row is added here or to `REAL` of test_optimizer_states.py, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

Step = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], None]


def lion(p: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    m = state["exp_avg"]
    p.mul_(0.99)
    p.add_(m.clone().mul_(0.9).add(g).sgn_(), alpha=-1e-3)
    m.mul_(0.99).add_(g)


def low_rank_adam(g: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    m, v = state["exp_avg"].view(g.shape), state["exp_avg_sq"].view(g.shape)
    m.mul_(0.9).add_(g)
    v.mul_(0.99).addcmul_(g, g)
    return m / v.sqrt().add_(1e-8)


def galore(p: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    basis = state["projector"].view(-1, g.shape[1])
    step = low_rank_adam(g @ basis.t(), state)
    p.add_((step @ basis) * 0.25, alpha=-1e-3)


def apollo(p: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    basis = torch.empty(g.shape[1], min(256, *g.shape), dtype=p.dtype)  # made from a seed
    low = g @ basis
    step = low_rank_adam(low, state)
    scale = torch.norm(step, dim=1) / (torch.norm(low, dim=1) + 1e-8)
    scaled = g * scale.unsqueeze(1)
    limit = torch.norm(scaled)
    scaled = scaled / limit
    scaled *= 1.0
    p.add_(scaled, alpha=-1e-3)


def soap(p: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    """soap.py, a step between two updates of the eigenvectors. Of its source: `grad =
    torch.tensordot(grad, mat, dims=[[0], [0]])`, `state['GG'][idx].lerp_(outer_product, ...)`."""
    q, factors = (list(_squares(state[name], g.shape)) for name in ("Q", "GG"))

    def project(t: torch.Tensor, end: int) -> torch.Tensor:
        for matrix in q:
            turned = t.permute(*range(1, t.ndim), 0)
            t = torch.tensordot(t, matrix, dims=[[0], [end]]) if len(matrix) else turned
        return t

    m, v = state["exp_avg"], state["exp_avg_sq"]
    projected = project(g, 0)
    m.mul_(0.95).add_(projected, alpha=0.05)
    v.mul_(0.95).add_(projected.square(), alpha=0.05)
    step = project(m / v.sqrt().add_(1e-8), 1)
    p.add_(step, alpha=-1e-3)
    p.add_(p, alpha=-1e-5)
    back = project(m, 1)
    for axis, factor in enumerate(factors):
        if len(factor):
            other = [[i for i in range(g.ndim) if i != axis]] * 2
            factor.lerp_(torch.tensordot(g, g, dims=other), 0.05)
    state["exp_avg"] = project(back, 0)


def _squares(flat: torch.Tensor, sides: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """The square matrices that a state holds one after the other; an empty one for a side above
    10,000."""
    for side in sides:
        count = side * side if len(sides) > 1 and side <= 10_000 else 0
        made, flat = flat[:count], flat[count:]
        yield made.view(side, side) if count else made
    assert not len(flat)


def lomo(p: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    wide_gradient, wide = g.to(torch.float32), p.to(torch.float32)
    p.copy_(wide.add_(wide_gradient, alpha=-1e-3))


def any_precision(p: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    m, v = state["exp_avg"], state["exp_avg_sq"]
    m.mul_(0.9).add_(g)
    v.mul_(0.99).addcmul_(g, g)
    denominator = (v.sqrt() / 0.5).add_(1e-8)
    if "compensation" not in state:
        p.addcdiv_(m, denominator, value=-1e-3)
        return
    error = state["compensation"]
    error.addcdiv_(m, denominator, value=-1e-3)
    before = p.clone()
    p.add_(error)
    error.add_(before.sub_(p))


def foreach_of_torch_2_0(p: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    m, v = [state["exp_avg"]], [state["exp_avg_sq"]]
    torch._foreach_mul_([p], 0.99)
    torch._foreach_mul_(m, 0.9)
    torch._foreach_add_(m, [g], alpha=0.1)
    torch._foreach_mul_(v, 0.99)
    torch._foreach_addcmul_(v, [g], [g], 0.01)
    root = torch._foreach_sqrt(v)
    torch._foreach_div_(root, [0.5])
    torch._foreach_addcdiv_([p], m, torch._foreach_add(root, 1e-8), [-1e-3])


def factored(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1) * column.rsqrt()


def rms(t: torch.Tensor) -> torch.Tensor:
    return t.norm(2) / t.numel() ** 0.5


def factored_update(g: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    row, column = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
    update = (g**2) + 1e-30
    row.mul_(0.9).add_(update.mean(dim=-1))
    column.mul_(0.9).add_(update.mean(dim=-2))
    update = factored(row, column)
    update.mul_(g)
    return update.div_(rms(update).clamp_(min=1.0))


def adalomo(p: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    wide_gradient = g.to(torch.float32)
    # The package divides the fp32 copy of a 16-bit gradient in place, and an fp32 one likewise.
    update = factored_update(wide_gradient.div_(1024), state)
    wide = p.to(torch.float32)
    torch.norm(wide, 2.0)
    wide.add_(update, alpha=-1e-3)
    p.copy_(wide)


def came(p: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    rms(p)
    update = factored_update(g.float(), state)
    m, row, column = (state[name] for name in ("exp_avg", "exp_avg_res_row", "exp_avg_res_col"))
    m.mul_(0.9).add_(update)
    error = (update - m) ** 2 + 1e-16
    row.mul_(0.9).add_(error.mean(dim=-1))
    column.mul_(0.9).add_(error.mean(dim=-2))
    update = factored(row, column).mul_(m)
    update.mul_(1e-3)
    p.add_(-update)


def prodigy(p: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    m, v, s = state["exp_avg"], state["exp_avg_sq"], state["s"].view(-1)
    torch.dot(g.flatten(), state["p0"].view(-1) - p.flatten())
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.99).addcmul_(g, g)
    s.mul_(0.99).add_(g.flatten())
    s.abs().sum()
    p.addcdiv_(m, v.sqrt().add_(1e-8), value=-1e-3)


def schedule_free(p: torch.Tensor, g: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
    y, z = [p], [state["z"]]
    if "exp_avg_sq" in state:
        v = [state["exp_avg_sq"]]
        torch._foreach_mul_(v, 0.99)
        torch._foreach_addcmul_(v, [g], [g], value=0.01)
        denominator = torch._foreach_div(v, 0.5)
        torch._foreach_sqrt_(denominator)
        torch._foreach_add_(denominator, 1e-8)
        torch._foreach_div_([g], denominator)
    torch._foreach_lerp_(y, z, weight=0.1)
    torch._foreach_add_(y, [g], alpha=-1e-3)
    torch._foreach_sub_(z, [g], alpha=1e-3)


WRITTEN_OUT: dict[str, Step] = {
    "adamw-foreach-2.0": foreach_of_torch_2_0,
    "lion": lion,
    "galore": galore,
    "apollo": apollo,
    "soap": soap,
    "lomo": lomo,
    "adalomo": adalomo,
    "came": came,
    "prodigy": prodigy,
    "schedule-free-adamw": schedule_free,
    "schedule-free-radam": schedule_free,
    "schedule-free-sgd": schedule_free,
    "anyprecision-adamw": any_precision,
    "anyprecision-adamw-fp32": any_precision,
}
