"""The arrows of docs/ARCHITECTURE.md: which package may import which, read from the syntax trees;
and no path root is a package."""

from __future__ import annotations

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CORE = ROOT / "estimator" / "napkinmath"
FORBIDDEN_IN_CORE = {
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "napkinmath_profiler",
    "napkinmath_kernels",
}
NUMPY_ALLOWED = {"sweep.py"}
# Lower layers know nothing of the layers after them; a module is ranked by its path's longest
# listed prefix.
LAYERS = (
    ("units", "errors", "record", "json_text"),
    ("expr", "dtypes"),
    ("parallel_config", "workload_config"),
    (
        "train_config",
        "model_spec",
        "hardware",
        "attainable",
        "efficiency",
        "catalog.gpus",
        "cluster",
    ),
    ("costs", "ledger"),
    ("tape", "ops"),
    ("lowering", "catalog", "passes"),
    ("step", "timeline"),
    (
        "simulate",
        "stages",
        "schedule",
        "flops",
        "allocator",
        "varied_lengths",
        "collectives",
        "overlap",
        "pipeline_time",
        "throughput",
        "stragglers",
        "paging",
    ),
    (
        "estimate",
        "answers",
        "largest",
        "host_memory",
        "accuracy",
        "sweep",
        "grid",
        "batch",
        "batch_lines",
        "search",
        "plan",
        "plan_cluster",
        "mesh_bounds",
        "meshes",
        "guidelines",
        "lengths",
        "exports",
        "scaling",
        "workloads",
        "inference",
        "inputs",
        "calibration",
        "calibrated_time",
        "measured_layers",
        "local_machine",
    ),
    ("report",),
    ("serving",),
    ("cli", "__main__"),
)


def imports_of(path: pathlib.Path, *, top_level_only: bool = False) -> set[str]:
    """Dotted names that a file imports; at module level only, if asked, and never those for the
    type checker alone."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    skipped = {
        id(n)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for n in ast.walk(node)
    }
    found: set[str] = set()
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def core_files() -> list[pathlib.Path]:
    return sorted(CORE.rglob("*.py"))


def rank(module: str) -> int | None:
    """The layer of a module of the core."""
    name = module.removeprefix("napkinmath.")
    best: tuple[int, int] | None = None
    for level, names in enumerate(LAYERS):
        for prefix in names:
            if (name == prefix or name.startswith(prefix + ".")) and (
                best is None or len(prefix) > best[0]
            ):
                best = (len(prefix), level)
    return best[1] if best else None


@pytest.mark.parametrize("root", ["estimator", "profiler", "kernels"])
def test_path_roots_are_not_packages(root: str) -> None:
    assert not (ROOT / root / "__init__.py").exists()


@pytest.mark.parametrize("path", core_files(), ids=lambda p: str(p.relative_to(CORE)))
def test_core_imports_neither_torch_nor_the_other_packages(path: pathlib.Path) -> None:
    roots = {name.split(".")[0] for name in imports_of(path)}
    assert not roots & FORBIDDEN_IN_CORE
    if path.name not in NUMPY_ALLOWED:
        at_import = {name.split(".")[0] for name in imports_of(path, top_level_only=True)}
        assert not at_import & {"numpy", "pandas", "matplotlib", "rich", "dataclasses", "yaml"}


@pytest.mark.parametrize("path", core_files(), ids=lambda p: str(p.relative_to(CORE)))
def test_core_modules_import_only_lower_layers_when_loaded(path: pathlib.Path) -> None:
    own = ".".join(path.relative_to(CORE.parent).with_suffix("").parts).removesuffix(".__init__")
    level = rank(own)
    if own == "napkinmath":
        return
    assert level is not None, f"{own} is in no layer; add it to LAYERS and docs/ARCHITECTURE.md"
    for name in imports_of(path, top_level_only=True):
        if name.startswith("napkinmath."):
            other = rank(name)
            assert other is not None and other <= level, f"{own} imports {name}, which is above it"


@pytest.mark.parametrize("path", sorted((ROOT / "kernels").rglob("*.py")), ids=lambda p: p.name)
def test_kernels_import_nothing_of_ours(path: pathlib.Path) -> None:
    assert not {
        n for n in imports_of(path) if n.split(".")[0] in ("napkinmath", "napkinmath_profiler")
    }
