"""Writes in place, on whole tensors and through views: the functional program has eager's values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autopar.capture import Flat, capture
from autopar.errors import CaptureError
from autopar.graph import info, is_mutating, op_name
from autopar.passes.functionalize import functionalize
from tests.fast_cluster import FAST
from tests.models import Case, prepared
from tests.pinned import compile_pinned
from tests.ranks.test_parity import optimizer

WIDTH, STEPS = 6, 4


# --- models that write in place -------------------------------------------------------------------


def to_a_slice(h: Tensor, g: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, 1:] = h[:, :-1]
    out[:, 0] = 0.5
    return out + g


def to_an_index(h: Tensor, g: Tensor) -> Tensor:
    out = h.clone()
    out[..., -1] = g[..., 0] * 2
    out[:, 2, ::2] += g[:, 1, ::2]
    return out


def to_a_view_of_a_view(h: Tensor, g: Tensor) -> Tensor:
    out = h * 1
    part = out[:, 1:3]
    part[..., 2:] = g[:, :2, 2:]
    part[:, 0].mul_(3.0)
    return out * part.sum()


def to_a_transposed_view(h: Tensor, g: Tensor) -> Tensor:
    out = h + 1
    out.transpose(1, 2)[:, 0] = g[:, :, 0]
    out.permute(2, 0, 1)[3].add_(g[..., 1], alpha=2)
    flat = out.view(h.shape[0], -1)
    flat[:, 5:9] = g.flatten(1)[:, 5:9]
    return out


def between_two_reads_of_another_view(h: Tensor, g: Tensor) -> Tensor:
    out = h * 2
    watched, written = out[:, :2], out[:, 1]
    before = watched.exp().sum()
    written.copy_(g[:, 3])
    return out + before + watched.cos().mean()


def activations_in_place(h: Tensor, g: Tensor) -> Tensor:
    x = F.relu(h + g, inplace=True)
    x = F.leaky_relu(x - 0.2, 0.1, inplace=True) * 1
    x += g
    x /= 2
    return F.dropout(x.tanh_(), 0.0, inplace=True)


def in_a_loop(h: Tensor, g: Tensor) -> Tensor:
    out = h.new_empty(h.shape)
    state = g[:, 0]
    for i in range(h.shape[1]):
        state = torch.tanh(state + h[:, i])
        out[:, i] = state
    return out


def under_masks(h: Tensor, g: Tensor) -> Tensor:
    out = h.clone()
    out[g > 0.3] = 0.0
    out.masked_fill_(g < -0.3, 1.5)
    out[:, :, [0, 2]] = g[:, :, 1:3]
    out[:, 1:].masked_fill_(h[:, 1:] > 0.5, -1.0)
    return out + g


def over_what_had_a_gradient(h: Tensor, g: Tensor) -> Tensor:
    out = h.exp() * 1
    out[:, 0].zero_()
    out[:, 1].fill_(2.0)
    out[:, 2:, 0] = g.mean(dim=(1, 2))[:, None]
    return out.clone().fill_(1.0) * out + out.clone().zero_()


def of_integers(h: Tensor, g: Tensor) -> Tensor:
    order = torch.zeros(h.shape[1], dtype=torch.int64)
    order[1:] += torch.arange(h.shape[1] - 1)
    order[0] = 2.9
    mask = torch.ones(h.shape[1], WIDTH, dtype=torch.bool)
    mask.diagonal().fill_(False)
    mask[:, 1] &= False
    with torch.no_grad():
        table = torch.zeros(h.shape[1])
        table[1:] = torch.linspace(0, 1, h.shape[1])[1:]
        first, second = table.split(2)
        table.mul_(2.0)
        first.add_(second.sum())
        table.unbind()[3].zero_()
    literal = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=h.dtype)
    literal[1:].add_(1)
    return h[:, order] * mask + g * (table * literal)[:, None]


def in_narrower_types(h: Tensor, g: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, 1:] = g[:, 1:].float() * 0.5  # cast back by the write
    out[:, 0] += h[:, 0]
    out.pow_(2).mul_(2.0)
    return out


def of_complex_numbers(h: Tensor, g: Tensor) -> Tensor:
    pairs = torch.view_as_complex(h.reshape(*h.shape[:-1], -1, 2).clone())
    pairs *= torch.polar(torch.ones(3, dtype=h.dtype), torch.arange(3, dtype=h.dtype))
    torch.view_as_real(pairs)[..., 0].mul_(2.0)
    return torch.view_as_real(pairs).flatten(2) + g


def another_shape(h: Tensor, g: Tensor) -> Tensor:
    out = h * g
    row = out[:, 1]
    row.unsqueeze_(1)
    row += g[:, :1]
    out.squeeze_().transpose_(1, 2)
    return out.mT.contiguous() + row


WRITES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    f.__name__: f
    for f in (
        *(to_a_slice, to_an_index, to_a_view_of_a_view, to_a_transposed_view, between_two_reads_of_another_view),
        *(activations_in_place, in_a_loop, under_masks, over_what_had_a_gradient, of_integers, in_narrower_types),
        *(of_complex_numbers, another_shape),
    )
}


class Writer(nn.Module):
    """Two linear layers, a function that writes in place on what they give, and a head."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.write = write
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)  # no part of the loss
        return self.head(self.write(self.first(x), self.second(x))).square().sum()


def case(write: Callable[[Tensor, Tensor], Tensor]) -> Case:
    x = torch.randn(8, STEPS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Case(Writer(write), x)


MEAN_OVER_BATCH = {"to_a_view_of_a_view", "between_two_reads_of_another_view"}
"""These multiply a sum over the batch by a value of each row: no split of the batch computes that."""


@pytest.mark.parametrize("name", WRITES)
def test_functional_programs_have_values_and_gradients_of_eager(name: str) -> None:
    made = prepared(lambda: case(WRITES[name]))
    check_functional(made.model, made.batch)


@pytest.mark.parametrize(("mesh", "microbatches"), [({"dp": 1}, 2), ({"dp": 2}, 1)])
@pytest.mark.parametrize("name", sorted(set(WRITES) - MEAN_OVER_BATCH))
def test_compiled_writes_equal_eager(name: str, mesh: dict[str, int], microbatches: int) -> None:
    made = prepared(lambda: case(WRITES[name]))
    job = compile_pinned(
        made.model,
        mesh["dp"],
        sample=made.batch,
        mesh=mesh,
        microbatches=microbatches,
        cluster=FAST,
        optimizer=optimizer,
    )
    result = job.verify(made.batch, steps=2)
    assert result.tolerance <= 1e-9 or name == "in_narrower_types"
    assert result.ok, str(result)


def check_functional(model: nn.Module, batch: Tensor) -> Flat:
    """The functional program, run op by op, against the model."""
    flat = functionalize(capture(model, batch))
    assert not any(map(is_mutating, flat.nodes))
    expected = model(batch)
    found = run(flat, model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    parameters = dict(model.named_parameters())
    grads = [torch.autograd.grad(v, list(parameters.values()), allow_unused=True) for v in (found, expected)]
    for name, a, b in zip(parameters, *grads, strict=True):
        zero = torch.zeros_like(parameters[name])
        got, want = (zero if g is None else g for g in (a, b))
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11, msg=name)
    return flat


def run(flat: Flat, model: nn.Module, batch: Tensor) -> Tensor:
    """The loss by the flat graph; each value is checked against its metadata."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **flat.constants}
    values: dict[fx.Node, Any] = {}
    for node in flat.graph.nodes:
        if node.op == "placeholder":
            values[node] = batch if info(node).role == "input" else state[info(node).name]
    for node in flat.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)
        if isinstance(values[node], Tensor):
            meta = info(node).meta
            assert (meta.shape, meta.dtype) == (tuple(values[node].shape), values[node].dtype), op_name(node)
            assert values[node].requires_grad <= meta.needs_grad, op_name(node)
    return values[flat.loss]


# --- any program ----------------------------------------------------------------------------------


class Program(nn.Module):
    """Runs steps on a list of tensors that begins with one: take a view, write, or read into the loss."""

    def __init__(self, steps: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.steps = steps
        self.base, self.source = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        tensors = [self.base * x]
        total = self.source.sum() * x.sum()
        for kind, which, number in self.steps:
            t = tensors[which % len(tensors)]
            if kind in VIEWS:
                tensors.append(VIEWS[kind](t, number))
            elif kind in CHANGES:
                CHANGES[kind](t, self.source, number)
            else:
                total = total + (t.clone().sin() * (number + 1)).sum()
        return total + tensors[0].clone().square().sum()


VIEWS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "slice": lambda t, n: t[..., n % 2 :] if t.dim() and t.shape[-1] > 1 else t,
    "step": lambda t, n: t[:: 1 + n % 2] if t.dim() else t,
    "select": lambda t, n: t.select(n % t.dim(), -1) if t.dim() > 1 else t,
    "transpose": lambda t, n: t.transpose(0, n % t.dim()) if t.dim() else t,
    "permute": lambda t, n: t.permute(*range(1, t.dim()), 0) if t.dim() else t,
    "reshape": lambda t, n: t.reshape(-1),
    "unsqueeze": lambda t, n: t.unsqueeze(n % (t.dim() + 1)),
    "squeeze": lambda t, n: t.squeeze(),
    "narrow": lambda t, n: t.narrow(0, t.shape[0] // 2, 1) if t.dim() else t,
    "diagonal": lambda t, n: t.diagonal(0, 0, -1) if t.dim() > 1 else t,
    "contiguous": lambda t, n: t.contiguous(),
    "clone": lambda t, n: t.clone(),
}


def _put(t: Tensor, s: Tensor, n: int) -> None:
    if t.dim():
        t[n % t.shape[0]] = s.sum()


CHANGES: dict[str, Callable[[Tensor, Tensor, int], object]] = {
    "mul_": lambda t, s, n: t.mul_(s[n % len(s)]),
    "add_": lambda t, s, n: t.add_(n),
    "copy_": lambda t, s, n: t.copy_(s[: t.shape[-1]] if t.dim() and t.shape[-1] <= len(s) else s[0]),
    "fill_": lambda t, s, n: t.fill_(n),
    "masked": lambda t, s, n: t.masked_fill_(t.detach() > n / 4, 0.25),
    "setitem": _put,
    "index_put": lambda t, s, n: t.index_put_([torch.tensor([0])], s[n % len(s)]) if t.dim() else None,
}
STEP = st.tuples(st.sampled_from([*VIEWS, *CHANGES, *CHANGES, "read"]), st.integers(0, 7), st.integers(0, 5))


@settings(max_examples=15)
@given(st.lists(STEP, min_size=3, max_size=10))
def test_any_program_of_views_and_writes(steps: list[tuple[str, int, int]]) -> None:
    model = Program(steps)
    generator = torch.Generator().manual_seed(len(steps))
    model.base = nn.Parameter(torch.randn(2, 3, 4, generator=generator, dtype=torch.float64))
    model.source = nn.Parameter(torch.randn(4, generator=generator, dtype=torch.float64))
    check_functional(model, torch.randn(2, 3, 4, generator=generator, dtype=torch.float64))


# --- what is live, what is emitted, what is refused -----------------------------------------------


def flat_of(write: Callable[[Tensor, Tensor], Tensor]) -> Flat:
    made = prepared(lambda: case(write))
    return functionalize(capture(made.model, made.batch))


def names(flat: Flat) -> list[str]:
    return [op_name(node).split(".")[1] for node in flat.nodes]


def test_shifting_right_is_two_scatters() -> None:
    found = [name for name in names(flat_of(to_a_slice)) if "scatter" in name or name.endswith("_")]
    assert found == ["slice_scatter", "select_scatter"]


def test_a_write_that_nothing_reads_is_dropped() -> None:
    def write(h: Tensor, g: Tensor) -> Tensor:
        scratch = h.clone()
        scratch[:, 0] = g[:, 0]
        kept = scratch[:, 1] * 1
        scratch.zero_()
        return h + kept[:, None]

    found = names(flat_of(write))
    assert "full_like" not in found
    assert found.count("select_scatter") == 1  # of the same memory as what is read: that is as far as it looks


def test_a_gradient_may_come_through_writes_alone() -> None:
    class Written(Writer):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(x.shape, dtype=x.dtype)
            out[:, 0] = self.first(x)[:, 0]
            return out.square().sum()

    made = prepared(lambda: Case(Written(to_a_slice), case(to_a_slice).batch))
    check_functional(made.model, made.batch)


def test_a_write_to_everything_needs_no_scatter() -> None:
    def write(h: Tensor, g: Tensor) -> Tensor:
        out = torch.empty_like(h)
        out[:] = g
        out.flatten()[:] = h.flatten()
        return out

    assert set(names(flat_of(write))) <= {"linear", "flatten", "reshape", "pow", "sum", "alias", "square"}


def refusal(write: Callable[[Tensor, Tensor], Tensor]) -> str:
    with pytest.raises(CaptureError) as caught:
        flat_of(write)
    return str(caught.value)


def test_writes_that_outlive_the_step_are_refused() -> None:
    class Outside(Writer):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x) * self.table
            self.write(self, x)  # type: ignore[arg-type]
            return h.square().sum()

    def refused(write: Any) -> str:
        model = Outside(write).double()
        with pytest.raises(CaptureError) as caught:
            capture(model, torch.randn(8, STEPS, WIDTH, dtype=torch.float64))
        return str(caught.value)

    def scaled(weight: Tensor) -> None:
        with torch.no_grad():
            weight[0].mul_(2)

    assert "changes buffer 'table' in place" in refused(lambda m, x: m.table[1:].add_(1))
    assert "changes batch tensor 'input_0' in place" in refused(lambda m, x: x.transpose(0, 1).mul_(2))
    text = refused(lambda m, x: scaled(m.first.weight))
    assert "changes parameter 'first.weight' in place" in text
    assert "test_functionalize.py:" in text
    assert "change a copy (x = x.clone())" in text


def test_writes_past_autograd_are_refused() -> None:
    def write(h: Tensor, g: Tensor) -> Tensor:
        out = h * 1
        with torch.no_grad():
            out[:, 0] = 0.0
        return out

    text = refusal(write)
    assert "autograd doesn't see a write through detach or under no_grad" in text
    assert "test_functionalize.py:" in text


def test_writes_to_windows_are_refused() -> None:
    def write(h: Tensor, g: Tensor) -> Tensor:
        out = h * 1
        out.unfold(1, 2, 2)[:, 0] = 0.0
        return out

    assert "it writes to a view by aten.unfold.default" in refusal(write)


def test_an_op_without_an_out_of_place_form_is_refused() -> None:
    def write(h: Tensor, g: Tensor) -> Tensor:
        out = torch.zeros(STEPS, WIDTH, dtype=h.dtype)
        out.fill_diagonal_(1.0)
        return h * out + g

    assert "aten.fill_diagonal_.default" in refusal(write)
    assert "the op has no out-of-place form" in refusal(write)
