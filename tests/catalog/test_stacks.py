"""Stacks: every field makes a difference somewhere, and nothing but a field decides anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.catalog.optimizers import find_optimizer
from napkinmath.catalog.stacks import STACKS, find_stack
from napkinmath.ir.stack import Stack
from napkinmath.lowering.parallel.tensor_style import tensor_style
from napkinmath.models.families import MODELLING
from published.stacks import PUBLISHED

ROOT = Path(__file__).parents[2]
ROWS = {**STACKS, **PUBLISHED}
PARTS = {name: part for name, part in STACKS["hf"].items() if isinstance(part, Record)}
FIELDS = [(name, field) for name, part in PARTS.items() for field, _ in part.items()]


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("estimator", "profiler"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield file, ast.parse(file.read_text())


@pytest.fixture(scope="module")
def attributes_read() -> set[tuple[str, str]]:
    """(part, field) for every `....part.field` that code reads."""
    return {
        (node.value.attr, node.attr)
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute)
    }


@pytest.mark.slow
@pytest.mark.parametrize(("part", "field"), FIELDS)
def test_a_field_is_read_and_differs_between_stacks(
    part: str, field: str, attributes_read: set[tuple[str, str]]
) -> None:
    assert (part, field) in attributes_read, "no code reads it"
    assert len({getattr(getattr(row, part), field) for row in ROWS.values()}) > 1, "never different"


def is_of_a_stack(node: ast.expr) -> bool:
    """`stack`, `x.stack`, `stack.name` and `x.stack.name`."""
    if isinstance(node, ast.Attribute) and node.attr == "name":
        node = node.value
    return (isinstance(node, ast.Name) and node.id == "stack") or (
        isinstance(node, ast.Attribute) and node.attr == "stack"
    )


def asks_for_a_name(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return any(map(is_of_a_stack, [node.left, *node.comparators])) and any(
            isinstance(part, ast.Constant) and isinstance(part.value, str)
            for side in (node.left, *node.comparators)
            for part in ast.walk(side)
        )
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("startswith", "endswith")
        and is_of_a_stack(node.func.value)
    )


@pytest.mark.parametrize(
    "text",
    ["x.stack == 'hf'", "stack.startswith('m')", "p.stack.name in ('hf',)", "'hf' != c.stack"],
)
def test_a_question_for_a_name_is_found(text: str) -> None:
    assert any(map(asks_for_a_name, ast.walk(ast.parse(text))))


@pytest.mark.slow
def test_no_code_asks_for_a_stack_by_its_name() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Compare, ast.Call)) and asks_for_a_name(node)
    ]
    assert not found, "add a field to a part of Stack (ir/stack.py)"


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_what_a_stack_names_exists(row: Stack) -> None:
    from napkinmath.config.train_config import TrainConfig

    assert find_optimizer(row.optimizer.default).name == row.optimizer.default
    assert row.model.library in ("", *MODELLING)
    style = tensor_style(TrainConfig(), row)
    assert row.engine.tensor_style in ("", style.name)


def test_a_stack_is_one_record() -> None:
    """A row that is not in the catalog runs under a policy as it is."""
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.lowering.build import build_step
    from napkinmath.lowering.policy import Policy
    from napkinmath.models.families import read_config

    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
    }
    row = Stack(name="of a test", meaning="", source="")
    row = row.replace(optimizer=row.optimizer.replace(default="sgd"))
    step = build_step(
        read_config(config), Policy(TrainConfig(micro_batch_size=1, sequence_length=32), row)
    )
    assert step.update.optimizer.name == "sgd"


def test_a_trainer_is_another_name_of_one_stack() -> None:
    rows = [row for row in STACKS.values() if row.name not in PUBLISHED]
    tools = [(tool, row.name) for row in rows for tool in row.tools]
    assert len({tool for tool, _ in tools} | set(STACKS)) == len(tools) + len(STACKS)
    for tool, name in tools:
        assert find_stack(tool.upper().replace("-", "_")).name == name
    with pytest.raises(InputError, match="--kernels unsloth"):
        find_stack("unsloth")
