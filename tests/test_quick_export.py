from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.quick_export import quick_export
from autopar.source_lines import line_of_trace


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():  # a graph of its own, which export splits off
            scale = x.abs().mean()
        return self.activated(self.linear(x)) / scale

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() + 1


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    return torch.export.export(model, (torch.ones(2, 4),), strict=False)


def test_graphs_lines_and_code_are_those_of_torch_export() -> None:
    model = Layers()
    plain = exported(model)
    with quick_export():
        quick = exported(model)
    assert str(quick.graph) == str(plain.graph)
    assert quick.graph_module.code == plain.graph_module.code
    pairs = list(zip(quick.graph.nodes, plain.graph.nodes, strict=True))
    lines = [[line_of_trace(node.meta.get("stack_trace") or "") for node in pair] for pair in pairs]
    assert all(one == other for one, other in lines)
    said = {node.name: line for (node, _), (line, _) in zip(pairs, lines, strict=True)}
    assert all(said[name].startswith("test_quick_export.py:") for name in ("linear", "relu", "add_1", "div_1"))


class Refuses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


def test_what_follows_is_traced_as_ever() -> None:
    before = torch.fx.proxy.CapturedTraceback  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no"), quick_export():
        exported(Refuses())
    assert torch.fx.proxy.CapturedTraceback is before  # type: ignore[attr-defined]
