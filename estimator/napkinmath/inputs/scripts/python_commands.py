"""Functions and classes of a script that a library makes its command line of: their parameters are
the words of the line.

Libraries: python-fire core.py Fire; typer main.py run, params.py Option; tyro _cli.py cli;
jsonargparse cli.py; click decorators.py.
"""

from __future__ import annotations

import ast

from napkinmath.inputs.scripts.python_values import dotted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_RUNNERS = (
    *("fire.Fire", "Fire", "typer.run", "tyro.cli", "defopt.run"),
    *("jsonargparse.CLI", "jsonargparse.auto_cli", "CLI", "auto_cli"),
)
DEFAULTS = ("typer.Option", "typer.Argument")
"""Calls that stand for a parameter's default."""


def run_by(
    node: ast.Call,
    functions: Mapping[str, ast.FunctionDef | ast.AsyncFunctionDef],
    classes: Mapping[str, ast.ClassDef],
) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | None:
    """The function or class that `fire.Fire(train)`, or a call of click's command, runs with the
    line's words; None for another call."""
    command = functions.get(dotted(node.func))
    if command is not None and not (node.args or node.keywords) and _options(command) is not None:
        return command
    if dotted(node.func) not in _RUNNERS or not node.args:
        return None
    name = dotted(node.args[0])
    return functions.get(name) or classes.get(name)


def asks_for_file(test: ast.expr) -> bool:
    """Whether a test asks if the line is one file of settings, `len(sys.argv) == 2 and
    sys.argv[1].endswith(".json")`: a line of words is none."""
    text = ast.unparse(test)
    return text.startswith("len(sys.argv)") and "sys.argv[" in text and ".endswith(" in text


def words_for(
    function: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, told: Mapping[str, object]
) -> dict[str, object]:
    """The words of the line that are parameters of a function, or fields of a class."""
    if isinstance(function, ast.ClassDef):
        fields = [node.target for node in function.body if isinstance(node, ast.AnnAssign)]
        names = {dotted(field) for field in fields}
    else:
        spec = function.args
        names = {one.arg for one in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)}
        if spec.kwarg is not None:
            return dict(told)
    defaults = {} if isinstance(function, ast.ClassDef) else _options(function) or {}
    return {**defaults, **{key: value for key, value in told.items() if key in names}}


def _options(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
) -> dict[str, object] | None:
    """Defaults of `@click.option("--bs", default=4)`; None for a function that is no command."""
    calls = [one for one in function.decorator_list if isinstance(one, ast.Call)]
    if not any(dotted(one.func).endswith("command") for one in calls):
        return None
    found: dict[str, object] = {}
    for one in calls:
        texts = [arg.value for arg in one.args if isinstance(arg, ast.Constant)]
        long = next((text for text in texts if str(text).startswith("--")), None)
        default = next((k.value for k in one.keywords if k.arg == "default"), None)
        if long is not None and isinstance(default, ast.Constant):
            found[str(long)[2:].replace("-", "_")] = default.value
    return found


def methods_of(own: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """A class's own methods."""
    return {node.name: node for node in own.body if isinstance(node, ast.FunctionDef)}
