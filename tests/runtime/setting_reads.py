"""Which settings a command reads, worked out from the source: the attributes of `Settings` in the functions that the
command reaches by name.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from webhook.runtime import settings

ROOT: Final = Path(__file__).resolve().parents[2]
# `providers_of` calls these by name.
BUILT_BY_NAME: Final = [
    one.built_by.partition(":")[::2] for one in settings.EVIDENCE_PROVIDERS.values() if one.built_by
]
CLASSES: Final = {"Settings": "webhook.runtime.settings", "ExportSettings": "webhook.export.settings"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """A function or a class of a module; a method has the class in its name."""

    module: str
    name: str


class Read(NamedTuple):
    """An attribute of one of the two classes of settings."""

    of: str
    name: str


def settings_read_from(module: str, function: str) -> set[Read]:
    """The attributes of settings that the function reads, and all that it reaches; properties are followed."""
    return {read for one in reached_from(module, function) for scan in scans_of(one) for read in scan.reads}


@cache
def reached_from(module: str, function: str) -> frozenset[Definition]:
    """The definitions that the function reaches, itself included."""
    seen: set[Definition] = set()
    queue = [Definition(module, function)]
    while queue:
        one = queue.pop()
        if one in seen:
            continue
        seen.add(one)
        if one == Definition("webhook.evidence.providers", "providers_of"):
            queue += [Definition(module, name) for module, name in BUILT_BY_NAME]
        for scan in scans_of(one):
            queue += scan.reached
            queue += [Definition(CLASSES[read.of], f"{read.of}.{read.name}") for read in scan.reads]
    return frozenset(seen)


@cache
def scans_of(one: Definition) -> "tuple[FunctionScan, ...]":
    return tuple(FunctionScan(one.module, node, owner) for node, owner in functions_of(one))


@cache
def tree_of(module: str) -> ast.Module | None:
    path = ROOT / module.replace(".", "/")
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text())
    return None


def functions_of(one: Definition) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    """The function; of a class, its methods. The classes of settings are read attribute by attribute."""
    name, _, method = one.name.partition(".")
    for node in getattr(tree_of(one.module), "body", ()):
        if isinstance(node, Function) and node.name == one.name:
            yield node, None
        elif isinstance(node, ast.ClassDef) and node.name == name:
            if node.name in CLASSES and not method:
                continue
            for inner in node.body:
                if isinstance(inner, Function) and method in ("", inner.name):
                    yield inner, node


@cache
def imports_of(module: str) -> dict[str, tuple[str, str]]:
    """By the local name: module and name there; the name is empty where a module is imported."""
    found = {}
    for node in ast.walk(tree_of(module) or ast.Module([], [])):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("webhook"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = tree_of(whole) is not None
                found[alias.asname or alias.name] = (whole, "") if is_module else (str(node.module), alias.name)
    return found


def names_settings(annotation: ast.expr | None) -> str | None:
    """Which of the two classes an annotation names."""
    if annotation is None:
        return None
    for node in ast.walk(annotation):
        name = node.id if isinstance(node, ast.Name) else node.value if isinstance(node, ast.Constant) else None
        if name in CLASSES:
            return str(name)
    return None


class FunctionScan(ast.NodeVisitor):
    """What one function reads of settings, and which definitions it names."""

    def __init__(self, module: str, function: Function, owner: ast.ClassDef | None) -> None:
        self.module = module
        self.reads: set[Read] = set()
        self.reached: set[Definition] = set()
        self._variables: dict[str, str] = {}
        # `from m import f` within the function wins over the module's own `f`.
        self._local_imports = {
            alias.asname or alias.name: (str(node.module), alias.name)
            for node in ast.walk(function)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        if owner is not None and owner.name in CLASSES:
            self._variables["self"] = owner.name
        elif owner is not None:
            self._know_attributes(owner)
        self._know_parameters(function)
        for node in function.body:
            self.visit(node)

    def _know_parameters(self, function: Function | ast.Lambda) -> None:
        for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
            if (kind := names_settings(one.annotation)) is not None:
                self._variables[one.arg] = kind

    def _know_attributes(self, owner: ast.ClassDef) -> None:
        """What methods put into `self`, and fields that are annotated."""
        for node in ast.walk(owner):
            if isinstance(node, Function):
                self._know_parameters(node)
            elif isinstance(node, ast.AnnAssign) and (kind := names_settings(node.annotation)) is not None:
                self._variables[f"self.{ast.unparse(node.target).removeprefix('self.')}"] = kind
        for node in ast.walk(owner):
            if isinstance(node, ast.Assign) and (kind := self._kind_of(node.value)) is not None:
                self._variables.update({ast.unparse(target): kind for target in node.targets})

    def visit_Assign(self, node: ast.Assign) -> None:
        if (kind := self._kind_of(node.value)) is not None:
            self._variables.update({ast.unparse(target): kind for target in node.targets})
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._know_parameters(node)
        for inner in node.body:
            self.visit(inner)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._know_parameters(node)
        for inner in node.body:
            self.visit(inner)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if (kind := self._kind_of(node.value)) is not None:
            self.reads.add(Read(kind, node.attr))
        elif (definition := self._definition(node)) is not None:
            self.reached.add(definition)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if (definition := self._definition(node)) is not None:
            self.reached.add(definition)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "getattr":
            assert self._kind_of(node.args[0]) is None, f"{self.module}:{node.lineno}: name the setting"
        self.generic_visit(node)

    def _definition(self, node: ast.expr) -> Definition | None:
        imports = imports_of(self.module)
        if isinstance(node, ast.Name):
            found = self._local_imports.get(node.id) or imports.get(node.id)
            if found is None:
                return Definition(self.module, node.id)
            return Definition(*found) if found[1] else None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, name = imports.get(node.value.id, ("", ""))
            if module and not name:
                return Definition(module, node.attr)
            if module:
                return Definition(module, f"{name}.{node.attr}")
        return None

    def _kind_of(self, node: ast.expr) -> str | None:
        """The class of settings that an expression certainly has."""
        if isinstance(node, ast.Await):
            return self._kind_of(node.value)
        if isinstance(node, ast.Name | ast.Attribute):
            return self._variables.get(ast.unparse(node))
        if not isinstance(node, ast.Call):
            return None
        if isinstance(node.func, ast.Name) and node.func.id == "evolve" and node.args:
            return self._kind_of(node.args[0])
        owner = self._kind_of(node.func.value) if isinstance(node.func, ast.Attribute) else None
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        called = Definition(CLASSES[owner], f"{owner}.{method}") if owner else self._definition(node.func)
        if called is None:
            return None
        if called.name in CLASSES:
            return called.name
        return next((names_settings(found.returns) for found, _ in functions_of(called)), None)
