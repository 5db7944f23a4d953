"""One function of the emitted text: statements over variables that have no names yet, then names, then lines.

A statement is written with :class:`Var` objects in place of names. :meth:`Function.lines` names them in
order: a name is free again after its last use, so a value that an op only changes (``h = h + y``) keeps it.
"""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.codegen.text import Line, Origin


@dataclass(eq=False)
class Var:
    """A value in the function; ``base`` is the name it would like."""

    base: str
    name: str = ""


Atom = Var | str
"""A variable, or source text that stands for a value (``self.lm_head.weight``)."""

Code = tuple[Atom, ...]
"""Source text with variables in it."""


@dataclass(eq=False)
class Statement:
    """Lines of code that give ``targets`` their values.

    ``header`` ("" or ``with …:``, ``for …:``) stands around them; ``starts`` are targets that a loop carries,
    each with the value it has before the loop.
    """

    rows: list[tuple[Code, str]]
    targets: tuple[Var, ...]
    header: str = ""
    starts: tuple[tuple[Var, Atom], ...] = ()
    origin: tuple[int, str] | None = None  # (call, node) of the op that it computes

    def uses(self) -> list[Var]:
        """The variables it reads from outside."""
        own = set(self.targets)
        read = [a for code, _ in self.rows for a in code if isinstance(a, Var) and a not in own]
        return read + [a for _, a in self.starts if isinstance(a, Var)]


def assign(
    targets: Sequence[Var | None],
    value: Code,
    comment: str = "",
    header: str = "",
    origin: tuple[int, str] | None = None,
) -> Statement:
    """``a, _, b = value``; None is a result that nobody reads. ``value`` alone where there are no targets."""
    made = tuple(t for t in targets if t is not None)
    names = (*join([(t if t is not None else "_",) for t in targets]), " = ") if targets else ()
    return Statement([((*names, *value), comment)], made, header, origin=origin)


def join(items: Iterable[Code], between: str = ", ") -> Code:
    """``a, b, c``."""
    parts: list[Atom] = []
    for item in items:
        parts += [between, *item] if parts else item
    return tuple(parts)


@dataclass
class Function:
    """A method being written. ``reserved`` are names that no variable may take."""

    name: str
    arguments: list[Var]
    reserved: frozenset[str]
    statements: list[Statement] = field(default_factory=list)
    results: tuple[Atom, ...] = ()
    always_tuple: bool = False  # ``return (h,)`` also for one result
    notes: dict[Var, str] = field(default_factory=dict)  # what a comment says of an argument

    def argument(self, base: str, note: str = "") -> Var:
        """One more argument."""
        variable = Var(base)
        self.arguments.append(variable)
        self.notes[variable] = note
        return variable

    def add(self, statement: Statement) -> None:
        self.statements.append(statement)

    def lines(self, axes: Sequence[str]) -> list[Line]:
        """The method, its variables named; ``axes`` are the mesh axes it may mention."""
        self._name_variables(axes)
        body = [line for s in self.statements for line in _statement_lines(s)]
        results = [_text((r,)) for r in self.results]
        closing = f"({results[0]},)" if len(results) == 1 and self.always_tuple else ", ".join(results) or "()"
        used = [a for a in axes if any(_mentions(s, a) for s in self.statements)]
        signature = ", ".join(["self", *(a.name for a in self.arguments)])
        comment = ", ".join(f"{variable.name}: {note}" for variable, note in self.notes.items() if note)
        return [
            Line(1, f"def {self.name}({signature}):", comment),
            *(Line(2, f'{axis} = self.axes["{axis}"]') for axis in used),
            *body,
            Line(2, f"return {closing}"),
        ]

    def _name_variables(self, axes: Sequence[str]) -> None:
        reserved = self.reserved.union(axes)
        last = self._last_uses()
        taken: set[str] = set()
        for variable in self.arguments:
            _name(variable, reserved, taken)
        taken -= {v.name for v in self.arguments if v not in last}
        for position, statement in enumerate(self.statements):
            taken -= {v.name for v in statement.uses() if last[v] == position}
            _name_targets(statement, reserved, taken)
            taken -= {v.name for v in statement.targets if v not in last}

    def _last_uses(self) -> dict[Var, int]:
        last = {v: i for i, s in enumerate(self.statements) for v in s.uses()}
        return last | {r: len(self.statements) for r in self.results if isinstance(r, Var)}


def _name_targets(statement: Statement, reserved: frozenset[str], taken: set[str]) -> None:
    """What a loop carries keeps its name from before; nothing else may take a name that the loop reads."""
    inside = {a.name for code, _ in statement.rows for a in code if isinstance(a, Var)} - {""}
    before = {target: start.name for target, start in statement.starts if isinstance(start, Var)}
    blocked = taken | inside | set(before.values()) if statement.starts else taken
    for variable in statement.targets:
        name = before.get(variable, "")
        if name and name not in taken and name not in inside:
            variable.name = name
        else:
            _name(variable, reserved, blocked)
        taken.add(variable.name)


def _name(variable: Var, reserved: frozenset[str], taken: set[str]) -> None:
    """The wanted name, numbered where it is taken."""
    base = f"{variable.base}_" if variable.base in reserved else variable.base
    between = "_" if base[-1].isdigit() else ""
    name, number = base, 2
    while name in taken or name in reserved:
        name = f"{base}{between}{number}"
        number += 1
    variable.name = name
    taken.add(name)


def _text(code: Code) -> str:
    return "".join(part if isinstance(part, str) else part.name for part in code)


def _mentions(statement: Statement, axis: str) -> bool:
    texts = [part for code, _ in statement.rows for part in code if isinstance(part, str)]
    return any(part == axis for part in texts)


def _statement_lines(statement: Statement) -> list[Line]:
    copies = [
        Line(2, f"{target.name} = {_text((start,))}")
        for target, start in statement.starts
        if _text((start,)) != target.name
    ]
    origin = _origin(statement)
    if not statement.header:
        return copies + [Line(2, _text(code), comment, origin) for code, comment in statement.rows]
    body = [Line(3, _text(code), comment, origin) for code, comment in statement.rows]
    return [*copies, Line(2, statement.header), *body]


def _origin(statement: Statement) -> Origin | None:
    """A statement that unpacks a tuple has none: its elements are those of getitem nodes."""
    if statement.origin is None or len(statement.targets) != 1:
        return None
    return Origin(*statement.origin, statement.targets[0].name)


def identifier(text: str) -> str:
    """``text`` as a Python name."""
    cleaned = "".join(c if c.isalnum() or c == "_" else "_" for c in text).lstrip("_") or "value"
    return f"n{cleaned}" if cleaned[0].isdigit() else cleaned


PYTHON_NAMES = frozenset(keyword.kwlist) | frozenset(keyword.softkwlist) | frozenset(dir(builtins))
