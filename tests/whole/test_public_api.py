"""The public names: all there, loaded when used, typed, and nothing heavy comes with `import
napkinmath`."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import napkinmath
import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "estimator" / "napkinmath" / "__init__.py"
HEAVY = (
    "torch",
    "numpy",
    "rich",
    "dataclasses",
    "transformers",
    "matplotlib",
    "pandas",
    "yaml",
    "typing",
    "re",
    "json",
    "argparse",
    "inspect",
    "asyncio",
    "urllib",
)


def modules_after(code: str) -> set[str]:
    """Top-level modules loaded by a fresh interpreter that ran the code, beyond those of an empty
    program."""

    def loaded(program: str) -> set[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "estimator")}
        done = subprocess.run(
            [sys.executable, "-S", "-c", program + "\nimport sys\nprint(*sys.modules)"],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        return {name.partition(".")[0] for name in done.stdout.split("\n")[-2].split()}

    return loaded(code) - loaded("pass")


def test_import_loads_nothing_heavy() -> None:
    assert not modules_after("import napkinmath") & set(HEAVY)


def test_estimate_loads_nothing_heavy() -> None:
    """json reads the catalog's line and brings re; everything else stays away."""
    found = modules_after(
        "import napkinmath\nnapkinmath.estimate('llama-7b',"
        " adapter=napkinmath.AdapterConfig()).memory"
    )
    assert not found & (set(HEAVY) - {"json", "re"}), found & set(HEAVY)


def test_command_loads_nothing_heavy() -> None:
    found = modules_after(
        "from napkinmath.cli.main import main\nmain(['--model', 'llama-7b', '--qlora', '--json'])"
    )
    assert not found & (set(HEAVY) - {"json", "re"}), found & set(HEAVY)


@pytest.mark.parametrize("name", napkinmath.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(napkinmath, name) is not None
    assert name in dir(napkinmath)


@pytest.mark.torch
def test_training_script_finds_the_profiler_under_the_package() -> None:
    for name, module in napkinmath._WITH_TORCH.items():
        found = getattr(napkinmath, name)
        assert callable(found) and found.__module__.startswith(module)


@pytest.mark.torch  # the lane without it looks for its name among the modules
def test_without_torch_the_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "napkinmath_profiler.watch", raising=False)
    with pytest.raises(ImportError, match=r"napkinmath\.watch needs torch; .* pip install torch"):
        _ = napkinmath.watch


def test_lazy_names_and_typed_names_agree() -> None:
    """What a type checker sees is what __getattr__ gives."""
    imports = [
        node
        for node in ast.walk(ast.parse(SOURCE.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("napkinmath.")
    ]
    typed = {alias.asname: node.module for node in imports for alias in node.names if alias.asname}
    assert set(typed) == set(napkinmath.__all__) - {"__version__"}
    for name, module in typed.items():
        assert getattr(napkinmath, name) is getattr(sys.modules[str(module)], name)


def test_estimate_stays_the_function() -> None:
    """The submodule of the same name must not take the function's place, whichever is imported
    first."""
    code = (
        "import napkinmath.estimate\nfrom napkinmath import estimate\nimport napkinmath\nassert"
        " estimate is napkinmath.estimate and callable(estimate)"
    )
    modules_after(code)
    modules_after(
        "from napkinmath import estimate\nfrom napkinmath.estimate import Estimate, estimate as"
        " same\nassert estimate is same"
    )


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        napkinmath.nonsense  # noqa: B018


def test_typed_marker_is_shipped() -> None:
    assert (SOURCE.parent / "py.typed").exists()


def test_example_of_the_docstring() -> None:
    step = napkinmath.estimate(
        "llama-7b",
        adapter=napkinmath.AdapterConfig(rank=16),
        micro_batch_size=4,
        hardware="A100-80",
    )
    assert step.memory.allocated.value > 13e9
    assert step.verdict is napkinmath.Verdict.FITS


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attention": "eager"}, "Attention.EAGER"),
        ({"precision": "bf16"}, "Precision.BF16"),
        ({"adapter": "lora"}, "AdapterConfig"),
        ({"quantization": "nf4"}, "QuantizationConfig"),
        ({"recompute": True}, "RecomputeConfig"),
        ({"micro_batch_size": "4"}, "'4'"),
        ({"sequence_length": 0}, "0"),
        ({"hardware": 42}, "42"),
        ({"optimizer": "adamx"}, "adamx"),
    ],
)
def test_wrong_argument_is_named(fields: dict[str, object], said: str) -> None:
    """A plain string where an enumeration belongs would be compared in vain: it is refused, not
    ignored."""
    with pytest.raises(napkinmath.InputError, match=said):
        if fields.keys() <= set(napkinmath.TrainConfig.__record_fields__):
            fields = {"config": napkinmath.TrainConfig(**fields)}
        napkinmath.estimate("gpt2", **fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "model", [None, 7, ["llama-7b"], "", "lama-9", {}, {"model_type": "llama"}]
)
def test_wrong_model_is_named(model: object) -> None:
    with pytest.raises(napkinmath.InputError):
        napkinmath.read_model(model)  # type: ignore[arg-type]
