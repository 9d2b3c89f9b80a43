"""What a script does beside its trainer's arguments, by its text alone: an optimizer of its own,
parameters that it freezes or trains, types and layers that it changes."""

from __future__ import annotations

import ast

from napkinmath.inputs.scripts.python_loops import called, read_optimizer, sets_gradients
from napkinmath.inputs.scripts.python_values import Made, Unknown, dotted, items_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.python_keys import ScriptKeys


# What a loop over a model's parts runs over.
_OVER_MODULES = (".layers", "modules(", "children(", ".h)", ".h,", ".blocks")
# Packages that put adapters into a model by themselves (lycoris_lora, microsoft/LoRA loralib, minLoRA,
# AdapterHub adapters).
_ADAPTER_PACKAGES = ("lycoris", "loralib", "minlora", "adapters", "bitfit", "pyreft")


def read_beside_trainer(
    keys: ScriptKeys, trainer: Made, tree: ast.Module, dead: list[ast.stmt]
) -> None:
    """What a script does beside its trainer's arguments: an optimizer of its own, parameters that
    it freezes where no adapter is trained, layers that it takes out."""
    given = items_of(trainer.keys.get("optimizers")) or [None]
    if isinstance(given[0], Made) and given[0].kind == "optimizer":
        read_optimizer(keys, given[0])
    elif given[0] is not None:
        keys.set("optim", Unknown(source="optimizers", line=trainer.line), trainer.line)
    adapted = "use_peft" in keys.computed or keys.content.get("use_peft") not in (None, False)
    put_on = keys.lines.get("use_peft", 0)
    if line := _frozen_beside(tree, put_on) if adapted else _frozen_at(tree, dead):
        keys.set("frozen_in_code", True, line)
    if adapted and (line := _trained_at(tree, put_on)):
        keys.set("trained_in_code", True, line)
    if line := _cast_at(tree):
        keys.set("cast_in_code", True, line)
    if line := _layers_at(tree):
        keys.set("layers_in_code", True, line)
    if line := _adapters_at(tree):
        keys.set("adapters_in_code", True, line)


def _layers_at(tree: ast.Module) -> int:
    """The line that gives a model other layers, or a layer another module; 0 where none does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Delete) and any(".layers[" in ast.unparse(o) for o in node.targets):
            return node.lineno
        if isinstance(node, ast.For) and (line := _module_at(node)):
            return line
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if not isinstance(target, ast.Attribute):
            continue
        own = dotted(target).startswith("self.")
        if target.attr in ("layers", "h") and dotted(target).count(".") > 1 and not own:
            return target.lineno
        if ".layers[" in ast.unparse(target) and _makes_module(node):
            return target.lineno
    return 0


def _module_at(loop: ast.For) -> int:
    """The line of a loop over layers or modules that puts a new module into them: `layer.mlp =
    MoE(...)`, `setattr(parent, name, Linear(...))`; 0 where none does."""
    if not any(word in ast.unparse(loop.iter) for word in _OVER_MODULES):
        return 0
    for node in ast.walk(loop):
        if isinstance(node, ast.Assign):
            own = ast.unparse(node).startswith("self.")
            if isinstance(node.targets[0], ast.Attribute) and not own and _makes_module(node):
                return node.lineno
        elif isinstance(node, ast.Call) and dotted(node.func) == "setattr":
            constant = len(node.args) != 3 or isinstance(node.args[2], ast.Constant)
            if not constant:
                return node.lineno
    return 0


def _makes_module(node: ast.AST) -> bool:
    """Whether an assignment's value is made by a class, whose name begins with a capital."""
    value = node.value if isinstance(node, ast.Assign) else None
    name = dotted(value.func).rpartition(".")[2] if isinstance(value, ast.Call) else ""
    return name[:1].isupper()


def _adapters_at(tree: ast.Module) -> int:
    """The line that imports a package of adapters beside PEFT; 0 where none does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
        if any(name.partition(".")[0] in _ADAPTER_PACKAGES for name in names):
            return node.lineno  # type: ignore[attr-defined]
    return 0


def _frozen_at(tree: ast.Module, dead: list[ast.stmt]) -> int:
    """The line that freezes parameters of the model that is trained; 0 where none does, and where
    it stands in a branch that is not taken."""
    others = {id(inner) for one in dead for inner in ast.walk(one)} | {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and _is_other(ast.unparse(node.iter))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in others:
            continue
        if isinstance(node, ast.Assign) and sets_gradients(node):
            value: ast.expr | None = node.value
        elif isinstance(node, ast.Call) and called(node) == "requires_grad_":
            value = node.args[0] if node.args else ast.Constant(value=True)
        else:
            continue
        owner = node.targets[0] if isinstance(node, ast.Assign) else node.func
        on = isinstance(value, ast.Constant) and value.value is True
        if not on and not _is_other(ast.unparse(owner)):
            return node.lineno
    return 0


def _trained_at(tree: ast.Module, after: int) -> int:
    """The line of a loop over parameters that trains some of them beside the adapters put on at line
    `after`; 0 where none does. What stood in front of that is undone by it."""
    for node in ast.walk(tree):
        if (
            not isinstance(node, ast.For)
            or node.lineno <= after
            or "parameters(" not in (over := ast.unparse(node.iter))
        ):
            continue
        for inner in ast.walk(node) if not _is_other(over) else ():
            if isinstance(inner, ast.Assign) and sets_gradients(inner):
                value = inner.value
                if not (isinstance(value, ast.Constant) and value.value is False):
                    return inner.lineno
            elif called(inner) == "requires_grad_" and "False" not in ast.unparse(inner):
                return inner.lineno if isinstance(inner, ast.Call) else 0
    return 0


def _frozen_beside(tree: ast.Module, after: int) -> int:
    """The line of a loop over parameters that freezes some of the adapters put on at line `after`;
    0 where none does, and where it picks those that are none, which PEFT has frozen."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.For) or not after or node.lineno <= after:
            continue
        over, text = ast.unparse(node.iter), ast.unparse(node).lower()
        spares = any(one in text for one in ("'lora' not in", "'lora_' not in", "not 'lora"))
        if "parameters(" not in over or _is_other(over) or "lora" not in text or spares:
            continue
        lines = [
            inner.lineno
            for inner in ast.walk(node)
            if isinstance(inner, ast.Assign) and sets_gradients(inner)
            if "False" in ast.unparse(inner.value)
        ]
        if lines:
            return lines[0]
    return 0


def _cast_at(tree: ast.Module) -> int:
    """The line of a loop over modules or parameters that makes some of them fp32; 0 where none
    does, and where adapters alone are (PEFT makes them fp32 itself)."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.For) or not any(
            one in ast.unparse(node.iter) for one in ("named_modules(", "modules(", "parameters(")
        ):
            continue
        text = ast.unparse(node).lower()
        if any(one in text for one in ("lora", "if p.requires_grad", "if param.requires_grad")):
            continue
        if ".to(torch.float32)" in text or ".float()" in text:
            return node.lineno
    return 0


def _is_other(text: str) -> bool:
    """Whether an expression names a model beside the one that is trained."""
    return any(word in text.lower() for word in ("ref", "teacher", "reward", "old_"))
