"""ZeRO 1, 2 and 3, and masters on the host: equal to one device in float64; what is held, and what is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import simulate
from autopar.errors import ArgumentError, ScheduleError
from autopar.runtime import Parameter
from autopar.runtime.job import start
from autopar.runtime.shards import stored_shape
from autopar.runtime.units import layers, units
from autopar.schedules.weight_moves import MessageSizes, followers
from tests.fast_cluster import FAST
from tests.models import Case, Float64, llama, make, prepared
from tests.pinned import compile_pinned
from tests.ranks import test_parity as parity
from tests.ranks.test_optimizers import muon_and_adamw
from tests.ranks.test_parity import verified

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "zb-v": {"schedule": "zb-v"},
    "v-half vocab-2": {"schedule": "v-half", "vocabulary": "vocab-2"},
}
ODD = 50  # a vocabulary whose rows no number of ranks here divides


def model(batch: int, *, tied: bool) -> Callable[[], Case]:
    return lambda: llama(batch, layers=4, tied=tied, vocabulary=ODD)


def check(case: Callable[[], Case], mesh: dict[str, int], **options: Any) -> None:
    """Three steps, clipped, against one device."""
    with Float64():
        result = verified(prepared(case), mesh, **options)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_with_pipelines(zero: int, tied: bool, schedule: str) -> None:
    check(model(8, tied=tied), {"pp": 2, "dp": 2}, zero=zero, microbatches=4, **SCHEDULES[schedule])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 3}, {"pp": 2, "dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_meshes(zero: int, mesh: dict[str, int]) -> None:
    check(model(12, tied=True), mesh, zero=zero, microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"zero": 1}, {"zero": 2, "zero_ranks": 2}, {"zero": 3}], ids=str)
def test_over_rows_and_sequences(options: dict[str, Any]) -> None:
    """dp and cp together share the copies."""
    check(model(8, tied=True), {"dp": 2, "cp": 2}, microbatches=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, *SCHEDULES.values()], ids=str)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_copies_shared_by_some_of_the_ranks(zero: int, options: dict[str, Any]) -> None:
    mesh = {"pp": 2, "dp": 4} if options else {"dp": 4}
    check(model(8, tied=True), mesh, zero=zero, zero_ranks=2, microbatches=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", SCHEDULES.values(), ids=str)
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_masters_on_the_host(offload: str, zero: int, options: dict[str, Any]) -> None:
    check(model(8, tied=True), {"pp": 2, "dp": 2}, zero=zero, offload=(offload,), microbatches=4, **options)


SAMPLE: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {"zero": 1}),
    ({"dp": 3}, {"zero": 2}),
    ({"pp": 2, "dp": 2}, {"zero": 3, "schedule": "zb-v"}),
    ({"dp": 4}, {"zero": 3, "zero_ranks": 2}),
    ({"dp": 1}, {"offload": ("parameters",)}),
]


@pytest.mark.parametrize(("mesh", "options"), SAMPLE, ids=str)
def test_a_sample(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """A few of those above, for the fast tier: sizes of 3 to 12 rows, which mostly don't divide."""
    check(lambda: make("mlp", 24), mesh, microbatches=2, **options)


SIZES = {
    "apart": MessageSizes(part_bytes=1),  # all is large but what is a scalar
    "several": MessageSizes(part_bytes=2**8, bucket_bytes=1, least_bytes=1),  # biases are small; messages are an eighth
}
"""Of messages: by those of programs, all of models this small is one."""


def check_sizes(
    sizes: str,
    case: Callable[[], Case],
    mesh: dict[str, int],
    optimizer_of: Callable[[nn.Module], Any] = lambda _: parity.optimizer,
    **options: Any,
) -> None:
    """As :func:`check`, but that messages are other."""
    with Float64():
        made = prepared(case)
        given = {"optimizer": optimizer_of(made.model), "clip_norm": 0.5, "microbatches": 2, **options}
        gpus = math.prod(mesh.values())
        job = compile_pinned(made.model, gpus, sample=made.batch, loss=made.loss, mesh=mesh, cluster=FAST, **given)
        changed = copy(job)
        changed._job = job.job.like(sizes=SIZES[sizes])
        result = changed.verify(made.batch)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)
    plain, other = (_messages(each, made.batch) for each in (job, changed))
    assert other > plain or "zero" not in options, "this is another way to send weights, or the test is none"


def _messages(job: autopar.ParallelModel, batch: Any) -> int:
    def program(rank: int) -> None:
        start(job.job, job.job.axes(rank, "cpu")).step(job._tensors(batch))

    traffic = simulate.run(program, job.plan.mesh.world).traffic[0]
    return sum(sent.calls for sent in traffic if sent.operation in ("all_gather", "reduce_scatter"))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("mesh", "options"), SAMPLE, ids=str)
def test_a_sample_in_other_messages(mesh: dict[str, int], options: dict[str, Any], sizes: str) -> None:
    check_sizes(sizes, lambda: make("mlp", 24), mesh, **options)


def _named(given: dict[str, Any] | str) -> str:
    if isinstance(given, str):
        return given
    return str({name: getattr(value, "__name__", value) for name, value in given.items()})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "mesh", "options"),
    [
        ("apart", {"pp": 2, "dp": 2}, {"zero": 1}),
        ("several", {"pp": 2, "dp": 2}, {"zero": 1, "schedule": "interleaved", "chunks": 2, "microbatches": 4}),
        ("apart", {"dp": 3}, {"zero": 1, "recompute": "full"}),
        ("several", {"dp": 3}, {"zero": 2}),
        ("apart", {"pp": 2, "dp": 2}, {"zero": 3, "schedule": "zb-v", "microbatches": 4}),
        ("several", {"dp": 2, "tp": 2}, {"zero": 3, "recompute": "full"}),
        ("apart", {"pp": 2, "dp": 2}, {"zero": 2, "schedule": "v-half", "vocabulary": "vocab-2", "microbatches": 4}),
        ("several", {"pp": 2, "dp": 2}, {"zero": 1, "offload": ("optimizer",)}),
        ("apart", {"dp": 2}, {"zero": 1, "offload": ("parameters",)}),
        ("several", {"dp": 2}, {"zero": 1, "optimizer_of": muon_and_adamw}),
        ("apart", {"dp": 2}, {"zero": 3, "optimizer_of": muon_and_adamw}),
    ],
    ids=_named,
)
def test_other_messages(sizes: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    check_sizes(sizes, model(24, tied=True), mesh, **options)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_inside_of_a_backward(recompute: str, schedule: str) -> None:
    options = {"recompute": recompute, "schedule": schedule, "microbatches": 4}
    check(model(8, tied=False), {"pp": 2, "dp": 2}, zero=3, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the tracer's own, which it would trip over as errors
@pytest.mark.parametrize("what", ["layers", "stage"])
def test_weights_come_and_go_where_code_is_compiled(what: str) -> None:
    job = layers_job(2, depth=3, width=4, microbatches=2, zero=3)

    def program(rank: int, *, compiled: bool) -> list[float]:
        executor = start(job.job, job.job.axes(rank, "cpu"))
        (stage,) = executor.stages.values()
        modules = [stage] if what == "stage" else [layer for _, layer in layers(stage)]
        for module in modules if compiled else []:
            module.compile(backend="aot_eager")
        return [executor.step(batch_of(job)).item() for _ in range(3)]

    plain, found = (simulate.run(partial(program, compiled=c), 2).results[0] for c in (False, True))
    assert found == pytest.approx(plain, rel=1e-12)


class Queries(nn.Module):
    """Layers that work on views of a parameter, which is the code's between them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.queries = nn.Linear(8, 16), nn.Parameter(torch.randn(4, 16))
        self.layers = nn.ModuleList([nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(3)])
        self.leave = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = asked = self.queries.unsqueeze(0).expand(len(x), -1, -1)
        x = self.enter(x)
        for layer in self.layers:
            h = h.tanh() + layer(asked, x, x, need_weights=False)[0]
        return self.leave(h).square().mean()


@pytest.mark.parametrize("options", [{"zero": 3}, {"offload": ("parameters",)}], ids=str)
def test_views_of_weights_are_there_as_long_as_layers_use_them(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4, 8, dtype=torch.float64)
    given = {"sample": x, "mesh": {"dp": 2}, "cluster": FAST, "microbatches": 2, "optimizer": torch.optim.SGD}
    job = compile_pinned(Queries().double(), 2, **given, **options)
    assert job.verify(x, steps=2).ok
    assert job.job.programs[0].program.spanning == ("queries",)
    audited = job.audit()
    assert audited.ok, str(audited)


def test_zero_on_one_replica_changes_nothing() -> None:
    case = make("mlp", 4)
    job = compile_pinned(case.model, 1, sample=case.batch, zero=3, cluster=FAST)
    assert "GATHER" not in str(job.schedule)
    assert "zero=" not in job.source(0)


def test_plan_and_text_say_how_weights_are_stored() -> None:
    job = layers_job(4, depth=2, width=4, microbatches=1, zero=3, zero_ranks=2)
    stored = "optimizer state, gradients and parameters stored S(0)@dp over 2 neighbouring ranks, 2 copies"
    assert stored in job.plan.explain()
    text = job.source(0)
    assert "# layers.0 · weights S(0)@dp on 2 ranks, gathered ahead: 128 B" in text
    assert 'reduce=("dp",), zero=2)' in text


def refusal(kind: type[Exception], **options: Any) -> str:
    case = make("mlp", 8)
    with pytest.raises(kind) as caught:
        compile_pinned(case.model, 4, sample=case.batch, cluster=FAST, **options)
    return str(caught.value)


def test_what_can_not_be() -> None:
    stale = refusal(ScheduleError, mesh={"pp": 2, "dp": 2}, schedule="pipedream", zero=1)
    assert "use a synchronous schedule" in stale
    assert "zero_ranks may be one of [1, 2, 4]" in refusal(ArgumentError, mesh={"dp": 4}, zero=1, zero_ranks=3)


class Layers(nn.Module):
    """``depth`` square layers: nothing but weights, and few activations."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def layers_job(dp: int, *, depth: int, width: int, microbatches: int, **options: Any) -> autopar.ParallelModel:
    def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    return compile_pinned(
        Layers(depth, width).double(),
        dp,
        sample=torch.randn(microbatches * dp, width, dtype=torch.float64),
        mesh={"dp": dp},
        cluster=FAST,
        optimizer=sgd,
        microbatches=microbatches,
        **options,
    )


def batch_of(job: autopar.ParallelModel) -> dict[str, Tensor]:
    return {item.path: torch.ones(item.shape, dtype=getattr(torch, item.dtype)) for item in job.plan.inputs}


def peak_bytes(job: autopar.ParallelModel) -> int:
    """Of two steps, and of nothing that is kept to be looked at."""

    def program(rank: int) -> None:
        executor = start(job.job, job.job.axes(rank, "cpu"))
        for _ in range(2):
            executor.step(batch_of(job))

    return max(simulate.run(program, job.plan.mesh.world).peak_bytes)


@pytest.mark.slow
def test_no_more_is_held_than_has_to_be() -> None:
    """In units of a layer: masters and their gradients are a dp-th each; beside them, a few layers at a time. Layers
    are so large that they travel by themselves."""
    depth, width, dp = 16, 512, 4
    jobs = {zero: layers_job(dp, depth=depth, width=width, microbatches=2, zero=zero) for zero in (0, 1, 2, 3)}
    peaks = {zero: peak_bytes(job) / (8 * width * width) for zero, job in jobs.items()}
    part, slack, bucket = depth / dp, 1.0, 1  # activations are small; a bucket is a layer
    assert 2 * depth < peaks[0] < 2 * depth + 1 + slack  # weights, gradients in buckets, one on its way there
    assert 2 * depth + part < peaks[1] < 2 * depth + 2 * part + bucket + slack
    assert depth + 2 * part < peaks[2] < depth + 2 * part + 4 + slack  # full gradients: one made, some on their way
    assert 2 * part < peaks[3] < 2 * part + 2 + 4 + slack  # full weights: one used, one ahead


def stored_bytes(parameter: Parameter) -> int:
    """Of all ranks together, padding included."""
    elements = torch.Size(stored_shape(parameter)).numel() * parameter.zero
    return elements * 8


def gathered_bytes(job: autopar.ParallelModel) -> int:
    """Of a step under ZeRO 3 on one pipeline rank: every pass gathers every unit but those still there."""
    (program,), (module,) = [s.program for s in job.programs.stages], job.modules(0)
    unit_of = units(module, program.parameters, program.spanning)
    trained = [p for p in program.parameters if p.trainable]
    size = {n: sum(map(stored_bytes, ps)) for n, ps in groupby(trained, lambda p: unit_of[p.name])}
    roots, numbers = size.pop(-1, 0), sorted(size)
    first = [n for n in numbers if n <= min(m for m in numbers if m % 2) + 1]  # up to the second layer
    last = [n for n in numbers if n >= max(m for m in numbers if m % 2) - 1]
    total = 0
    (row,) = job.schedule.lists
    follows = {b: a for a, b in followers(row).items() if b is not None}
    for action in followers(row):
        still_there = roots + sum(size[n] for n in (first if action.kind == "F" else last))
        total += roots + sum(size.values()) - (still_there if action in follows else 0)
    return total


def check_sent(compiled: Callable[[int], autopar.ParallelModel], microbatches: int) -> None:
    """Beside what is sent without ZeRO: gathers and reduce-scatters as the formulas say, instead of the all-reduce."""
    jobs = {zero: compiled(zero) for zero in (0, 1, 2, 3)}
    sent = {zero: sent_bytes(job) for zero, job in jobs.items()}
    parameters = [p for p in jobs[1].programs.stages[0].program.parameters if p.trainable]
    part = sum(map(stored_bytes, parameters)) // 2  # one gather of everything, or one reduce-scatter, on two ranks
    rest = sent[0] - sum(8 * torch.Size(p.shape).numel() for p in parameters)  # an all-reduce sends all of it once
    assert sent[1] == rest + 2 * part
    assert sent[2] == rest + (1 + microbatches) * part
    assert sent[3] == rest + gathered_bytes(jobs[3]) // 2 + microbatches * part


def sent_bytes(job: autopar.ParallelModel) -> int:
    def program(rank: int) -> None:
        start(job.job, job.job.axes(rank, "cpu")).step(batch)

    batch = batch_of(job)
    return simulate.run(program, 2).sent_bytes[0]["dp"]


class _Scaled(nn.Module):
    """A layer with a factor that others use: a buffer, or one that is trained."""

    def __init__(self, width: int, *, trained: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        if trained:
            self.scale = nn.Parameter(torch.rand(width))
        else:
            self.register_buffer("scale", torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class _ScaledFirst(nn.Module):
    """What is computed before the layers uses factors of theirs."""

    def __init__(self, width: int, *, trained: bool) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(_Scaled(width, trained=trained) for _ in range(4))
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x * layer.scale
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def scaled_first(*, trained: bool) -> Case:
    torch.manual_seed(0)
    return Case(_ScaledFirst(8, trained=trained), {"x": torch.randn(8, 8)})


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize("trained", [False, True])
def test_what_layers_have_may_be_read_before_them(trained: bool, mesh: dict[str, int]) -> None:
    check(partial(scaled_first, trained=trained), mesh, zero=3, microbatches=2)


def test_rows_of_layers_are_folded_whoever_reads_their_buffers() -> None:
    with Float64():
        case = prepared(partial(scaled_first, trained=False))
        job = compile_pinned(case.model, 2, sample=case.batch, mesh={"dp": 2}, zero=3, cluster=FAST)
        assert 'Parameter(f"layers.{i}.scale"' in job.source(0)


def test_what_is_sent() -> None:
    check_sent(lambda zero: layers_job(2, depth=4, width=5, microbatches=3, zero=zero), 3)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_what_a_model_with_code_between_its_layers_sends(tied: bool, microbatches: int) -> None:
    with Float64():
        case = prepared(lambda: llama(6, layers=2, tied=tied, vocabulary=ODD))
        options: dict[str, Any] = {"mesh": {"dp": 2}, "cluster": FAST, "microbatches": microbatches}
        check_sent(lambda zero: compile_pinned(case.model, 2, sample=case.batch, zero=zero, **options), microbatches)


def test_a_list_without_gathers_is_refused_before_anything_is_computed() -> None:
    job = layers_job(2, depth=2, width=4, microbatches=1, zero=1)
    lists = tuple(tuple(a for a in row if a.kind != "GATHER") for row in job.schedule.lists)
    changed = replace(job.job, schedule=replace(job.schedule, lists=lists))

    def program(rank: int) -> None:
        executor = start(changed, changed.axes(rank, "cpu"))
        with pytest.raises(ScheduleError, match="needs its GATHER actions"):
            executor.step(batch_of(job))

    simulate.run(program, 2)
