"""What to change: the set of changes that is enough, and others that save memory."""

from __future__ import annotations

from napkinmath.answers.figures import Verdict
from napkinmath.base.units import format_bytes
from napkinmath.report import words
from napkinmath.report.words import in_gib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napkinmath.answers.estimate import Estimate
    from napkinmath.answers.figures import Change
    from napkinmath.report.screen import Screen

    Over = Callable[[Sequence[str]], tuple[str, str]]

INDENT = 13


def print_remedy(screen: Screen, e: Estimate, over: Over | None) -> None:
    """The changes that are enough; with `over` also the reader's command with them."""
    if e.priced_verdict in (Verdict.FITS, Verdict.NOT_ASKED) or e.takes_more:
        return
    found, command = e.remedy, ""
    if found is None:
        text = ["no set of the changes known is enough: a larger GPU, more GPUs or a smaller model"]
    else:
        text = [" ".join(found.flags), f"leaves {in_gib(found.headroom_bytes)} GiB"]
        text += [] if found.speed_ratio is None else [_tempo(found.speed_ratio)]
        command, replaced = over(found.flags) if over is not None else ("", "")
        text += [f"instead of {replaced}"] if replaced else []
    screen.flow("  enough", text, indent=INDENT)
    if command:
        screen.whole("  that is".ljust(INDENT), command)


def print_changes(screen: Screen, changes: tuple[Change, ...], over: Over | None) -> None:
    """Each change that saves memory, and what it replaces in the reader's command."""
    flags = max((len(change.flag) for change in changes), default=0)
    timed = 13 if any(change.speed_ratio is not None for change in changes) else 0
    for number, change in enumerate(changes):
        speed = "" if change.speed_ratio is None else _tempo(change.speed_ratio)
        saved = "-" + format_bytes(change.saved_bytes)
        label = "  save more" if number == 0 else ""
        meaning = words.printable(change.meaning)
        replaced = over([change.flag])[1] if over is not None else ""
        instead = f"instead of {words.printable(replaced)}" if replaced else ""
        room = screen.width - INDENT - 11 - timed - flags - 2
        flag = words.printable(change.flag)
        both = f"{meaning}, {instead}" if instead else meaning
        text = next((x for x in (both, instead or meaning) if len(x) <= room), "")
        screen.line(
            (label.ljust(INDENT), "dim"),
            f"{saved:<11}{speed:<{timed}}",
            (flag.ljust(flags), "bold"),
            (f"  {text}" if text else "", "dim"),
        )


def _tempo(ratio: float) -> str:
    percent = round(100 * (ratio - 1))
    return (
        "same speed" if percent == 0 else f"{abs(percent)}% {'faster' if percent > 0 else 'slower'}"
    )
