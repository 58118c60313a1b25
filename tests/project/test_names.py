"""One name means one thing in the product's code."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_two_classes_have_the_same_name() -> None:
    modules = defaultdict(list)
    for path in (ROOT / "webhook").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in modules.items() if len(found) > 1} == {}


def test_the_type_of_unparsed_objects_is_declared_once() -> None:
    aliases = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "webhook").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node) in ("Raw = dict[str, Any]", "Json = dict[str, Any]")
    ]
    assert len(aliases) == 1, aliases
