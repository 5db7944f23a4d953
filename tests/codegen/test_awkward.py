"""Models whose modules, names or data flow are not those of a plain stack of layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.codegen.programs import assert_equal, emit_alone, expected, folded, run
from tests.models import Case

WIDTH = 6


def square(output: Tensor, batch: object) -> Tensor:
    return output.square().sum()


class Reused(nn.Module):
    """The same two layers, called in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = torch.tanh(layer(x))
        return x


class Borrowing(nn.Module):
    """Layers that all read one parameter of the model, and one layer that reads another's weight."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, scale: Tensor, other: Tensor | None = None) -> Tensor:
            x = torch.tanh(self.own(x)) * scale
            return x if other is None else x @ other

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList([Borrowing.Layer() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = layer(x, self.scale)
        return self.layers[3](x, self.scale, self.layers[0].own.weight)


class OddNames(nn.Module):
    """Module names that are no attributes; inputs that are called like Python's or our own."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"a-b": nn.Linear(WIDTH, WIDTH), "class": nn.Linear(WIDTH, WIDTH)})
        self.i = nn.Linear(WIDTH, WIDTH)
        self.declare = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, sum: Tensor, torch: Tensor) -> Tensor:
        x = self.declare(self.i(h) + sum)
        return self.heads["a-b"](x) * self.heads["class"](x) + torch


class Tables(nn.Module):
    """A buffer, a table that is made from it, a frozen parameter, and a batch tensor that isn't used."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.rand(WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.layers[1].weight.requires_grad_(False)

    def forward(self, x: Tensor, unused: Tensor) -> Tensor:
        table = torch.cos(self.frequency * 3)
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) * table
        return x


class TwoStreams(nn.Module):
    """Layers that pass on two values, of which one begins as the other; the first is used to the end."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(self.a(y)) + first, torch.sin(self.b(x))

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([TwoStreams.Layer() for _ in range(4)])
        self.outward = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = self.inward(x)
        x = y = first
        for layer in self.layers:
            x, y = layer(x, y, first)
        return self.outward(x * y) + first


class Skips(nn.Module):
    """A U: what the first half makes, the second half reads in reverse."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.up = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            kept.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], -1)))
        return x


class Parts(nn.Module):
    """Results in parts: some unread, many at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for layer in self.layers:
            a, _, b, _ = layer(x).chunk(4, -1)
            top, _ = x.max(-1, keepdim=True)
            many = x.split(1, -1)
            x = torch.cat([a, b, many[7], many[0], top, many[3] * many[3], a], -1)
            x = F.pad(x, (0, 8 - x.shape[-1]))
        return x


def batch_of(model: nn.Module) -> dict[str, Tensor]:
    """One tensor for every argument, under its name."""
    names = inspect.signature(model.forward).parameters
    return {name: torch.randn(4, WIDTH, dtype=torch.float64) for name in names}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "reused": Reused,
    "borrowing": Borrowing,
    "odd_names": OddNames,
    "tables": Tables,
    "two_streams": TwoStreams,
    "skips": Skips,
    "parts": Parts,
    "sequential": lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Tanh()),
    "repeated": lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH), nn.Tanh()) * 3, nn.Linear(WIDTH, 2)),
}


def case_of(name: str) -> Case:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    return Case(model, batch_of(model), square)


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_awkward_models(name: str, stages: int) -> None:
    case = case_of(name)
    model = folded(case)
    if sum(model.block_of(call).kind != "tables" for call in model.calls) < stages:
        pytest.fail("the model has too few units; fewer stages")
    assert_equal(run(case, emit_alone(model, stages)), expected(case), 1e-12)


def test_a_value_is_sent_once_and_passed_through() -> None:
    first, middle, last = (one.program for one in emit_alone(folded(case_of("skips")), 3))
    crossing = len(first.sends)
    assert crossing == len(middle.receives) == 2
    assert [t.shape for t in middle.sends] == [t.shape for t in last.receives]
    assert "return h, h2" in emit_alone(folded(case_of("skips")), 3)[1].text


def test_modules_called_twice_are_written_out() -> None:
    text = emit_alone(folded(case_of("reused")))[0].text
    assert text.count("class ") == 1
    assert text.count("self.layers[0].weight") == 2
    assert text.count('declare(self, "layers.0.weight"') == 1


def test_borrowed_parameters_are_arguments() -> None:
    text = emit_alone(folded(case_of("borrowing")))[0].text
    assert "h = self.layers[i](h, self.scale)" in text
    assert "h = self.layers[3](h, self.scale, self.layers[0].own.weight)" in text
    assert 'declare(self, "layers.0.own.weight"' not in text


def test_a_frozen_parameter_and_a_buffer() -> None:
    case = case_of("tables")
    program = emit_alone(folded(case))[0].program
    assert {p.name for p in program.parameters if not p.trainable} == {"frequency", "layers.1.weight"}
    assert {p.name for p in program.parameters if p.is_buffer} == {"frequency"}
    assert [i.name for i in program.inputs] == ["x"]
