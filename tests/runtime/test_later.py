"""Put-off weight gradients: I and W together are B, whatever is between them, and little is kept meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from autopar.errors import ScheduleError
from autopar.mesh import Mesh
from autopar.runtime import Axes, Axis, Parameter, Program, buckets, linear, matmul
from autopar.runtime.grads import Reducer, reduce_groups
from autopar.runtime.later import Later, Place, accumulate, lent_memory
from autopar.schedules.weight_moves import MessageSizes
from autopar.simulate.memory import MemoryTracker
from tests.runtime.ranks import on_ranks

Op = Callable[[Tensor, Tensor, Axes], Tensor]
OPS = {linear: torch.ops.aten.linear, matmul: torch.ops.aten.matmul}
K, N, WIDTH = 3, 5, 8
MICROBATCHES = (0, 1, 2)


@pytest.fixture
def axes() -> Axes:
    return Axes.build(Mesh(), 0, "cpu")


def weight_of(op: Op, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn((N, K) if op is linear else (K, N), dtype=dtype))


def gradients(product: Tensor, *of: Tensor) -> list[Tensor | None]:
    """Of a sum that isn't plain, so that the gradient of the product isn't either."""
    for tensor in of:
        tensor.grad = None
    (product * torch.linspace(-1, 1, product.numel(), dtype=product.dtype).view(product.shape)).sum().backward()
    return [tensor.grad for tensor in of]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(K,), (4, K), (2, 4, K), (2, 3, 4, K), (0, K)])
@pytest.mark.parametrize("off", [False, True])
def test_products_and_their_gradients(
    op: Op, dtype: torch.dtype, shape: tuple[int, ...], off: bool, axes: Axes
) -> None:
    x, weight = torch.randn(shape, dtype=dtype, requires_grad=True), weight_of(op, dtype)
    wanted = OPS[op](x, weight)
    of_x, of_weight = gradients(wanted, x, weight)

    found = op(x, weight, axes)
    assert torch.equal(found, wanted)
    if off:
        with axes.later.putting_off((0, 0)):
            assert gradients(found, x, weight)[1] is None
        axes.later.run((0, 0), accumulate)
    else:
        gradients(found, x, weight)
    torch.testing.assert_close(x.grad, of_x)
    torch.testing.assert_close(weight.grad, of_weight)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("x_needs", "weight_needs"), [(True, False), (False, True), (False, False)])
def test_only_what_a_gradient_needs_is_kept(op: Op, x_needs: bool, weight_needs: bool, axes: Axes) -> None:
    x = torch.randn(4, K, dtype=torch.float64, requires_grad=x_needs)
    weight = weight_of(op).requires_grad_(weight_needs)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        product = op(x, weight, axes)
    assert product.requires_grad == (x_needs or weight_needs)
    kept = [tensor.untyped_storage().data_ptr() for tensor in saved]
    assert kept == [t.untyped_storage().data_ptr() for t, needed in ((x, weight_needs), (weight, x_needs)) if needed]
    if product.requires_grad:
        with axes.later.putting_off((0, 0)):
            product.sum().backward()
        assert axes.later.parameters((0, 0)) == ((weight,) if weight_needs else ())


class Layer(nn.Module):
    """A block of a transformer without attention, its weights used in all ways that matter.

    ``table`` is looked up and a factor; ``inward`` is used twice; ``place`` gets the very gradient that the product
    before it gets; ``scale`` has its gradient from I.
    """

    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.axes = axes
        shapes = {"table": (16, WIDTH), "inward": (WIDTH, 4 * WIDTH), "outward": (WIDTH, 4 * WIDTH)}
        shapes |= {"place": (6, WIDTH), "scale": (WIDTH,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=torch.float64) / WIDTH**0.5))

    def forward(self, h: Tensor, ids: Tensor) -> Tensor:
        h = h + F.embedding(ids, self.table)
        for _ in range(2):
            up = F.gelu(matmul(F.rms_norm(h, (WIDTH,), self.scale), self.inward, self.axes))
            h = h + (linear(up, self.outward, self.axes) + self.place)
        return h + linear(h, self.table, self.axes).tanh()[:, :WIDTH]


def part(microbatch: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a stage gets of a microbatch: a received value, the batch, and the gradient of what it makes."""
    random = torch.Generator().manual_seed(microbatch)
    h, grad = (torch.randn(6, WIDTH, generator=random, dtype=torch.float64) for _ in range(2))
    return h.requires_grad_(), torch.randint(0, 16, (6,), generator=random), grad


def split_step(layer: Layer, order: tuple[int, ...], place: Callable[[int], Place]) -> list[Tensor | None]:
    """I of all microbatches, then W in ``order``; the gradients of what was received."""
    received = []
    for microbatch in MICROBATCHES:
        h, ids, grad = part(microbatch)
        product = layer(h, ids)
        with layer.axes.later.putting_off(place(microbatch)):
            torch.autograd.backward([get_gradient_edge(product)], [grad])
        received.append(h.grad)
    for microbatch in order:
        layer.axes.later.run(place(microbatch), accumulate)
    layer.axes.later.require_done()
    return received


@pytest.mark.parametrize("order", list(permutations(MICROBATCHES)))
def test_split_backwards_equal_whole_ones_in_any_order(order: tuple[int, ...], axes: Axes) -> None:
    layer = Layer(axes)
    received = []
    for microbatch in MICROBATCHES:
        h, ids, grad = part(microbatch)
        layer(h, ids).backward(grad)
        received.append(h.grad)
    wanted = {name: parameter.grad for name, parameter in layer.named_parameters()}

    layer.zero_grad()
    found = split_step(layer, order, lambda microbatch: (2, microbatch))
    for one, other in zip(found, received, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-12, atol=1e-12)


def test_what_only_products_reach_has_no_gradient_before_w(axes: Axes) -> None:
    layer = Layer(axes)
    h, ids, grad = part(0)
    with axes.later.putting_off((0, 0)):
        layer(h, ids).backward(grad)
    has = {name for name, parameter in layer.named_parameters() if parameter.grad is not None}
    assert has == {"table", "place", "scale"}
    parameters = axes.later.parameters((0, 0))
    assert [id(p) for p in parameters] == [id(p) for p in (layer.table, *(layer.outward, layer.inward) * 2)]
    axes.later.run((0, 0), accumulate)
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_nothing_of_the_graph_lives_between_i_and_w_and_nothing_at_all_after_w(axes: Axes) -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    alive: dict[str, weakref.ref[object]] = {}

    def keep(name: str, tensor: Tensor) -> Tensor:
        alive[name] = weakref.ref(tensor.untyped_storage())
        return tensor

    h = keep("received", torch.randn(4, WIDTH)).requires_grad_()
    factor = keep("factor", h.exp())
    product = keep("product", linear(factor, weight, axes))
    result = keep("result", product.tanh())
    product.register_hook(lambda grad: keep("gradient", grad))
    edge = get_gradient_edge(result)
    del h, factor, product, result
    gc.collect()
    assert {name for name, storage in alive.items() if storage() is not None} == {"received", "factor", "result"}
    with axes.later.putting_off((0, 0)):
        torch.autograd.backward([edge], [torch.randn(4, WIDTH)])
    del edge
    assert {name for name, storage in alive.items() if storage() is not None} == {"factor", "gradient"}
    axes.later.run((0, 0), accumulate)
    assert {name for name, storage in alive.items() if storage() is not None} == set()


def test_each_product_is_freed_as_soon_as_it_is_added(axes: Axes) -> None:
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(3)]
    with MemoryTracker() as tracker:
        h = torch.randn(64, WIDTH)
        for weight in weights:
            h = linear(h, weight, axes).relu()
        with axes.later.putting_off((0, 0)):
            h.sum().backward()
        del h
        live = []

        def added(parameter: Tensor, left: Tensor, right: Tensor) -> None:
            live.append(tracker.live_bytes)
            assert parameter.grad is None

        axes.later.run((0, 0), added)
    one = 64 * WIDTH * 4
    assert [count // one for count in live] == [6, 4, 2]  # x and gradient of each that is left


def test_a_gradient_that_is_kept_is_nobody_elses(axes: Axes) -> None:
    """Autograd would make it the ``.grad`` of ``both`` and add the next microbatch's to it, if it saw no other user."""
    both, weight = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def loss(microbatch: int) -> Tensor:
        x = torch.full((4, 4), float(microbatch))
        return (linear(matmul(x, both, axes), weight, axes) + both).square().sum()

    (loss(1) + loss(2)).backward()
    wanted = [both.grad, weight.grad]
    both.grad = weight.grad = None
    for microbatch in (1, 2):
        with axes.later.putting_off((0, microbatch)):
            loss(microbatch).backward()
    for microbatch in (1, 2):
        axes.later.run((0, microbatch), accumulate)
    torch.testing.assert_close([both.grad, weight.grad], wanted)


def test_the_gradient_of_what_is_no_leaf_is_not_put_off(axes: Axes) -> None:
    weight = nn.Parameter(torch.randn(N, K))
    x = torch.randn(4, K)
    (wanted,) = torch.autograd.grad(F.linear(x, weight * 2).sum(), [weight])
    with axes.later.putting_off((0, 0)):
        linear(x, weight * 2, axes).sum().backward()
    torch.testing.assert_close(weight.grad, wanted)
    assert axes.later.parameters((0, 0)) == ()


def test_under_recomputation(axes: Axes) -> None:
    layer = Layer(axes)
    h, ids, grad = part(0)
    layer(h, ids).backward(grad)
    wanted = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    recomputed = checkpoint(layer, h, ids, use_reentrant=False)
    with axes.later.putting_off((0, 0)):
        recomputed.backward(grad)
    axes.later.run((0, 0), accumulate)
    for parameter, gradient in zip(layer.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


def test_layers_share_what_their_rank_puts_off(axes: Axes) -> None:
    assert axes.within("layers.3").later is axes.later
    assert Axes.build(Mesh(), 0, "cpu").later is not axes.later


def test_after_an_error_backwards_are_whole_again(axes: Axes) -> None:
    weight = nn.Parameter(torch.randn(N, K))
    with pytest.raises(ValueError, match="lost"), axes.later.putting_off((0, 0)):
        raise ValueError("lost")
    linear(torch.randn(4, K), weight, axes).sum().backward()
    assert weight.grad is not None


def test_w_without_i_and_i_without_w_are_refused() -> None:
    later = Later()
    later.require_done()
    with pytest.raises(ScheduleError, match=r"no weight gradients were put off for stage 1 microbatch 4; W runs once"):
        later.run((1, 4), accumulate)
    with later.putting_off((1, 4)), later.putting_off((0, 2)):
        pass
    with pytest.raises(ScheduleError, match=r"of stage 0 microbatch 2, stage 1 microbatch 4 were put off and never"):
        later.require_done()
    later.run((1, 4), accumulate)
    later.run((0, 2), accumulate)
    later.require_done()
    with pytest.raises(ScheduleError, match="stage 1 microbatch 4"):
        later.parameters((1, 4))


@pytest.mark.filterwarnings("ignore")  # the tracer's own, which it would trip over as errors
def test_a_compiled_module_computes_the_same_in_one_piece(axes: Axes) -> None:
    """Its backward is compiled as a whole one: nothing is left for W."""
    layer = Layer(axes)
    h, ids, grad = part(0)
    layer(h, ids).backward(grad)
    wanted = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    product = torch.compile(layer, backend="aot_eager", fullgraph=True)(h, ids)
    with axes.later.putting_off((0, 0)):
        product.backward(grad)
    axes.later.run((0, 0), accumulate)
    for parameter, gradient in zip(layer.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


def reducer_of(layer: Layer, axes: Axes, reduce: tuple[str, ...], bucket_bytes: int = 1) -> Reducer:
    shapes = {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()}
    specs = tuple(Parameter(name, shape, shape, "float64", {}, reduce) for name, shape in shapes.items())
    program = Program(0, 1, axes.mesh.to_json(), 1, (), (), (), (), specs)
    return Reducer(layer, program, reduce_groups([program], axes, (0,)), axes, (0,), MessageSizes(1, bucket_bytes, 1))


def whole_gradients(axes: Axes, microbatches: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    layer = Layer(axes)
    for microbatch in range(microbatches):
        h, ids, grad = part(microbatch)
        layer(h, ids).backward(grad)
    return {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
@pytest.mark.parametrize("announced", [False, True])
def test_put_off_gradients_are_summed_over_ranks(bucket_bytes: int, announced: bool) -> None:
    """Two steps of two microbatches on each of two ranks, with and without a bucket for each parameter."""

    def program(axes: Axes) -> dict[str, Tensor]:
        torch.manual_seed(0)
        layer = Layer(axes)
        reducer = reducer_of(layer, axes, ("dp",), bucket_bytes)
        places = set()
        for _ in range(2):
            reducer.zero()
            for microbatch in (2 * axes.rank, 2 * axes.rank + 1):
                h, ids, grad = part(microbatch)
                with axes.later.putting_off((0, microbatch)):
                    layer(h, ids).backward(grad)
            axes.later.run((0, 2 * axes.rank + 1), reducer.accumulate)
            last = (0, 2 * axes.rank)
            if announced:
                reducer.expect_products(axes.later.parameters(last), last=True)
            axes.later.run(last, reducer.accumulate)
            reducer.launch()
            reducer.wait()
            places.add(tuple(p.grad.data_ptr() for p in layer.parameters() if p.grad is not None))
        assert len(places) == 1  # the buckets' memory, in both steps
        return {name: gradient.clone() for name, gradient in reducer.gradients().items()}

    wanted = whole_gradients(Axes.build(Mesh(), 0, "cpu"), 4)
    for found in on_ranks(Mesh(dp=2), program):
        assert set(found) == set(wanted)
        for name, gradient in wanted.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


def test_gradients_that_need_no_sum_are_added_too(axes: Axes) -> None:
    wanted = whole_gradients(axes, 1)
    torch.manual_seed(0)
    layer = Layer(axes)
    reducer = reducer_of(layer, axes, ())
    h, ids, grad = part(0)
    with axes.later.putting_off((0, 0)):
        layer(h, ids).backward(grad)
    reducer.expect_products(axes.later.parameters((0, 0)), last=True)
    axes.later.run((0, 0), reducer.accumulate)
    reducer.launch()
    reducer.wait()
    for name, gradient in reducer.gradients().items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-12, atol=1e-12)


def test_sums_start_when_the_last_product_of_their_bucket_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets go from the last parameter to the first: scale and place are complete before W begins."""
    events: list[list[str]] = [[], []]
    original = buckets.reduce_sum_

    def recorded(x: Tensor, axis: Axis, *, async_op: bool = False) -> object:
        events[axis.index].append("sum")
        return original(x, axis, async_op=async_op)

    monkeypatch.setattr(buckets, "reduce_sum_", recorded)

    def program(axes: Axes) -> None:
        layer = Layer(axes)
        reducer = reducer_of(layer, axes, ("dp",))
        names = {id(parameter): name for name, parameter in layer.named_parameters()}
        h, ids, grad = part(axes.rank)
        with axes.later.putting_off((0, 0)):
            layer(h, ids).backward(grad)
        reducer.expect_products(axes.later.parameters((0, 0)), last=True)

        def added(parameter: Tensor, left: Tensor, right: Tensor) -> None:
            events[axes.rank].append(names[id(parameter)])
            reducer.accumulate(parameter, left, right)

        axes.later.run((0, 0), added)
        reducer.launch()
        reducer.wait()

    on_ranks(Mesh(dp=2), program)
    outward = ["table", "outward", "inward", "outward", "sum", "inward", "sum", "sum"]
    assert events == [["sum", "sum", *outward]] * 2


def test_a_factor_that_is_a_weight_is_copied_while_it_is_there(axes: Axes) -> None:
    """A store takes back the memory of weights between passes."""
    model = nn.ParameterDict({"asked": torch.randn(4, K), "weight": weight_of(linear, torch.float32)})
    x = model["asked"].expand(2, -1, -1)
    _, wanted = gradients(F.linear(x, model["weight"]), model["asked"], model["weight"])
    found = linear(x, model["weight"], axes)
    with axes.later.putting_off((0, 0), lent_memory(model)):
        gradients(found, model["asked"], model["weight"])
    with torch.no_grad():
        model["asked"].zero_()  # as whoever has the memory next
    axes.later.run((0, 0), accumulate)
    torch.testing.assert_close(model["weight"].grad, wanted)
