"""Emitted modules under torch.compile: one graph, collectives and their gradients within."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar import simulate
from autopar.mesh import Mesh
from autopar.runtime import (
    Axes,
    I,
    P,
    R,
    S,
    all_gather,
    all_reduce,
    all_to_all,
    convert,
    cross_entropy_sharded,
    embedding_sharded,
    reduce_scatter,
    rng,
)

aten = torch.ops.aten


class Block(nn.Module):
    """Every transition and special form once; dropout where asked for."""

    def __init__(self, axes: Axes, dropout: bool) -> None:
        super().__init__()
        self.axes, self.dropout = axes, dropout
        self.embed = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        tp = self.axes["tp"]
        x = reduce_scatter(embedding_sharded(self.embed, ids, tp), tp, src=P, dst=S(1))
        x = all_to_all(all_to_all(x, tp, src=S(1), dst=S(2)), tp, src=S(2), dst=S(1))
        x = all_gather(aten.tanh(x), tp, src=S(1), dst=R)
        if self.dropout:
            with rng(self.axes, 7, ("tp",)):
                x = aten.dropout(x, 0.5, True)
        x = all_reduce(x, tp, src=P, dst=R)
        rows = convert(convert(self.embed, tp, src=I, dst=R), tp, src=R, dst=S(0, 2))
        columns = all_gather(convert(self.embed, tp, src=I, dst=S(1)), tp, src=S(1), dst=I)
        scale = all_reduce(rows.sum(), tp, src=P, dst=I) * columns.square().sum()
        logits = aten.linear(x, self.embed) * scale.tanh()
        return cross_entropy_sharded(logits.flatten(0, 1), labels.flatten(), tp)


@pytest.mark.filterwarnings("ignore")  # the tracer's own, which it would trip over as errors
@pytest.mark.parametrize("dropout", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_equals_eager(dropout: bool) -> None:
    ids, labels = torch.randint(0, 16, (2, 6)), torch.randint(0, 16, (2, 6))

    def program(rank: int) -> None:
        axes = Axes.build(Mesh(tp=2), rank, "cpu")
        block = Block(axes, dropout)
        compiled = torch.compile(block, backend="eager" if dropout else "aot_eager", fullgraph=not dropout)
        for step in range(2):
            axes.stream.step = step
            found = []
            for run in (block, compiled):
                loss = run(ids, labels)
                (gradient,) = torch.autograd.grad(loss, [block.embed])
                found.append((loss.item(), gradient))
            assert found[0][0] == pytest.approx(found[1][0], rel=1e-14)
            torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-12, atol=1e-12)

    simulate.run(program, 2, track_memory=False)
