"""`--audio`: how long the sounds of a batch are, as the model's own arithmetic counts them."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.inputs.option_table.batch import seconds_of
from napkinmath.ir.sounds import USUAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.ir.model_spec import ModelSpec


def steps_asked(spec: ModelSpec, options: Mapping[str, object], notes: list[str]) -> int | None:
    """The length of a sequence that is a sound; None where the sound does not say it. Raises
    InputError where the model reads no sound, or where the length is given twice."""
    sound, given = spec.sound, options.get("audio")
    if sound is None:
        unread = any(stage.part.is_unread for stage in spec.stages)
        why = (
            "has a tower of sounds without rules" if unread and spec.pictures else "reads no sounds"
        )
        raise InputError(f"--audio {shown(given)}: {spec.name} {why}; leave it out")
    seconds = USUAL if given is None else seconds_of(given, "--audio")
    if sound.seconds:
        if given is not None and seconds > sound.seconds:
            raise InputError(
                f"--audio {shown(given)}: {spec.name} reads {sound.seconds} s of every sample, to"
                f" which shorter ones are padded; use --audio {sound.seconds}s or less"
            )
        return None
    if given is None and "ctx" in options:
        return None
    if "ctx" in options:
        raise InputError(
            f"--audio {shown(given)} and --ctx {shown(options['ctx'])} both say how long a sequence"
            f" of {spec.name} is; give one of them"
        )
    steps = sound.steps_of(seconds)
    if steps < 1:
        raise InputError(f"--audio {shown(given)} is shorter than a step of {spec.name}")
    if given is None:
        notes.append(
            f"--audio {USUAL:g}s ({steps} steps): the longest sample that transformers'"
            " run_speech_recognition_ctc.py keeps"
        )
    return steps
