"""Which operands of a stage's layers nothing else uses, read off its text."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator


def unshared_operands(text: str, stage: str = "Stage") -> dict[str, frozenset[int]]:
    """Path of each layer that ``stage`` of an emitted ``text`` calls -> positions of operands that no other code reads.

    A layer that is called at several places has none.
    """
    found = re.search(rf"^class {stage}\b.*?(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)  # parsing all takes long
    assert found is not None
    defined = ast.parse(found[0]).body[0]
    assert isinstance(defined, ast.ClassDef)
    forward = next(node for node in defined.body if isinstance(node, ast.FunctionDef) and node.name == "forward")
    reader = _Reader()
    for argument in forward.args.args:
        reader.bind(argument.arg)
    for statement in forward.body:
        reader.read(statement, {})
    unshared: dict[str, frozenset[int]] = {}
    for path, versions in reader.calls:
        own = frozenset(n for n, version in enumerate(versions) if version is not None and reader.reads[version] == 1)
        unshared[path] = own & unshared[path] if path in unshared else own
    return unshared


class _Reader:
    """Follows straight code and loops over numbers; every value that a name gets is a version."""

    def __init__(self) -> None:
        self.reads: Counter[int] = Counter()
        self.calls: list[tuple[str, list[int | None]]] = []
        self._versions: dict[str, int] = {}

    def bind(self, name: str) -> None:
        self._versions[name] = len(self.reads) + 1
        self.reads[self._versions[name]] = 0

    def read(self, statement: ast.stmt, numbers: dict[str, int]) -> None:
        if isinstance(statement, ast.For):
            for number in _numbers(statement):
                for inner in statement.body:
                    self.read(inner, numbers | number)
            return
        if (renamed := _renamed(statement)) and renamed.keys() <= self._versions.keys():
            self._versions |= {name: self._versions[old] for old, names in renamed.items() for name in names}
            return
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        for call in calls:
            if (path := _path(call.func, numbers)).startswith("self."):
                self.calls.append((path.removeprefix("self."), [self._version(operand) for operand in call.args]))
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in self._versions:
                self.reads[self._versions[node.id]] += 1
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.bind(node.id)

    def _version(self, operand: ast.expr) -> int | None:
        return self._versions.get(operand.id) if isinstance(operand, ast.Name) else None


def _renamed(statement: ast.stmt) -> dict[str, list[str]]:
    """Name -> other names that a statement gives what it stands for: ``a, b = c, d``. Empty for any other statement."""
    if not isinstance(statement, ast.Assign):
        return {}
    found: dict[str, list[str]] = {}
    for target in statement.targets:
        for old, new in zip(_items(statement.value), _items(target), strict=False):
            if not (isinstance(old, ast.Name) and isinstance(new, ast.Name)):
                return {}
            found.setdefault(old.id, []).append(new.id)
    return found


def _items(expression: ast.expr) -> list[ast.expr]:
    return expression.elts if isinstance(expression, ast.Tuple) else [expression]


def _numbers(loop: ast.For) -> Iterator[dict[str, int]]:
    """Of ``for i in range(first, end)``: each i."""
    assert isinstance(loop.target, ast.Name)
    assert isinstance(loop.iter, ast.Call)
    first, end = (ast.literal_eval(bound) for bound in loop.iter.args)
    for number in range(first, end):
        yield {loop.target.id: number}


def _path(expression: ast.expr, numbers: dict[str, int]) -> str:
    """``self.layers[i].mlp`` with its number, dotted."""
    if isinstance(expression, ast.Name):
        return expression.id
    if isinstance(expression, ast.Attribute):
        return f"{_path(expression.value, numbers)}.{expression.attr}"
    if isinstance(expression, ast.Subscript):
        index = expression.slice
        place = numbers.get(index.id, "") if isinstance(index, ast.Name) else getattr(index, "value", "")
        return f"{_path(expression.value, numbers)}.{place}"
    return ""
