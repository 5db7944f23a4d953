"""Masters and working copies: how they are made of each other, and when their memory is there."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar import simulate
from autopar.errors import ScheduleError
from autopar.mesh import Mesh
from autopar.runtime import Axes, Parameter, Program, declare
from autopar.runtime.grads import Reducer, reduce_groups
from autopar.runtime.modules import dtype_of
from autopar.runtime.store import Copy, Departures, Store
from autopar.runtime.streaming import Streaming
from autopar.runtime.units import SPANNING, layers, units
from autopar.runtime.weights import StateSource, materialize, unshard
from autopar.schedules.weight_moves import MESSAGES, MessageSizes
from tests.runtime.ranks import on_ranks

WIDTH, DEPTH = 5, 3


class Layer(nn.Module):
    def __init__(self, shape: tuple[int, ...] = (WIDTH, WIDTH), dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        declare(self, "weight", shape, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight.t())


class Stage(nn.Module):
    """``scale``, some layers, ``shift``; ``scale`` may be used again at the end."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, again: bool = False) -> None:
        super().__init__()
        declare(self, "scale", (WIDTH,), dtype)
        for i in range(DEPTH):
            declare(self, f"layers.{i}", Layer(dtype=dtype))
        declare(self, "shift", (WIDTH,), dtype)
        self.again, self.recomputes = again, False

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for i in range(DEPTH):
            layer = self.layers[i]
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        x = x + self.shift
        return (x * self.scale if self.again else x).square().sum()


SHAPES: dict[str, tuple[int, ...]] = {
    "scale": (WIDTH,),
    **{f"layers.{i}.weight": (WIDTH, WIDTH) for i in range(DEPTH)},
    "shift": (WIDTH,),
}


def state(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()}


def program_of(mesh: Mesh, zero: int, dtype: str = "float64", master: str = "", *, spanning: bool = False) -> Program:
    specs = tuple(
        Parameter(name, shape, shape, dtype, reduce=("dp",), master=master, zero=zero) for name, shape in SHAPES.items()
    )
    program = Program(0, 1, mesh.to_json(), 1, (), (), (), (), specs)
    return replace(program, spanning=("scale",) if spanning else ())


APART = MessageSizes(part_bytes=1)
"""Everything is large, and travels by itself."""

PAIRS = MessageSizes(part_bytes=2**20, bucket_bytes=1, least_bytes=2 * 8 * WIDTH * WIDTH)
"""Everything is small; two layers are a message."""


def load(axes: Axes, program: Program, **options: Any) -> Store:
    first = program.parameters[0]
    module = Stage(dtype_of(first.dtype), again=bool(program.spanning))
    source = StateSource(state(dtype_of(first.master or first.dtype)))
    return Store.load(module, program, axes, source, **options)


@pytest.mark.parametrize("zero_ranks", [0, 2])
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize(("dtype", "master"), [("float64", ""), ("bfloat16", "float32")])
@pytest.mark.parametrize("sizes", [MESSAGES, APART, PAIRS])
def test_copies_are_whole_whatever_is_stored(
    sizes: MessageSizes, dtype: str, master: str, host: bool, zero_ranks: int
) -> None:
    mesh = Mesh(dp=4)

    def program(rank: int) -> dict[str, Tensor]:
        axes = Axes.build(mesh, rank, "cpu", zero_ranks=zero_ranks)
        store = load(axes, program_of(mesh, zero_ranks or 4, dtype, master), host=host, sizes=sizes)
        store.gather()
        store.ready()
        wanted = state(dtype_of(master or dtype))
        for name, parameter in store.module.named_parameters():
            assert torch.equal(parameter, wanted[name].to(dtype_of(dtype))), name
            assert store.masters[name].dtype == dtype_of(master or dtype)
            assert store.masters[name].shape[0] == -(-WIDTH // (zero_ranks or 4))  # 5 rows on 4 ranks: 2, 2, 1, 0
        return {name: master.detach() for name, master in store.masters.items()}

    stored = simulate.run(program, 4).results
    for spec in program_of(mesh, zero_ranks or 4, dtype, master).parameters:
        shards = [(mesh.coordinates(rank), stored[rank][spec.name]) for rank in range(4)]
        assert torch.equal(unshard(spec, shards), state(dtype_of(master or dtype))[spec.name])


def test_a_weight_that_is_stored_as_it_is_used_is_its_own_master() -> None:
    axes = Axes.build(Mesh(), 0, "cpu")
    store = load(axes, program_of(Mesh(), 1))
    assert not store.copies
    assert all(store.masters[name] is p for name, p in store.module.named_parameters())
    store.ready()  # there is nothing to gather


def test_scalars_are_stored_whole() -> None:
    axes = Axes.alone(Mesh(dp=2), 1, "cpu")
    module = nn.Module()
    declare(module, "scale", (), torch.float64)
    scalar = Parameter("scale", (), (), "float64", reduce=("dp",))
    program = Program(0, 1, Mesh(dp=2).to_json(), 1, (), (), (), (), (scalar,))
    store = Store.load(module, program, axes, StateSource({"scale": torch.tensor(3.0, dtype=torch.float64)}))
    assert store.masters["scale"].item() == 3


def test_units_are_layers_and_the_code_between_them() -> None:
    module = Stage()
    specs = [Parameter(name, shape, shape, "float64") for name, shape in SHAPES.items()]
    assert list(units(module, specs).values()) == [0, 1, 3, 5, 6]
    assert units(module, specs, ("scale",))["scale"] == SPANNING
    layer = next(path for path, _ in layers(module))
    buffer = Parameter(f"{layer}.table", (4,), (4,), "float64", trainable=False, is_buffer=True)
    assert units(module, [buffer, *specs]) == units(module, specs), "the stage's own code may read it first"


# Streaming: what is there when.


def there(store: Store) -> list[str]:
    """The copies that have memory now."""
    return [name for name, copy in store.copies.items() if copy.whole.untyped_storage().nbytes()]


def watched(store: Store, seen: list[list[str]]) -> None:
    """Notes what is there in the forward and in the backward of each layer."""
    for i in range(DEPTH):
        layer = store.module.get_submodule(f"layers.{i}")
        layer.register_forward_hook(lambda *_: seen.append(there(store)))
        layer.weight.register_hook(lambda _: seen.append(there(store)))


def on_two(check: Callable[[Axes, Store], None], **options: bool) -> None:
    def program(axes: Axes) -> None:
        check(axes, load(axes, program_of(axes.mesh, 2, **options), resident=False))

    on_ranks(Mesh(dp=2), program)


X = torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH)
LAYERS = [f"layers.{i}.weight" for i in range(DEPTH)]


def test_one_layer_and_the_next_are_there() -> None:
    def check(axes: Axes, store: Store) -> None:
        stream, seen = Streaming(store), list[list[str]]()
        watched(store, seen)
        assert there(store) == []
        stream.prefetch("F")
        assert there(store) == ["scale", LAYERS[0]]
        with stream.running("F", ""):
            loss = store.module(X)
        assert there(store) == []
        with stream.running("B", ""):
            loss.backward()
        assert there(store) == []
        forward = [LAYERS[0:2], [*LAYERS[1:3], "shift"], [LAYERS[2], "shift"]]
        backward = [LAYERS[1:3], ["scale", *LAYERS[0:2]], ["scale", LAYERS[0]]]
        assert seen == [*forward, *backward]

    on_two(check)


def test_what_the_next_pass_begins_with_stays() -> None:
    def check(axes: Axes, store: Store) -> None:
        stream = Streaming(store)
        with stream.running("F", "B"):
            loss = store.module(X)
        assert there(store) == [LAYERS[2], "shift"]
        with stream.running("B", "F"):
            loss.backward()
        assert there(store) == ["scale", LAYERS[0]]
        with stream.running("F", "F"):
            store.module(X)
        assert there(store) == ["scale", LAYERS[0]]  # gathered again behind the last layer
        with stream.running("F", ""):
            store.module(X)
        assert there(store) == []

    on_two(check)


def test_what_several_calls_use_is_there_for_the_whole_pass() -> None:
    def check(axes: Axes, store: Store) -> None:
        stream, seen = Streaming(store), list[list[str]]()
        watched(store, seen)
        with stream.running("F", ""):
            loss = store.module(X)
        with stream.running("B", ""):
            loss.backward()
        assert all("scale" in names for names in seen)

    on_two(check, spanning=True)


def test_hooks_keep_no_activation() -> None:
    def check(axes: Axes, store: Store) -> None:
        stream, made = Streaming(store), list[weakref.ref[Tensor]]()
        for i in range(DEPTH):
            layer = store.module.get_submodule(f"layers.{i}")
            layer.register_forward_hook(lambda _, __, x: made.append(weakref.ref(x)))
        with stream.running("F", "B"):
            loss = store.module(X)
        with stream.running("B", ""):
            loss.backward()
        del loss
        gc.collect()
        assert len(made) == DEPTH
        assert all(ref() is None for ref in made)

    on_two(check)


def gradients(recompute: bool) -> tuple[dict[str, Tensor], list[int]]:
    """Of one rank, and how many units were gathered in forward and backward."""
    started: list[int] = []

    def program(axes: Axes) -> dict[str, Tensor]:
        store = load(axes, program_of(axes.mesh, 2), resident=False)
        stream, module = Streaming(store), store.module
        module.recomputes = recompute  # type: ignore[assignment]
        for unit, _ in store.sequence:
            start = unit.start
            unit.start = lambda start=start: (started.append(axes.rank), start())[1]  # type: ignore[method-assign]
        with stream.running("F", ""):
            loss = module(X)
        with stream.running("B", ""):
            loss.backward()
        return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}

    return on_ranks(Mesh(dp=2), program)[0], started


def test_recomputation_inside_of_a_backward_neither_gathers_nor_frees() -> None:
    plain, count = gradients(recompute=False)
    again, recount = gradients(recompute=True)
    assert recount == count
    assert count.count(0) == 2 * (DEPTH + 2)
    whole = Stage()
    whole.load_state_dict(state(), assign=True)
    for parameter in whole.parameters():
        parameter.requires_grad_()
    whole(X).backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(plain[name], parameter.grad, rtol=1e-14, atol=1e-14)
        assert torch.equal(plain[name], again[name])


# Gradients of masters.


def reduced(
    axes: Axes, zero: int, *, dtype: str = "float64", master: str = "", scatters: bool, host: bool = False
) -> Mapping[str, Tensor]:
    """Of three microbatches of rank ``r``, ``r + 1`` times a gradient of ones each."""
    program = program_of(axes.mesh, zero, dtype, master)
    store = load(axes, program, host=host)
    reducer = Reducer(
        store.module,
        program,
        reduce_groups([program], axes, (0,)),
        axes,
        (0,),
        masters=store.masters,
        scatters=scatters,
    )
    for microbatch in range(3):
        reducer.expect(last=microbatch == 2)
        total = sum((p * (axes.rank + 1)).sum() for p in store.module.parameters())
        total.backward()  # type: ignore[union-attr]
        if scatters:
            reducer.scatter()
            assert all(p.grad is None for p in store.module.parameters())
    reducer.launch()
    reducer.wait()
    found = dict(reducer.gradients())
    reducer.zero()
    assert all(p.grad is None for p in store.masters.values())
    return found


@pytest.mark.parametrize("scatters", [False, True])
@pytest.mark.parametrize("zero_ranks", [0, 2])
@pytest.mark.parametrize(("dtype", "master"), [("float64", ""), ("bfloat16", "float32")])
@pytest.mark.parametrize("host", [False, True])
def test_masters_get_the_sum_of_their_rows(
    host: bool, dtype: str, master: str, zero_ranks: int, scatters: bool
) -> None:
    def program(rank: int) -> None:
        axes = Axes.build(Mesh(dp=4), rank, "cpu", zero_ranks=zero_ranks)
        zero = zero_ranks or 4
        found = reduced(axes, zero, dtype=dtype, master=master, scatters=scatters, host=host)
        rows = -(-WIDTH // zero)
        real = max(0, min(rows, WIDTH - rank % zero * rows))
        for gradient in found.values():
            assert gradient.dtype == dtype_of(master or dtype)
            assert gradient.shape[0] == rows
            assert torch.all(gradient[:real] == 3 * (1 + 2 + 3 + 4))
            assert not torch.any(gradient[real:])

    simulate.run(program, 4)


def test_microbatches_add_up_in_the_masters_dtype() -> None:
    """300 times 1 in bfloat16 is 256: the sum must not be made there."""
    axes = Axes.build(Mesh(), 0, "cpu")
    program = program_of(Mesh(), 1, "bfloat16", "float32")
    store = load(axes, program)
    groups = reduce_groups([program], axes, (0,))
    reducer = Reducer(store.module, program, groups, axes, (0,), masters=store.masters)
    for microbatch in range(300):
        reducer.expect(last=microbatch == 299)
        torch.stack([p.sum() for p in store.module.parameters()]).sum().backward()
    reducer.launch()
    reducer.wait()
    assert all(torch.all(g == 300) for g in reducer.gradients().values())


def test_a_copy_knows_its_memory() -> None:
    axes = Axes.alone(Mesh(dp=4), 0, "cpu")
    spec = Parameter("w", (5, 3), (5, 3), "bfloat16", master="float32", zero=4)
    copy = Copy.of(spec, torch.zeros(2, 3), axes, host=False, resident=False)
    assert copy.nbytes == 4 * 2 * 3 * 2
    assert copy.whole.untyped_storage().nbytes() == 0
    assert copy.working.shape == (5, 3)


def test_layers_of_the_first_forward_wait_for_their_own_weights_alone() -> None:
    """When a layer is reached, what it uses is there, and the weights of later ones are still on their way."""
    mesh = Mesh(dp=4)

    def program(rank: int) -> tuple[list[int], Tensor]:
        store = load(Axes.build(mesh, rank, "cpu"), program_of(mesh, 4), sizes=APART)
        layers = [layer for _, layer in store.sequence if layer is not None]
        coming: list[int] = []
        for microbatch in range(2):
            if not microbatch:
                store.gather()
            with store.arriving():
                hooks = [
                    layer.register_forward_pre_hook(
                        lambda *_: coming.append(sum(unit.is_under_way for unit, _ in store.sequence))
                    )
                    for layer in layers
                ]
                loss = store.module(torch.ones(2, WIDTH, dtype=torch.float64))
            assert not any(unit.is_under_way for unit, _ in store.sequence)
            for hook in hooks:
                hook.remove()
        assert not any(layer._forward_pre_hooks for layer in layers)
        return coming, loss.detach()

    whole = Stage()
    materialize(whole, program_of(Mesh(), 1), lambda spec: nn.Parameter(state()[spec.name]))
    expected = whole(torch.ones(2, WIDTH, dtype=torch.float64)).detach()
    for coming, loss in simulate.run(program, 4).results:
        assert coming == [3, 2, 0, 0, 0, 0]  # with the last layer, the code behind it
        assert torch.equal(loss, expected)


def test_layers_of_the_first_forward_wait_for_the_message_that_they_are_in() -> None:
    """``scale`` and two layers are one, the last layer and ``shift`` the other, which is there with the last layer."""
    mesh = Mesh(dp=4)

    def program(rank: int) -> tuple[list[int], Tensor]:
        store = load(Axes.build(mesh, rank, "cpu"), program_of(mesh, 4), sizes=PAIRS)
        coming: list[int] = []
        store.gather()
        for i in range(DEPTH):
            layer = store.module.get_submodule(f"layers.{i}")
            layer.register_forward_hook(lambda *_: coming.append(sum(u.is_under_way for u, _ in store.sequence)))
        with store.arriving():
            loss = store.module(X)
        assert [[copy.spec.name for copy in unit.copies] for unit, _ in store.sequence] == [
            ["scale", *LAYERS[:2]],
            [LAYERS[2], "shift"],
        ]
        return coming, loss.detach()

    whole = Stage()
    materialize(whole, program_of(Mesh(), 1), lambda spec: nn.Parameter(state()[spec.name]))
    found = simulate.run(program, 4)
    for coming, loss in found.results:
        assert coming == [1, 1, 0]
        assert torch.equal(loss, whole(X).detach())
    assert {sent.calls for traffic in found.traffic for sent in traffic if sent.operation == "all_gather"} == {2}


class Pair(nn.Module):
    """Two weights."""

    def __init__(self) -> None:
        super().__init__()
        declare(self, "up", (WIDTH, WIDTH), torch.float64)
        declare(self, "down", (WIDTH, WIDTH), torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.up.t()) @ self.down


class Pairs(nn.Module):
    def __init__(self, depth: int = DEPTH) -> None:
        super().__init__()
        self.depth = depth
        for i in range(depth):
            declare(self, f"layers.{i}", Pair())

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.depth):
            x = self.layers[i](x)
        return x.square().sum()


def pairs(depth: int = DEPTH) -> tuple[Program, dict[str, Tensor]]:
    """For two ranks, with values of the weights."""
    names = [f"layers.{i}.{name}" for i in range(depth) for name in ("up", "down")]
    specs = tuple(Parameter(name, (WIDTH, WIDTH), (WIDTH, WIDTH), "float64", zero=2) for name in names)
    random = torch.Generator().manual_seed(0)
    values = {name: torch.randn(WIDTH, WIDTH, generator=random, dtype=torch.float64) for name in names}
    return Program(0, 1, Mesh(dp=2).to_json(), 1, (), (), (), (), specs), values


def test_few_messages_are_under_way_where_they_need_memory_twice() -> None:
    """Of five of one store and one of another, in order; a wait for a late one waits for those before it."""
    single = MessageSizes(part_bytes=2**20, bucket_bytes=1, least_bytes=1)

    def program(rank: int) -> None:
        axes, departures = Axes.build(Mesh(dp=2), rank, "cpu"), Departures(twice_bytes=1)
        stores, shared = [], {"departures": departures, "sizes": single}
        for depth in (5, 1):
            program, values = pairs(depth)
            stores.append(Store.load(Pairs(depth), program, axes, StateSource(values), **shared))  # type: ignore[arg-type]
        first, second = ([unit for unit, _ in store.sequence] for store in stores)
        assert [len(unit.copies) for unit in (*first, *second)] == [2] * 6
        for store in stores:
            store.gather()
        assert [unit.is_under_way for unit in (*first, *second)] == [True, True, False, False, False, False]
        assert all(map(departures.is_coming, (*first, *second)))
        departures.wait(first[0])
        assert [unit.is_under_way for unit in (*first, *second)] == [False, True, True, False, False, False]
        departures.wait(second[0])
        assert not any(map(departures.is_coming, first[:4]))
        for store in stores:
            store.ready()
            for name, parameter in store.module.named_parameters():
                assert torch.equal(parameter, pairs(5)[1][name])

    simulate.run(program, 2)


@pytest.mark.parametrize(("sizes", "messages"), [(MESSAGES, 1), (APART, 2)])
def test_weights_of_a_layer_stream_in_one_message_or_by_themselves(sizes: MessageSizes, messages: int) -> None:
    """In one, they have no memory of their own until they are there, and the next layer's start after that."""
    program, values = pairs()
    names = list(values)

    def step(rank: int) -> list[Tensor]:
        axes = Axes.build(Mesh(dp=2), rank, "cpu")
        store = Store.load(Pairs(), program, axes, StateSource(values), resident=False, sizes=sizes)
        stream, coming = Streaming(store), list[int]()
        for unit, _ in store.sequence:
            wait = unit.wait
            unit.wait = lambda wait=wait: (coming.append(sum(u.is_under_way for u, _ in store.sequence)), wait())[1]  # type: ignore[method-assign]
        stream.prefetch("F")
        assert there(store) == ([] if messages == 1 else names[:2])
        with stream.running("F", "B"):
            loss = store.module(X)
        assert there(store) == names[-2:]
        with stream.running("B", ""):
            loss.backward()
        assert max(coming) == 1
        return [parameter.grad for parameter in store.module.parameters() if parameter.grad is not None]

    whole = Pairs()
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        setattr(whole.get_submodule(path), leaf, nn.Parameter(value.clone()))
    whole(X).backward()
    found = simulate.run(step, 2)
    for gradients_ in found.results:
        for gradient, parameter in zip(gradients_, whole.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-14, atol=1e-14)
    gathers = {sent.calls for traffic in found.traffic for sent in traffic if sent.operation == "all_gather"}
    assert gathers == {messages * (2 * DEPTH - 1)}, "the last layer is still there for the backward"


def test_a_forward_needs_weights_that_were_gathered() -> None:
    store = load(Axes.alone(Mesh(dp=2), 0, "cpu"), program_of(Mesh(dp=2), 2))
    with pytest.raises(ScheduleError, match="GATHER"), store.arriving():
        pass


def test_small_weights_of_two_dtypes_are_one_message_each_way() -> None:
    """Gathered as bytes; their gradients travel in the masters' dtype."""
    mesh, dtypes = Mesh(dp=2), {"wide": "float32", "narrow": "bfloat16"}
    specs = [
        Parameter(name, (WIDTH,), (WIDTH,), dtype, reduce=("dp",), master="float32", zero=2)
        for name, dtype in dtypes.items()
    ]
    program = Program(0, 1, mesh.to_json(), 1, (), (), (), (), tuple(specs))
    values = {name: torch.arange(1.0, WIDTH + 1) / (3 if name == "wide" else 2) for name in dtypes}

    def step(rank: int) -> list[Tensor]:
        axes, module = Axes.build(mesh, rank, "cpu"), nn.Module()
        for name, dtype in dtypes.items():
            declare(module, name, (WIDTH,), dtype_of(dtype))
        store = Store.load(module, program, axes, StateSource(values))
        store.gather()
        store.ready()
        for name, dtype in dtypes.items():
            assert torch.equal(module.get_parameter(name), values[name].to(dtype_of(dtype)))
        groups = reduce_groups([program], axes, (0,))
        reducer = Reducer(module, program, groups, axes, (0,), masters=store.masters, scatters=True)
        reducer.expect(last=True)
        ((rank + 1) * (module.wide.sum() + module.narrow.float().sum())).backward()
        reducer.scatter()
        reducer.launch()
        reducer.wait()
        return list(reducer.gradients().values())

    found = simulate.run(step, 2)
    for rank, gradients in enumerate(found.results):
        real = WIDTH - 3 * rank  # 3 rows and 2, and one of padding
        assert [g.tolist() for g in gradients] == [[3.0] * min(3, real) + [0.0] * (3 - min(3, real))] * 2
    for traffic in found.traffic:
        calls = {sent.operation: sent.calls for sent in traffic if sent.group == "dp"}
        assert calls == {"all_gather": 1, "reduce_scatter": 1}
