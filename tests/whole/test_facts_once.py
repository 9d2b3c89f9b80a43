"""A fact of the world stands in one place: its literal in a second place fails here."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from napkinmath.base.cuda import DEFAULT_PROCESSORS
from napkinmath.base.dtypes import ALIASES, DTYPES, dtype_name, find_dtype

ROOT = Path(__file__).parents[2]
OURS = ("estimator", "profiler")
KERNELS = ROOT / "kernels" / "napkinmath_kernels"
ALLOCATOR = {"GRANULE": 512, "SMALL_SEGMENT": 2 << 20, "LARGE_SEGMENT": 20 << 20}


def number(node: ast.AST) -> int | None:
    """The value of an expression of whole numbers; None for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp):
        left, right = number(node.left), number(node.right)
        if left is None or right is None or not 0 <= right < 1 << 40:
            return None
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.LShift) and right < 64:
            return left << right
        if isinstance(node.op, ast.Pow) and right < 64:
            return left**right
    return None


def is_gib(node: ast.AST) -> bool:
    return number(node) == 1 << 30


def is_mib_as_a_unit(node: ast.AST) -> bool:
    """2**20 that something is multiplied or divided by, or that names bytes; a count may be as
    large."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div, ast.FloorDiv)):
        return 1 << 20 in (number(node.left), number(node.right))
    return isinstance(node, ast.Assign) and number(node.value) == 1 << 20 and "BYTES" in names(node)


def names(node: ast.Assign) -> str:
    return " ".join(t.id for t in node.targets if isinstance(t, ast.Name)).upper()


def is_allocator_size(node: ast.AST) -> bool:
    """512 that is called a granule or rounds, and segments of the caching allocator."""
    if isinstance(node, ast.Assign):
        return any(word in names(node) for word in (*ALLOCATOR, "GRANUL")) and not isinstance(
            node.value, (ast.Name, ast.Attribute)
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.BitAnd)):
        right = node.right.operand if isinstance(node.right, ast.UnaryOp) else node.right
        return number(right) == ALLOCATOR["GRANULE"]
    return False


def is_processors(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and number(node) == DEFAULT_PROCESSORS


def is_alias_of_a_type(node: ast.AST) -> bool:
    """A table that maps torch's name of a type to ours, or back."""
    if not isinstance(node, ast.Dict):
        return False
    words = {(d.torch, d.name) for d in DTYPES.values() if d.torch != d.name}
    return any(
        isinstance(key, ast.Constant)
        and isinstance(value, ast.Constant)
        and any(pair in words for pair in ((key.value, value.value), (value.value, key.value)))
        for key, value in zip(node.keys, node.values, strict=True)
    )


def is_precision_rule(node: ast.AST) -> bool:
    """A table keyed by precisions whose values say types."""
    return (
        isinstance(node, ast.Dict)
        and len([key for key in node.keys if key is not None and is_precision(key)]) > 2
        and any(isinstance(value, (ast.Tuple, ast.Call)) for value in node.values)
    )


def is_precision(key: ast.AST) -> bool:
    return (
        isinstance(key, ast.Attribute)
        and isinstance(key.value, ast.Name)
        and key.value.id == "Precision"
    )


def is_four_bit_pair(node: ast.AST) -> bool:
    return isinstance(node, (ast.Tuple, ast.List, ast.Set)) and {"nf4", "fp4"} == {
        part.value for part in node.elts if isinstance(part, ast.Constant)
    }


class Fact(NamedTuple):
    found: Callable[[ast.AST], bool]
    home: str
    """Module of the estimator that may write it."""
    elsewhere: frozenset[str] = frozenset()
    """Other files in which the same literal means something else."""
    example: str = ""


FACTS = {
    "GiB": Fact(is_gib, "base/units.py", example="x / 2**30"),
    "MiB": Fact(is_mib_as_a_unit, "base/units.py", example="BLOCK_BYTES = 1 << 20"),
    "the allocator's sizes": Fact(
        is_allocator_size, "base/cuda.py", example="size = (n + 511) // 512 * 512"
    ),
    "multiprocessors where no GPU is named": Fact(
        is_processors,
        "base/cuda.py",
        frozenset({"napkinmath/report/screen.py"}),  # columns of a terminal
        example="f(processors=132)",
    ),
    "names of types": Fact(
        is_alias_of_a_type, "base/dtypes.py", example="{'bfloat16': 'bf16', 'a': 'b'}"
    ),
    "types of a precision": Fact(
        is_precision_rule,
        "lowering/precision.py",
        # switches of the Trainer's file, which say other things as well
        frozenset({"napkinmath/exports/names.py"}),
        example="{Precision.BF16: (1, 2), Precision.FP16: (1, 3), Precision.FP32: (1, 4)}",
    ),
    "bitsandbytes' 4-bit formats": Fact(
        is_four_bit_pair,
        "config/train_config.py",
        frozenset({"napkinmath_profiler/cli/oracle.py"}),  # choices of a flag
        example="x in ('nf4', 'fp4')",
    ),
}


LITERALS = (ast.Constant, ast.BinOp, ast.Assign, ast.Dict, ast.Tuple, ast.List, ast.Set)
# Lines without any of these hold no literal of a fact; the others' files are parsed.
HINTS = re.compile(
    r"\b(511|512|132|1024|1048576|1073741824)\b|(<<|\*\*) ?[1-3]0|GRANUL|SEGMENT"
    r"|[\"']b?float\d\d|[\"'][nf][fp]4[\"']|Precision\.\w+:"
)
Literals = list[tuple[str, list[ast.AST]]]


def literals(text: str) -> list[ast.AST]:
    if HINTS.search(text) is None:
        return []
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, LITERALS)]


@pytest.fixture(scope="module")
def modules() -> Literals:
    """(path below its package's root, literals) of every module."""
    return [
        (file.relative_to(ROOT / folder).as_posix(), literals(file.read_text()))
        for folder in OURS
        for file in sorted((ROOT / folder).rglob("*.py"))
    ]


def places(fact: Fact, modules: Literals) -> list[str]:
    return [
        f"{path}:{getattr(node, 'lineno', 0)}"
        for path, nodes in modules
        if path not in fact.elsewhere
        for node in nodes
        if fact.found(node)
    ]


@pytest.mark.parametrize("fact", FACTS.values(), ids=FACTS)
def test_a_fact_stands_once(fact: Fact, modules: Literals) -> None:
    second = [p for p in places(fact, modules) if not p.startswith(f"napkinmath/{fact.home}:")]
    assert not second, f"import it from {fact.home}"


@pytest.mark.parametrize("fact", FACTS.values(), ids=FACTS)
def test_a_second_place_would_be_found(fact: Fact) -> None:
    assert places(fact, [("napkinmath/other.py", literals(fact.example))])
    assert not places(fact, [("napkinmath/other.py", literals("x = {1: (1024,)}"))])


def test_the_default_gpu_is_that_of_the_catalog() -> None:
    from napkinmath.catalog.gpus import find_hardware

    assert find_hardware("h100").gpu.num_sms == DEFAULT_PROCESSORS


def constants_of(file: Path) -> dict[str, object]:
    """Module-level constants of a file that is not imported: kernels need torch and Triton."""
    found: dict[str, object] = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = number(node.value)
            if value is None:
                try:
                    value = ast.literal_eval(node.value)
                except ValueError:
                    continue
            found[node.targets[0].id] = value
    return found


def test_the_kernels_package_has_the_same_figures() -> None:
    """It imports nothing of ours, so that it stands alone; its figures are ours all the same."""
    from napkinmath.catalog.loss_kernels import CHUNK_BYTES

    launch = constants_of(KERNELS / "triton_kernels" / "launch.py")
    costs = constants_of(KERNELS / "costs.py")
    loss = constants_of(KERNELS / "ops" / "head_chunks.py")
    assert launch["NUM_PROCESSORS_ON_META"] == DEFAULT_PROCESSORS
    assert costs["CHUNK_BYTES"] == loss["DEFAULT_CHUNK_BYTES"] == CHUNK_BYTES
    items = costs["ITEM_BYTES"]
    assert isinstance(items, dict)
    assert items == {name: find_dtype(name).bits // 8 for name in items}
    defaults = {
        default.value
        for node in ast.walk(ast.parse((KERNELS / "costs.py").read_text()))
        if isinstance(node, ast.FunctionDef)
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if argument.arg == "multiprocessors" and isinstance(default, ast.Constant)
    }
    assert defaults == {DEFAULT_PROCESSORS}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_type_is_known_by_every_name(dtype) -> None:
    for word in (dtype.name, dtype.torch, f"torch.{dtype.torch}", dtype.torch.upper()):
        assert find_dtype(word) is dtype
        assert dtype_name(word) == dtype.name
    assert ALIASES[dtype.torch] == dtype.name


def test_digits_are_those_that_int_reads() -> None:
    """`'²'.isdigit()` is true, and int() refuses it; isdecimal() says what int() takes. Bytes have
    isdigit() alone, which is of ASCII."""
    assert "²".isdigit() and not "²".isdecimal() and int("٣") == 3 and not "²".encode().isdigit()
    files = [file for folder in (*OURS, "kernels") for file in (ROOT / folder).rglob("*.py")]
    asked = [str(file) for file in files if ".isdigit()" in file.read_text(encoding="utf-8")]
    assert len(files) > 100
    assert [Path(file).name for file in asked] == ["batch.py"], "of bytes, in a file's tail"
