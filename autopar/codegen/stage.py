"""The methods of a stage: ``forward``, which runs its calls, and ``totals``, sums over the batch alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import count

from torch import fx

from autopar.codegen import comments
from autopar.codegen.block import Writer
from autopar.codegen.cuts import Part
from autopar.codegen.function import Atom, Code, Function, Statement, Var, assign, identifier, join
from autopar.codegen.job import Job
from autopar.codegen.names import bases
from autopar.codegen.runs import Run, number, runs
from autopar.codegen.text import attribute, literal
from autopar.graph import INPUT_CALL, Meta, Value, info
from autopar.passes.edges import Change, Edge, changed_meta, changed_types, edge, made_types
from autopar.spmd import transition


@dataclass
class Body:
    """A method being written; ``atoms`` is what stands for each value, after some transitions, so far."""

    job: Job
    part: Part
    function: Function
    atoms: dict[Edge, Atom] = field(default_factory=dict)

    def argument(self, value: Edge, base: str, note: str = "") -> None:
        self.atoms[value] = self.function.argument(base, note)

    def inputs(self) -> None:
        """What the part reads of the batch, as arguments."""
        for position in self.part.inputs:
            self.argument(Edge(Value(INPUT_CALL, position)), identifier(self.job.model.inputs[position].name))

    def take(self, into: Edge) -> Atom:
        """What stands for the value behind an edge; writes the transitions that aren't there yet."""
        if into not in self.atoms:
            *before, change = into.changes
            given = self.take(Edge(into.value, tuple(before)))
            variable = Var(self._base(into.value))
            self.function.add(assign([variable], *self.change(into.value, tuple(before), change, given)))
            self.atoms[into] = variable
        return self.atoms[into]

    def change(self, value: Value, before: tuple[Change, ...], change: Change, given: Atom) -> tuple[Code, str]:
        """Code and comment of one transition."""
        way = transition(change.src, change.dst)
        assert way is not None, change
        meta = self.meta(value, before)
        after = changed_meta(meta, change, self.job.mesh)
        end = f", src={literal(change.src)}, dst={literal(change.dst)})"
        code: Code = (f"{way.function}(", given, ", ", change.axis, end)
        return code, comments.of_change(meta, after, change.src, change.dst, self.job.mesh.size(change.axis))

    def meta(self, value: Value, changes: tuple[Change, ...]) -> Meta:
        meta = self.job.meta(value)
        for change in changes:
            meta = changed_meta(meta, change, self.job.mesh)
        return meta

    def _base(self, value: Value) -> str:
        if value.call == INPUT_CALL:
            return identifier(self.job.model.inputs[value.output].name)
        return self.job.names[value]

    def inline(
        self,
        index: int,
        edges: Mapping[int, Edge],
        needed: Collection[fx.Node],
        known: Mapping[fx.Node, Atom] | None = None,
    ) -> dict[fx.Node, Atom]:
        """Write the ``needed`` ops of a call into this method, of which some may be ``known`` already.

        Returns what stands for each op.
        """
        job = self.job
        call = job.model.calls[index]
        block = job.model.block_of(call)
        given: dict[fx.Node, Atom] = {n: attribute(call.parameters[k]) for k, n in enumerate(block.parameters)}
        given |= {n: self.take(edges[k]) for k, n in enumerate(block.inputs) if n in needed}
        inputs = {n: self._base(call.operands[k]) for k, n in enumerate(block.inputs)}
        outputs = {n: job.names[Value(index, k)] for k, n in enumerate(block.outputs)}
        writer = Writer(self.function, bases(block, inputs, outputs), count(job.random_offsets[index]), index)
        atoms = writer.values(block, given | dict(known or {}), needed)
        self.atoms |= {Edge(Value(index, k)): atoms[n] for k, n in enumerate(block.outputs) if n in atoms}
        return atoms

    def tables(self, needed: Mapping[int, Collection[fx.Node]]) -> None:
        for index, nodes in needed.items():
            positions = range(len(self.job.model.calls[index].operands))
            self.inline(index, {k: edge(self.job.model, self.job.mesh, index, k) for k in positions}, nodes)

    def run(self, run: Run) -> None:
        """Write one call of a layer, or a loop over several."""
        job, last = self.job, run.calls[-1]
        call = job.model.calls[run.calls[0]]
        outputs = job.model.block_of(call).outputs
        carried = {output for _, output in run.carried}
        values = [Value(last, k) for k in range(len(outputs))]
        targets = [Var(job.names[v]) if v.output in carried or job.is_read(v) else None for v in values]
        arguments, starts, rows = self._arguments(run, targets)
        borrowed = [attribute(call.parameters[k]) for k in sorted(job.borrowed[call.block])]
        layer, header = _layer(call.path, len(run.calls))
        code: Code = (f"{layer}(", *join([(a,) for a in (*arguments, *borrowed)]), ")")
        note = ", ".join(comments.typed(info(n).meta, info(n).types()) for n in outputs)
        step = assign(targets, code, note, header)
        self.function.add(Statement([*rows, *step.rows], step.targets, step.header, starts))
        self.atoms |= {Edge(v): target for v, target in zip(values, targets, strict=True) if target is not None}

    def _arguments(
        self, run: Run, targets: list[Var | None]
    ) -> tuple[list[Atom], tuple[tuple[Var, Atom], ...], list[tuple[Code, str]]]:
        """Arguments of the call; the variables that a loop carries; their transitions inside of the loop."""
        carried = dict(run.carried) if run.is_loop else {}
        arguments: list[Atom] = []
        starts: dict[Var, Atom] = {}
        rows: list[tuple[Code, str]] = []
        for position in range(len(self.job.model.calls[run.calls[0]].operands)):
            into = self.part.edges[run.calls[0], position]
            target = targets[carried[position]] if position in carried else None
            if target is None:
                arguments.append(self.take(into))
                continue
            arguments.append(target)
            if target not in starts:
                inside = self.part.edges[run.calls[1], position]
                starts[target] = self.take(Edge(into.value) if inside.changes else into)
                rows += self._inside(inside, target)
        return arguments, tuple(starts.items()), rows

    def _inside(self, into: Edge, target: Var) -> list[tuple[Code, str]]:
        rows: list[tuple[Code, str]] = []
        for done, change in enumerate(into.changes):
            code, comment = self.change(into.value, into.changes[:done], change, target)
            rows.append(((target, " = ", *code), comment))
        return rows


def _layer(path: str, times: int) -> tuple[str, str]:
    """The layer as an expression, and the header of the loop over several of them."""
    place = number(path)
    if times == 1 or place is None:
        return attribute(path), ""
    prefix, first = place
    return f"{attribute(prefix)}[i]", f"for i in range({first}, {first + times}):"


def forward(job: Job, part: Part, reserved: frozenset[str]) -> Function:
    """``forward(*receives, *inputs, *totals)``: returns what it sends as a tuple, or the loss."""
    body = Body(job, part, Function("forward", [], reserved))
    for wire in part.receives:
        types = changed_types(made_types(job.model, wire.value), wire.changes)
        body.argument(Edge(wire.value, wire.changes), job.names[wire.value], comments.typed(wire.meta, types))
    body.inputs()
    for total in part.totals:
        body.argument(total, job.names[total.value])
    body.tables(part.tables)
    for run in runs(job, part):
        index = run.calls[0]
        if index in job.inlined:
            ops = job.model.block_of(job.model.calls[index]).graph.nodes
            positions = range(len(job.model.calls[index].operands))
            body.inline(index, {k: part.edges[index, k] for k in positions}, set(ops))
        else:
            body.run(run)
    if part.index == len(job.stages) - 1 and job.vocabulary is None:
        body.function.results = (body.take(Edge(job.model.loss)),)
    else:
        body.function.results = tuple(body.take(Edge(wire.value, wire.changes)) for wire in part.sends)
        body.function.always_tuple = True
    return body.function


def totals(job: Job, part: Part, reserved: frozenset[str]) -> Function | None:
    """``totals(*inputs)``: this rank's and microbatch's value of each total, as a tuple."""
    if not part.totals:
        return None
    body = Body(job, part, Function("totals", [], reserved, always_tuple=True))
    body.inputs()
    body.tables(part.total_tables)
    body.function.results = tuple(body.take(Edge(total.value)) for total in part.totals)
    return body.function
