"""Lists the dotted paths that README, CHANGELOG and docs of a commit name, imports spelled out:

python tests/whole/list_paths_of_0_1.py [COMMIT] > tests/whole/paths_of_0_1.txt
"""

from __future__ import annotations

import re
import subprocess
import sys

COMMIT = "a5cae30"  # the last of 0.1
_PATH = re.compile(r"\bnapkinmath(?:_profiler|_kernels)?(?:\.[A-Za-z_]\w*)+")
_IMPORT = re.compile(
    r"from (napkinmath\w*(?:\.\w+)*) import (?:\(([^)]*)\)|([^\n#`]+))", re.MULTILINE
)
_FILES = re.compile(r"\.(py|md|json|git|yaml|toml|txt|html|svg)$")


def paths_in(text: str) -> set[str]:
    """The paths that a text names: `napkinmath.a.b`, and module.name of every import."""
    found = {path for path in _PATH.findall(text) if not _FILES.search(path)}
    for module, several, one in _IMPORT.findall(text):
        names = (word.strip().partition(" as ")[0] for word in (several or one).split(","))
        found |= {f"{module}.{name.strip()}" for name in names if name.strip().isidentifier()}
    return found


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def main(commit: str = COMMIT) -> None:
    pages = [f for f in git("ls-tree", "-r", "--name-only", commit).split() if f.endswith(".md")]
    found: set[str] = set()
    for page in [*pages, "estimator/napkinmath/__init__.py"]:
        found |= paths_in(git("show", f"{commit}:{page}"))
    print("\n".join(sorted(found)))


if __name__ == "__main__":
    main(*sys.argv[1:])
