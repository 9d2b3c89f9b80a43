"""What is typed before any help is read: a command line of bare words. It gets the command that says
the same."""

from __future__ import annotations

from napkinmath.base.command_line import posix
from napkinmath.base.errors import InputError, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_METHODS = ("full", "lora", "qlora")
_FILLERS = (
    *("estimate", "train", "training", "tune", "finetune", "fine-tune", "finetuning"),
    *("fine-tuning", "on", "with", "for", "using", "a", "an", "the", "gpu"),
)
_ENGINES = ("generate", "inference", "infer", "serving")
_PLANS = ("plan", "planning")


def is_gpu(word: str) -> bool:
    """Whether a word names a GPU of the catalog."""
    from napkinmath.catalog.gpus import find_gpu

    try:
        return bool(find_gpu(word))
    except InputError:
        return False


def _is_memory(word: str) -> bool:
    """Whether a word is a size in gigabytes: 24gb."""
    size = word.lower().removesuffix("gib").removesuffix("gb")
    return size != word.lower() and size.isdecimal()


def as_command(command: str, words: Sequence[str], flags: Sequence[str]) -> InputError | None:
    """The refusal of bare words, with the command that they mean; `flags` were typed with them. None
    where they are several models, or none that is known."""
    said = [word.lower() for word in words]
    serves = command.endswith(" generate") or any(word in _ENGINES for word in said)
    plans = command.endswith(" plan") or any(word in _PLANS for word in said)
    if serves:
        command = "estimate generate"
        flags = [*flags, *(["--plan"] if plans and "--plan" not in flags else [])]
    elif plans:
        command = "estimate plan"
    rest: list[str] = []
    found: list[str] = []
    at = 0
    while at < len(words):
        two, word = " ".join(words[at : at + 2]), words[at]
        named = not is_gpu(word) or _is_memory(two.rpartition(" ")[2])  # 'rtx 4090', 'a100 80gb'
        pair = at + 1 < len(words) and named and is_gpu(two)
        name = two if pair else word
        at += 1 + pair
        count, _, kind = name.lower().partition("x")
        if name.lower() in _METHODS:
            found += [] if command.endswith("generate") else [f"--{name.lower()}"]
        elif name.lower() in (*_FILLERS, *_ENGINES, *_PLANS):
            continue
        elif count.isdecimal() and kind and is_gpu(kind):
            found += ["--gpus", name]
        elif is_gpu(name):
            found += ["--gpu", name]
        elif _is_memory(name):
            found += [] if "--gpu" in found else ["--vram", name]
        else:
            rest.append(name)
    return _refusal(command, words, flags, found, rest)


def _refusal(
    command: str, words: Sequence[str], flags: Sequence[str], found: list[str], rest: list[str]
) -> InputError | None:
    said, model = shown(" ".join(words)), _model(rest)
    if rest and (not model or "--model" in flags):
        return None
    if model or "--model" in flags:
        typed = [command, *map(posix, [*([model] if model else []), *found, *flags])]
        return InputError(f"{said} has words without a flag; write: {' '.join(typed)}")
    if "--gpu" not in found:
        return None
    gpu = posix(found[found.index("--gpu") + 1])
    return InputError(
        f"{said} names a GPU and no model; what fits it: estimate models --fits {gpu}"
    )


def _model(words: Sequence[str]) -> str:
    """The model that words mean together, or all but the first or last; '' where they are several
    or none."""
    from napkinmath.catalog.models import find_row

    if sum(find_row(word) is not None for word in words) > 1:
        return ""
    for some in (words, words[1:], words[:-1]):
        if some and find_row("-".join(some)) is not None:
            return "-".join(some)
    return ""
