"""A model whose vocabulary is split over the pipeline, its methods composed by hand, without a schedule.

Every rank runs all stages, and the exchanges between pipeline ranks are transitions on pp that autograd knows; the
cross entropy is torch's own, of all ranks' logits side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import simulate
from autopar.batch import flatten
from autopar.cluster import Cluster
from autopar.codegen import EmittedStage, EmittedVocabulary, emit, emit_vocabulary
from autopar.graph import Model
from autopar.mesh import Mesh
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.localize import localize
from autopar.passes.split_vocabulary import split_vocabulary
from autopar.passes.vocabulary import staged_calls
from autopar.planner.prices import MicrobatchPrices, RankPrices
from autopar.planner.sharding import AxisProblem, solve_axis
from autopar.runtime import Axes, Parameter, Program, VocabularyProgram, all_gather, all_reduce, batches, convert
from autopar.runtime.collectives import reduce_sum_
from autopar.runtime.load import load_program, load_vocabulary
from autopar.runtime.weights import StateSource, materialize, unshard, whole
from autopar.spmd import I, P, R, S
from tests.codegen.programs import Result, folded, place_at_random, weights
from tests.models import Case


@dataclass(frozen=True)
class Emitted:
    """The programs of one job."""

    mesh: Mesh
    model: Model
    stages: tuple[EmittedStage, ...]
    vocabulary: EmittedVocabulary


def emitted(case: Case, mesh: Mesh, *, microbatches: int = 1, seed: int | None = None) -> Emitted:
    """Cut, solved (with ``seed``: under random prices), written."""
    model = split_vocabulary(folded(case), mesh.pp, mesh.tp)
    if seed is None:
        _place(model, mesh, microbatches)
    else:
        place_at_random(model, mesh, microbatches, seed)
    units = staged_calls(model)
    cut = [units[len(units) * k // mesh.pp : len(units) * (k + 1) // mesh.pp] for k in range(mesh.pp)]
    stages = emit(model, cut, mesh, microbatches=microbatches, digest="3f9a")
    vocabulary = emit_vocabulary(model, cut, mesh, microbatches=microbatches, digest="3f9a")
    assert vocabulary is not None
    return Emitted(mesh, model, stages, vocabulary)


def _place(model: Model, mesh: Mesh, microbatches: int) -> None:
    cluster = Cluster.load("h100")
    problems = [AxisProblem("mb", microbatches, MicrobatchPrices(), "batch")] if microbatches > 1 else []
    for axis in (a for a in ("dp", "tp") if mesh.size(a) > 1):
        link = cluster.link(mesh.size(axis), mesh.stride(axis), mesh.world)
        link = replace(link, call_seconds=0.0)  # so that sequences of a few tokens are split, too
        prices = RankPrices(mesh.size(axis), cluster.device, link, microbatches)
        problems.append(AxisProblem(axis, mesh.size(axis), prices, "batch" if axis == "dp" else "model"))
    for problem in problems:
        solve_axis(model, problem)
        insert_collectives(model, problem.axis)
        localize(model, problem.axis, problem.size)


@dataclass
class _Rank:
    """The modules that one rank runs."""

    axes: Axes
    batch: Mapping[str, Tensor]
    stages: list[tuple[Any, Program]]
    vocabulary: tuple[Any, VocabularyProgram]

    def step(self) -> tuple[float, dict[str, Tensor]]:
        programs = [*self.stages, self.vocabulary]
        totals = [self.totals(module, program) for module, program in programs]
        loss = torch.zeros((), dtype=torch.float64)
        for microbatch in range(self.vocabulary[1].microbatches):
            self.axes.stream.microbatch = microbatch
            term = self.forward(microbatch, totals)
            term.backward()
            loss += term.detach()
        for axis in self.vocabulary[1].loss_axes:
            reduce_sum_(loss, self.axes[axis])
        found: dict[str, Tensor] = {}
        for module, program in programs:
            for parameter in program.parameters:
                self.collect(found, module, parameter)
        return float(loss), found

    def totals(self, module: Any, program: Program | VocabularyProgram) -> tuple[Tensor, ...]:
        if not program.totals:
            return ()
        each = [module.totals(*self.inputs(program, m)) for m in range(program.microbatches)]
        sums = tuple(torch.stack(values).sum(0) for values in zip(*each, strict=True))
        for total, value in zip(program.totals, sums, strict=True):
            for axis in total.axes:
                reduce_sum_(value, self.axes[axis])
        return sums

    def inputs(self, program: Program | VocabularyProgram, microbatch: int) -> tuple[Tensor, ...]:
        return batches.parts(self.batch, program, microbatch, self.axes)

    def forward(self, microbatch: int, totals: list[tuple[Tensor, ...]]) -> Tensor:
        module, program = self.vocabulary
        pp, tp = self.axes["pp"], self.axes["tp"]
        given = self.inputs(program, microbatch)
        sent: tuple[Tensor, ...] = ()
        if program.embedding is not None:
            sent = (all_reduce(module.embed_ids(*given), pp, src=P, dst=I),)
            assert tuple(sent[0].shape) == program.embedding.shape
        for (stage, own), sums in zip(self.stages, totals, strict=False):
            assert [tuple(x.shape) for x in sent] == [x.shape for x in own.receives]
            sent = stage(*sent, *self.inputs(own, microbatch), *sums)
        (hidden,) = sent
        assert tuple(hidden.shape) == program.hidden.shape
        z = module.product(module.enter(convert(hidden, pp, src=I, dst=R)))
        z = module.shape(z) if hasattr(module, "shape") else z
        assert z.shape[1] == program.rows
        z = all_gather(all_gather(z, tp, src=S(1), dst=I), pp, src=S(1), dst=I)
        entropy = F.cross_entropy(
            z[:, : program.classes],
            module.targets(*given),
            reduction=program.reduction,
            ignore_index=program.ignore_index,
            label_smoothing=program.label_smoothing,
        )
        tail: Tensor = module.tail(entropy, *given, *totals[-1])
        return tail

    def collect(self, found: dict[str, Tensor], module: nn.Module, parameter: Parameter) -> None:
        """The gradient, summed over the axes and stages that hold terms of it."""
        gradient = module.get_parameter(parameter.name).grad if parameter.trainable else None
        if gradient is None:
            return
        for axis in parameter.reduce:
            reduce_sum_(gradient, self.axes[axis])
        found[parameter.name] = found[parameter.name] + gradient if parameter.name in found else gradient


def run(case: Case, job: Emitted) -> Result:
    """The loss and the whole gradients of one step."""
    batch, _ = flatten(case.batch)
    source = StateSource(weights(case.model))

    def rank(index: int) -> tuple[float, dict[str, Tensor]]:
        axes = Axes.build(job.mesh, index, "cpu")
        stages: list[tuple[Any, Program]] = []
        for one in job.stages:
            loaded = load_program(one.text, filename=f"stage_{one.stage}.py")
            stages.append((loaded.stage(axes), loaded.program))
        vocabulary = load_vocabulary(job.vocabulary.text, filename="vocabulary.py")
        assert vocabulary.program == job.vocabulary.program
        made = vocabulary.vocabulary(axes)
        for module, program in [*stages, (made, vocabulary.program)]:
            materialize(module, program, whole(source, axes, "cpu"))
        return _Rank(axes, batch, stages, (made, vocabulary.program)).step()

    ranks = simulate.run(rank, job.mesh.world).results
    assert len({loss for loss, _ in ranks}) == 1
    parameters = {p.name: p for program in [*job.stages, job.vocabulary] for p in program.program.parameters}
    shards = {
        name: [(job.mesh.coordinates(r), gradients[name]) for r, (_, gradients) in enumerate(ranks)]
        for name in ranks[0][1]
    }
    return ranks[0][0], {name: unshard(parameters[name], held) for name, held in shards.items()}
