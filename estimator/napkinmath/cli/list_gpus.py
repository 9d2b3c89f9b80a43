"""`estimate gpus [WORD ...]`: the catalog of GPUs, filtered by words of name, alias, vendor or
architecture."""

from __future__ import annotations

import json

from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record
from napkinmath.cli.flag_rows import DEBUG, TEXT
from napkinmath.cli.forms import form_rows
from napkinmath.cli.parser import Parser
from napkinmath.report.formats import Answer, Sheet, taken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.config.hardware import Gpu

_RATES = ("bf16", "fp16", "fp8", "fp32")
_PARSER = Parser(
    "estimate gpus",
    "List the catalog of GPUs. Words filter by name, alias, vendor or architecture.",
    (
        (
            "filter",
            (
                (
                    ("--min-memory",),
                    TEXT,
                    "SIZE",
                    "only GPUs with at least this much memory, e.g. 24GiB",
                ),
            ),
        ),
        (
            "output",
            (*form_rows(json="the rows as JSON, with the source of each number"), DEBUG),
        ),
    ),
    positional=("words", "WORD...", "e.g. h100, ampere, amd"),
)


def run(argv: Sequence[str]) -> int:
    """Prints the rows that match; none is an error."""
    options = _PARSER.parse(argv)
    form = taken(options)
    from napkinmath.base.units import parse_bytes
    from napkinmath.catalog.gpus import load_gpus
    from napkinmath.report.columns import print_sheet
    from napkinmath.report.listing import matches, words_of

    words = words_of(options)
    least = (
        parse_bytes(str(options["min_memory"]), what="--min-memory")
        if "min_memory" in options
        else 0
    )
    rows = [
        gpu
        for gpu in load_gpus()
        if gpu.nominal_bytes >= least
        and matches(
            words, gpu.name, *gpu.aliases, gpu.vendor, gpu.architecture, gpu.compute_capability
        )
    ]
    if not rows:
        asked = " ".join(words) or options.get("min_memory", "")
        raise InputError(
            f"no GPU of the catalog matches {shown(asked)}; ask for less, or nothing for the whole"
            " list"
        )
    if form is None:
        print_sheet(_sheet(rows))
        return 0
    plain = lambda: json.dumps([_plain(gpu) for gpu in rows], indent=1)  # noqa: E731
    print(form.text(Answer(sheets=lambda: [_sheet(rows)], json=plain)))
    return 0


def _sheet(gpus: list[Gpu]) -> Sheet:
    from napkinmath.base.units import GIB

    heads = (
        "name",
        "GiB",
        "GB/s",
        *(f"{rate} TFLOP/s" for rate in _RATES),
        "architecture",
        "also known as",
    )
    table = tuple(
        (
            gpu.name,
            f"{gpu.memory_bytes / GIB:.1f}",
            f"{gpu.bandwidth_bytes_per_s / 1e9:.0f}",
            *(_rate(gpu, rate) for rate in _RATES),
            gpu.architecture,
            ", ".join(gpu.aliases),
        )
        for gpu in gpus
    )
    return Sheet(
        heads=heads, rows=table, right=heads[1:-2], least=(heads[-1], heads[-2], heads[-3])
    )


def _rate(gpu: Gpu, dtype: str) -> str:
    rates = dict(gpu.dense_flops)
    return f"{rates[dtype] / 1e12:.4g}" if dtype in rates else "-"


def _plain(value: object) -> object:
    """Records as mappings, pairs as mappings, for JSON."""

    if isinstance(value, Record):
        return {
            field: dict(item) if field in ("dense_flops", "sources") else _plain(item)
            for field, item in value.items()
        }
    return list(value) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
