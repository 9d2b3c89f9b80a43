"""Modules beside a script that it imports from: their constants, functions and classes, by their
text alone. Nothing is imported."""

from __future__ import annotations

import ast
import os
from abc import abstractmethod

from napkinmath.base.errors import InputError
from napkinmath.inputs.scripts.python_expressions import Expressions
from napkinmath.inputs.scripts.python_values import Made, Unknown, dotted, is_plain
from napkinmath.models.config_file import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Scope = dict[str, Any]

# What a script imports of these is the library's, though a checkout of it may lie around the script.
_LIBRARIES = (
    *("transformers", "trl", "peft", "accelerate", "datasets", "torch", "deepspeed", "unsloth"),
    *("bitsandbytes", "lightning", "pytorch_lightning", "sentence_transformers"),
    *("modelscope", "liger_kernel", "optimum", "auto_gptq", "gptqmodel", "awq", "adapters"),
)
_VISION_INFO = "process_vision_info"  # of qwen_vl_utils
_COLLATOR = "UnslothVisionDataCollator"
_FOR_EACH = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ListComp, ast.GeneratorExp)
_ABOVE = 3
_MOST_MODULES = 24
_MOST_TEXT = 1 << 19


class OwnModules:
    """The modules of a script's own folder, or of one above it, each read once."""

    def __init__(self, script: str) -> None:
        self.folder = os.path.dirname(script) if os.path.isfile(script) else None
        self.read: dict[str, ast.Module] = {}
        """Paths of the modules that were read -> their trees."""

    def find(self, module: str, level: int, beside: str = "") -> tuple[str, ast.Module] | None:
        """(path, tree) of the module that `from MODULE import ...` names in the script, or in the
        module `beside`; None where it is no file of this repository."""
        folder = os.path.dirname(beside) if beside else self.folder
        is_library = not level and module.partition(".")[0] in _LIBRARIES
        if folder is None or is_library or not (module or level):
            return None
        name = module.replace(".", "/")
        for _ in range(max(0, level - 1)):
            folder = os.path.join(folder, os.pardir)
        for _ in range(1 if level else _ABOVE):
            for end in (".py", "/__init__.py"):
                path = os.path.normpath(os.path.join(folder, name + end))
                if os.path.isfile(path):
                    return self._parsed(path)
            folder = os.path.join(folder, os.pardir)
        return None

    def _parsed(self, path: str) -> tuple[str, ast.Module] | None:
        if path not in self.read:
            if len(self.read) >= _MOST_MODULES:
                return None
            try:
                text = read_text(path, what="module")
                tree = ast.parse(text if len(text) <= _MOST_TEXT else "")
            except (InputError, SyntaxError, ValueError, RecursionError, MemoryError):
                return None
            self.read[path] = tree
        return path, self.read[path]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _image_in(outer: ast.AST) -> int:
    """The line of what runs for each row that gives images; 0 for none."""
    for node in ast.walk(outer):
        if isinstance(node, ast.Call):
            given = [word.value for word in node.keywords if word.arg == "images"]
            if dotted(node.func).endswith(_VISION_INFO) or not all(map(_is_none, given)):
                return node.lineno
        elif isinstance(node, ast.Dict) and _says_image(node):
            return node.lineno
    return 0


def _says_image(node: ast.Dict) -> bool:
    """Whether it is `{"type": "image", ...}`, of a chat's message."""
    pairs = zip(node.keys, node.values, strict=True)
    return any(
        isinstance(key, ast.Constant)
        and key.value == "type"
        and isinstance(value, ast.Constant)
        and value.value in ("image", "image_url")
        for key, value in pairs
    )


def definitions(tree: ast.Module) -> list[ast.stmt]:
    """What a module's import binds: its settings, functions, classes and imports."""
    kinds = (ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return [node for node in tree.body if isinstance(node, kinds)]


class Imports(Expressions):
    """Statements that import, with the functions and classes that are known so far."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.tree = ast.Module(body=[], type_ignores=[])
        """The script's own module."""
        self.functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        self.classes: dict[str, ast.ClassDef] = {}
        self.modules: dict[str, str] = {}
        """Imported names -> where they are from."""
        self.own, self.beside = OwnModules(path), ""
        self.imported: dict[str, Made] = {}
        """Paths of the script's own modules -> their settings."""
        self.foreign: set[str] = set()
        """Functions and classes of other modules, which are entered where they are called."""

    @abstractmethod
    def block(self, body: list[ast.stmt], scope: Scope) -> object:
        """Runs through statements."""

    def import_(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        """Binds what an import names: of a module of the script's own, what its text says."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                made = self._own_module(alias.name, 0)
                name = alias.asname or alias.name
                if made is not None and "." not in name:
                    scope[name] = made
            return
        module = node.module or ""
        own = self._own_module(module, node.level)
        for alias in node.names:
            name = alias.asname or alias.name
            self.modules[name] = f"{module}.{alias.name}"
            whole = (
                None if own else self._own_module(f"{module}.{alias.name}".strip("."), node.level)
            )
            if own is not None and alias.name in own.keys:
                scope[name] = own.keys[alias.name]
            elif own is not None and alias.name == "*":
                scope |= {k: it for k, it in own.keys.items() if not k.startswith("_")}
            elif whole is not None:
                scope[name] = whole
            for known in (self.functions, self.classes) if own is not None else ():
                if alias.name in known and name != alias.name:
                    known[name] = known[alias.name]  # pyright: ignore[reportArgumentType]

    def _own_module(self, module: str, level: int) -> Made | None:
        """A module of the script's own as an object of its settings; its functions and classes are
        known by their names from then on."""
        found = self.own.find(module, level, self.beside)
        if found is None:
            return None
        path, tree = found
        if path not in self.imported:
            made = self.imported[path] = Made("object", module, 0)
            outer, before = (self.scope, self.beside), {*self.functions, *self.classes}
            self.scope, self.beside = {"__name__": module}, path
            self.block(definitions(tree), self.scope)
            made.keys = {key: it for key, it in self.scope.items() if key != "__name__"}
            (self.scope, self.beside), theirs = outer, made.keys
            self.foreign |= {*self.functions, *self.classes} - before
            for key, value in theirs.items():  # what its functions refer to
                self.scope.setdefault(key, value)
        return self.imported[path]

    def is_unread(self, name: str) -> bool:
        """Whether a class comes from a package of somebody's own that was not read."""
        root = self.modules.get(name, "").partition(".")[0]
        return bool(root) and name not in self.classes and root not in _LIBRARIES

    def is_own_class(self, name: str) -> bool:
        """Whether a class is of the script, or of a package that is no library of models."""
        real = self.modules.get(name, "")
        known = (not real and name not in self.classes) or real.partition(".")[0] in _LIBRARIES
        return bool(name) and "." not in name and not known and not name.startswith("Auto")

    def images_at(self) -> int:
        """The line that puts images into a batch: a processor's `images` or a message's part that is
        one, in what is done for each row, or a collator of pictures; 0 where none does. What stands by
        itself, as a question to the model does, is no batch."""
        for tree in (self.tree, *self.own.read.values()):
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and dotted(node.func).endswith(_COLLATOR):
                    return node.lineno
                line = _image_in(node) if isinstance(node, _FOR_EACH) else 0
                if line:
                    return line
        return 0

    def call_also(self, node: ast.Assign, scope: Scope) -> None:
        """Knows a function or class by the name that `make = Class` gives it, or `make = Class if
        test else Other`: the first where only a run knows the test."""
        given, target = node.value, node.targets[0]
        if isinstance(given, ast.IfExp):
            test = self.value(given.test, scope)
            given = given.orelse if is_plain(test) and not test else given.body
        if not isinstance(given, ast.Name) or not isinstance(target, ast.Name):
            return
        if given.id in self.classes:
            self.classes[target.id] = self.classes[given.id]
        elif given.id in self.functions:
            self.functions[target.id] = self.functions[given.id]
        elif given.id in self.modules:
            self.modules[target.id] = self.modules[given.id]

    def tree_with(self, node: ast.AST) -> ast.Module:
        """The module, of the script and those that were read, in which a node stands."""
        read = (one for one in self.own.read.values() if any(it is node for it in ast.walk(one)))
        return next(read, self.tree)

    def attributes(self) -> set[str]:
        """The names of all attributes that the code which was read asks for."""
        trees = (self.tree, *self.own.read.values())
        nodes = (node for tree in trees for node in ast.walk(tree))
        return {node.attr for node in nodes if isinstance(node, ast.Attribute)}

    def calls_any(self, names: tuple[str, ...]) -> bool:
        """Whether the script, or a module that was read, calls one of these names anywhere."""
        return any(
            isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in names
            for tree in (self.tree, *self.own.read.values())
            for node in ast.walk(tree)
        )

    def parameters(
        self,
        function: ast.FunctionDef | ast.AsyncFunctionDef,
        given: list[Any],
        named: dict[str, Any],
    ) -> Scope:
        """What a call binds; a parameter without a value or default is unknown."""
        spec = function.args
        names = [*spec.posonlyargs, *spec.args]
        scope: Scope = {}
        for name, default in zip(reversed(names), reversed(spec.defaults), strict=False):
            scope[name.arg] = self.value(default, self.scope)
        for name, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
            if default is not None:
                scope[name.arg] = self.value(default, self.scope)
        scope |= {name.arg: value for name, value in zip(names, given, strict=False)}
        scope |= {
            k: v for k, v in named.items() if any(k == a.arg for a in (*names, *spec.kwonlyargs))
        }
        for name in (*names, *spec.kwonlyargs):
            scope.setdefault(name.arg, Unknown(source=name.arg, line=name.lineno))
        if spec.kwarg is not None:
            scope[spec.kwarg.arg] = {k: v for k, v in named.items() if k not in scope}
        return scope

    def fields(self, own: ast.ClassDef) -> dict[str, Any]:
        """A class's own fields with their defaults; a field() is looked into."""
        found: dict[str, Any] = {}
        for node in own.body[:500]:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                found[name] = Unknown(source=name, line=node.lineno)
                default = node.value
                if isinstance(default, ast.Call) and dotted(default.func).endswith("field"):
                    words = {k.arg: k.value for k in default.keywords}
                    default = words.get("default")
                    made = words.get("default_factory")
                    default = made.body if isinstance(made, ast.Lambda) else default
                if default is not None:
                    found[name] = self.value(default, self.scope)
        return found
