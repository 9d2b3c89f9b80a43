"""The largest batch and the longest context of a configuration, printed for each GPU named."""

from __future__ import annotations

from napkinmath.base.units import GIB
from napkinmath.ir.step import reads_tokens

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.planning.search import Limit


def print_limits(estimates: list[Estimate], *, batch: bool, context: bool) -> int:
    """Prints each limit with the estimates on both sides of it; returns 1 where not even the
    smallest fits somewhere."""
    from napkinmath.planning.search import largest_batch, longest_context

    code = 0
    for e in estimates:
        found = ([largest_batch(e)] if batch else []) + ([longest_context(e)] if context else [])
        for limit in found:
            print(limit_line(e, limit))
            code = code if limit.fits else 1
    return code


def limit_line(e: Estimate, limit: Limit) -> str:
    """'largest batch on A100: 7 (74.1 GiB of 79.3); up to 8 may fit, 9 does not fit'."""
    assert e.hardware is not None
    name = "largest batch" if limit.what == "batch" else "longest context"
    given = f" at batch {e.config.micro_batch_size}"
    if limit.what == "batch":
        given = f" at {e.config.sequence_length} tokens" if reads_tokens(e.step) else ""
        given = " at the lengths given" if e.config.batch.lengths else given
    start = f"{name} of {e.spec.name} on {e.hardware.gpu.name}{given}: "
    if not limit.fits:
        return f"{start}none surely fits" + (
            f"; up to {limit.may_fit:,} may fit" if limit.may_fit else ""
        )
    assert limit.at is not None
    device = limit.at.memory.device.value / GIB
    line = f"{start}{limit.fits:,}   {device:.1f} of {e.hardware.memory_bytes / GIB:.1f} GiB"
    if limit.may_fit > limit.fits:
        line += f"   up to {limit.may_fit:,} may fit, {limit.may_fit + 1:,} does not fit"
    elif limit.beyond is not None:
        line += f"   {limit.fits + 1:,}: {limit.beyond.verdict.value}"
    else:
        line += (
            "   which is all the model has positions for"
            if limit.fits == e.spec.longest_sequence
            else "   the search's end"
        )
    return line
