"""Consecutive calls of one layer that can be written as a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.codegen.cuts import Part
from autopar.codegen.job import Job
from autopar.codegen.text import is_index
from autopar.graph import Value
from autopar.passes.edges import Edge


@dataclass(frozen=True)
class Run:
    """Calls in order; ``carried`` maps the inputs that come from the call before to the output they are."""

    calls: tuple[int, ...]
    carried: tuple[tuple[int, int], ...] = ()

    @property
    def is_loop(self) -> bool:
        return len(self.calls) > 1


def runs(job: Job, part: Part) -> list[Run]:
    """The stage's calls, equal neighbours joined into loops."""
    found: list[Run] = []
    for call in part.calls:
        joined = _join(job, part, found[-1], call) if found else None
        found[-1:] = [joined] if joined is not None else [*found[-1:], Run((call,))]
    return found


def number(path: str) -> tuple[str, int] | None:
    """``("model.layers", 3)`` for ``model.layers.3``."""
    prefix, _, last = path.rpartition(".")
    return (prefix, int(last)) if is_index(last) else None


def _join(job: Job, part: Part, run: Run, call: int) -> Run | None:
    before = run.calls[-1]
    carried = _carried(part, before, call) if _neighbours(job, before, call) else None
    if carried is None or (run.is_loop and carried != run.carried):
        return None
    if not _only_passed_on(job, before, call, carried) or not _same_start(part, run.calls[0], carried):
        return None
    if not _same_changes(part, run.calls[0], call, carried):
        return None
    return Run((*run.calls, call), carried)


def _neighbours(job: Job, before: int, call: int) -> bool:
    """The same class, numbers in sequence, and the same borrowed parameters."""
    a, b = job.model.calls[before], job.model.calls[call]
    if before in job.inlined or call in job.inlined or a.block != b.block:
        return False
    first, second = number(a.path), number(b.path)
    if first is None or second != (first[0], first[1] + 1):
        return False
    return all(a.parameters[k] == b.parameters[k] for k in job.borrowed[a.block])


def _carried(part: Part, before: int, call: int) -> tuple[tuple[int, int], ...] | None:
    """Inputs that are outputs of the call before; None where another input differs between the two calls."""
    carried = []
    for position, into in _edges(part, call):
        if into.value.call == before:
            carried.append((position, into.value.output))
        elif into != part.edges[before, position]:
            return None
    return tuple(carried)


def _edges(part: Part, call: int) -> Sequence[tuple[int, Edge]]:
    return [(position, into) for (index, position), into in part.edges.items() if index == call]


def _only_passed_on(job: Job, before: int, call: int, carried: tuple[tuple[int, int], ...]) -> bool:
    """Nobody but the next call reads what the call before made, and that only where it is carried."""
    outputs = job.model.block_of(job.model.calls[before]).outputs
    made = [Value(before, output) for output in range(len(outputs))]
    readers = {reader for value in made for reader in job.readers.get(value, ())}
    return readers == {(call, position) for position, _ in carried} and job.model.loss not in made


def _same_start(part: Part, first: int, carried: tuple[tuple[int, int], ...]) -> bool:
    """Inputs that carry one output begin with one value."""
    starts: dict[int, Edge] = {}
    return all(starts.setdefault(o, part.edges[first, p]) == part.edges[first, p] for p, o in carried)


def _same_changes(part: Part, first: int, call: int, carried: tuple[tuple[int, int], ...]) -> bool:
    """Between two turns come the transitions that come before the first, or none; one way for each output."""
    changed = {wire.value for wire in part.receives if wire.changes}
    ways: dict[int, object] = {}
    for position, output in carried:
        changes, start = part.edges[call, position].changes, part.edges[first, position]
        if changes and (changes != start.changes or start.value in changed):
            return False
        if ways.setdefault(output, changes) != changes:
            return False
    return True
