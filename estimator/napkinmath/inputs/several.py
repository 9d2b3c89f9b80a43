"""Options that take several values: '1,2,4', '1k..128k' (doubling), '512..4096:512' (by steps), or
a flag given more than once."""

from __future__ import annotations

from itertools import product

from napkinmath.base.errors import InputError, shown
from napkinmath.base.units import parse_count
from napkinmath.base.values import listed
from napkinmath.inputs.method_options import ADAPTER_OPTIONS, QUANT_OPTIONS, flag
from napkinmath.inputs.option_table import COUNTS, LISTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_VALUES = 1 << 20
# What a sweep leaves open within one record of the step.
OPEN = ("bs", "ctx", "rank")


def several(key: str, given: object) -> list[object]:
    """The values of one option, in the order given, each once. Raises InputError for an empty or
    endless range."""
    texts = listed(given)
    found: list[object] = []
    for text in texts:
        if not isinstance(text, str):
            found.append(text)
            continue
        for part in text.split(";" if key in LISTS or text.startswith("selective:") else ","):
            part = part.strip()
            if not part:
                raise InputError(
                    f"{flag(key)} {shown(text)} has an empty value between its separators; write"
                    " e.g. 1,2,4"
                )
            found += _range(key, part) if ".." in part and key in COUNTS else [part]
    return list({repr(value): value for value in found}.values())


def _range(key: str, text: str) -> list[object]:
    """'1k..8k' -> 1024, 2048, 4096, 8192; '512..1536:512' -> 512, 1024, 1536."""
    what = flag(key)
    ends, _, step_text = text.partition(":")
    low_text, _, high_text = ends.partition("..")
    low, high = parse_count(low_text, what=what), parse_count(high_text, what=what)
    if low > high:
        raise InputError(f"{what} {shown(text)} runs downwards; write {high_text}..{low_text}")
    if not step_text:
        found: list[object] = []
        while low < high:
            found.append(low)
            low *= 2
        return [*found, high]
    step = parse_count(step_text, what=what)
    if (high - low) // step >= MAX_VALUES:
        raise InputError(
            f"{what} {shown(text)} has more than {MAX_VALUES} values; use a larger step"
        )
    return list(range(low, high + 1, step))


def expand(
    options: Mapping[str, object],
) -> tuple[list[str], list[dict[str, object]], dict[str, list[object]]]:
    """(keys that vary, combinations of all options but batch, length and rank, values of those
    three).

    An option that says nothing about a method (a rank with full fine-tuning) is left out of that
    method's combinations.
    """
    values = {key: several(key, value) for key, value in options.items()}
    varied = [key for key, found in values.items() if len(found) > 1]
    with_open_size = (
        tuple(key for key in OPEN if key != "bs") if "global_batch" in values else OPEN
    )  # there the micro-steps depend on the batch
    inner = {key: values.pop(key) for key in with_open_size if key in values}
    made: dict[str, dict[str, object]] = {}
    for combination in product(*values.values()):
        one = _meaningful(
            dict(zip(values, combination, strict=True)), several_methods="method" in varied
        )
        made.setdefault(repr(one), one)
    return varied, list(made.values()), inner


def _meaningful(options: dict[str, object], *, several_methods: bool) -> dict[str, object]:
    """Drops what belongs to other methods than this one, where several are compared."""
    if not several_methods:
        return options
    method = str(options.get("method", "full")).lower()
    dropped: tuple[str, ...] = ()
    if method in ("full", "pretrain", "full-finetune", "fft"):
        dropped = (*ADAPTER_OPTIONS, "quant", *QUANT_OPTIONS)
    elif method in ("lora", "dora"):
        dropped = ("quant", *QUANT_OPTIONS)
    else:
        return (
            options
            if method != "ia3"
            else {
                k: v for k, v in options.items() if k not in ("rank", "alpha", "dropout", "rslora")
            }
        )
    return {key: value for key, value in options.items() if key not in dropped}


def inner_values(
    inner: Mapping[str, list[object]], options: Mapping[str, object]
) -> Iterator[tuple[str, list[object]]]:
    """Batch, length and rank as far as they mean something for these options."""
    full = str(options.get("method", "full")).lower() in (
        "full",
        "pretrain",
        "full-finetune",
        "fft",
        "ia3",
    )
    for key, found in inner.items():
        if not (key == "rank" and full):
            yield key, found
