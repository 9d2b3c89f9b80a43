"""A training loop of a script's own: the loader that it runs over, when it steps and what it
multiplies in, by its text alone.

Calls: torch 2.9 utils/data/dataloader.py, amp/autocast_mode.py, nn/utils/clip_grad.py;
accelerate 1.12 accelerator.py prepare, accumulate.
"""

from __future__ import annotations

import ast

from napkinmath.base.errors import InputError
from napkinmath.inputs.scripts.python_imports import Imports
from napkinmath.inputs.scripts.python_keys import ScriptKeys
from napkinmath.inputs.scripts.python_values import Made, Unknown, dotted, is_plain, mapping_of
from napkinmath.models.config_file import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Scope = dict[str, Any]

_CLIPS = ("clip_grad_norm_", "clip_grad_value_")
_DEEPEST = 4
# Arguments with which torch's optimizers keep or hold another number of tensors: no `optim` of the
# Trainer names these.
_OTHER_STATES = {"amsgrad": True, "foreach": False}
# What a loop does that its model's loss is not, or that spreads it -> in words.
_SHARDS = ("fully_shard", "FullyShardedDataParallel", "FSDP")
_OTHERS = {
    "generate": "generates in it",
    "requires_grad_": "freezes parameters in its code",
    **dict.fromkeys(_SHARDS, "shards its model in its code"),
    "initialize": "has DeepSpeed's choices in its code",
    "all_reduce": "shares its gradients in its code",
}
OPTIMIZERS = {
    "AdamW": "adamw_torch",
    "Adam": "adamw_torch",
    "SGD": "sgd",
    "Adafactor": "adafactor",
    **dict.fromkeys(("AdamW8bit", "Adam8bit"), "adamw_8bit"),
    **dict.fromkeys(("AdamW32bit", "Adam32bit"), "adamw-bnb"),
    **dict.fromkeys(("PagedAdamW8bit", "PagedAdam8bit"), "paged_adamw_8bit"),
    **dict.fromkeys(("PagedAdamW", "PagedAdamW32bit", "PagedAdam32bit"), "paged_adamw_32bit"),
    "Lion8bit": "lion_8bit",
    "Lion32bit": "lion_32bit",
    "PagedLion8bit": "paged_lion_8bit",
    **dict.fromkeys(("PagedLion", "PagedLion32bit"), "paged_lion_32bit"),
}
"""An optimizer's class of torch, transformers or bitsandbytes -> the Trainer's word, or ours."""


class Loop:
    """A loop with a backward in it."""

    def __init__(self, node: ast.For | ast.AsyncFor) -> None:
        self.node = node
        self.loader: Made | None = None
        self.accumulation: Any = None
        """Micro-steps of an update, where a remainder says so."""


class Loops(Imports):
    """Walks loops and keeps those that train."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.loops: list[Loop] = []
        self.models: list[Made] = []
        self.adapters: list[Made] = []
        self.loaders: list[Made] = []
        self.optimizers: list[Made] = []
        self.accelerators: list[Made] = []
        self.autocasts: list[Made] = []
        self.engines: list[Made] = []
        """What `deepspeed.initialize` gives."""
        self.dead: list[ast.stmt] = []
        """Statements of branches that are not taken, whatever a run finds out."""

    def cuts(self, tree: ast.Module) -> dict[int, int]:
        """Lengths that the script's tokenizers cut to -> the line that says so, wherever it
        stands: what maps a dataset is called by no statement of it."""
        found: dict[int, int] = {}
        for node in (one for it in (tree, *self.own.read.values()) for one in ast.walk(it)):
            if isinstance(node, ast.Call):
                words = {k.arg: k.value for k in node.keywords if k.arg}
                given = words.get("max_length") if "truncation" in words else None
                given = given or words.get("model_max_length")
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
                given = node.value if node.targets[0].attr == "model_max_length" else None
            else:
                continue
            length = None if given is None else self.value(given, self.scope)
            if isinstance(length, int) and length > 0:
                found.setdefault(length, node.lineno)
        return found

    def kept_of(self, kind: str) -> list[Made] | None:
        """Where things of a kind are kept, in the order in which they are made."""
        return {
            "model": self.models,
            "adapter": self.adapters,
            "loader": self.loaders,
            "optimizer": self.optimizers,
            "accelerator": self.accelerators,
            "autocast": self.autocasts,
            "engine": self.engines,
        }.get(kind)

    def see_loop(self, node: ast.For | ast.AsyncFor, scope: Scope) -> None:
        """Keeps a loop whose body calls backward."""
        if not any(called(one) == "backward" for one in ast.walk(node)):
            return
        found = Loop(node)
        found.loader = self._loader(node.iter, scope, _DEEPEST)
        for test in ast.walk(node):
            if not isinstance(test, ast.If) or all(called(o) != "step" for o in ast.walk(test)):
                continue
            if (every := _remainder(test.test)) is not None:
                found.accumulation = self.value(every, scope)
        self.loops.append(found)

    def _loader(self, over: ast.expr, scope: Scope, depth: int) -> Made | None:
        """The loader in `enumerate(tqdm(loader))`."""
        if isinstance(over, ast.Call) and depth:
            found = (self._loader(one, scope, depth - 1) for one in over.args[:4])
            return next((one for one in found if one is not None), None)
        value = None if isinstance(over, ast.Call) else self.value(over, scope)
        return value if isinstance(value, Made) and value.kind == "loader" else None


def called(node: ast.AST) -> str:
    """The last name of a call; '' for another node."""
    return dotted_end(node.func) if isinstance(node, ast.Call) else ""


def dotted_end(node: ast.expr) -> str:
    """'step' of `optimizer.step`, whatever stands in front."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _remainder(test: ast.expr) -> ast.expr | None:
    """N of a test with `x % N` in it."""
    found = (one for one in ast.walk(test) if isinstance(one, ast.BinOp))
    return next((one.right for one in found if isinstance(one.op, ast.Mod)), None)


def engine_config(walk: Loops) -> dict[str, Any]:
    """The configuration that the script gives its DeepSpeed engine, where its text says all of it; an
    empty one for another script."""
    given = mapping_of(walk.engines[-1].keys.get("config")) if walk.engines else {}
    return given if is_plain(given) else {}


def prepared_by(name: str, given: list[Any]) -> list[Any] | None:
    """What `accelerator.prepare(...)` gives: what it was given; None for another call."""
    is_one = name.endswith((".prepare", ".setup", ".setup_dataloaders")) and len(given) > 1
    return list(given) if is_one else None


def one_of(models: list[Made], tree: ast.Module) -> list[Made]:
    """Models that branches load into one variable as one, which has what they say alike."""
    lines = {one.line for one in models}
    into = {
        dotted(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and lines & {*range(node.lineno, (node.end_lineno or 0) + 1)}
        for target in node.targets
    }
    if len(models) < 2 or len(into) != 1 or "" in into:
        return models
    found = models[0].copied()
    for model in models[1:]:
        for key in {*found.keys, *model.keys}:
            if found.keys.get(key) != model.keys.get(key):
                found.set(key, Unknown(source="a branch", line=model.line), model.line)
    return [found]


def read_loop(walk: Loops, models: list[Made], tree: ast.Module, path: str) -> ScriptKeys:
    """The keys of a Trainer's file for the script's last loop. Raises InputError with what it does
    that is not read."""
    loops = [one for one in walk.loops if one.loader is not None] or walk.loops
    engine = engine_config(walk)
    reason = _refused(loops, models, tree, "initialize" if engine else "")
    if reason:
        given = [one.keys.get("model_name") for one in models]
        names = dict.fromkeys(it.source if isinstance(it, Unknown) else str(it) for it in given)
        loads = f"; it loads {', '.join(map(quoted, list(names)[:3]))}" if names else ""
        raise InputError(
            f"{quoted(path)} trains in a loop of its own that is not read: it {reason}{loads}; give"
            " its choices with flags (`estimate --help`)"
        )
    keys, loop = ScriptKeys(), loops[-1]
    line = loop.node.lineno
    loader = loop.loader
    size = Unknown(source="the loop's loader", line=line)
    if not engine or loader:
        keys.set(
            "per_device_train_batch_size",
            loader.keys.get("batch_size", 1) if loader else size,
            loader.line if loader else line,
        )
    if not engine:
        _read_update(keys, walk, loop, tree)
    if walk.optimizers:
        read_optimizer(keys, walk.optimizers[-1])
    if not any(isinstance(o, ast.Attribute) and o.attr == "loss" for o in ast.walk(loop.node)):
        keys.set("compute_loss", "the loop", line)
    return keys


def _read_update(keys: ScriptKeys, walk: Loops, loop: Loop, tree: ast.Module) -> None:
    """Micro-steps, types and clipping of a loop that no engine runs."""
    steps, line = loop.accumulation, loop.node.lineno
    accelerator = walk.accelerators[-1].keys if walk.accelerators else {}
    keys.set(
        "gradient_accumulation_steps",
        accelerator.get("gradient_accumulation_steps", 1) if steps is None else steps,
        line,
    )
    _read_types(keys, walk, accelerator.get("mixed_precision"))
    clips = any(called(one) in _CLIPS for one in ast.walk(tree))
    keys.set("max_grad_norm", 1.0 if clips else 0, line)


def stack_of(walk: Loops, tree: ast.Module) -> str:
    """The row of catalog/stacks: whether a variable keeps the model's outputs, and who casts them."""
    if walk.accelerators:
        return "accelerate-loop" if _keeps_outputs(tree) else "hf"
    return "hf-loop" if _keeps_outputs(tree) or walk.autocasts else "hf"


def _keeps_outputs(tree: ast.Module) -> bool:
    """Whether a call's `.loss` is read off a variable, not off the call itself."""
    found = [one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and one.attr == "loss"]
    return not any(isinstance(one.value, ast.Call) for one in found)


def _refused(loops: list[Loop], models: list[Made], tree: ast.Module, known: str) -> str:
    """What keeps a loop from being read, in words; a call that is `known` does not."""
    if len(models) != 1:
        return f"loads {len(models)} models" if models else "makes its model itself"
    if not ("For" in models[0].name or "LMHead" in models[0].name):
        return f"puts a head of its own on {models[0].name}"
    if not loops:
        return "has its backward outside of a loop over data"
    for node in ast.walk(tree):
        name = called(node)
        if (
            name in _OTHERS
            and name != known
            and (name != "generate" or any(_holds(o.node, node) for o in loops))
        ):
            return _OTHERS[name]
        if sets_gradients(node):
            return _OTHERS["requires_grad_"]
    return ""


def sets_gradients(node: ast.AST) -> bool:
    """Whether an assignment sets `requires_grad` of something."""
    return isinstance(node, ast.Assign) and any(
        dotted_end(target) == "requires_grad" for target in node.targets
    )


def freezes(tree: ast.Module) -> bool:
    """Whether a script itself says which parameters are trained."""
    return any(called(o) == "requires_grad_" or sets_gradients(o) for o in ast.walk(tree))


def shards(tree: ast.Module) -> bool:
    """Whether a script itself shards its model by FSDP."""
    return any(called(one) in _SHARDS for one in ast.walk(tree))


def _holds(outer: ast.AST, inner: ast.AST) -> bool:
    return any(one is inner for one in ast.walk(outer))


def _read_types(keys: ScriptKeys, walk: Loops, mixed: Any) -> None:
    """bf16 and fp16: accelerate's mixed precision, or torch's autocast, which is fp16 on a GPU
    where no type is named."""
    if isinstance(mixed, str) and mixed in ("bf16", "fp16"):
        keys.set(mixed, True, walk.accelerators[-1].line)
    elif isinstance(mixed, Unknown):
        keys.set("bf16", mixed, mixed.line)
    found: dict[str, int] = {}
    for made in walk.autocasts:
        kind, enabled = made.keys.get("dtype", "float16"), made.keys.get("enabled", True)
        if enabled is not False:
            found[kind if isinstance(kind, str) and enabled is True else ""] = made.line
    if not found:
        return
    kind, line = next(iter(found.items()))
    if len(found) == 1 and kind in ("bfloat16", "float16"):
        keys.set("bf16" if kind == "bfloat16" else "fp16", True, line)
    else:
        keys.set("bf16", Unknown(source="the type of its autocast", line=line), line)


def read_optimizer(keys: ScriptKeys, made: Made) -> None:
    """The Trainer's word for an optimizer that a script makes; one with other states is asked for."""
    word: object = OPTIMIZERS.get(made.name, Unknown(source=made.name, line=made.line))
    if word == "adamw_torch" and made.keys.get("fused") is True:
        word = "adamw_torch_fused"
    elif word == "sgd" and made.keys.get("momentum"):
        word = "momentum"
    for key, other in _OTHER_STATES.items():
        if made.keys.get(key) is other:
            word = Unknown(source=f"{made.name}({key}={other})", line=made.line)
    keys.set("optim", word, made.line)
