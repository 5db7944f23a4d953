"""The emitted module of a vocabulary that is split over the pipeline: one text for all its ranks.

Its methods are what one rank does between the exchanges of a schedule (:class:`~autopar.runtime.VocabularyProgram`);
the cross entropy between ``shape`` and ``tail`` is the runtime's, over all ranks' logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from autopar.codegen import comments
from autopar.codegen.classes import stage_parameters, vocabulary_class
from autopar.codegen.cuts import Part, vocabulary_part
from autopar.codegen.emit import imports, rows
from autopar.codegen.function import Atom, Function
from autopar.codegen.header import vocabulary_header
from autopar.codegen.interface import program_lines, vocabulary_program
from autopar.codegen.job import Job, make_job
from autopar.codegen.stage import Body, totals
from autopar.codegen.text import Line, Origin, Row, layout
from autopar.errors import GraphError, StageError
from autopar.graph import Block, Model, RuntimeOp, Value, arguments, info, is_aten, operands
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.edges import Edge, changed_types, made_types, needed_tables
from autopar.passes.hoist import hoist_parameter_sums
from autopar.passes.logits import parameter_of
from autopar.passes.recut import closure
from autopar.passes.vocabulary import Head, VocabularyCalls, head_of, localize_vocabulary, vocabulary_calls
from autopar.runtime.program import VocabularyProgram


@dataclass(frozen=True)
class EmittedVocabulary:
    """The program of the vocabulary: ``text`` is a whole Python module that ends with ``PROGRAM``; ``lines`` as in
    :class:`~autopar.codegen.EmittedStage`."""

    text: str
    program: VocabularyProgram
    lines: Mapping[int, Origin]

    def of_plan(self, digest: str) -> EmittedVocabulary:
        """The same, of the plan with this ``digest``."""
        text = self.text.replace(self.program.plan_digest, digest)
        return replace(self, text=text, program=replace(self.program, plan_digest=digest))


def emit_vocabulary(
    model: Model,
    stages: Sequence[Sequence[int]],
    mesh: Mesh,
    *,
    microbatches: int,
    digest: str,
    options: Options | None = None,
) -> EmittedVocabulary | None:
    """Write the program of the vocabulary; None where :func:`~autopar.codegen.emit` has it in its stages.

    Arguments and errors are those of ``emit``.
    """
    calls = vocabulary_calls(model)
    if calls is None:
        return None
    hoisted, reduce = hoist_parameter_sums(model)
    local = _joined(localize_vocabulary(hoisted, mesh.pp), calls)
    job = make_job(local, stages, mesh, microbatches=microbatches, digest=digest, reduce=reduce, options=options)
    part = vocabulary_part(job, calls)
    head = head_of(local.block_of(local.calls[calls.head]))
    _check(job, part, head)
    methods = _Methods(job, part, calls, head, job.reserved).all()
    written = [line for function in methods.values() for line in [*function.lines(job.axes), Line(0, "")]][:-1]
    program = vocabulary_program(job, part, head, methods)
    body = ["", "", *layout(vocabulary_class(job, part, written)), "", "", *program_lines(job, part, program)]
    text = [*vocabulary_header(job, part, program), *imports(job, body), "", "aten = torch.ops.aten", *body]
    lines = {number: row.origin for number, row in enumerate(rows(text), 1) if isinstance(row, Row)}
    return EmittedVocabulary("\n".join(text) + "\n", program, lines)


METHODS = ("totals", "embed_ids", "enter", "product", "shape", "targets", "tail")


def _check(job: Job, part: Part, head: Head) -> None:
    """One value enters, the runtime can make the weight's gradient by itself, and names are free."""
    for index, position in stage_parameters(job, part):
        name = job.model.calls[index].parameters[position]
        if name.split(".")[0] in METHODS:
            raise StageError(
                f"parameter {name!r} begins with the name of a method of Vocabulary ({', '.join(METHODS)}); "
                'rename that module, or keep the vocabulary on stages (vocabulary="stage")'
            )
    if len(part.receives) != 1:
        raise GraphError(f"the head takes {len(part.receives)} values of the pipeline's stages; it can take one")
    if all(parameter_of(factor) is not head.weight for factor in operands(head.product)):
        raise GraphError(f"{head.product.name}: the head's weight is exchanged before it is used")


def _joined(model: Model, calls: VocabularyCalls) -> Model:
    """The embedding's lookup by the joint position of a rank on pp and tp."""
    if calls.embedding is None:
        return model
    call = model.calls[calls.embedding]
    (node,) = [n for n in model.block_of(call).ops if n in model.block_of(call).outputs]
    weight, ids = operands(node)[:2]
    padding = arguments(node)["padding_idx"] if is_aten(node) else node.kwargs.get("padding_idx", -1)
    table = model.parameters[call.parameters[model.block_of(call).parameters.index(weight)]]
    node.target = RuntimeOp("embedding_rows")
    node.args, node.kwargs = (weight, ids, table.meta.shape[0], padding), {}
    return model


@dataclass(frozen=True)
class _Methods:
    """Writes the methods, in the order in which they are called."""

    job: Job
    part: Part
    calls: VocabularyCalls
    head: Head
    reserved: frozenset[str]

    def all(self) -> dict[str, Function]:
        found = {
            "totals": totals(self.job, self.part, self.reserved),
            "embed_ids": self.embed() if self.calls.embedding is not None else None,
            "enter": self.enter(),
            "product": self.between("product", "x", self.head.x, self.head.biased),
            "shape": self.between("shape", "z", self.head.biased, self.head.logits)
            if self.head.logits is not self.head.biased
            else None,
            "targets": self.targets(),
            "tail": self.tail(),
        }
        return {name: function for name, function in found.items() if function is not None}

    def embed(self) -> Function:
        body, index = self.body("embed_ids"), self.calls.embedding
        assert index is not None
        body.inputs()
        body.tables(needed_tables(self.job.model, self.job.model.calls[index].operands))
        body.inline(index, self.edges(index), set(self.block(index).graph.nodes))
        (wire,) = self.part.sends
        body.function.results = (body.take(Edge(wire.value, wire.changes)),)
        return body.function

    def enter(self) -> Function:
        body, (wire,) = self.body("enter"), self.part.receives
        types = changed_types(made_types(self.job.model, wire.value), wire.changes)
        body.argument(Edge(wire.value, wire.changes), self.job.names[wire.value], comments.typed(wire.meta, types))
        return self.until(body, self.head.x)

    def targets(self) -> Function:
        body = self.body("targets")
        body.inputs()
        (wire,) = self.part.receives
        given = [v for v in self.job.model.calls[self.calls.head].operands if v != wire.value]
        body.tables(needed_tables(self.job.model, given))
        return self.until(body, self.head.targets)

    def until(self, body: Body, result: fx.Node) -> Function:
        """All of the head that leads to ``result``."""
        index = self.calls.head
        needed = closure([result])
        inputs = {n for n in self.block(index).inputs if n is result or needed.intersection(n.users)}
        atoms = body.inline(index, self.edges(index), needed | inputs)
        body.function.results = (atoms[result],)
        return body.function

    def between(self, name: str, base: str, first: fx.Node, result: fx.Node) -> Function:
        """What leads from one node of the head to another."""
        body = self.body(name)
        data = info(first)
        known: Mapping[fx.Node, Atom] = {
            first: body.function.argument(base, comments.typed(data.meta, data.types())),
        }
        atoms = body.inline(self.calls.head, {}, closure([result], without={first}), known)
        body.function.results = (atoms[result],)
        return body.function

    def tail(self) -> Function:
        body = self.body("tail")
        entropy = Edge(Value(self.calls.head, 0))
        data = info(self.head.entropy)
        body.argument(entropy, "entropy", comments.typed(data.meta, data.types()))
        body.inputs()
        for total in self.part.totals:
            body.argument(total, self.job.names[total.value])
        if self.calls.tail is not None:
            edges = self.edges(self.calls.tail)
            body.tables(needed_tables(self.job.model, [e.value for e in edges.values() if e.total_axes is None]))
            body.inline(self.calls.tail, edges, set(self.block(self.calls.tail).graph.nodes))
        body.function.results = (body.take(Edge(self.job.model.loss)),)
        return body.function

    def body(self, name: str) -> Body:
        return Body(self.job, self.part, Function(name, [], self.reserved))

    def block(self, index: int) -> Block:
        return self.job.model.block_of(self.job.model.calls[index])

    def edges(self, index: int) -> dict[int, Edge]:
        return {position: into for (call, position), into in self.part.edges.items() if call == index}
