"""Values that a script works out when it runs: those that change an answer are asked for by the
flag that gives them; the others change nothing."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.inputs.megatron_model import SIZES
from napkinmath.inputs.option_table import BY_KEY, MODEL_WAYS
from napkinmath.inputs.option_table.option import flag_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from napkinmath.inputs.scripts.source import Source

    Read = Callable[[Mapping[str, object]], Mapping[str, object]]

# Values that a key may have: what an option becomes with one of them shows that the key sets it.
_TRIED: tuple[object, ...] = (
    *(2, 3, True, False, "bf16", "adamw_torch", "sgd", "flash_attention_2", "a/model"),
)
_MOST_KEYS = 200
_FOLLOWS = ("gpus", "nodes", "model")  # of degrees, where a file says those or pads words to them
# An option that is given beside a file settles the choices that it is part of.
_SETTLES = {
    "method": ("rank", "targets", "alpha", "dropout", "quant", "method"),
    "quant": ("quant", "double_quant", "method"),
    "gpus": ("gpus", "nodes"),
    "global_batch": ("grad_accum",),
}


def refuse_computed(sources: Sequence[tuple[Source, Read]], given: Mapping[str, object]) -> None:
    """Raises InputError, naming the flags, where a value that only a run knows sets an option that
    is not given."""
    settled = {*given, *(o for key in given for o in _SETTLES.get(key, ()))}
    if any(key in given for key in MODEL_WAYS):
        settled.update(MODEL_WAYS)
    asked, paths = dict[str, str](), list[str]()
    for source, read in sources:
        # The model's sizes, without which nothing can be read, stand in for what they are asked.
        sizes = {key: 8 for key in SIZES if key in source.computed}
        for key, computed in list(source.computed.items())[:_MOST_KEYS]:
            found = _options_set({**source.content, **sizes}, key, read)
            found = {"model" if option in MODEL_WAYS else option for option in found}
            found = {"model"} if key in sizes and not settled & {"model"} else found
            found = found - {"grad_accum"} or found  # of a mesh, whose ranks share the batch
            if found and not found & settled:
                first = min(found, key=lambda o: (o in _FOLLOWS, list(BY_KEY).index(o)))
                line = f" (line {computed.line})" if computed.line else ""
                asked.setdefault(first, f"{key} comes from {computed.source}{line}")
                paths.append(source.path)
    if asked:
        flags = " and ".join(f"{flag_of(o)} {BY_KEY[o].metavar}".rstrip() for o in asked)
        raise InputError(
            f"{', '.join(asked.values())}: known only when {paths[0]} runs; add {flags}"
        )


def _options_set(content: Mapping[str, object], key: str, read: Read) -> set[str]:
    """The options that differ with a key's value."""
    found: set[str] = set()
    made: list[Mapping[str, object]] = []
    for value in (None, *_TRIED):
        try:
            made.append(read({**content, key: value} if value is not None else content))
        except InputError:
            continue
    for options in made[1:]:
        names = {*options, *made[0]} - {"job_keys"}
        changed = {o for o in names if o in BY_KEY and options.get(o) != made[0].get(o)}
        if changed and (not found or len(changed) < len(found)):
            found = changed
    return found
