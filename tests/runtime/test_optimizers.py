"""Optimizers by themselves: what is found out of a class, layouts, and ours on parts against torch's on the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop, SparseAdam
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from autopar.errors import ArgumentError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.runtime import Axes, Parameter
from autopar.runtime.optimizers import Parameters, Recipe, check_optimizer, make_optimizer, maker, one_device, probe
from autopar.runtime.optimizers.layout import Layout, add_up, gather
from autopar.runtime.optimizers.recipe import adamw
from autopar.runtime.optimizers.several import Several
from autopar.runtime.stand_in import standing_for
from tests.runtime.ranks import on_ranks

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8, dtype=torch.float64)
        self.down = nn.Linear(8, 6, bias=False, dtype=torch.float64)
        self.tied = self.up
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


class Unwritten(Optimizer):
    """Its step is the base class's, which raises an error without words."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})


def test_an_optimizer_that_fails_without_a_word_is_named() -> None:
    optimizer = Unwritten([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(probe.UntriedError, match=r"optimizer Unwritten doesn't step .* \(NotImplementedError\), so"):
        probe.traits(optimizer, CPU)


# --- what a class does ------------------------------------------------------------------------------


def all_of_torch() -> list[type[Optimizer]]:
    found = [kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]
    return [kind for kind in found if kind not in (Optimizer, LBFGS, SparseAdam)]


class RowScaled(Optimizer):
    """Divides each row of a gradient by its largest entry: no element by itself."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(group["lr"] * p.grad / p.grad.abs().amax(-1, keepdim=True))


class Coupled(RowScaled):
    """Divides by the norm over all parameters."""

    def step(self, closure: Any = None) -> None:
        with_grad = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in with_grad]).norm()
        for p in with_grad:
            p.data.sub_(self.defaults["lr"] * p.grad / norm)


class Counting(RowScaled):
    """Element by element, but counts its steps per group instead of per parameter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(group["lr"] / group["count"] * p.grad)


class Preconditioned(RowScaled):
    """As Shampoo: gathers statistics for long before it uses them."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["left"] = state.get("left", 0) + p.grad @ p.grad.mT
                    p.data.sub_(group["lr"] * p.grad)


class EightBits(RowScaled):
    """Momentum in 8 bits, a scale for each block of 16."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                old = 0.0
                if "codes" in state:
                    old = (state["codes"].double() * state["scales"]).view_as(p)
                momentum = 0.9 * old + p.grad
                state["scales"] = momentum.reshape(-1, 16).abs().amax(1, keepdim=True) / 127
                state["codes"] = (momentum.reshape(-1, 16) / state["scales"]).round().to(torch.int8)
                p.data.sub_(group["lr"] * momentum)


def traits(kind: Callable[..., Optimizer], **options: Any) -> probe.Traits:
    return probe.traits(kind([nn.Parameter(torch.zeros(4, 4))], **options), CPU)


@pytest.mark.parametrize("kind", all_of_torch())
def test_classes_of_torch(kind: type[Optimizer]) -> None:
    found = traits(kind)
    assert found.elementwise == (kind not in (Adafactor, Muon))
    assert found.independent
    assert found.separable


def test_what_users_write() -> None:
    row = traits(RowScaled)
    assert (row.elementwise, row.independent, row.separable) == (False, True, True)
    assert not traits(Coupled).independent
    counting = traits(Counting)
    assert (counting.elementwise, counting.independent, counting.separable) == (True, True, False)


def test_a_learning_rate_of_zero_hides_nothing() -> None:
    assert not traits(RowScaled, lr=0.0).elementwise


def test_state_of_unknown_shape_is_not_trusted() -> None:
    found = traits(Preconditioned)
    assert found.strange == {"left": (8, 8)}
    assert not found.elementwise


def test_eight_bit_moments_may_round_differently() -> None:
    found = traits(EightBits)
    assert found.elementwise
    assert found.strange == {}


def test_groups_are_tried_apart() -> None:
    """A class may do something else for some of its groups."""
    tensors = [nn.Parameter(torch.zeros(2, 2)) for _ in range(2)]
    optimizer = AdamW([{"params": tensors[:1]}, {"params": tensors[1:], "amsgrad": True}])
    assert probe.traits(optimizer, CPU).moments == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


def test_closures_and_sparse_gradients_are_refused() -> None:
    tensors = [nn.Parameter(torch.zeros(2, 2))]
    with pytest.raises(ArgumentError, match=r"LBFGS evaluates the model again .* AdamW"):
        probe.refuse(LBFGS(tensors))
    with pytest.raises(ArgumentError, match=r"SparseAdam takes sparse gradients only"):
        probe.refuse(SparseAdam(tensors))
    probe.refuse(AdamW(tensors))
    probe.refuse(RowScaled(tensors))


# --- what users give --------------------------------------------------------------------------------


def test_the_default_is_one_kernel_where_parameters_stand_for_those_of_a_gpu() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    with standing_for("cuda"):
        assert adamw(parameters).defaults["fused"]
    with standing_for("cpu"):
        assert not adamw(parameters).defaults["fused"]
    assert not adamw(parameters).defaults["fused"]


def test_parameters_have_names_once_and_no_frozen_ones() -> None:
    net = Net()
    parameters = Parameters.of(net)
    assert [name for name, _ in parameters.named()] == ["up.weight", "up.bias", "down.weight"]
    assert parameters.get("tied.weight") is net.up.weight
    assert parameters.get("frozen") is None
    assert parameters[-1] is net.down.weight
    assert len(parameters) == len(list(parameters)) == 3


def test_a_rank_sees_the_parameters_of_other_ranks_without_their_rows() -> None:
    specs = [Parameter("a", (4, 6), (8, 6), "float64", {"tp": "S(0)"}), Parameter("b", (5, 3), (5, 3), "bfloat16")]
    own = nn.Parameter(torch.zeros(4, 6, dtype=torch.float64))
    parameters = Parameters.stored(specs, {"a": own}, CPU)
    assert parameters[0] is own
    assert (parameters[1].shape, parameters[1].dtype) == ((0, 3), torch.bfloat16)
    for kind in (AdamW, Adagrad, Muon):
        own.grad = torch.ones_like(own)
        kind(parameters).step()


def rebuilt(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    (made,) = Recipe.of(optimizer, model)(Parameters.of(model))
    return made


def test_an_optimizer_is_made_again_with_its_groups_and_options() -> None:
    net = Net()
    groups = [
        {"params": [net.up.weight, net.down.weight], "lr": torch.tensor(0.5)},
        {"params": [net.up.bias], "weight_decay": 0.25},
        {"params": [net.frozen]},
    ]
    given = AdamW(groups, lr=0.1, betas=(0.8, 0.9), amsgrad=True)
    made = rebuilt(given, net)
    assert type(made) is AdamW
    assert made.defaults == given.defaults
    assert [[id(p) for p in g["params"]] for g in made.param_groups] == [
        [id(net.up.weight), id(net.down.weight)],
        [id(net.up.bias)],
        [],
    ]
    for new, old in zip(made.param_groups, given.param_groups, strict=True):
        assert {k: v for k, v in new.items() if k != "params"} == {k: v for k, v in old.items() if k != "params"}
    assert made.param_groups[0]["lr"] is not given.param_groups[0]["lr"]


def test_a_fresh_optimizer_may_have_state() -> None:
    net = Net()
    rebuilt(Adagrad(net.parameters(), initial_accumulator_value=0.5), net)


class Keeping(AdamW):
    """Keeps arguments under other names, and doesn't take what it keeps (as classes of bitsandbytes)."""

    def __init__(self, params: Any, cap: float = 1.0, bits: int = 32, **options: Any) -> None:
        assert bits == 32
        super().__init__(params, **options)
        self.limit, self.bits, self.table = cap, 8, {}


class Listing(AdamW):
    """Refers to its parameters outside of groups: its constructor has to be called."""

    def __init__(self, params: Any, cap: float = 1.0) -> None:
        super().__init__(params)
        self.cap, self.all = cap, [p for group in self.param_groups for p in group["params"]]


class Losing(Listing):
    def __init__(self, params: Any, lost: int = 3) -> None:
        super().__init__(params)


def test_arguments_outside_of_groups_are_kept() -> None:
    net = Net()
    given = Keeping(net.parameters(), cap=7.0, lr=0.5)
    made = rebuilt(given, net)
    assert (made.limit, made.bits, made.param_groups[0]["lr"]) == (7.0, 8, 0.5)
    assert made.table is not given.table
    assert probe.traits(given, CPU).elementwise
    (listing,) = Recipe.of(Listing(net.parameters(), cap=7.0), net)(Parameters.of(other := Net()))
    assert listing.cap == 7.0
    assert listing.all[0] is other.up.weight
    with pytest.raises(ArgumentError, match=r"Losing doesn't keep its argument 'lost'.*lambda parameters: Losing"):
        rebuilt(Losing(net.parameters()), net)


def test_what_can_not_be_made_again_is_refused() -> None:
    net = Net()
    with pytest.raises(ArgumentError, match=r"group 0 of SGD has a tensor of shape \[3\] that is no parameter of Net"):
        Recipe.of(SGD(Net().parameters()), net)
    for kind in (Adagrad, AdamW):
        stepped = kind(net.parameters())
        net.up.weight.grad = torch.ones_like(net.up.weight)
        stepped.step()
        with pytest.raises(ArgumentError, match="has been stepped"):
            Recipe.of(stepped, net)
    scheduled = SGD(net.parameters())
    LambdaLR(scheduled, lambda step: 0.5)
    with pytest.raises(ArgumentError, match=r"scheduler is attached .* scheduler=lambda optimizer"):
        Recipe.of(scheduled, net)


def test_what_is_no_optimizer_is_refused() -> None:
    net = Net()
    for given in (3, "adam", ()):
        with pytest.raises(ArgumentError, match=r"give a torch\.optim\.Optimizer over the model's parameters"):
            maker(given, net)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="lambda parameters: SGD"):
        maker(SGD(net.parameters()), None)
    with pytest.raises(ArgumentError, match="made a int"):
        one_device(lambda parameters: [3], None, net)  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match=r"3 tensors that it wasn't given, the first of shape \[8, 6\]"):
        one_device(lambda parameters: SGD([*Net().up.parameters(), *Net().down.parameters()]), None, net)


def test_schedulers_reach_all_of_several() -> None:
    net = Net()
    given = (Muon([net.up.weight, net.down.weight], lr=1.0), lambda p: AdamW([p.get("up.bias")], lr=2.0))
    optimizer = one_device(maker(given, net), lambda o: LambdaLR(o, lambda step: 0.5**step), net)
    assert isinstance(optimizer, Several)
    for parameter in (net.up.weight, net.up.bias, net.down.weight):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [group["lr"] for one in optimizer.optimizers for group in one.param_groups] == [0.5, 1.0]
    assert set(optimizer.state) == {net.up.weight, net.up.bias, net.down.weight}


def test_a_state_dict_goes_through_several() -> None:
    net = Net()

    def made() -> Several:
        return Several([SGD([net.up.weight], momentum=0.5), AdamW([net.up.bias])])

    net.up.weight.grad, net.up.bias.grad = torch.ones_like(net.up.weight), torch.ones_like(net.up.bias)
    first, second = made(), made()
    first.step()
    first.param_groups[1]["lr"] = 0.125
    second.load_state_dict(first.state_dict())
    assert second.optimizers[1].param_groups[0]["lr"] == 0.125
    assert torch.equal(second.optimizers[0].state[net.up.weight]["momentum_buffer"], torch.ones_like(net.up.weight))


def test_bad_schedulers_and_doubled_parameters_are_refused() -> None:
    net = Net()
    with pytest.raises(ArgumentError, match="ReduceLROnPlateau, which goes by a loss"):
        one_device(SGD, ReduceLROnPlateau, net)
    with pytest.raises(ArgumentError, match="scheduler made a int"):
        one_device(SGD, lambda o: 3, net)  # type: ignore[arg-type, return-value]
    with pytest.raises(ArgumentError, match=r"shape \[8, 6\] is both SGD's and AdamW's"):
        one_device(lambda p: [SGD(p), AdamW(p)], None, net)


# --- parts ------------------------------------------------------------------------------------------

STORED = [
    Parameter("rows", (4, 6), (8, 6), "float64", {"tp": "S(0)"}),
    Parameter("columns", (8, 6), (8, 12), "float64", {"tp": "S(1)"}),
    Parameter("strided", (6, 5), (12, 5), "float64", {"tp": "S(0,3)"}),
    Parameter("padded", (3, 6), (11, 6), "float64", {"pp": "S(0)", "tp": "S(0)"}, padding=(0, 1)),
    Parameter("whole", (7, 3), (7, 3), "float64"),
    Parameter("zeroed", (7, 3), (7, 3), "float64", zero=2),
    Parameter("both", (5, 6), (10, 6), "float64", {"tp": "S(0)"}, zero=2),
    Parameter("vector", (5,), (10,), "float64", {"tp": "S(0)"}, zero=2),
]
CUBE = Parameter("cube", (2, 3, 4), (2, 3, 8), "float64", {"tp": "S(2)"}, zero=2)
FEW = Parameter("few", (1, 7), (2, 7), "float64", {"tp": "S(0)"}, zero=2)
"""ZeRO splits its one row."""
STACK = Parameter("stack", (1, 3, 4), (2, 3, 4), "float64", {"tp": "S(0)"}, zero=2)
MESH = Mesh(pp=2, dp=2, tp=2)


def values(parameters: list[Parameter], seed: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {p.name: torch.randn(p.full_shape, generator=random, dtype=torch.float64) for p in parameters}


def test_a_part_and_the_whole_are_each_other() -> None:
    matrices = [*STORED[:-1], FEW, STACK]
    full = values(matrices, 0)

    def there_and_back(axes: Axes) -> tuple[list[Tensor], list[Tensor]]:
        layouts = [Layout.of(p, axes) for p in matrices]
        parts = [layout.own(full[p.name]) for layout, p in zip(layouts, matrices, strict=True)]
        return parts, gather(list(zip(parts, layouts, strict=True)))

    ranks = on_ranks(MESH, there_and_back)
    for _, wholes in ranks:
        for p, whole in zip(matrices, wholes, strict=True):
            assert torch.equal(whole, full[p.name]), p.name
    last = dict(zip([p.name for p in matrices], ranks[-1][0], strict=True))  # the last of every axis
    assert torch.equal(last["strided"], full["strided"][[2, 3, 6, 7, 10, 11]])
    assert torch.equal(last["padded"], torch.cat([full["padded"][9:], torch.zeros(1, 6)]))
    assert torch.equal(last["zeroed"], torch.cat([full["zeroed"][4:], torch.zeros(1, 3)]))
    assert torch.equal(last["few"], torch.cat([full["few"][1:, 4:], torch.zeros(1, 1)], 1))
    assert torch.equal(last["stack"], torch.cat([full["stack"][1:, 2:], torch.zeros(1, 1, 4)], 1))
    assert torch.equal(last["both"], torch.cat([full["both"][8:], torch.zeros(1, 6)]))


def test_sums_are_over_the_named_axes() -> None:
    def summed(axes: Axes) -> list[float]:
        terms = [torch.tensor([float(axes.rank)], dtype=torch.float64), torch.tensor([1.0])]
        add_up([(terms[0], (axes["tp"], axes["pp"])), (terms[1], (axes["tp"],))], CPU)
        return [float(term) for term in terms]

    assert on_ranks(MESH, summed)[2] == [2 + 3 + 6 + 7, 2]


ON_PARTS: dict[str, tuple[list[Parameter], Callable[[Any], Optimizer]]] = {
    "adafactor": ([*STORED, CUBE], lambda p: Adafactor(p, lr=0.1, weight_decay=0.1)),
    "adafactor large": ([*STORED, CUBE], lambda p: Adafactor(p, lr=0.1, eps=(1e-3, 10.0), maximize=True)),
    "adafactor unbounded": ([*STORED, CUBE], lambda p: Adafactor(p, lr=0.1, d=1e3)),
    "muon": ([*STORED[:-1], FEW], lambda p: Muon(p, lr=0.1)),
    "muon plain": (STORED[:-1], lambda p: Muon(p, lr=0.1, nesterov=False, adjust_lr_fn="match_rms_adamw")),
    "adamw": ([*STORED, CUBE], lambda p: AdamW(p, lr=0.1)),
}


@pytest.mark.parametrize("name", ON_PARTS)
def test_on_parts_as_on_the_whole(name: str) -> None:
    """Three steps; the largest gradients a thousand times the smallest, so that bounds and floors count."""
    parameters, make = ON_PARTS[name]
    start = values(parameters, 0)
    gradients = [values(parameters, 1 + step) for step in range(3)]
    for step, scale in enumerate((1e-3, 1.0, 10.0)):
        gradients[step] = {n: g * scale for n, g in gradients[step].items()}
    expected = {n: nn.Parameter(t.clone()) for n, t in start.items()}
    train(make(list(expected.values())), expected, gradients)

    def on_rank(axes: Axes) -> dict[str, tuple[Tensor, Tensor]]:
        layouts = {p.name: Layout.of(p, axes) for p in parameters}
        masters = {n: nn.Parameter(part(layout, start[n])) for n, layout in layouts.items()}
        optimizer = make_optimizer(make, {p.name: p for p in parameters}, masters, axes, Options())
        assert optimizer is not None
        train(optimizer, masters, [{n: part(layouts[n], g) for n, g in step.items()} for step in gradients])
        return {n: (masters[n].detach(), part(layouts[n], expected[n].detach())) for n in masters}

    for rank in on_ranks(MESH, on_rank):
        for n, (found, wanted) in rank.items():
            assert (found - wanted).abs().max() <= 1e-12, n


def part(layout: Layout, whole: Tensor) -> Tensor:
    return layout.own(whole).clone()


def train(optimizer: Optimizer, parameters: dict[str, nn.Parameter], gradients: list[dict[str, Tensor]]) -> None:
    for step in gradients:
        for name, parameter in parameters.items():
            parameter.grad = step[name].clone()
        optimizer.step()


def test_statistics_are_those_of_the_whole() -> None:
    """A rank with some columns has whole means of rows, and the other way round."""
    parameters = [p for p in STORED if p.name in ("rows", "columns")]
    start, gradients = values(parameters, 0), [values(parameters, 1), values(parameters, 2)]
    whole = {n: nn.Parameter(t.clone()) for n, t in start.items()}
    expected = Adafactor(list(whole.values()))
    train(expected, whole, gradients)

    def on_rank(axes: Axes) -> tuple[Tensor, Tensor]:
        layouts = {p.name: Layout.of(p, axes) for p in parameters}
        masters = {n: nn.Parameter(part(layout, start[n])) for n, layout in layouts.items()}
        optimizer = make_optimizer(Adafactor, {p.name: p for p in parameters}, masters, axes, Options())
        assert optimizer is not None
        train(optimizer, masters, [{n: part(layouts[n], g) for n, g in step.items()} for step in gradients])
        return optimizer.state[masters["columns"]]["row_var"], optimizer.state[masters["rows"]]["col_var"]

    for rows, columns in on_ranks(Mesh(tp=2), on_rank):
        torch.testing.assert_close(rows, expected.state[whole["columns"]]["row_var"], rtol=1e-12, atol=0)
        torch.testing.assert_close(columns, expected.state[whole["rows"]]["col_var"], rtol=1e-12, atol=0)


@pytest.mark.parametrize("parameter", [FEW, STACK], ids=lambda p: p.name)
def test_means_of_rows_that_are_split_are_refused(parameter: Parameter) -> None:
    def on_rank(axes: Axes) -> None:
        layout = Layout.of(parameter, axes)
        masters = {parameter.name: nn.Parameter(part(layout, values([parameter], 0)[parameter.name]))}
        with pytest.raises(ArgumentError, match=r"Adafactor .* ZeRO splits .* use zero=0"):
            make_optimizer(Adafactor, {parameter.name: parameter}, masters, axes, Options())

    on_ranks(MESH, on_rank)


@pytest.mark.parametrize("kind", [RowScaled, Preconditioned, Coupled])
def test_what_needs_whole_parameters_is_refused_on_parts(kind: type[Optimizer]) -> None:
    specs = {p.name: p for p in STORED}
    whole = {n: p for n, p in specs.items() if n == "whole"}
    says = {
        RowScaled: r"RowScaled needs whole parameters: trained in parts, .* parts of 'rows'; use .* tp=1",
        Preconditioned: r"keeps state of another shape than theirs \(left \[8, 8\]",
        Coupled: r"Coupled makes the update of one parameter depend on others",
    }
    with pytest.raises(ArgumentError, match=says[kind]):
        check_optimizer(kind, None, specs, MESH, Options(), CPU)
    check_optimizer(kind, None, whole, Mesh(dp=2), Options(), CPU)


# --- narrow moments ---------------------------------------------------------------------------------


def test_moments_are_narrow_between_steps() -> None:
    net = Net()
    optimizer = one_device(AdamW, None, net, Options(state_dtype="bfloat16"))
    twin = AdamW([nn.Parameter(p.detach().clone()) for p in Parameters.of(net)])
    random = torch.Generator().manual_seed(0)
    for _ in range(3):
        for p, q in zip(Parameters.of(net), twin.param_groups[0]["params"], strict=True):
            p.grad = torch.randn(p.shape, generator=random, dtype=torch.float64)
            q.grad = p.grad.clone()
        optimizer.step()
        twin.step()
        for q in twin.param_groups[0]["params"]:
            for name in ("exp_avg", "exp_avg_sq"):
                twin.state[q][name] = twin.state[q][name].bfloat16().double()
    for p, q in zip(Parameters.of(net), twin.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)
        assert p.grad is not None
        assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16
        assert optimizer.state[p]["step"].dtype == torch.float32
        assert float(optimizer.state[p]["step"]) == 3
    again = one_device(AdamW, None, net, Options(state_dtype="bfloat16"))
    again.load_state_dict(optimizer.state_dict())
    for p in Parameters.of(net):
        assert again.state[p]["exp_avg"].dtype == torch.bfloat16
        assert torch.equal(again.state[p]["exp_avg"], optimizer.state[p]["exp_avg"])


def test_narrow_moments_need_moments() -> None:
    net = Net()
    with pytest.raises(ArgumentError, match="SGD keeps no moments"):
        one_device(SGD, None, net, Options(state_dtype="bfloat16"))
    with pytest.raises(ArgumentError, match=r"no narrower than the torch\.bfloat16 that Adam updates"):
        one_device(Adam, None, net.bfloat16(), Options(state_dtype="float32"))
    for kind in (NAdam, RMSprop):
        one_device(kind, None, net, Options(state_dtype="bfloat16"))  # the model's own dtype: nothing to do
