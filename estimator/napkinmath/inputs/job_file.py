"""Job files: ours, and those of axolotl, TRL / HF Trainer, torchtune and LLaMA-Factory, told apart by their keys."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def with_job_file(given: Mapping[str, object], notes: list[str]) -> dict[str, object]:
    """The options of the job file, if one was given, under those of the command line."""
    options = dict(given)
    if "job" not in options:
        return options
    raise NotImplementedError
