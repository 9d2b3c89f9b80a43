"""The report of `estimate generate`: what an engine holds, what its cache holds, and its speed."""

from __future__ import annotations

import json
import sys

from napkinmath.answers.figures import Verdict
from napkinmath.base.units import GIB, format_bytes, format_seconds
from napkinmath.report.columns import fitted
from napkinmath.report.formats import Sheet
from napkinmath.report.screen import Screen, is_unicode, terminal_width, wants_color, wrap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.generation import BatchSpeed, Generation

_INDENT = 13
_AMOUNT = len("   14.96 GiB   ")
_HEADS = ("sequences", "first token", "between tokens", "tokens/s", "requests/s")
_ASSUMED = (
    "times between tokens are within 10% of measured servers in half of the cases (docs/rollouts.md);"
    " experts' prompts take longer",
    "image towers, a server's queue under load and hits of cached prefixes are not priced",
)


def memory_lines(g: Generation) -> list[tuple[str, int, str]]:
    """(what, bytes, how it comes about) of one rank."""
    stored = g.format.name if g.format else g.config.dtype
    engine = g.engine
    lines = [
        ("weights", g.model.weight_bytes, f"{stored}, one of {g.config.ranks} ranks")
        if g.config.ranks > 1
        else ("weights", g.model.weight_bytes, stored),
        ("one forward", g.activation_bytes, f"{_tokens(g.chunk)} of prompts, or all logits"),
        (
            "CUDA graphs",
            g.graph_bytes,
            "within the share" if engine.share_holds_graphs else "beside the share",
        ),
        ("process", g.context_bytes, "context, kernels, communicators"),
        ("cache", max(0, g.cache_bytes), _cache_text(g)),
    ]
    return [line for line in lines if line[1]]


def _cache_text(g: Generation) -> str:
    pages = g.pages
    if pages is None:
        return f"grows: {format_bytes(g.sequence_bytes(g.whole))} a sequence"
    number = pages.number(g.cache_bytes)
    return (
        f"{number:,} pages of {pages.block_tokens} tokens, {format_bytes(pages.block_bytes)} each"
    )


def _tokens(count: int) -> str:
    return f"{count:,} tokens"


def print_generation(
    g: Generation,
    *,
    price: float | None,
    token_s: float | None,
    explain: bool = False,
    plans: bool = False,
) -> None:
    """Prints the report."""
    out = sys.stdout
    screen = Screen(terminal_width(out), color=wants_color(out), unicode=is_unicode(out))
    screen.line((f"{g.spec.name}", "bold"), f"  on {_machine(g)}, {g.engine.spelling}")
    screen.flow("", _asked(g), indent=2, separator=", ")
    screen.line((f"  {_verdict(g)}", "bold"))
    for name, nbytes, text in memory_lines(g):
        rows = wrap(text, screen.width - _INDENT - _AMOUNT)
        screen.line((f"  {name:<{_INDENT - 2}}", "dim"), f"{nbytes / GIB:8.2f} GiB   {rows[0]}")
        for row in rows[1:]:
            screen.line(" " * (_INDENT + _AMOUNT) + row)
    screen.line(
        ("  on device  ", "dim"),
        f"{g.device_bytes / GIB:8.2f} GiB   of {g.hardware.memory_bytes / GIB:.1f}",
    )
    _print_capacity(screen, g)
    if g.verdict is Verdict.FITS and g.clock is not None:
        for line in fitted(sheet_of(g, price), screen.width, indent="  "):
            screen.line(line)
        _print_target(screen, g, token_s)
    if plans:
        _print_plan(screen, plan_sheet(g, price, token_s), g, token_s)
    else:
        _print_others(screen, g, price, token_s)
    if explain:
        _print_explained(screen, g)
    if beyond := _beyond(g):
        screen.flow("  note", beyond, indent=_INDENT)
    screen.flow("  assumed", _assumed(g), indent=_INDENT)
    out.write(screen.text())


def _print_plan(screen: Screen, sheet: Sheet, g: Generation, token_s: float | None) -> None:
    from napkinmath.answers.generation_plan import fitting

    if sheet.rows:
        screen.line(("  plan", "dim"), "  the cheapest token first")
        for line in fitted(sheet, screen.width, indent="  "):
            screen.line(line)
        return
    held = f"{g.config.sequences:,} sequences" if g.config.sequences else "a sequence"
    why = f"no format on 1 to {g.placements()[-1].config.ranks} GPUs holds {held} of {g.whole:,} tokens"
    if token_s is not None and fitting(g):
        why = f"nothing that fits keeps {format_seconds(token_s)} between tokens"
    screen.flow("  plan", [why], indent=_INDENT)


def _machine(g: Generation) -> str:
    return (f"{g.config.ranks} x " if g.config.ranks > 1 else "") + g.hardware.gpu.name


def _asked(g: Generation) -> list[str]:
    stored = g.format.name if g.format else g.config.dtype
    return [
        f"prompts of {g.config.prompt:,} tokens",
        f"completions of {g.config.completion:,}",
        *([f"{g.config.beams} beams"] if g.config.beams > 1 else []),
        f"weights {stored}",
        f"cache {g.config.cache_format}",
    ]


def _verdict(g: Generation) -> str:
    if g.verdict is Verdict.FITS:
        return f"FITS   {g.running_sequences:,} sequence{'s' if g.running_sequences > 1 else ''} at once"
    if g.cache_bytes <= 0:
        short = format_bytes(-g.cache_bytes)
        return f"DOES NOT FIT   {short} too much before a page of cache"
    if g.fitting_sequences < 1:
        need = format_bytes(g.sequence_bytes(g.whole))
        return f"DOES NOT FIT   one sequence needs {need} of cache"
    return f"DOES NOT FIT   the cache holds {g.fitting_sequences:,} sequences"


def _print_capacity(screen: Screen, g: Generation) -> None:
    longest = g.longest_context
    alone = "alone no limit by memory" if longest is None else f"longest alone {longest:,} tokens"
    items = [
        f"{g.fitting_sequences:,} sequences of {g.whole:,} tokens",
        alone,
        f"the engine runs {g.asked_sequences:,} at most",
    ]
    screen.flow("  cache holds", items, indent=_INDENT + 2)


def _cells(speed: BatchSpeed) -> tuple[str, ...]:
    cells = (
        f"{speed.sequences:,}",
        format_seconds(speed.first_token_s),
        format_seconds(speed.token_s),
        f"{speed.tokens_per_s:,.0f}",
        f"{speed.requests_per_s:.3g}",
    )
    return cells if speed.money is None else (*cells, f"{speed.money:.3g}")


def _print_target(screen: Screen, g: Generation, token_s: float | None) -> None:
    if token_s is None:
        return
    most = g.within(token_s)
    text = (
        f"{most:,} sequences at once, {g.speed(most).requests_per_s:.3g} requests/s"
        if most
        else f"not even one sequence alone: {format_seconds(g.speed(1).token_s)} a token"
    )
    screen.flow(f"  within {format_seconds(token_s)}", [text], indent=_INDENT + 4)


def _print_others(
    screen: Screen, g: Generation, price: float | None, token_s: float | None
) -> None:
    """The same on other numbers of GPUs, and in other formats."""
    sizes = [
        (f"--tp {o.config.ranks}", o) for o in g.placements() if o.config.ranks != g.config.ranks
    ]
    stored = [(f"--quant {o.config.quantization or 'none'}", o) for o in g.formats()]
    if g.verdict is not Verdict.FITS:  # of each other format the fewest GPUs that are enough
        from napkinmath.answers.generation_plan import fitting

        least = {o.config.quantization: o for o in reversed(fitting(g))}
        stored = [(_placed_as(o), o) for name, o in least.items() if name != g.config.quantization]
    for label, others in (("  other GPUs", sizes), ("  formats", stored)):
        items = [f"{name} {_in_short(other, price, token_s)}" for name, other in others]
        if items:
            screen.flow(label, items, indent=_INDENT)


def _placed_as(g: Generation) -> str:
    return f"--tp {g.config.ranks} --quant {g.config.quantization or 'none'}"


def plan_sheet(g: Generation, price: float | None, token_s: float | None) -> Sheet:
    """Sizes and formats that fit, the cheapest token first."""
    from napkinmath.answers.generation_plan import planned

    rows = planned(g, price, token_s)
    money = () if price is None else ("money / 1M",)
    return Sheet(
        heads=("placement", *_HEADS, *money),
        rows=tuple((_placed_as(row.generation), *_cells(row.speed)) for row in rows),
        right=(*_HEADS, *money),
        title=f"{g.spec.name} on {g.hardware.gpu.name}",
    )


def _in_short(g: Generation, price: float | None, token_s: float | None) -> str:
    """What another placement gives: alone, and with as many as fit, or as keep a time."""
    if g.verdict is not Verdict.FITS:
        return "does not fit"
    if g.clock is None:
        return f"{g.running_sequences:,} sequences"
    most = g.running_sequences if token_s is None else g.within(token_s)
    alone = f"{format_seconds(g.speed(1).token_s)} a token alone"
    if not most:
        return alone
    full = g.speed(most, price)
    money = "" if full.money is None else f", {full.money:.3g} a million"
    rate = f"{full.tokens_per_s:,.0f} tokens/s"
    if token_s is not None:
        rate = f"{full.requests_per_s:.3g} requests/s within {format_seconds(token_s)}"
    return f"{alone}, {full.sequences:,} at once: {rate}{money}"


def _print_explained(screen: Screen, g: Generation) -> None:
    if g.clock is not None and g.running_sequences:
        most = g.config.sequences or g.running_sequences
        for name, time in (
            ("one prompt", g.clock.prefill(min(g.chunk, g.config.prompt))),
            ("a token, 1", g.token(1)),
            (f"a token, {most:,}", g.token(most)),
        ):
            parts = [
                f"{label} {format_seconds(value)}"
                for label, value in (
                    ("products", time.products_s),
                    ("attention", time.attention_s),
                    ("small kernels", time.other_s),
                    ("tensor-parallel sums", time.network_s),
                    ("engine and host", time.host_s),
                )
                if value
            ]
            screen.flow(f"  {name}", parts, indent=_INDENT + 8)
    for layer in g.model.layers:
        if layer.cache is not None:
            cache = layer.cache
            kept = f"{cache.token_bytes:,} B a token" if cache.token_bytes else ""
            kept += f" {cache.state_bytes:,} B a sequence" if cache.state_bytes else ""
            kept += f", window {cache.window:,}" if cache.window else ""
            screen.line(f"  {layer.name}: {layer.count} x {kept.strip()}")
    screen.flow("  sources", [g.engine.source], indent=_INDENT)


def _beyond(g: Generation) -> list[str]:
    """Sequences longer than the model's positions (vllm 0.11 config/model.py
    _get_and_verify_max_len)."""
    if not g.spec.positions or g.whole <= g.spec.positions:
        return []
    return [
        f"sequences of {_tokens(g.whole)}: {g.spec.name} has positions for {g.spec.positions:,}, and"
        " engines refuse longer ones without a flag"
    ]


def _assumed(g: Generation) -> list[str]:
    share = g.config.memory_share or g.engine.memory_share
    given = (
        f"memory share {share:g}" if share else f"{g.defaults.reserved_bytes / GIB:g} GiB left free"
    )
    found = [f"{g.engine.spelling}: {given}, {_tokens(g.chunk)} a prefill"]
    found += _ASSUMED
    if g.graph_bytes:
        found.append("bytes of graphs rest on few logs")
    if g.engine.attends_by_triton(g.hardware.gpu, g.spec.family):
        found.append(
            "attention with sinks runs in Triton's kernel on this GPU and is priced as FlashAttention:"
            " of gpt-oss on A100 prompts of 32,000 tokens took 1.8 times as long, of 4,000 up to 1.2"
        )
    if g.engine.left_open:
        found.append(g.engine.left_open)
    return found


def sheet_of(g: Generation, price: float | None) -> Sheet:
    """The table of speeds."""
    speeds = g.speeds(price)
    heads = _HEADS if not speeds or speeds[0].money is None else (*_HEADS, "money / 1M")
    return Sheet(
        heads=heads,
        rows=tuple(_cells(speed) for speed in speeds),
        right=heads,
        title=f"{g.spec.name} on {_machine(g)}",
    )


def joined(sheets: list[Sheet]) -> Sheet:
    """The tables of several machines as one, whose first column names them."""
    if len(sheets) == 1:
        return sheets[0]
    heads = max((sheet.heads for sheet in sheets), key=len)
    rows = tuple((sheet.title, *row) for sheet in sheets for row in sheet.rows)
    return Sheet(heads=("machine", *heads), rows=rows, right=heads)


def _speed_json(speed: BatchSpeed) -> dict[str, object]:
    return {name: getattr(speed, name) for name in type(speed).__annotations__}


def generation_json(
    g: Generation, price: float | None, token_s: float | None, *, plans: bool = False
) -> str:
    """The answer as JSON; seconds and bytes."""
    answer: dict[str, object] = {
        "model": g.spec.name,
        "engine": g.engine.spelling,
        "gpu": g.hardware.gpu.name,
        "tp": g.config.ranks,
        "verdict": g.verdict.value,
        "memory": {name.replace(" ", "_"): nbytes for name, nbytes, _ in memory_lines(g)},
        "device_bytes": g.device_bytes,
        "memory_bytes": g.hardware.memory_bytes,
        "sequences": g.running_sequences,
        "cache_sequences": g.fitting_sequences,
        "longest_context": g.longest_context,
        "sequence_bytes": g.sequence_bytes(g.whole),
        "speeds": [_speed_json(speed) for speed in g.speeds(price)],
        "assumed": [*_beyond(g), *_assumed(g)],
    }
    if token_s is not None:
        answer["sequences_within"] = g.within(token_s)
    if plans:
        from napkinmath.answers.generation_plan import planned

        answer["plan"] = [
            {
                "tp": row.generation.config.ranks,
                "quant": row.generation.config.quantization or "none",
                **_speed_json(row.speed),
            }
            for row in planned(g, price, token_s)
        ]
    return json.dumps(answer, indent=1)
