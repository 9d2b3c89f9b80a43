"""Every dotted path that README, CHANGELOG and docs of 0.1 name is found still.

The list is committed; `list_paths_of_0_1.py` beside it makes it from the commit.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
from napkinmath.moved import NAMES
from whole.list_paths_of_0_1 import paths_in

pytestmark = pytest.mark.torch  # the profiler's and the kernels' modules are imported
PATHS = (Path(__file__).parent / "paths_of_0_1.txt").read_text(encoding="utf-8").split()
NEEDS = {"napkinmath_profiler": "torch", "napkinmath_kernels": "torch"}


def found(path: str) -> object:
    """What a path leads to: a module, or names within one."""
    module, names = path, list[str]()
    while True:
        try:
            value: object = import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            names.insert(0, name)
            if not module:
                raise
    for name in names:
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_0_1_is_found(path: str) -> None:
    needed = NEEDS.get(path.partition(".")[0])
    if needed is not None:
        pytest.importorskip(needed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert found(path) is not None


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in NAMES.items() for n in names])
def test_a_name_that_left_a_module_is_found_with_a_warning(module: str, name: str) -> None:
    home = (
        import_module(f"napkinmath.{module}")
        if module != "estimate"
        else sys.modules.get("napkinmath.estimate") or import_module("napkinmath.estimate")
    )
    with pytest.warns(DeprecationWarning, match="ends with napkinmath") as caught:
        value = getattr(home, name)
    assert value is getattr(import_module(f"napkinmath.{NAMES[module][name]}"), name)
    assert len(caught) == 1
    with pytest.raises(AttributeError):
        _ = home.never_was


def test_the_import_of_read_model_works() -> None:
    with pytest.warns(DeprecationWarning, match=r"models\.read"):
        from napkinmath.catalog.models import read_model
    assert read_model("gpt2").name == "gpt2"


def test_the_list_is_read_from_text() -> None:
    text = "see `napkinmath.a.b` and\nfrom napkinmath.c import (\n    d,\n    e as f,\n)\nx napkinmath.g.py"
    assert paths_in(text) == {"napkinmath.a.b", "napkinmath.c", "napkinmath.c.d", "napkinmath.c.e"}
