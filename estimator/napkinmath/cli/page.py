"""`estimate page`: the page as static files that need no installation where they are read."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.cli.flag_rows import DEBUG, TEXT
from napkinmath.cli.parser import Parser

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_FLAGS = (
    (("--out",), TEXT, "DIR", "folder to write; a page that is there is replaced"),
    (
        ("--runtime",),
        TEXT,
        "FILE",
        "the npm package of Pyodide, where npm cannot fetch it here",
    ),
    DEBUG,
)


def run(argv: Sequence[str]) -> int:
    """Writes the folder and says how to look at it."""
    options = Parser(
        "estimate page",
        "The page as static files: the same Python in the browser, on any static host, offline.",
        (("page", _FLAGS),),
    ).parse(argv)
    if "out" not in options:
        raise InputError("no folder was named; use --out DIR")
    from napkinmath.serving.static_page import ARCHIVE, static_files, write_folder

    folder = str(options["out"])
    files = static_files(_runtime(options.get("runtime")))
    write_folder(folder, files)
    ours = len(files[ARCHIVE])
    total = sum(map(len, files.values()))
    print(f"{folder}: {len(files)} files, {total / 1e6:.1f} MB, {ours / 1e6:.2f} MB of them ours")
    print(f"look at it: python -m http.server -b 127.0.0.1 -d {folder}")
    return 0


def _runtime(path: object) -> bytes:
    from napkinmath.serving.static_page import checked, fetched_runtime

    if path is None:
        return fetched_runtime()
    with open(str(path), "rb") as file:
        return checked(file.read(), str(path))
