"""The emitted modules of a job: one per pipeline stage, as text and as its interface."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from autopar.codegen.classes import LayerClasses, stage_class
from autopar.codegen.cuts import Part, parts
from autopar.codegen.header import header
from autopar.codegen.interface import program_lines, program_of
from autopar.codegen.job import Job, make_job
from autopar.codegen.stage import forward, totals
from autopar.codegen.text import Line, Origin, Row, layout, wrap
from autopar.graph import Model
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.passes.defer_weights import defer_weights
from autopar.passes.float8 import float8
from autopar.passes.hoist import hoist_parameter_sums
from autopar.passes.overlap_dispatch import start_dispatches
from autopar.passes.recompute import Regions, split_blocks
from autopar.passes.routers import name_routers
from autopar.plan import ExpertsPlan
from autopar.runtime.program import Program


@dataclass(frozen=True)
class EmittedStage:
    """The program of one pipeline stage: ``text`` is a whole Python module that ends with ``PROGRAM``.

    ``lines`` says which op of the model a line of the text computes (line number, from 1).
    """

    stage: int
    text: str
    program: Program
    lines: Mapping[int, Origin]

    def of_plan(self, digest: str) -> EmittedStage:
        """The same, of the plan with this ``digest``."""
        text = self.text.replace(self.program.plan_digest, digest)
        return replace(self, text=text, program=replace(self.program, plan_digest=digest))


def emit(
    model: Model,
    stages: Sequence[Sequence[int]],
    mesh: Mesh,
    *,
    microbatches: int,
    digest: str,
    split_backward: bool = False,
    options: Options | None = None,
    recompute: Mapping[int, Regions] | None = None,
    experts: Mapping[str, ExpertsPlan] | None = None,
    placement: Sequence[int] = (),
) -> tuple[EmittedStage, ...]:
    """Write the program of every stage.

    ``model`` is solved and local on every axis, and stays as it is; ``stages`` are the call indices of each
    stage (calls of tables are left out: every stage computes for itself what it needs of them).
    ``split_backward``: for a schedule with passes I and W, gradients of weights can be put off. ``recompute`` gives
    calls the regions that their backward computes again; ``experts``, by layer, how they are stored and reckoned with;
    ``placement`` is each stage's index on pp (empty: they go around).
    Raises StageError where stages, calls and mesh don't fit,
    GraphError where a value can't become what is taken.
    """
    varied, regions = split_blocks(model, recompute or {})
    hoisted, reduce = hoist_parameter_sums(varied)
    hoisted = start_dispatches(hoisted, regions)  # which looks for products by their rules
    if options is not None and options.float8:
        hoisted = float8(hoisted)
    if split_backward:
        hoisted = defer_weights(hoisted)
    job = make_job(
        name_routers(hoisted),
        stages,
        mesh,
        microbatches=microbatches,
        digest=digest,
        reduce=reduce,
        options=options,
        regions=regions,
        experts=experts,
        placement=placement,
    )
    classes = LayerClasses(job)
    return tuple(_emit_stage(job, part, classes) for part in parts(job))


def _emit_stage(job: Job, part: Part, layers: LayerClasses) -> EmittedStage:
    run, count = forward(job, part, job.reserved), totals(job, part, job.reserved)
    methods = [*([*count.lines(job.axes), Line(0, "")] if count else []), *run.lines(job.axes)]
    program = program_of(job, part, run)
    classes = [line for block in _blocks(job, part, layers) for line in ["", "", *block]]
    body = [
        *classes,
        "",
        "",
        *layout(stage_class(job, part, methods)),
        "",
        "",
        *program_lines(job, part, program),
    ]
    text = [*header(job, part, program), *imports(job, body), "", "aten = torch.ops.aten", *body]
    lines = {number: row.origin for number, row in enumerate(rows(text), 1) if isinstance(row, Row)}
    return EmittedStage(part.index, "\n".join(text) + "\n", program, lines)


def rows(text: Sequence[str]) -> Iterator[str]:
    """The rows of a text; some entries are several."""
    for entry in text:
        yield from [entry] if isinstance(entry, Row) else entry.split("\n")


def _blocks(job: Job, part: Part, layers: LayerClasses) -> list[list[str]]:
    calls: dict[int, list[int]] = {}
    for call in part.calls:
        if call not in job.inlined:
            calls.setdefault(job.model.calls[call].block, []).append(call)
    return [layers.rows(block, served) for block, served in calls.items()]


_READ: Final = re.compile(r'"(?:\\.|[^"\\])*"|#.*|(?<![\w.])(?<!def )([A-Za-z_]\w*)\b(?!=[^=])')
"""A name that is read, in the first group; or a string, or a comment. Names of attributes and of arguments aren't."""


def imports(job: Job, body: Sequence[str]) -> list[str]:
    """What the body reads of the runtime; local variables never have these names."""
    read = set(_READ.findall("\n".join(body)))
    names = sorted(job.runtime_names & read, key=lambda n: (n.upper() != n, not n[0].isupper(), n))
    line = f"from autopar.runtime import {', '.join(names)}"
    if len(line) > 110:
        line = f"from autopar.runtime import ({', '.join(names)})"
    return ["import torch", "from torch import nn", "", *wrap(line, 110)]
