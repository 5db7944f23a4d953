"""Whether reshapes copy: as they do of real tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.graph import Info, Meta, set_info
from autopar.rules.shape import copies

aten = torch.ops.aten
SHAPE = (2, 3, 4, 5)

Step = Callable[[random.Random, Tensor], tuple[Any, tuple[Any, ...], dict[str, Any]]]
STEPS: dict[str, Step] = {
    "transpose": lambda draw, x: (aten.transpose.int, tuple(draw.sample(range(x.ndim), 2)), {}),
    "double": lambda draw, x: (aten.mul.Tensor, (2.0,), {}),
    "cast": lambda draw, x: (aten.to.dtype, (torch.float32,), {}),
    "clone": lambda draw, x: (aten.clone.default, (), {}),
    "channels last": lambda draw, x: (aten.clone.default, (), {"memory_format": torch.channels_last}),
    "in order": lambda draw, x: (aten.clone.default, (), {"memory_format": torch.contiguous_format}),
    "cast in order": lambda draw, x: (aten.to.dtype, (torch.float32, False, True, torch.contiguous_format), {}),
}


def node_of(graph: fx.Graph, made: Tensor, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.call_function(target, args, kwargs)
    return set_info(node, Info((Meta(tuple(made.shape), made.dtype),)))


@pytest.mark.parametrize("seed", range(4))
def test_a_reshape_copies_where_it_does_of_real_tensors(seed: int) -> None:
    draw, found = random.Random(seed), set()
    for _ in range(30):
        graph, value = fx.Graph(), torch.zeros(SHAPE, dtype=torch.float64)
        node = set_info(graph.placeholder("x"), Info((Meta(SHAPE, value.dtype),), role="input"))
        other, zeros = node, value
        for name in draw.choices([*STEPS, "add"], k=draw.randint(1, 4)):
            if name == "add":
                if zeros.shape != value.shape:
                    continue
                target, args, given, kwargs = aten.add.Tensor, (other,), (zeros,), {}
            else:
                target, args, kwargs = STEPS[name](draw, value)
                given = args
            made = target(value, *given, **kwargs)
            node, value = node_of(graph, made, target, node, *args, **kwargs), made
        shape = draw.choice([(6, 20), (2, 12, 5), (24, 5), (120,)])
        reshaped = value.reshape(shape)
        found.add(reshaped.data_ptr() != value.data_ptr())
        last = node_of(graph, reshaped, aten.reshape.default, node, list(shape))
        assert copies(last, "cpu") == (reshaped.data_ptr() != value.data_ptr()), graph
    assert found == {False, True}
