"""What a data set's lengths mean: the share of padding, the tokens of a packed batch, lengths read
from a file."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.base.json_input import NotJson, loads
from napkinmath.base.values import whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST_LENGTHS = 10_000_000
SAMPLE = 4096


def padded_share(lengths: Sequence[int], batch: int) -> float:
    """The share of padding in batches drawn from a sample and padded to their longest: one less
    mean over expected longest."""
    ordered, count = sorted(lengths), len(lengths)
    longest = sum(
        length * (((i + 1) / count) ** batch - (i / count) ** batch)
        for i, length in enumerate(ordered)
    )
    return max(0.0, 1 - sum(ordered) / count / longest)


def read_lengths(path: str) -> tuple[int, ...]:
    """Lengths from a text file (numbers divided by white space or commas) or a JSON list, or one a
    line of JSON Lines under "length".

    A long file is thinned to SAMPLE quantiles, the shortest and the longest kept. Raises InputError
    for anything else.
    """
    from napkinmath.base.opener import without_waiting

    try:
        with open(path, encoding="utf-8", opener=without_waiting) as file:
            text = file.read(MOST_LENGTHS * 8 + 1)
    except UnicodeDecodeError as error:
        raise InputError(
            f"--lengths {shown(path, limit=200)} is not text in UTF-8 (byte {error.start}); give a"
            " text file of numbers"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a null in a path
        reason = error.strerror if isinstance(error, OSError) else "it is no path"
        raise InputError(
            f"--lengths {shown(path, limit=200)}: {reason}; name a file of numbers, or give numbers"
        ) from None
    if len(text) > MOST_LENGTHS * 8:
        raise InputError(
            f"--lengths {shown(path, limit=200)} has more than {MOST_LENGTHS * 8} characters; give"
            " a sample of its lengths"
        )
    found = (
        _jsonl(text, path)
        if text.lstrip().startswith("{")
        else [_number(word, path) for word in text.strip("[] \n").replace(",", " ").split()]
    )
    if not found:
        raise InputError(
            f"--lengths {shown(path, limit=200)} holds no lengths; write one number a line"
        )
    return thinned(found)


def with_lengths(options: Mapping[str, object]) -> dict[str, object]:
    """Options of a command line with the file that --lengths names read; what a server or a batch
    is sent never names a file."""
    found = dict(options)
    given = found.get("lengths")
    word = given[0] if isinstance(given, list) and given else given  # pyright: ignore[reportUnknownVariableType]
    if isinstance(word, str) and word[:1] not in tuple("-0123456789"):
        found["lengths"] = list(read_lengths(word)) if word is given else [list(read_lengths(word))]
    return found


def thinned(lengths: Sequence[int]) -> tuple[int, ...]:
    """At most SAMPLE lengths with the same distribution: quantiles, the shortest and the longest
    among them."""
    ordered = sorted(lengths)
    if len(ordered) <= SAMPLE:
        return tuple(lengths)
    last = len(ordered) - 1
    return tuple(ordered[round(i * last / (SAMPLE - 1))] for i in range(SAMPLE))


def _jsonl(text: str, path: str) -> list[int]:
    found: list[int] = []
    for line in text.splitlines():
        if line.strip():
            try:
                content = loads(line)
            except NotJson as error:
                raise InputError(
                    f"--lengths {shown(path, limit=200)}: the line {shown(line, limit=50)} {error}"
                ) from None
            if not isinstance(content, dict) or "length" not in content:
                raise InputError(
                    f"--lengths {shown(path, limit=200)} has the line {shown(line, limit=50)};"
                    ' write {"length": 512} a line'
                )
            found.append(_number(content["length"], path))  # pyright: ignore[reportUnknownArgumentType]
    return found


def _number(word: object, path: str) -> int:
    try:
        value = whole(float(word) if isinstance(word, str) else word)
    except ValueError:
        value = None
    if value is None or not 1 <= value <= 1 << 40:
        raise InputError(
            f"--lengths {shown(path, limit=200)} holds {shown(word, limit=40)}, which is no length;"
            " write whole numbers from 1 on"
        )
    return value
