"""The source of an op runs exactly that op, and reads well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.codegen.expressions import expression
from autopar.errors import GraphError
from autopar.graph import AxisRef, Info, Meta, RuntimeOp, set_info
from autopar.spmd import R, S

aten = torch.ops.aten
X = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X + 1
W = torch.ones(5, 4, dtype=torch.float64)
IDS = torch.tensor([[0, 1], [2, 0]])
END = 9223372036854775807

EXAMPLES: list[tuple[Any, Sequence[Any], dict[str, Any], str]] = [
    (aten.add.Tensor, (X, Y), {}, "a + b"),
    (aten.add.Tensor, (X, 1e-6), {}, "a + 1e-06"),
    (aten.add.Tensor, (X, Y), {"alpha": 2}, "aten.add(a, b, alpha=2)"),
    (aten.sub.Tensor, (X, Y), {}, "a - b"),
    (aten.mul.Tensor, (X, 2), {}, "a * 2"),
    (aten.mul.Tensor, (X, float("-inf")), {}, 'a * float("-inf")'),
    (aten.div.Tensor, (X, Y), {}, "a / b"),
    (
        aten.div.Tensor_mode,
        (X, Y),
        {"rounding_mode": "floor"},
        'aten.div.Tensor_mode(a, b, rounding_mode="floor")',
    ),
    (aten.pow.Tensor_Scalar, (X, 2), {}, "a**2"),
    (aten.neg.default, (X,), {}, "-a"),
    (aten.ne.Scalar, (IDS, -100), {}, "a != -100"),
    (aten.lt.Tensor, (X, Y), {}, "a < b"),
    (aten.bitwise_not.default, (IDS,), {}, "~a"),
    (aten.matmul.default, (X, W.T), {}, "a @ b"),
    (aten.linear.default, (X, W), {}, "aten.linear(a, b)"),
    (aten.linear.default, (X, W, None), {}, "aten.linear(a, b)"),
    (aten.slice.Tensor, (X, 2, 2, END), {}, "a[..., 2:]"),
    (aten.slice.Tensor, (X, -1, 0, 2), {}, "a[..., :2]"),
    (aten.slice.Tensor, (X, 1, 1, 3, 2), {}, "a[:, 1:3:2]"),
    (aten.slice.Tensor, (X, 1, -2, END), {}, "a[:, -2:]"),
    (aten.slice.Tensor, (X, 0, 1), {}, "a[1:]"),
    (aten.slice.Tensor, (X,), {}, "a[:]"),
    (aten.select.int, (X, 1, -1), {}, "a[:, -1]"),
    (aten.select.int, (X, 2, 0), {}, "a[..., 0]"),
    (aten.slice.Tensor, (X,), {"dim": 1, "start": 1}, "aten.slice(a, dim=1, start=1)"),
    (aten.mean.dim, (X, [-1], True), {}, "aten.mean.dim(a, [-1], keepdim=True)"),
    (aten.sum.default, (X,), {}, "aten.sum.default(a)"),
    (aten.cat.default, ([X, Y], -1), {}, "aten.cat([a, b], dim=-1)"),
    (aten.transpose.int, (X, 1, 2), {}, "aten.transpose(a, 1, 2)"),
    (aten.embedding.default, (W, IDS), {}, "aten.embedding(a, b)"),
    (aten.to.dtype, (X, torch.float32), {}, "aten.to.dtype(a, torch.float32)"),
    (aten.split.Tensor, (X, 2, 2), {}, "aten.split(a, 2, dim=2)"),
    (aten.layer_norm.default, (X, [4], None, None, 1e-6), {}, "aten.layer_norm(a, [4], eps=1e-06)"),
    (aten.layer_norm.default, (X, [4], W[0], W[1], 1e-5, False), {}, "aten.layer_norm(a, [4], b, c)"),
    (
        aten.scaled_dot_product_attention.default,
        (X, X, X, None, 0.0, True),
        {"scale": 0.5},
        "aten.scaled_dot_product_attention(a, a, a, is_causal=True, scale=0.5)",
    ),
    (aten.index.Tensor, (X, [None, IDS[0]]), {}, "aten.index(a, [None, b])"),
    (
        aten.zeros.default,
        ([2, 3],),
        {"dtype": torch.int64, "pin_memory": False},
        "aten.zeros([2, 3], dtype=torch.int64)",
    ),
]


class Recorder(TorchDispatchMode):
    """Keeps the overloads that reach the dispatcher's end."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


def written(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The source, and the tensors that its names stand for."""
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {}
    tensors: dict[str, Any] = {}

    def place(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if id(item) not in nodes:
                name = "abc"[len(nodes)]
                nodes[id(item)] = set_info(graph.placeholder(name), Info((Meta(tuple(item.shape), item.dtype),)))
                tensors[name] = item
            return nodes[id(item)]
        return [place(i) for i in item] if isinstance(item, list) else item

    node = graph.call_function(target, tuple(place(a) for a in args), {k: place(v) for k, v in kwargs.items()})
    set_info(node, Info((Meta((), torch.float32),), source="model.py:7"))
    return "".join(str(part) for part in expression(node, lambda n: n.name)), tensors


@pytest.mark.parametrize(("target", "args", "kwargs", "text"), EXAMPLES, ids=[e[3] for e in EXAMPLES])
def test_the_source_runs_that_very_op(target: Any, args: Sequence[Any], kwargs: dict[str, Any], text: str) -> None:
    source, tensors = written(target, args, kwargs)
    assert source == text
    with Recorder() as expected:
        wanted = target(*args, **kwargs)
    with Recorder() as found:
        made = eval(source, {"aten": aten, "torch": torch}, tensors)
    torch.testing.assert_close(made, wanted, rtol=0, atol=0)
    assert [c for c in found.calls if c != "aten.alias.default"] == expected.calls


def test_runtime_functions_and_axes() -> None:
    graph = fx.Graph()
    x = set_info(graph.placeholder("x"), Info((Meta((4,), torch.float32),)))
    node = graph.call_function(RuntimeOp("all_gather"), (x, AxisRef("tp")), {"src": S(0, 4), "dst": R})
    parts = expression(node, lambda n: n.name)
    assert "".join(map(str, parts)) == "all_gather(x, tp, src=S(0, 4), dst=R)"
    assert "tp" in parts


def test_a_device_is_that_of_the_rank() -> None:
    text, _ = written(aten.arange.default, (4,), {"device": torch.device("cpu"), "pin_memory": False})
    assert text == "aten.arange(4, device=self.axes.device)"


def test_a_python_function_is_refused_by_its_line() -> None:
    with pytest.raises(GraphError, match=r"sorted at model.py:7 is no op"):
        written(sorted, (X,), {})
