"""``estimate learn``: the form of an architecture that no family answers, learned from the installed
library, checked against a traced step and kept."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from napkinmath.base.errors import InputError, shown
from napkinmath.base.progress import counted
from napkinmath.base.whole_file import refuse_existing
from napkinmath.catalog.learned_forms import read_forms
from napkinmath.models.families import FAMILIES
from napkinmath.models.tasks import for_task

from napkinmath_profiler.cli.learn_flags import parser
from napkinmath_profiler.tracing.learning.checking import QUICK, Agreement, agreement
from napkinmath_profiler.tracing.learning.config_fields import full_config
from napkinmath_profiler.tracing.learning.learner import learn
from napkinmath_profiler.tracing.learning.writing import keep
from napkinmath_profiler.tracing.trace_errors import TraceError

CLOSE = 0.01
"""Share of the traced peak up to which a form is kept."""


def run(argv: Sequence[str]) -> int:
    """Learns, checks, keeps; prints where and how well. Raises InputError with what it cannot
    learn."""
    options: dict[str, Any] = parser().parse(argv)
    config = _config(options.get("config"))
    if "task" in options:
        config = for_task(config, options["task"])
    if "out" in options:
        refuse_existing(options["out"], "force" in options, what="learned form")
    _quieten()
    kind, form = shown(config["model_type"]), _learned(config)
    path = keep([form], options.get("out", ""))
    found = [] if "no_check" in options else _checked(config, path)
    worst = max((abs(a.difference) for a in found), default=0.0)
    if worst > CLOSE:
        os.unlink(path)
        raise InputError(
            f"model_type {kind} cannot be learned: its form is {worst:.1%} off the traced step;"
            " use `estimate trace`"
        )
    print(f"learned {kind} for {form['task']} into {path}")
    for one in found:
        print(f"  {one.name}: {one.difference:+.3%} of the traced peak")
    if config["model_type"] in FAMILIES:
        print("  its own family answers estimates; the form is there to compare")
    return 0


def _learned(config: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return learn(config)
    except TraceError as error:
        raise InputError(_refusal(config, str(error))) from None
    except Exception as error:  # whatever a class raises of its own config
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(_refusal(config, first)) from error


def _refusal(config: Mapping[str, Any], reason: str) -> str:
    return (
        f"model_type {shown(config['model_type'])} cannot be learned: {reason.rstrip('.')}; use"
        " `estimate trace`"
    )


def _checked(config: Mapping[str, Any], path: str) -> list[Agreement]:
    cells = counted(QUICK, "traced steps", len(QUICK))
    (form,) = read_forms(path)
    return agreement(config, form, cells)


def _config(given: object) -> dict[str, Any]:
    """The config of a file, a folder or a model type."""
    if not given:
        raise InputError("estimate learn needs a config; write e.g. `estimate learn config.json`")
    text = str(given)
    if text.replace("-", "_").isidentifier() and not os.path.exists(text):
        return _of_type(text)
    from napkinmath.models import config_file

    found = config_file.find(text)
    if found is None:
        raise InputError(f"config {shown(text)} is no file, folder or model type")
    config = dict(config_file.read(found))
    if "model_type" not in config:
        raise InputError(f'config {shown(text)} has no "model_type"; add it')
    return config


def _of_type(model_type: str) -> dict[str, Any]:
    try:
        return full_config({"model_type": model_type})
    except (ValueError, KeyError):
        raise InputError(
            f"model type {shown(model_type)} is unknown to the installed transformers; name a"
            " config.json"
        ) from None


def _quieten() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
