"""Values that name another key of the same file, as OmegaConf has them."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_STEPS = 8  # a chain of names that is longer goes in a circle


def interpolated(flat: Mapping[str, object]) -> dict[str, object]:
    """The keys with each whole value of the form '${key}', or '${oc.select:key,default}', replaced
    by what it names; what names nothing stays as it is."""
    return {key: _value(flat, value) for key, value in flat.items()}


def _value(flat: Mapping[str, object], value: object) -> object:
    found = value
    for _ in range(_STEPS):
        if not isinstance(found, str) or not found.startswith("${") or not found.endswith("}"):
            return found
        name, comma, default = found[2:-1].removeprefix("oc.select:").partition(",")
        if name.strip() in flat:
            found = flat[name.strip()]
        elif comma:
            return None if default.strip() == "null" else default.strip()
        else:
            return value
    return value
