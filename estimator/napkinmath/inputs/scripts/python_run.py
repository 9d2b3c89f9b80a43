"""Walks a script's statements in order, with the values that the text alone says: which model,
adapter and arguments reach a trainer. Nothing is imported, called or run."""

from __future__ import annotations

import ast
from typing import NamedTuple

from napkinmath.inputs.scripts import python_calls as calls
from napkinmath.inputs.scripts.python_adapters import finds_linears, with_adapter
from napkinmath.inputs.scripts.python_commands import (
    DEFAULTS,
    asks_for_file,
    methods_of,
    run_by,
    words_for,
)
from napkinmath.inputs.scripts.python_expressions import DEEPEST, MOST_STEPS
from napkinmath.inputs.scripts.python_files import DataFiles
from napkinmath.inputs.scripts.python_loops import Loops, prepared_by
from napkinmath.inputs.scripts.python_models import given_to, keep_model, on_model, set_on
from napkinmath.inputs.scripts.python_process import Process
from napkinmath.inputs.scripts.python_texts import text_method
from napkinmath.inputs.scripts.python_trainers import keep_own_methods
from napkinmath.inputs.scripts.python_values import (
    MISSING,
    Made,
    Unknown,
    change,
    dotted,
    is_plain,
    items_of,
    joined,
    known_call,
    mapping_of,
    unknown,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Scope = dict[str, Any]

_DEEPEST_CALLS = 12


class Training(NamedTuple):
    """A trainer that the script makes."""

    trainer: Made
    node: ast.AST
    """The call that makes it."""


class Walk(Loops):
    """What the statements of a script make."""

    def __init__(self, told: Mapping[str, object], path: str = "") -> None:
        super().__init__(path)
        self.told, self.files = told, DataFiles(path)
        """The words of the script's command line, as far as they are known."""
        if not told:  # it is run by its name alone
            self.scope["sys"] = system = Made("object", "sys", 0)
            system.keys["argv"] = [path]
        self.parsed: list[Made] = []
        """What the script's parsers gave."""
        self.called: set[str] = set()
        self.trainings: list[Training] = []
        self.process = Process()
        self.has_backward = False
        self.making: ast.AST = ast.Pass()
        """The call that makes an object of the script's own class."""
        self.calls = self.doubts = self.rounds = 0

    def walk(self, tree: ast.Module) -> None:
        """Reads the module; where it calls nothing that trains, its functions and methods as well."""
        self.tree = tree
        self.block(tree.body, self.scope)
        if self.trainings:
            return
        for name, function in list(self.functions.items()):
            if name not in self.called | self.foreign:
                words = words_for(function, self.told) if function.decorator_list else {}
                self._enter(function, self.parameters(function, [], words), words)
        for own in list(self.classes.values()):
            if self.trainings or own.name in self.called:
                break
            if own.name in self.foreign:
                continue
            self._instance(own, [], {})

    # ------------------------------------------------------------ statements

    def block(self, body: list[ast.stmt], scope: Scope) -> object:
        """Runs through statements; the value of a return, or MISSING."""
        for statement in body:
            self.steps += 1
            if self.steps > MOST_STEPS or self.depth > DEEPEST:
                return MISSING
            self.depth += 1
            found = self._statement(statement, scope)
            self.depth -= 1
            if found is not MISSING:
                return found
        return MISSING

    def _statement(self, node: ast.stmt, scope: Scope) -> object:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self.functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            self.classes[node.name] = node
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            self.import_(node, scope)
        elif isinstance(node, ast.Assign):
            value = self.value(node.value, scope)
            self.call_also(node, scope)
            for target in node.targets:
                self._bind(target, value, scope)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._bind(node.target, self.value(node.value, scope), scope)
        elif isinstance(node, ast.AugAssign):
            both = ast.BinOp(left=node.target, op=node.op, right=node.value)
            self._bind(node.target, self.value(ast.copy_location(both, node), scope), scope)
        elif isinstance(node, ast.Expr):
            self.value(node.value, scope)
        elif isinstance(node, ast.Return):
            return None if node.value is None else self.value(node.value, scope)
        else:
            return self._compound(node, scope)
        return MISSING

    def _compound(self, node: ast.stmt, scope: Scope) -> object:
        if isinstance(node, ast.If):
            return self._if(node, scope)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                value = self.value(item.context_expr, scope)
                if item.optional_vars is not None:
                    self._bind(item.optional_vars, value, scope)
            return self.block(node.body, scope)
        if isinstance(node, ast.Try):
            found = self.block(node.body, scope)
            return found if found is not MISSING else self.block(node.finalbody, scope)
        if isinstance(node, (ast.For, ast.AsyncFor)):
            self.see_loop(node, scope)
            self._bind(node.target, unknown(node.iter), scope)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            self.rounds += 1
            self.block(node.body, scope)
            self.rounds -= 1
        return MISSING

    def _if(self, node: ast.If, scope: Scope) -> object:
        test = False if asks_for_file(node.test) else self.value(node.test, scope)
        if is_plain(test) or isinstance(test, Made):
            self.dead += node.orelse if test else node.body
            return self.block(node.body if test else node.orelse, scope)
        one, other = dict(scope), dict(scope)
        self.doubts += 1
        first = self.block(node.body, one)
        second = self.block(node.orelse, other)
        self.doubts -= 1
        for name in {**one, **other}:
            scope[name] = joined(node, one.get(name, MISSING), other.get(name, MISSING))
        if first is MISSING or second is MISSING:
            return MISSING
        return joined(node, first, second)

    def _bind(self, target: ast.expr, value: object, scope: Scope) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value, scope)
            if isinstance(owner, Made):
                set_on(owner, target.attr, value, target.lineno)
            self.process.set(dotted(target), value, target.lineno)
        elif isinstance(target, ast.Subscript):
            owner, key = self.value(target.value, scope), self.value(target.slice, scope)
            self.process.set(f"{dotted(target.value)}.{key}", value, target.lineno)
            flat = all(items_of(one) is None for one in items_of(value) or ())
            if isinstance(owner, dict) and isinstance(key, str):
                mapping_of(owner)[key] = value if flat else unknown(target)
        elif isinstance(target, (ast.Tuple, ast.List)):
            given = None if isinstance(value, dict) else items_of(value)
            for index, one in enumerate(target.elts):
                if given is not None and len(given) == len(target.elts):
                    self._bind(one, given[index], scope)
                elif index == 0 and isinstance(value, Made):
                    self._bind(one, value, scope)
                else:
                    self._bind(one, unknown(one), scope)

    # ------------------------------------------------------------ calls

    def call(self, node: ast.Call, scope: Scope) -> Any:
        """What a call gives, as far as its text says."""
        given = [self.value(one, scope) for one in node.args if not isinstance(one, ast.Starred)]
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, scope)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif isinstance(value, dict):
                named |= value
            elif isinstance(value, Made):
                named |= value.keys
            elif isinstance(value, Unknown):
                named[calls.REST] = value
        for one in (*given, *named.values()):
            if isinstance(one, Made):
                one.passed = True
        name = dotted(node.func)
        if (run := run_by(node, self.functions, self.classes)) is not None:
            words = words_for(run, self.told)
            is_class = isinstance(run, ast.ClassDef)
            return self._instance(run, [], words) if is_class else self._function(run, [], words)
        if name in DEFAULTS:
            return given[0] if given else named.get("default")
        if name in ("cast", "typing.cast") and len(given) == 2:
            return given[1]
        if isinstance(node.func, ast.Attribute):
            self.has_backward |= node.func.attr == "backward"
            owner = self.value(node.func.value, scope)
            if isinstance(owner, str) and (said := text_method(owner, node.func.attr, given)):
                return said[0]
            if isinstance(owner, list):
                doubted = self.doubts + self.rounds > 0
                change(owner, node, given, doubted=doubted)  # pyright: ignore[reportUnknownArgumentType]
            if isinstance(owner, (Made, dict)) and (
                found := self._method(node, owner, given, named)
            ):
                return found[0]
        self.process.call(name, given, named, node, doubted=self.doubts > 0)
        if (same := prepared_by(name, given)) is not None:
            return same
        if name in self.functions:
            return self._function(self.functions[name], given, named)
        if name in self.classes:
            self.making = node
            return self._instance(self.classes[name], given, named)
        if name == "dict":
            return {**mapping_of(given[0] if given else None), **named}
        if (read := self.files.called(name, given, named, node.lineno)) is not None:
            return read[0]
        is_known, value = known_call(name, given)
        if is_known:
            return value
        return self._made(node, name, given, named)

    def _made(self, node: ast.Call, name: str, given: list[Any], named: dict[str, Any]) -> Any:
        real = self.modules.get(name.partition(".")[0], "")
        made = calls.made_by(name, real, given, named, node)
        if made is None:
            passed = [one for one in (*given, *named.values()) if isinstance(one, Made)]
            changed = given_to(name if "." in name else real or name, passed, named, node)
            return changed or with_adapter(passed, node) or unknown(node)
        if made is calls.NOTHING:
            return None
        if isinstance(made, Made) and "model_name" in made.keys:
            made.keys["model_name"] = self.files.origin(made.keys["model_name"])
            if made.kind == "model" and self.is_own_class(name.rpartition(".")[0]):
                made.set("model_class", name.rpartition(".")[0], node.lineno)
        if isinstance(made, Made) and (kept := self.kept_of(made.kind)) is not None:
            kept.append(made)
        if isinstance(made, Made) and made.kind == "engine":
            return [made.keys.get("model", unknown(node)), *(unknown(node) for _ in range(3))]
        if isinstance(made, Made) and made.kind in ("trainer", "lightning"):
            if self.is_unread(name):
                made.set("unread_class", name, node.lineno)
            self.trainings.append(Training(made, node))
        return made

    def _method(
        self, node: ast.Call, owner: Any, given: list[Any], named: dict[str, Any]
    ) -> tuple[Any] | None:
        """(what a method of something made gives), or None for one that is not known."""
        assert isinstance(node.func, ast.Attribute)
        name = node.func.attr
        if isinstance(owner, dict):
            known = mapping_of(owner)
            if name == "get" and given and isinstance(given[0], str):
                return (known.get(given[0], given[1] if len(given) > 1 else None),)
            if name == "update":
                known.update({**mapping_of(given[0] if given else None), **named})
                return (None,)
            return None
        if owner.kind == "file":
            return self.files.method(owner, name)
        if owner.kind == "object" and name == "get" and given and isinstance(given[0], str):
            return (owner.keys.get(given[0], given[1] if len(given) > 1 else None),)
        if owner.kind == "parser":
            return (self._parsed(calls.parsed(owner, name, given, named, node, self.told)),)
        if any(owner is module for module in self.imported.values()):
            if name in self.functions:
                return (self._function(self.functions[name], given, named),)
            own = self.classes.get(name)
            return None if own is None else (self._instance(own, given, named),)
        own = owner.keys.get("__class__")
        if owner.kind == "object" and isinstance(own, ast.ClassDef):
            method = methods_of(own).get(name)
            return None if method is None else (self._function(method, [owner, *given], named),)
        if owner.kind == "lightning" and name == "fit":
            owner.set("fitted", given[0] if given else named.get("model"), node.lineno)
        if owner.kind == "model":
            return (on_model(owner, name, given, named, node),)
        if owner.kind == "trainer" and name == "train":
            keep_model(owner)
        return None

    def _parsed(self, made: Any) -> Any:
        """What a parser made, with the script's own dataclasses filled by their defaults and by the
        command line, whose other words are the trainer's arguments."""
        several = [self._own_of(one) for one in items_of(made) or [made]]
        made_things = [one for one in several if isinstance(one, Made)]
        fields = {key for one in made_things if one.kind == "object" for key in one.keys}
        for one in made_things:
            for key, value in self.told.items():
                if key in one.keys or (one.kind == "args" and key not in fields):
                    one.set(key, value, one.lines.get(key, one.line))
        self.parsed += made_things
        return several if isinstance(made, list) else several[0]

    def _own_of(self, made: Any) -> Any:
        is_own = isinstance(made, Made) and made.name in self.classes
        return self._instance(self.classes[made.name], [], {}) if is_own else made

    def _function(
        self,
        function: ast.FunctionDef | ast.AsyncFunctionDef,
        given: list[Any],
        named: dict[str, Any],
    ) -> Any:
        if self.calls >= _DEEPEST_CALLS:
            return unknown(function)
        self.called.add(function.name)
        if finds_linears(function):
            return "all-linear"
        found = self._enter(function, self.parameters(function, given, named), named)
        return None if found is MISSING else found

    def _enter(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope, named: dict[str, Any]
    ) -> object:
        depth, self.depth = self.depth, 0
        self.calls += 1
        found = self.block(function.body, scope)
        self.calls -= 1
        self.depth = depth
        return found

    def _instance(self, own: ast.ClassDef, given: list[Any], named: dict[str, Any]) -> Any:
        """An object of the script's own class: of a trainer's or arguments' class where it extends
        one, else its fields and what __init__ sets."""
        self.called.add(own.name)
        bases = [dotted(base) for base in own.bases]
        for base in bases:
            if base in self.classes and base not in self.called:
                bases += [dotted(more) for more in self.classes[base].bases]
        call = ast.Call(func=ast.Name(id=own.name, ctx=ast.Load()), args=[], keywords=[])
        call.lineno = own.lineno
        for base in bases[:8]:
            if base in self.classes and base != own.name:
                continue  # what that one extends tells
            made = calls.made_by(base, self.modules.get(base, ""), given, named, call)
            if isinstance(made, Made) and made.kind in ("trainer", "args"):
                if own.name in calls.ARGUMENTS:
                    made.name = own.name  # a copy of TRL's
                if made.kind == "trainer":
                    keep_own_methods(made, own)
                    self.trainings.append(Training(made, self.making))
                for key, value in self.fields(own).items():
                    made.own.add(key)
                    made.keys.setdefault(key, value)
                return made
        given_fields = {**self.fields(own), **named}
        found = Made("object", own.name, own.lineno)
        if any(base.rpartition(".")[2] == "ModelConfig" for base in bases):
            found = calls.of_model_config(own.name, given_fields, call)
        found.keys |= {**given_fields, "__class__": own}
        if (init := methods_of(own).get("__init__")) is not None and self.calls < _DEEPEST_CALLS:
            self._enter(init, self.parameters(init, [found, *given], named), named)
        return found
