"""Gradient buckets and the global norm."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import MismatchError
from autopar.mesh import Mesh
from autopar.runtime import Axes, Axis, Parameter, Program, buckets
from autopar.runtime.clip import clip_, global_norm
from autopar.runtime.grads import Reducer, launch_shared, reduce_groups, reduce_ranks
from autopar.runtime.job import start
from autopar.schedules.weight_moves import MessageSizes
from tests.models import make
from tests.pinned import compile_pinned
from tests.runtime.ranks import on_ranks

NAMES = ("a", "b", "c", "d")


class Chain(nn.Module):
    """d(c(b(a(x)))), elementwise; the backward reaches d first."""

    def __init__(self, names: tuple[str, ...] = NAMES, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.full((4,), 2.0, dtype=dtype)))
        self.used = names

    def forward(self, x: Tensor) -> Tensor:
        for name in self.used:
            x = x * self.get_parameter(name)
        return x.sum()


def reducer_of(axes: Axes, module: Chain, *, bucket_bytes: int = 64, reduce: tuple[str, ...] = ("dp",)) -> Reducer:
    dtype = str(module.a.dtype).removeprefix("torch.")
    specs = tuple(Parameter(name, (4,), (4,), dtype, {}, reduce) for name, _ in module.named_parameters())
    program = Program(0, 1, axes.mesh.to_json(), 1, (), (), (), (), specs)
    return Reducer(module, program, reduce_groups([program], axes, (0,)), axes, (0,), MessageSizes(1, bucket_bytes))


def storages(module: nn.Module) -> list[int]:
    return [p.grad.untyped_storage().data_ptr() for p in module.parameters() if p.grad is not None]


def test_gradients_are_views_of_buckets_filled_from_the_last_parameter() -> None:
    def program(axes: Axes) -> list[int]:
        module = Chain()
        reducer = reducer_of(axes, module, bucket_bytes=96)  # three gradients of 32 bytes
        module(torch.ones(4, dtype=torch.float64)).backward()
        assert len(reducer.buckets) == 2
        at = storages(module)
        return [at.index(storage) for storage in at]

    assert on_ranks(Mesh(dp=2), program)[0] == [0, 1, 1, 1]


def test_a_small_model_still_has_buckets_to_overlap() -> None:
    def program(axes: Axes) -> int:
        module = nn.Module()
        for i in range(16):
            module.register_parameter(f"w{i}", nn.Parameter(torch.ones(2**18)))  # 1 MiB each
        names = [name for name, _ in module.named_parameters()]
        specs = tuple(Parameter(name, (2**18,), (2**18,), "float32", {}, ("dp",)) for name in names)
        program = Program(0, 1, axes.mesh.to_json(), 1, (), (), (), (), specs)
        reducer = Reducer(module, program, reduce_groups([program], axes, (0,)), axes, (0,))
        torch.stack([p.sum() for p in module.parameters()]).sum().backward()
        assert len(reducer.buckets) == len(set(storages(module)))
        return len(reducer.buckets)

    assert on_ranks(Mesh(dp=2), program) == [8, 8]


def test_buckets_of_the_last_backward_are_summed_while_it_runs(sums: list[list[str]]) -> None:
    def program(axes: Axes) -> None:
        module, events = Chain(), sums[axes.rank]
        reducer = reducer_of(axes, module)  # two buckets: d and c, b and a
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda _, name=name: events.append(name))  # type: ignore[misc]
        module(torch.ones(4, dtype=torch.float64)).backward()
        reducer.expect(last=True)
        module(torch.ones(4, dtype=torch.float64)).backward()
        events.append("end")
        reducer.launch()
        reducer.wait()

    on_ranks(Mesh(dp=2), program)
    assert sums[:2] == [["d", "c", "b", "a", "d", "c", "sum", "b", "a", "sum", "end"]] * 2


def test_sums_start_in_the_order_of_the_buckets_whichever_is_complete_first(sums: list[list[str]]) -> None:
    def program(axes: Axes) -> None:
        module = Chain()
        reducer = reducer_of(axes, module)
        module.used = NAMES[::-1]  # the backward completes a and b first, in the second bucket
        for name, parameter in module.named_parameters():
            parameter.register_hook(lambda _, name=name: sums[axes.rank].append(name))  # type: ignore[misc]
        reducer.expect(last=True)
        module(torch.ones(4, dtype=torch.float64)).backward()

    on_ranks(Mesh(dp=2), program)
    assert sums[0] == ["a", "b", "c", "d", "sum", "sum"]


def test_ranks_that_sum_equal_gradients_in_another_order_are_told() -> None:
    def program(axes: Axes) -> None:
        modules = [Chain(("a", "b")), Chain(("a", "c"))]
        reducers = [reducer_of(axes, module, bucket_bytes=32) for module in modules]
        for module in modules:
            module(torch.ones(4, dtype=torch.float64)).backward()
        for reducer in reducers if axes.rank == 0 else reducers[::-1]:
            reducer.launch()

    with pytest.raises(MismatchError, match=r"\('gradients of b' and 'gradients of c'\)"):
        on_ranks(Mesh(dp=2), program)


def test_a_rank_that_did_not_use_a_parameter_adds_nothing_to_its_sum() -> None:
    def program(axes: Axes) -> dict[str, list[float]]:
        module = Chain()
        reducer = reducer_of(axes, module)
        for used in (NAMES, ("a", "c", "d") if axes.rank == 0 else NAMES):
            module.used = used
            reducer.zero()
            reducer.expect(last=True)
            module(torch.ones(4, dtype=torch.float64)).backward()
            reducer.launch()
            reducer.wait()
        return {name: grad.tolist() for name, grad in reducer.gradients().items()}

    first, second = on_ranks(Mesh(dp=2), program)
    assert second == {"a": [12.0] * 4, "b": [8.0] * 4, "c": [12.0] * 4, "d": [12.0] * 4}
    assert first == {name: grad for name, grad in second.items() if name != "b"}


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Per rank, "sum" for every sum that a reducer starts."""
    events: list[list[str]] = [[], []]
    original = buckets.reduce_sum_

    def recorded(x: Tensor, axis: Axis, *, async_op: bool = False) -> object:
        events[axis.index].append("sum")
        return original(x, axis, async_op=async_op)

    monkeypatch.setattr(buckets, "reduce_sum_", recorded)
    return events


@pytest.mark.parametrize("zero", ["reducer", "to none", "in place"])
def test_gradients_stay_in_their_buckets_whatever_zeroes_them(zero: str) -> None:
    def program(axes: Axes) -> int:
        module = Chain()
        reducer = reducer_of(axes, module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        places = set()
        for step in range(3):
            x = torch.full((4,), float(axes.rank + step), dtype=torch.float64)
            module(x).backward()
            reducer.expect(last=True)
            module(x).backward()
            reducer.launch()
            reducer.wait()
            for gradient in reducer.gradients().values():
                assert gradient.tolist() == [16.0 * (1 + 2 * step)] * 4
            places.add(tuple(storages(module)))
            if zero == "reducer":
                reducer.zero()
            else:
                optimizer.zero_grad(set_to_none=zero == "to none")
        return len(places)

    assert on_ranks(Mesh(dp=2), program) == [1, 1]


def test_a_parameter_without_gradient_does_not_hold_up_its_bucket() -> None:
    def program(axes: Axes) -> dict[str, list[float]]:
        module = Chain()
        reducer = reducer_of(axes, module)
        module.used = ("a", "c", "d")
        reducer.expect(last=True)
        module(torch.ones(4, dtype=torch.float64)).backward()
        reducer.launch()
        reducer.wait()
        return {name: grad.tolist() for name, grad in reducer.gradients().items()}

    assert on_ranks(Mesh(dp=2), program)[1] == {name: [8.0] * 4 for name in "acd"}


def test_copies_of_tied_weights_share_buckets_however_large_their_stages_are() -> None:
    def program(axes: Axes) -> list[float]:
        stage, module, large = axes["pp"].index, nn.Module(), 2**18  # 1 MiB each
        for name in ("x", "y", *(f"w{i}" for i in range(16 * (1 - stage)))):
            module.register_parameter(name, nn.Parameter(torch.ones(large)))
        specs = tuple(
            Parameter(name, (large,), (large,), "float32", shared_stages=(0, 1) if name in "xy" else ())
            for name, _ in module.named_parameters()
        )
        program = Program(stage, 2, axes.mesh.to_json(), 1, (), (), (), (), specs)
        reducer = Reducer(module, program, reduce_groups([program], axes, (0, 1)), axes, (0, 1))
        reducer.expect(last=True)
        torch.stack([p.sum() * (stage + 1) for p in module.parameters()]).sum().backward()
        reducer.launch()
        launch_shared([reducer])
        reducer.wait()
        return [reducer.gradients()[name][-1].item() for name in "xy"]

    assert on_ranks(Mesh(pp=2), program) == [[3.0, 3.0], [3.0, 3.0]]


def test_weights_of_several_stages_are_summed_in_one_order_on_all_ranks() -> None:
    """In a V of four stages, 0 and 2 have ``x``, 1 and 3 ``y``: the first rank ends with 3 and 0, the other with 2 and
    1. Both have one shape, so that nothing but the values tells one sum from the other."""
    placement, shared = (0, 1, 1, 0), {0: ("x", (0, 2)), 1: ("y", (1, 3)), 2: ("x", (0, 2)), 3: ("y", (1, 3))}

    def program(axes: Axes) -> dict[str, float]:
        modules, programs = {}, {}
        for stage in (3, 0) if axes["pp"].index == 0 else (2, 1):
            name, stages = shared[stage]
            modules[stage] = nn.Module()
            modules[stage].register_parameter(name, nn.Parameter(torch.ones(4)))
            specs = (Parameter(name, (4,), (4,), "float32", shared_stages=stages),)
            programs[stage] = Program(stage, 4, axes.mesh.to_json(), 1, (), (), (), (), specs)
        groups = reduce_groups(programs.values(), axes, placement)
        reducers = {s: Reducer(modules[s], programs[s], groups, axes, placement) for s in modules}
        for stage, reducer in reducers.items():
            reducer.expect(last=True)
            (next(modules[stage].parameters()).sum() * 10**stage).backward()
            reducer.launch()
        launch_shared(reducers.values())
        for reducer in reducers.values():
            reducer.wait()
        return {name: g[0].item() for reducer in reducers.values() for name, g in reducer.gradients().items()}

    assert on_ranks(Mesh(pp=2), program) == [{"x": 101.0, "y": 1010.0}] * 2


def test_nothing_is_summed_where_nothing_is_pending(sums: list[list[str]]) -> None:
    axes = Axes.build(Mesh(), 0, "cpu")
    module = Chain()
    reducer = reducer_of(axes, module)
    reducer.expect(last=True)
    module(torch.ones(4, dtype=torch.float64)).backward()
    reducer.launch()
    reducer.wait()
    assert sums == [[], []]
    assert reducer.gradients()["a"].tolist() == [8.0] * 4


MESH = Mesh(pp=4, dp=2, tp=2)


@pytest.mark.parametrize(
    ("reduce", "shared", "ranks"),
    [
        ((), (), (5,)),
        (("dp",), (), (5, 7)),
        (("tp",), (), (4, 5)),
        (("tp", "dp"), (), (4, 5, 6, 7)),
        ((), (0, 1), (1, 5)),
        (("dp",), (1, 3), (5, 7, 13, 15)),
    ],
)
def test_who_sums(reduce: tuple[str, ...], shared: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    axes = Axes.alone(MESH, 5, "cpu")
    parameter = Parameter("w", (4,), (4,), "float32", {}, reduce, shared_stages=shared)
    assert reduce_ranks(parameter, axes, (0, 1, 2, 3)) == ranks


def test_placement_says_where_tied_stages_are() -> None:
    axes = Axes.alone(MESH, 5, "cpu")
    parameter = Parameter("w", (4,), (4,), "float32", shared_stages=(0, 7))
    assert reduce_ranks(parameter, axes, (0, 1, 2, 3, 3, 2, 1, 1)) == (1, 5)
    assert reduce_ranks(parameter, axes, (1, 0, 3, 2, 2, 3, 0, 1)) == (5,)  # both are here: one Parameter


def test_groups_are_named_after_all_their_axes() -> None:
    def program(axes: Axes) -> list[str | None]:
        specs = (
            Parameter("both", (4,), (4,), "float32", {}, ("dp", "tp")),
            Parameter("tied", (4,), (4,), "float32", {}, ("dp",), shared_stages=(0, 1)),
            Parameter("plain", (4,), (4,), "float32", {}, ("dp",)),
        )
        program = Program(axes["pp"].index, 2, axes.mesh.to_json(), 1, (), (), (), (), specs)
        groups = reduce_groups([program], axes, (0, 1))
        found = [groups[reduce_ranks(spec, axes, (0, 1))] for spec in specs]
        return [axis.group.group_desc if axis.group else None for axis in found]

    names = on_ranks(Mesh(pp=2, dp=2, tp=2), program)
    assert names == [["mesh_dp_tp", "mesh_pp_dp", "mesh_dp"]] * 8


def norm_program(kind: str, dtype: torch.dtype) -> Callable[[Axes], tuple[float, float, float]]:
    """A gradient of 3.0 in every element of ``a``, whole or split over tp, equal over dp."""

    def program(axes: Axes) -> tuple[float, float, float]:
        module = Chain(("a",), dtype)
        spec = Parameter("a", (4,), (4,), str(dtype).removeprefix("torch."), {"tp": kind})
        program = Program(0, 1, axes.mesh.to_json(), 1, (), (), (), (), (spec,))
        reducer = Reducer(module, program, reduce_groups([program], axes, (0,)), axes, (0,))
        module(torch.full((4,), 3.0, dtype=dtype)).backward()
        norm, before = global_norm({0: reducer}, axes).item(), clip_({0: reducer}, axes, 1.5)
        return norm, before.item(), module.a.grad[0].item()  # type: ignore[index]

    return program


@pytest.mark.parametrize(("kind", "elements"), [("I", 4), ("R", 4), ("S(0)", 8), ("S(0,2)", 8)])
def test_every_element_counts_once(kind: str, elements: int) -> None:
    norm = 3.0 * elements**0.5
    clipped = 3.0 * 1.5 / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
    for found in on_ranks(Mesh(dp=2, tp=2), norm_program(kind, torch.float64)):
        assert found == pytest.approx((norm, norm, clipped), rel=1e-14)


def test_the_norm_of_low_precision_gradients_is_accumulated_in_float32() -> None:
    module = Chain(("a",), torch.bfloat16)
    module.a = nn.Parameter(torch.ones(3001, dtype=torch.bfloat16))
    axes = Axes.build(Mesh(), 0, "cpu")
    reducer = reducer_of(axes, module)
    module(torch.ones(3001, dtype=torch.bfloat16)).backward()
    assert global_norm({0: reducer}, axes).item() == pytest.approx(3001**0.5, rel=1e-6)


def test_small_gradients_are_not_scaled_up() -> None:
    axes = Axes.build(Mesh(), 0, "cpu")
    module = Chain(("a",))
    reducer = reducer_of(axes, module)
    module(torch.ones(4, dtype=torch.float64)).backward()
    assert clip_({0: reducer}, axes, 100.0).item() == 2.0
    assert reducer.gradients()["a"].tolist() == [1.0] * 4


def test_weights_of_a_job_that_is_no_more_are_freed() -> None:
    """Tensors' hooks hold what Python's collector doesn't see."""
    case = make("mlp", 8, torch.float32)
    job = compile_pinned(case.model, 1, sample=case.batch, precision="bf16").job
    executor = start(job, job.axes(0, "cpu"))
    masters = [weakref.ref(master) for master in executor.masters.values()]
    del executor, job
    gc.collect()
    assert [master() for master in masters] == [None] * len(masters)


@pytest.mark.parametrize("sums_twice", [False, True])
def test_others_wait_for_terms_alone(*, sums_twice: bool) -> None:
    """What was sent in the last backward is let go of by what other stages send, but for a sum that follows it."""
    bucket = SimpleNamespace(armed=True, started=True, per_pass=True, sums_twice=sums_twice, reduce=lambda: None)
    reducer, flying = Reducer.__new__(Reducer), deque([bucket])
    vars(reducer).update(_buckets=[bucket], _shared=[], _flying=flying)
    reducer.launch()
    assert list(flying) == ([] if sums_twice else [bucket])
    assert not bucket.armed


def test_a_message_that_is_sent_again_isn_t_waited_for_as_an_older_one() -> None:
    """Of a stage that sends a single one in each backward; it settles what it sent before when it starts."""
    settled: list[str] = []
    buckets = [
        SimpleNamespace(per_pass=True, start=lambda: None, settle=partial(settled.append, name)) for name in "abc"
    ]
    flying: deque[Any] = deque()
    for times, bucket in zip((4, 2, 1), buckets, strict=True):
        reducer = Reducer.__new__(Reducer)
        vars(reducer).update(_buckets=buckets, _flying=flying)
        for _ in range(times):
            reducer._start(bucket)
    assert settled == ["a"]
    assert list(flying) == buckets[1:]
