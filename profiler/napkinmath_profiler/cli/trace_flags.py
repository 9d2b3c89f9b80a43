"""Flags of `estimate trace`, apart from what runs it: its help needs no torch."""

from __future__ import annotations

from napkinmath.cli.flag_rows import ON, TEXT
from napkinmath.cli.flags import SHARED
from napkinmath.cli.parser import Parser

OWN = (
    (("--all-layers",), ON, "", "trace every layer instead of writing out the repeated ones"),
    (
        ("--snapshot",),
        TEXT,
        "FILE",
        "write the step as a snapshot that PyTorch's memory_viz reads (.pickle)",
    ),
    (("--chrome",), TEXT, "FILE", "write the step as a Chrome / Perfetto trace (.json)"),
    (("--force",), ON, "", "replace files that exist"),
)
DESCRIPTION = (
    "Run your installed transformers, peft, bitsandbytes and torch on tensors without storage, and"
    " report the step's memory."
)


def parser() -> Parser:
    """Every flag of the command."""
    return Parser(
        "estimate trace",
        DESCRIPTION,
        (*SHARED, ("trace", OWN)),
        positional=("job", "MODEL|JOB", "a model, or a job file, as for `estimate`"),
    )
