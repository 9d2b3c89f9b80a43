"""Messages of the library, which name fields of its records, worded in flags."""

from __future__ import annotations

import re

from napkinmath.inputs.option_table import OPTIONS
from napkinmath.inputs.option_table.option import FLAG, ON, SWITCH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.option_table.option import Option

# A word without an underscore may be plain English, and a quoted one is the user's own.
_FIELD = re.compile(r"(?<![\w'\"`./-])([a-z]+(?:_[a-z]+)+)(?![\w'\"`(./-])(?:=(\w+))?")


def _options_by_field() -> dict[str, Option]:
    """The option that sets a field alone, or by the field's own name."""
    found: dict[str, Option] = {}
    for option in OPTIONS:
        field = option.sets.rpartition(".")[2]
        if option.is_at(FLAG) and (field == option.key or not option.joint):
            if field == option.key:
                found[field] = option
            else:
                found.setdefault(field, option)
    return found


def in_flags(message: str) -> str:
    """'virtual_pipeline_size=8 needs pipeline_schedule interleaved' -> '--pp-chunks 8 needs
    --pp-schedule interleaved'."""
    options = _options_by_field()

    def worded(found: re.Match[str]) -> str:
        option = options.get(found[1])
        if option is None:
            return found[0]
        if found[2] is None:
            return option.flag
        if option.kind in (SWITCH, ON) and found[2] in ("True", "False"):
            return option.flag if found[2] == "True" else f"--no-{option.flag[2:]}"
        return f"{option.flag} {found[2]}"

    return _FIELD.sub(worded, message)
