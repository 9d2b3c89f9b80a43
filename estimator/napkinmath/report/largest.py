"""The largest batch and the longest context, as the report says them."""

from __future__ import annotations

from napkinmath.ir.step import reads_tokens

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.planning.search import Reach


def largest_sizes(estimate: Estimate) -> list[str]:
    """'batch up to 9 at 2048', 'context up to 18,000 at batch 1': each fits when it is run, one
    more does not; nothing without a GPU."""
    if estimate.hardware is None:
        return []
    from napkinmath.planning.search import reaches

    return [largest_text(estimate, reach) for reach in reaches(estimate)]


def largest_text(estimate: Estimate, reach: Reach) -> str:
    """One of them; a search that has ended early gives what fits and what does not."""
    config, sound = estimate.config, estimate.spec.sound
    at = f" at batch {config.micro_batch_size}"
    if reach.what == "batch":
        at = f" at {config.sequence_length}" if reads_tokens(estimate.step) else ""
    text = f"{reach.what} up to {reach.size:,}" if reach.size else f"no {reach.what}"
    if reach.ended_early:
        text = f"{reach.what} {reach.size:,} or more" if reach.size else f"{reach.what} not found"
    if sound is not None and sound.hop and reach.what == "context" and reach.size:
        text += f" (--audio {sound.seconds_of(reach.size):.12g})"
    text += at
    if reach.ended_early:
        least = f"below {reach.failing:,} " if reach.failing <= reach.most else "larger ones "
        text += f" ({least}not all searched, a trial takes seconds)"
    return text + (" (some larger ones fit too)" if reach.uneven else "")
