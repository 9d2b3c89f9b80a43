"""Writes an estimate's configuration as another tool's file."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.config.train_config import TrainConfig


def write_export(e: Estimate, model: str, kind: str, out: str | None, *, force: bool) -> None:
    """Prints the config of that kind, or writes it to `out`; what the tool cannot say goes to
    standard error."""
    import sys

    from napkinmath.base.errors import plain
    from napkinmath.base.whole_file import write_whole
    from napkinmath.exports import export_with_meaning

    text, notes, meant = export_with_meaning(e.config, model, kind)
    for note in [*notes, *_as_written(e, meant, notes)]:
        print(f"note: {plain(note)}", file=sys.stderr)
    if out is None:
        print(text, end="")
        return
    write_whole(out, text, force=force)
    print(f"{kind} configuration written to {out}", file=sys.stderr)


def _as_written(e: Estimate, meant: TrainConfig | None, notes: list[str]) -> list[str]:
    """What the file's own configuration takes, where it is another than the one asked for."""
    from napkinmath.base.units import format_bytes
    from napkinmath.planning.search import same_but

    if meant is None or not notes:
        return []
    other = same_but(e, meant)
    before, after = (format_bytes(x.memory.device.value) for x in (e, other))
    return [
        f"as written it takes {after} of the device where {before} was meant: {other.verdict.value}"
    ]
