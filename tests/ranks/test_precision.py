"""Mixed precision on ranks: within the spread that other orders of summation have on one device."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import autopar
from autopar import simulate
from autopar.api import prepare
from autopar.batch import flatten
from autopar.cluster import Link
from autopar.errors import ArgumentError, AutoparError, ScheduleError
from autopar.graph import Call, Model, info, op_name, operands
from autopar.passes.mixed_precision import LOWER
from autopar.planner.prices import RankPrices
from autopar.planner.sharding import AxisProblem, solve_axis
from autopar.runtime import Axes
from autopar.runtime.job import start
from autopar.spmd import I
from tests.fast_cluster import FAST
from tests.models import Case, NanoGPT, gpt2, llama, prepared, tokens
from tests.pinned import compile_pinned
from tests.ranks.test_parity import name_of, tame_optimizer

STEPS, CLIP_NORM, ROWS = 3, 0.5, 8
MODELS = {"gpt2": gpt2, "llama": llama}
MESHES: list[dict[str, Any]] = [
    {"dp": 2},
    {"tp": 2},
    {"pp": 2, "dp": 2},
    {"pp": 2, "schedule": "v-half", "vocabulary": "vocab-2"},
]


@dataclass(frozen=True)
class Run:
    """Losses of all steps, gradients of the last, parameters after it."""

    losses: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def case(name: str) -> Case:
    return prepared(lambda: MODELS[name](ROWS), torch.float32)


class InParts(TorchFunctionMode):
    """Each product in ``parts`` of what it sums over, added in the lower precision, forward and backward; a bias last.

    So does a library that splits a long sum over its cores, and so do ranks.
    """

    def __init__(self, lower: torch.dtype, parts: int) -> None:
        super().__init__()
        self.lower, self.parts = lower, parts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return self.product(x, weight.t(), *bias)
        if func is torch.addmm:
            bias, x, weight = args
            return self.product(x, weight, bias)
        return func(*args, **(kwargs or {}))

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x, weight = x.to(self.lower), weight.to(self.lower)
        made = torch.cat([self.sum_of_parts(x, columns) for columns in weight.chunk(self.parts, 1)], -1)
        return made if bias is None else made + bias.to(self.lower)

    def sum_of_parts(self, x: Tensor, weight: Tensor) -> Tensor:
        first, *rest = (a @ b for a, b in zip(x.chunk(self.parts, -1), weight.chunk(self.parts), strict=True))
        return sum(rest, first)


def one_device(name: str, precision: str, pieces: int, parts: int) -> Run:
    """Trained by hand under ``torch.autocast``, the batch in so many pieces, products in so many parts (0: as is)."""
    model, batch, lower = case(name).model, case(name).batch, LOWER[precision]
    scale = 2.0**16 if precision == "fp16" else 1.0
    optimizer = tame_optimizer(model.parameters())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for piece in range(pieces):
            rows = slice(ROWS * piece // pieces, ROWS * (piece + 1) // pieces)
            part = {key: value[rows] for key, value in batch.items()}
            share = tokens_that_count(part) / tokens_that_count(batch)
            with torch.autocast("cpu", lower), InParts(lower, parts) if parts else contextlib.nullcontext():
                loss = model(**part).loss * share
            (loss * scale).backward()
            total += float(loss.detach())
        losses.append(total)
        gradients = {n: p.grad.div_(scale).clone() for n, p in model.named_parameters() if p.grad is not None}
        nn.utils.clip_grad_norm_(list(model.parameters()), CLIP_NORM)
        optimizer.step()
    return Run(losses, gradients, {n: p.detach() for n, p in model.named_parameters()})


def tokens_that_count(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"][:, 1:] != -100).sum())


@cache
def one_device_runs(name: str, precision: str) -> list[Run]:
    """The same training in orders that differ; the first is what a user would run."""
    return [one_device(name, precision, pieces, parts) for parts in (0, 1, 2, 4) for pieces in (1, 8)]


def distance(a: Run, b: Run) -> tuple[float, float, float]:
    """The largest relative difference of losses; that of all gradients, and of all parameters, as vectors."""
    losses = max(abs(x - y) / abs(y) for x, y in zip(a.losses, b.losses, strict=True))
    return losses, vector_distance(a.gradients, b.gradients), vector_distance(a.parameters, b.parameters)


def vector_distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    difference = math.sqrt(sum(float((a[n] - b[n]).double().square().sum()) for n in b))
    return difference / math.sqrt(sum(float(b[n].double().square().sum()) for n in b))


@cache
def spread(name: str, precision: str) -> tuple[float, ...]:
    """How far two one-device runs are apart, at most."""
    pairs = [distance(a, b) for a, b in itertools.combinations(one_device_runs(name, precision), 2)]
    return tuple(map(max, zip(*pairs, strict=True)))


def compiled(one: Case, precision: str, options: dict[str, Any], **more: Any) -> autopar.ParallelModel:
    mesh = {axis: size for axis, size in options.items() if axis in ("pp", "dp", "tp")}
    rest = {name: value for name, value in options.items() if name not in mesh}
    given: dict[str, Any] = {"optimizer": tame_optimizer, "clip_norm": CLIP_NORM, "cluster": FAST, "microbatches": 2}
    given |= rest | more
    ranks = math.prod(mesh.values())
    return compile_pinned(one.model, ranks, sample=one.batch, mesh=mesh, precision=precision, **given)


MARGIN = 1.25
"""The spread is measured on some orders of the many that there are; another may lie a little outside of it."""


def check(name: str, options: dict[str, Any], precision: str) -> None:
    one = case(name)
    made = compiled(one, precision, options).simulate(one.batch, STEPS, track_memory=False)
    own = distance(Run(made.losses, made.gradients, made.parameters), one_device_runs(name, precision)[0])
    allowed = spread(name, precision)
    assert all(a <= MARGIN * b for a, b in zip(own, allowed, strict=True)), (own, allowed)


@pytest.mark.slow
@pytest.mark.parametrize("precision", LOWER)
@pytest.mark.parametrize("options", MESHES, ids=name_of)
@pytest.mark.parametrize("name", MODELS)
def test_within_the_spread_of_one_device(name: str, options: dict[str, Any], precision: str) -> None:
    check(name, options, precision)


MORE: list[dict[str, Any]] = [
    {"dp": 2, "zero": 2},
    {"dp": 2, "tp": 2, "zero": 3},
    {"pp": 2, "schedule": "zb-v"},
    {"pp": 2, "tp": 2, "vocabulary": "vocab-1"},
    {"tp": 2, "recompute": "full"},
    {"tp": 2, "head_chunks": 3},
    {"pp": 2, "vocabulary": "vocab-2", "head_chunks": 3},
]


@pytest.mark.slow
@pytest.mark.parametrize("precision", LOWER)
@pytest.mark.parametrize("options", MORE, ids=name_of)
def test_with_what_else_saves_memory(options: dict[str, Any], precision: str) -> None:
    check("llama", options, precision)


@pytest.mark.slow
def test_the_spread_is_no_excuse() -> None:
    """What is allowed is far below what a mistake makes: another seed of weights, or a step less."""
    losses, gradients, parameters = spread("llama", "bf16")
    assert losses < 1e-4
    assert gradients < 0.02
    assert parameters < 2e-4


def test_verify_takes_autocast_as_reference() -> None:
    one = small()
    result = compiled(one, "bf16", {"dp": 2}).verify(one.batch, steps=1)
    assert result.ok, str(result)
    assert result.loss_error < 5e-4
    assert max(result.gradient_errors.values()) < 0.05, "float32 would be further away"


# --- what travels is narrow ---------------------------------------------------------------------------


def small() -> Case:
    ids = tokens(4)
    return prepared(lambda: Case(NanoGPT(layers=1), (ids, ids.roll(-1, 1))), torch.float32)


def transitions(job: autopar.ParallelModel, block: str) -> list[tuple[str, int]]:
    """Collectives of a block's graph, in order, each with the bytes of what it makes whole or adds up."""
    (found,) = (b for b in job.lowered.blocks if b.name == block)
    moves = [n for n in found.ops if n.kwargs.get("src", I) != I]
    return [(op_name(n), max(info(n).meta.bytes, info(operands(n)[0]).meta.bytes)) for n in moves]


def test_collectives_carry_the_narrow_type() -> None:
    """Layers split over tp: the same collectives, each of half the bytes, in the backward too. Where messages cost a
    little, fewer of them are made than what saves most memory traffic has."""
    made, link = {}, replace(FAST.intra_node, bytes_per_second=5e9)
    for precision in ("model", "bf16"):
        job = compiled(case("llama"), precision, {"tp": 2}, cluster=replace(FAST, intra_node=link, inter_node=link))
        made[precision] = transitions(job, "LlamaDecoderLayer")
    assert [name for name, _ in made["model"]] == ["all_gather", "reduce_scatter"] * 2
    assert made["bf16"] == [(name, size // 2) for name, size in made["model"]]


def test_the_budget_counts_masters() -> None:
    """Ranks that have room for 0.6 of what all parameters take split enough of them, though their copies are narrow."""
    one = small()
    model = prepare(one.model, one.batch, precision="bf16")[0]
    nodes = dict(pair for call in model.calls for pair in trained(model, call))
    whole = {n: model.parameters[n].meta.numel * (18 if model.parameters[n].master else 16) for n in nodes}
    budget = int(0.6 * sum(whole.values()))
    slow = Link("slow", 1e-3, 1e6)
    solve_axis(model, AxisProblem("tp", 2, RankPrices(2, FAST.device, slow, 1), "model", budget))
    kept = {n: whole[n] // (2 if info(node).choices["tp"].result.is_shard else 1) for n, node in nodes.items()}
    assert sum(kept.values()) <= budget


def trained(model: Model, call: Call) -> Iterator[tuple[str, fx.Node]]:
    named = zip(call.parameters, model.block_of(call).parameters, strict=True)
    return ((name, node) for name, node in named if model.parameters[name].trainable)


# --- overflow -----------------------------------------------------------------------------------------


class Spiked(nn.Module):
    """The gradient of ``last``, of the last stage alone, is what the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.last = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, spike: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean() + (self.last * spike).sum()


def spiked_batch(spike: float) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    spikes = torch.zeros(4, 8)
    spikes[0, 0] = spike
    return torch.randn(4, 8), spikes


@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp": 2}, {"pp": 2, "dp": 2}], ids=name_of)
def test_an_overflow_skips_the_step_on_every_rank(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    job = compiled(Case(Spiked(), spiked_batch(0.0)), "fp16", mesh).job
    batches = [flatten(spiked_batch(spike))[0] for spike in (0.0, 1e36, math.nan, 0.0)]

    def rank_program(rank: int) -> list[tuple[float, bool, bool]]:
        executor = start(job, Axes.build(job.mesh, rank, "cpu", job.seed))
        assert executor.scaler is not None
        found = []
        for batch in batches:
            before = {n: p.detach().clone() for n, p in executor.named_parameters().items()}
            executor.step(batch)
            same = [torch.equal(before[n], p) for n, p in executor.named_parameters().items()]
            found.append((executor.scaler.scale, all(same), any(same)))
        return found

    for found in simulate.run(rank_program, job.mesh.world).results:
        scales, unchanged, _ = zip(*found, strict=True)
        assert scales == (2.0**16, 2.0**15, 2.0**14, 2.0**14)
        assert unchanged == (False, True, True, False)


# --- requests that can't be -------------------------------------------------------------------------------


def refusal(**options: Any) -> str:
    one = options.pop("case", Case(Spiked(), spiked_batch(0.0)))
    with pytest.raises(AutoparError) as caught:
        compiled(one, options.pop("precision", "fp16"), options.pop("mesh", {"pp": 2}), **options)
    assert type(caught.value) in (ArgumentError, ScheduleError)
    return str(caught.value)


def test_refusals_say_what_works() -> None:
    assert "use a synchronous schedule" in refusal(schedule="pipedream", clip_norm=None)
    half = Case(Spiked().half(), tuple(t.half() for t in spiked_batch(0.0)))
    assert "'last' is float16; give the model in float32" in refusal(case=half)
    with torch.autocast("cpu", torch.bfloat16):
        assert "an autocast to torch.bfloat16 is around the call" in refusal()


def test_an_autocast_around_compile_is_the_precision() -> None:
    one = Case(Spiked(), spiked_batch(0.0))
    given: dict[str, Any] = {"sample": one.batch, "cluster": FAST}
    with torch.autocast("cpu", torch.bfloat16):
        job = compile_pinned(one.model, 1, **given)
        again = compile_pinned(one.model, 1, plan=job.plan, **given)
    assert job.plan.options.precision == "bf16"
    assert again.plan == job.plan
    wanted = compile_pinned(one.model, 1, precision="bf16", **given)
    assert wanted.source(0) == job.source(0)
