"""Functions with a backward of their own, and moves of modules, in a capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributions import Distribution, Normal, kl_divergence
from torch.utils.checkpoint import checkpoint

from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.function_capture import traceable_calls
from tests.fast_cluster import FAST
from tests.pinned import compile_pinned


class Scaled(Function):
    """x weighted by a gate; its backward is another than that of the product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, power: float) -> Tensor:
        ctx.save_for_backward(x, gate)
        ctx.power = power
        return x * gate**power

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, gate = ctx.saved_tensors
        return grads[0] * gate, (grads[0] * x.sign()).sum(-1, keepdim=True) * ctx.power, None


class TwoResults(Function):
    """A value and where it is positive, with ``setup_context``."""

    @staticmethod
    def forward(x: Tensor) -> Any:
        return x.relu(), x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.where(ctx.saved_tensors[0], grads[0], 0.1 * grads[0])


class Through(Function):
    """Its backward calls a function that has its own backward, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return Rounded.apply(grads[0])


class Rounded(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Product(Function):
    """A linear layer; operations of its backward are several to autograd, which keeps what only it has seen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return 0.5 * grads[0] @ weight, 2 * torch.einsum("bso,bsi->oi", grads[0], x)


class Layers(nn.Module):
    """Of which one has a backward of its own, and reads a weight as nothing that has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = Product.apply(self.inward(x), self.outward.weight)
        return (h / self.inward.weight.data.abs().max()).pow(2).mean()


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=str)
def test_backwards_of_products_and_data_are_captured(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    result = compile_pinned(Layers().double(), 2, sample=x, mesh=mesh, cluster=FAST).verify(x, steps=2)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


class Clamps(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.inward.weight.data.clamp_(-1, 1)
        return super().forward(x)


def test_data_that_is_written_to_is_refused_by_name() -> None:
    with pytest.raises(CaptureError, match=r"test_function_capture\.py:\d+ changes parameter 'inward.weight' in place"):
        capture(Clamps(), torch.randn(4, 6, 8))


class Maps(Layers):
    """Products of rows with themselves, and a mask of positions by mapping a function of two of them."""

    def forward(self, x: Tensor) -> Tensor:
        outer = torch.vmap(lambda row: torch.outer(row, row) @ self.outward.weight.exp())(self.inward(x).sum(1))
        position = torch.arange(x.shape[1])
        near = lambda here, there: (here >= there) & (here - there < 3)  # noqa: E731
        for dims in ((None, 0), (0, None)):
            near = torch.vmap(near, in_dims=dims)
        return (near(position, position).double() @ self.inward(x)).square().mean() + outer.square().mean()


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=str)
def test_what_is_mapped_is_captured(mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    x = 0.1 * torch.randn(4, 6, 8, dtype=torch.float64)
    result = compile_pinned(Maps().double(), 2, sample=x, mesh=mesh, cluster=FAST).verify(x, steps=2)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


class Checkpointed(Layers):
    """One layer is computed again by a function of its own; where its input takes no gradient, nor do its weights."""

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.inward, checkpoint(self.outward, x, use_reentrant=True) + x, use_reentrant=True)
        return checkpoint(self.outward, self.inward(x) + h, use_reentrant=True).square().mean()


class Freezes(Layers):
    """A critic is trained on what is made, and what is made by the critic, which is frozen meanwhile."""

    def forward(self, x: Tensor) -> Tensor:
        made = self.inward(x)
        loss = self.outward(made.detach()).square().mean()
        self.outward.requires_grad_(False)
        self.outward.bias.requires_grad = False
        assert not self.outward.bias.requires_grad
        loss = loss - self.outward(made).exp().mean()
        for parameter in self.outward.parameters():
            parameter.requires_grad = True
        return loss


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("kind", [Checkpointed, Freezes])
def test_what_takes_no_gradient_for_a_while_is_captured(kind: type[Layers], mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    result = compile_pinned(kind().double(), 2, sample=x, mesh=mesh, cluster=FAST, microbatches=2).verify(x, steps=2)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


class FreezesForGood(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.outward.requires_grad_(False)
        return self.outward(self.inward(x)).square().mean()


class Thaws(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.inward.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.inward.weight.requires_grad = True
        return self.outward(self.inward(x)).square().mean()


@pytest.mark.parametrize(
    ("kind", "problem"), [(FreezesForGood, "freezes a parameter and leaves it so"), (Thaws, "lets a frozen parameter")]
)
def test_what_is_trained_must_not_change(kind: type[Layers], problem: str) -> None:
    with pytest.raises(CaptureError, match=rf"{problem}(.|\n)*test_function_capture\.py:\d+"):
        capture(kind(), torch.randn(4, 6, 8))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.gate, self.outward = nn.Linear(6, 8), nn.Linear(6, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, where = TwoResults.apply(Scaled.apply(self.inward(x), self.gate(x).sigmoid(), 2.0))
        self.outward = self.outward.to(h.dtype)
        return self.outward(h * where + Through.apply(h)).pow(2).mean()


def test_gradients_are_those_of_the_functions_own_backward() -> None:
    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(8, 6, dtype=torch.float64)
    job = compile_pinned(model, 2, sample=x, mesh={"dp": 2}, cluster=FAST)
    result = job.verify(x, steps=2)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


class Detached(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        with torch.no_grad():
            return grads[0] * 2


class Rounds(Model):
    def forward(self, x: Tensor) -> Tensor:
        return Detached.apply(self.inward(x)).pow(2).mean()


def test_a_backward_that_autograd_cant_see_through_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"backward of Detached (.|\n)*test_function_capture\.py:\d+"):
        capture(Rounds(), torch.randn(8, 6))


class Casts(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.outward = self.outward.to(torch.bfloat16)
        return super().forward(x)


def test_a_move_that_changes_a_module_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"test_function_capture\.py:\d+"):
        capture(Casts(), torch.randn(8, 6))


def test_nothing_is_left_overridden() -> None:
    before = (nn.Module.to, Function.__dict__["apply"], torch.vmap, torch.func.vmap)
    with pytest.raises(ZeroDivisionError), traceable_calls():
        raise ZeroDivisionError
    assert (nn.Module.to, Function.__dict__["apply"], torch.vmap, torch.func.vmap) == before


class Likelihood(nn.Module):
    """Of a Gaussian whose variance is made, too: one for each number (``rows`` False) or for each row."""

    def __init__(self, rows: bool, **options: Any) -> None:
        super().__init__()
        self.mean, self.rows, self.options = nn.Linear(8, 8), rows, options

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean = self.mean(x)
        variance = (mean.exp() - 0.5).relu()  # some below the least that counts
        loss = nn.functional.gaussian_nll_loss(
            mean, y, variance.sum(-1) if self.rows else variance, eps=0.1, **self.options
        )
        return loss if loss.dim() == 0 else loss.sum()


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"reduction": "none", "full": True}], ids=str)
@pytest.mark.parametrize("rows", [False, True])
def test_a_loss_that_looks_at_values_is_captured(rows: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(8, 8).double(), torch.randn(8, 8).double())
    job = compile_pinned(Likelihood(rows, **options).double(), 2, sample=batch, cluster=FAST, microbatches=2)
    result = job.verify(batch)
    assert result.ok, str(result)


class Hooked(nn.Module):
    """A hook that knows its model keeps what a layer made, another changes what one is given."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)
        self.kept: dict[str, Tensor] = {}
        self.enter.register_forward_hook(lambda _, __, made: self.kept.update(enter=made))
        self.leave.register_forward_pre_hook(lambda _, given, scale=self.leave.bias: (given[0] * scale.sum(),))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.enter(x).relu()).square().mean() + self.kept["enter"].abs().mean()


@pytest.mark.filterwarnings("ignore:.*assigned during export")
def test_hooks_of_a_copy_know_the_copy() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 8, dtype=torch.float64)
    job = compile_pinned(Hooked().double(), 2, sample=x, mesh={"dp": 2}, cluster=FAST, optimizer=torch.optim.SGD)
    result = job.verify(x, steps=2)
    assert result.ok, str(result)


class Distributed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = Normal(self.enter(x), self.enter(x).exp())
        other = Normal(torch.zeros_like(x), torch.ones_like(x))
        return kl_divergence(made, other).sum(-1).mean() - made.log_prob(x).mean()


def test_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", True)  # torch turns it off for good once it compiles anything
    torch.manual_seed(0)
    x = torch.randn(8, 8, dtype=torch.float64)
    job = compile_pinned(Distributed().double(), 4, sample=x, mesh={"dp": 2, "tp": 2}, cluster=FAST, microbatches=2)
    with pytest.raises(ValueError, match="parameter scale"):  # they look again
        Normal(torch.zeros(()), -torch.ones(()))
    assert job.verify(x, steps=2).ok


def of_a_parameter(model: nn.Linear) -> None:
    model.weight.register_hook(lambda g: g / 2)


def after_it(model: nn.Linear) -> None:
    model.weight.register_post_accumulate_grad_hook(lambda p: None)


def of_a_module(model: nn.Linear) -> None:
    model.register_full_backward_hook(lambda *_: None)


def before_it(model: nn.Linear) -> None:
    model.register_full_backward_pre_hook(lambda *_: None)


def in_the_pass(model: nn.Linear) -> None:
    model.register_forward_hook(lambda _, __, made: made.register_hook(lambda g: g / 2) and None)


@pytest.mark.parametrize(
    ("hook", "what"),
    [
        (of_a_parameter, "a hook of parameter 'weight' waits"),
        (after_it, "a hook of parameter 'weight' waits"),
        (of_a_module, "a hook of Linear '' waits"),
        (before_it, "a hook of Linear '' waits"),
        (in_the_pass, r"a hook of a tensor waits(.|\n)*made\.register_hook(.|\n)*autograd.Function"),
    ],
)
def test_hooks_of_gradients_are_refused(hook: Callable[[nn.Linear], None], what: str) -> None:
    model = nn.Linear(4, 4)
    hook(model)
    with pytest.raises(CaptureError, match=what):
        capture(model, torch.randn(2, 4), loss=lambda output, _: output.mean())
