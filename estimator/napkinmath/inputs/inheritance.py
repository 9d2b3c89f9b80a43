"""Files that build on others: what a trainer's file names as its `defaults` lies under it."""

from __future__ import annotations

import os

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.inputs import yaml_text
from napkinmath.models import config_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_STEPS = 8  # files that name one another; a longer chain goes in a circle
_ALONE = "_override_"  # a section with this replaces the one below it


def with_parents(
    content: Mapping[str, object], path: str, tool: str, *, key: str = "defaults", steps: int = 0
) -> dict[str, object]:
    """The keys of a file over those of the files that it names, section by section; a path is read
    from the folder of the file that names it. Raises InputError where one of them is not there."""
    named = values.listed(content.get(key) or [])
    found: dict[str, object] = {}
    for name in named:
        if steps >= _STEPS:
            raise InputError(f"{key} of {tool}'s file {shown(path)} name one another; undo that")
        parent = os.path.join(os.path.dirname(path), str(name))
        if not os.path.isfile(parent):
            raise InputError(
                f"{tool}'s file {shown(path)} builds on {shown(str(name))}, which is not there;"
                " put it beside this file, or give the whole config"
            )
        text = config_file.read_text(parent, what=f"{tool}'s file")
        loaded = yaml_text.load(text, parent, what=f"{tool}'s file", twice=[])
        below = values.mapping(loaded or {}, str(name))
        found = _merged(found, with_parents(below, parent, tool, key=key, steps=steps + 1))
    own = {name: value for name, value in content.items() if name != key}
    return _merged(found, own)


def _merged(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    found = dict(below)
    for name, value in above.items():
        lower = found.get(name)
        if not values.is_mapping(value):
            found[name] = value
            continue
        section = {**values.mapping(value, name)}
        alone = section.pop(_ALONE, False)
        if alone or not values.is_mapping(lower):
            found[name] = section
        else:
            found[name] = _merged(values.mapping(lower, name), section)
    return found
