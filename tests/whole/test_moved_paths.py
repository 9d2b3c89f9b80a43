"""Paths of 0.1 import for one more release, and say where they went."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import napkinmath
import pytest
from napkinmath.moved import END, MOVED, new_paths

ROOT = next(
    folder for folder in Path(__file__).resolve().parents if (folder / "estimator").is_dir()
)


def forget(name: str) -> None:
    """Takes an old path out of the loaded modules, so that it is imported anew."""
    for loaded in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
        del sys.modules[loaded]


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_imports_and_names_the_new_one(old: str) -> None:
    path = f"napkinmath.{old}"
    forget(path)
    with pytest.warns(DeprecationWarning) as caught:
        module = import_module(path)
    said = " ".join(str(warning.message) for warning in caught)
    assert END in said and all(new in said for new in new_paths(path))
    assert not (ROOT / "estimator" / "napkinmath" / f"{old.replace('.', '/')}.py").exists()
    for new in new_paths(path):
        home = import_module(new)
        name = next(n for n in vars(home) if not n.startswith("_"))
        assert getattr(module, name) is not None


def test_names_of_an_old_path_are_those_of_the_new_one() -> None:
    forget("napkinmath.train_config")
    with pytest.warns(DeprecationWarning):
        from napkinmath.train_config import TrainConfig
    assert TrainConfig is napkinmath.TrainConfig


def test_a_folder_moves_with_its_modules() -> None:
    forget("napkinmath.catalog.families")
    with pytest.warns(DeprecationWarning):
        from napkinmath.catalog.families.llama import llama
    from napkinmath.models.families.llama import llama as new

    assert llama is new


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="nonsense"):
        import_module("napkinmath.nonsense")
    forget("napkinmath.units")
    with pytest.warns(DeprecationWarning):
        units = import_module("napkinmath.units")
    with pytest.raises(AttributeError, match=r"napkinmath\.base\.units"):
        _ = units.nonsense


def test_nothing_of_ours_uses_an_old_path() -> None:
    """The warning as an error: the command's whole way."""
    command = [sys.executable, "-W", "error::DeprecationWarning", "-m", "napkinmath"]
    environment = {"PYTHONPATH": str(ROOT / "estimator")}
    done = subprocess.run([*command, "--model", "llama-7b"], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_end_is_a_later_release() -> None:
    def version(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(".")))

    assert version(napkinmath.__version__) < version(END)
