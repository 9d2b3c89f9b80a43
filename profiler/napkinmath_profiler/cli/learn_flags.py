"""Flags of `estimate learn`, apart from what runs it: its help needs no torch."""

from __future__ import annotations

from napkinmath.cli.flag_rows import ON, TEXT
from napkinmath.cli.parser import Parser

OWN = (
    (
        ("--task",),
        TEXT,
        "TASK",
        "the class to learn, where the config's architectures does not say it: masked-lm,"
        " seq2seq-lm, sequence-classification, token-classification, question-answering",
    ),
    (("--out",), TEXT, "FILE", "write the learned form there instead of among this machine's own"),
    (("--force",), ON, "", "replace a file that exists"),
    (("--no-check",), ON, "", "keep the form without comparing it with a traced step"),
)


def parser() -> Parser:
    """Every flag of the command."""
    return Parser(
        "estimate learn",
        "Learn an architecture from your installed transformers, so that estimates, sweeps and plans"
        " answer it. CONFIG is a config.json, its folder, or a model type.",
        (("learn", OWN),),
        positional=("config", "CONFIG", "a config.json, its folder, or a model type"),
    )
