"""Why a script is not read, in words."""

from __future__ import annotations

import ast

from napkinmath.base.errors import InputError, shown
from napkinmath.inputs.scripts.python_values import dotted
from napkinmath.models.config_file import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.python_run import Walk

# Methods with which an object of somebody's own trains.
_TRAINS = ("train", "fit", "run", "finetune", "learn")


def no_trainer(walk: Walk, path: str, tool: str) -> InputError:
    """Of a script that makes no known trainer; `tool` is the package that builds its training."""
    named = next((one.keys.get("model_name") for one in walk.models), None)
    loads = f"; it loads {shown(named)}" if isinstance(named, str) else ""
    if tool:
        return InputError(
            f"{quoted(path)} builds a training of {tool} in Python, which is not read; give its"
            " model, batch, length and sharding with flags (`estimate --help`)"
        )
    if walk.has_backward:
        return InputError(
            f"{quoted(path)} trains in a loop of its own, which is not read{loads}; give its"
            " choices with flags (`estimate --help`)"
        )
    if own := _own_trainer(walk):
        return InputError(
            f"{quoted(path)} trains with {own}, which is not read{loads}; give its choices with"
            " flags (`estimate --help`)"
        )
    return InputError(
        f"{quoted(path)} trains nothing: it makes no trainer{loads}; for a training give the"
        " script that makes one"
    )


def _own_trainer(walk: Walk) -> str:
    """'X of PACKAGE' where the script makes something of an imported class and has it train."""
    made: dict[str, str] = {}
    for node in ast.walk(walk.tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            calls = [one for one in ast.walk(node.value) if isinstance(one, ast.Call)]
            classes = [name for one in calls if (name := dotted(one.func)) in walk.modules]
            if classes:
                made[node.targets[0].id] = classes[0]
    for node in ast.walk(walk.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = dotted(node.func.value)
        if node.func.attr in _TRAINS and owner in made:
            package = walk.modules[made[owner]].rpartition(".")[0]
            return f"{made[owner]} of {package.partition('.')[0]}" if package else made[owner]
    return ""
