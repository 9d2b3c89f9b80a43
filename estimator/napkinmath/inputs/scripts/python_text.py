"""A Python file or a notebook as a syntax tree; neither is run."""

from __future__ import annotations

import ast

from napkinmath.base import values
from napkinmath.base.errors import InputError
from napkinmath.models import config_file
from napkinmath.models.config_file import quoted

MAX_TEXT = 1 << 20
_SHELL_MARKS = ("!", "%", "?")


def tree_of(text: str, path: str) -> ast.Module:
    """The syntax tree of a file's text. Raises InputError where it is no Python, or too large."""
    is_notebook = path.lower().endswith(".ipynb")
    code = _cells(text, path) if is_notebook else text
    if len(code) > MAX_TEXT:
        raise InputError(
            f"script {quoted(path)} has {len(code)} characters of code, more than the {MAX_TEXT}"
            " that are read; give the part that trains"
        )
    try:
        return ast.parse(code)
    except SyntaxError as error:
        place = f" at line {error.lineno}" if error.lineno and not is_notebook else ""
        raise InputError(
            f"script {quoted(path)} is not Python{place}: {error.msg}; repair it"
        ) from None
    except (RecursionError, MemoryError):
        raise InputError(
            f"script {quoted(path)} is nested too deeply; give the part that trains"
        ) from None
    except ValueError as error:
        raise InputError(f"script {quoted(path)} is not Python: {error}; repair it") from None


def _cells(text: str, path: str) -> str:
    """The code cells of a notebook, one after another; a cell that is no Python is left out."""
    cells = (cell for cell in code_cells(text, path) if not cell.lstrip().startswith("%%"))
    return "\n".join(code for cell in cells if (code := _plain(cell)) is not None)


def code_cells(text: str, path: str) -> list[str]:
    """The texts of a notebook's code cells. Raises InputError for what is none."""
    content = config_file.parse(text, path, what="notebook")
    cells: object = content.get("cells")
    if not isinstance(cells, list):
        raise InputError(f"notebook {quoted(path)} has no list of cells; give a Jupyter notebook")
    found: list[str] = []
    for cell in values.listed(content["cells"]):
        if not values.is_mapping(cell):
            continue
        given = values.mapping(cell, "cell")
        if given.get("cell_type") != "code":
            continue
        source = given.get("source")
        found.append("".join(map(str, values.listed(source))) if source is not None else "")
    return found


def shell_of_cells(text: str, path: str) -> str:
    """The commands of a notebook as a shell script: `!` lines, cells of bash, and what `%env` sets. What
    Python fills in, `{name}`, is a variable that the script does not set."""
    import re

    found: list[str] = []
    for cell in code_cells(text, path):
        first = cell.lstrip().partition("\n")[0].split()
        if first[:1] in (["%%bash"], ["%%sh"], ["%%shell"]):
            found.append(cell.lstrip().partition("\n")[2])
            continue
        is_continued = False
        for line in cell.splitlines():
            bare = line.lstrip()
            if is_continued or bare.startswith("!"):
                command = line if is_continued else bare.lstrip("!")
                found.append(re.sub(r"(?<!\$)\{(\w+)\}", r"${\1}", command))
                is_continued = bare.rstrip().endswith("\\")
            elif bare.startswith("%env ") and "=" in bare:
                found.append("export " + bare.removeprefix("%env ").strip())
    return "\n".join(found)


def _plain(cell: str) -> str | None:
    """A cell without what only Jupyter understands; None where the rest is no Python."""
    lines: list[str] = []
    is_continued = False
    for line in cell.splitlines():
        bare = line.lstrip()
        if is_continued or bare.startswith(_SHELL_MARKS):
            is_continued = bare.rstrip().endswith("\\")
            line = line[: len(line) - len(bare)] + "pass"
        lines.append(line)
    code = "\n".join(lines)
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return code
