"""The page as a folder of static files: the same front end, with the same Python run in the browser
by WebAssembly.

The runtime (Pyodide) comes when the folder is made, by name and version, through npm's own client;
what came is checked against the hash below.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import json
import os
import subprocess
import tarfile
import tempfile

from napkinmath.base.errors import InputError, shown
from napkinmath.base.whole_file import write_whole
from napkinmath.serving.front_end import PACKAGE, PAGE, front_end, read
from napkinmath.serving.own_files import licence_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PYODIDE = "314.0.7"
PYODIDE_SHA512 = (
    "d18bd7c4485f11da4b7dbfd790cd8114078c44eab488c517d9bcf31fda4eb6dc"
    "8c716930abe1db139bb2b860fcd8b37bcb6abe48dbe2ffa579244b0e943d91d4"
)
SECONDS_TO_FETCH = 300
# What answers nothing in a browser: the command line, the server, and the page's own files.
_OF_THE_SERVER = (
    "page/",
    "server.py",
    "connections.py",
    "workers.py",
    "cache.py",
    "static_page.py",
    "front_end.py",
)
LEFT_OUT = (
    "cli/",
    "__main__.py",
    "inputs/scripts/",  # which `estimate serve` reads
    *(f"serving/{name}" for name in (*_OF_THE_SERVER, "own_files.py")),
)
RUNTIME = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "pyodide-lock.json",
    "python_stdlib.zip",
)
# A meta element has no frame-ancestors; the wasm word lets the interpreter be compiled.
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; connect-src"
    " 'self'; img-src 'self' data:; worker-src 'self'; base-uri 'none'; form-action 'none'"
)
ARCHIVE = "napkinmath.tar.bz2"
"""The file of the folder that holds our own Python."""


def static_files(runtime: bytes) -> dict[str, bytes]:
    """Every file of the folder by its name, `runtime` being the npm package as it was fetched."""
    files = {**page_files(), **_unpacked(runtime), **_licences(), ARCHIVE: archive()}
    files["service_worker.js"] = _service_worker(files)
    return files


def page_files() -> dict[str, bytes]:
    """The page as the server gives it, with transport and worker of the browser."""
    static = ("worker.js", "service_worker.js")
    files = front_end("static", "transport.js")
    files |= {name: read(PAGE, "static", name) for name in static}
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<title>'
    files["index.html"] = files["index.html"].replace(b"<title>", policy.encode(), 1)
    return files


def archive() -> bytes:
    """The estimator and its catalogues, packed as one piece: a third smaller than a zip, which packs
    file by file, and without what is written for readers. The same bytes for the same sources."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:bz2") as packed:
        # files alike beside each other: bzip2 packs blocks of 900 kB
        for name in sorted(_sources(), key=lambda name: (os.path.splitext(name)[1], name)):
            content = read(PACKAGE, *name.split("/"))
            content = _bare(content) if name.endswith(".py") else content
            entry = tarfile.TarInfo(f"napkinmath/{name}")
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    return made.getvalue()


@functools.cache
def _bare(source: bytes) -> bytes:
    """The same program without comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            kept = [each for each in node.body if not _is_text(each)]
            node.body = kept or [ast.Pass()]
    return ast.unparse(tree).encode()


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _sources() -> Iterator[str]:
    for folder, folders, names in os.walk(PACKAGE):
        if "__pycache__" in folders:
            folders.remove("__pycache__")  # its files come and go while Python runs
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), PACKAGE).replace(os.sep, "/")
            if not path.startswith(LEFT_OUT):
                yield path


def fetched_runtime() -> bytes:
    """The runtime's package through `npm pack`; InputError where it cannot be had."""
    with tempfile.TemporaryDirectory() as folder:
        _npm_pack(folder)
        names = [name for name in os.listdir(folder) if name.endswith(".tgz")]
        if len(names) != 1:
            raise InputError(f"npm packed {len(names)} files for pyodide@{PYODIDE}; {_way_out()}")
        return checked(read(folder, names[0]), f"pyodide@{PYODIDE} of npm")


def _npm_pack(folder: str) -> None:
    import shutil

    npm = shutil.which("npm")
    if npm is None:
        raise InputError(f"npm is not installed, which brings the page's Python; {_way_out()}")
    command = [npm, "pack", "--silent", f"pyodide@{PYODIDE}", "--pack-destination", folder]
    try:
        done = subprocess.run(command, capture_output=True, timeout=SECONDS_TO_FETCH, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(
            f"npm did not bring pyodide@{PYODIDE} ({type(error).__name__}); {_way_out()}"
        ) from None
    if done.returncode:
        raise InputError(f"npm did not bring pyodide@{PYODIDE}; {_way_out()}")


def checked(content: bytes, what: str) -> bytes:
    """The package, if it is the one whose hash stands here."""
    if hashlib.sha512(content).hexdigest() != PYODIDE_SHA512:
        raise InputError(f"{what} is not the package whose hash is known here; {_way_out()}")
    return content


def _way_out() -> str:
    return (
        f"run `npm pack pyodide@{PYODIDE}` where npm works and give its file: --runtime"
        f" pyodide-{PYODIDE}.tgz, or use `estimate serve`"
    )


def _unpacked(package: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(package), mode="r:gz") as packed:
        wanted = {
            name: packed.extractfile(f"package/{name}") for name in (*RUNTIME, "package.json")
        }
        found = {name: file.read() for name, file in wanted.items() if file is not None}
    found["pyodide-package.json"] = found.pop("package.json")
    return found


def _licences() -> dict[str, bytes]:
    folder = os.path.join(PAGE, "licences")
    found = {f"licences/{name}": read(folder, name) for name in sorted(os.listdir(folder))}
    return {
        **found,
        "licences/LICENSE.txt": licence_text("LICENSE"),
        "licences/NOTICE.txt": licence_text("NOTICE"),
    }


def _service_worker(files: dict[str, bytes]) -> bytes:
    """The script with the names of all files, and one hash of them: a new folder replaces what an
    old one left in the browser."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + hashlib.sha256(files[name]).digest())
    kept = ["./", *sorted(set(files) - {"service_worker.js"})]
    head = f"const DIGEST = {json.dumps(digest.hexdigest())};\nconst FILES = {json.dumps(kept)};\n"
    return head.encode() + files["service_worker.js"]


def write_folder(folder: str, files: dict[str, bytes]) -> None:
    """Writes the files; InputError where the folder holds anything that is no such page."""
    taken = os.listdir(folder) if os.path.isdir(folder) else []
    if taken and ARCHIVE not in taken:
        raise InputError(f"{shown(folder)} is not empty and no page of ours; name another folder")
    for name, content in files.items():
        path = os.path.join(folder, *name.split("/"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_whole(path, content, force=True)
