"""From a small model to its emitted stages, run one after another in this process or on simulated ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar import simulate
from autopar.batch import flatten
from autopar.capture import loss_of
from autopar.codegen import EmittedStage, emit
from autopar.graph import Model
from autopar.mesh import Mesh
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.localize import localize
from autopar.planner.prices import MicrobatchPrices, may_be_term
from autopar.planner.sharding import AxisProblem, solve_axis
from autopar.runtime import Axes
from autopar.runtime.job import Job, run_rank
from autopar.runtime.load import load_program
from autopar.runtime.weights import StateSource
from autopar.schedules import generate, lower
from autopar.spmd import P, transition
from tests.models import Case
from tests.shared_captures import graph_of

Result = tuple[float, dict[str, Tensor]]
"""Loss and gradients by name."""


def cut(model: Model, stages: int) -> list[list[int]]:
    """As even as it gets."""
    units = [i for i, call in enumerate(model.calls) if model.block_of(call).kind != "tables"]
    return [units[len(units) * k // stages : len(units) * (k + 1) // stages] for k in range(stages)]


def folded(case: Case) -> Model:
    return graph_of(case.model, case.batch, case.loss)


def emit_alone(model: Model, stages: int = 1) -> tuple[EmittedStage, ...]:
    """Programs of a model that no axis was solved for."""
    return emit(model, cut(model, stages), Mesh(pp=stages), microbatches=1, digest="3f9a")


def expected(case: Case) -> Result:
    """What the model itself computes."""
    tensors, structure = flatten(case.batch)
    args, kwargs = structure.call_arguments(tensors)
    case.model.zero_grad()
    loss = loss_of(case.model(*args, **kwargs), case.batch, case.loss)
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in case.model.named_parameters() if p.grad is not None}


def weights(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def load(emitted: EmittedStage, model: nn.Module) -> nn.Module:
    """The stage on one rank, with copies of the model's weights."""
    loaded = load_program(emitted.text, filename=f"stage_{emitted.stage}.py")
    stage = loaded.stage(Axes.build(Mesh(), 0, "cpu"))
    full = weights(model)
    own = {p.name: full[p.name].clone() for p in emitted.program.parameters}
    assert set(own) == set(stage.state_dict())
    stage.load_state_dict(own, assign=True)
    return stage


def run(
    case: Case, emitted: Sequence[EmittedStage], wrap: Callable[[nn.Module], Any] = lambda module: module
) -> Result:
    """All stages, one after another; gradients of tied weights are summed over the stages."""
    batch, _ = flatten(case.batch)
    stages = [load(one, case.model) for one in emitted]
    sent: Any = ()
    for one, stage in zip(emitted, stages, strict=True):
        assert [tuple(t.shape) for t in sent] == [t.shape for t in one.program.receives]
        assert not one.program.totals
        sent = wrap(stage)(*sent, *(batch[i.path] for i in one.program.inputs))
    sent.backward()
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return float(sent.detach()), found


@dataclass(frozen=True, kw_only=True)
class RandomPrices(MicrobatchPrices):
    """Prices that make the planner choose any legal placement, a different one for each seed."""

    random: random.Random

    def op(self, node: Any, op: Any, rule: Any, choice: Any) -> float:
        """Whole ops cost more, so that most things are split."""
        kinds = (*choice.operands, choice.result)
        return self.random.random() * (3.0 if all(kind.is_whole for kind in kinds) else 1.0)

    def change(self, meta: Any, src: Any, dst: Any, *, per_step: bool, from_tables: bool) -> float | None:
        if src == dst:
            return 0.0
        is_legal = transition(src, dst) is not None and (dst != P or may_be_term(meta))
        return 0.3 * self.random.random() if is_legal else None


def place_at_random(model: Model, mesh: Mesh, microbatches: int, seed: int) -> None:
    """Solve every axis under random prices; the model becomes local."""
    problems = [AxisProblem("mb", microbatches, MicrobatchPrices(), "batch")] if microbatches > 1 else []
    prices = RandomPrices(random=random.Random(seed))
    for axis, kind in {"dp": "batch", "ep": "batch", "cp": "sequence", "tp": "model"}.items():
        if mesh.size(axis) > 1:
            holds_experts = axis in mesh.expert_axes
            problems.append(AxisProblem(axis, mesh.size(axis), prices, kind, holds_experts=holds_experts))
    for problem in problems:
        solve_axis(model, problem)
        insert_collectives(model, problem.axis)
        localize(model, problem.axis, problem.size)


def simulated(case: Case, emitted: Sequence[EmittedStage], mesh: Mesh, microbatches: int) -> Result:
    """One step on simulated ranks: the loss and the whole gradients."""
    schedule = lower(generate("1f1b", mesh.pp, microbatches))
    source = StateSource(weights(case.model))
    job = Job(tuple(one.text for one in emitted), schedule, mesh, source)
    batch, _ = flatten(case.batch)
    ranks = simulate.run(lambda rank: run_rank(job, rank, batch, 1), mesh.world).results
    assert len({rank.losses[0] for rank in ranks}) == 1
    return ranks[0].losses[0], job.gather(ranks)[0]


def assert_equal(found: Result, wanted: Result, tolerance: float) -> None:
    """Relative errors of the loss and of every gradient; the same names on both sides."""
    assert abs(found[0] - wanted[0]) <= tolerance * abs(wanted[0])
    assert set(found[1]) == set(wanted[1])
    for name, gradient in wanted[1].items():
        error = (found[1][name] - gradient).norm() / gradient.norm().clamp_min(1e-30)
        assert error <= tolerance, f"{name}: {error}"
