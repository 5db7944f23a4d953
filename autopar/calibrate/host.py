"""What the host takes to issue a call of a program: a step of tiny layers, of which the device makes short work.

The program is run as emitted ones are, and a layer has what one of a transformer has there: views, casts, products,
attention; masters in float32, of which copies in bfloat16 are made once a step. Calls are counted as the cost model
does (:data:`autopar.cost_models.step.HOST_SECONDS`).
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn

from autopar.calibrate.clock import Clock
from autopar.mesh import Mesh
from autopar.runtime.axes import Axes
from autopar.runtime.executor import Executor
from autopar.runtime.modules import declare
from autopar.runtime.optimizers import adamw
from autopar.runtime.program import Input, Parameter, Program
from autopar.runtime.store import Store
from autopar.runtime.weights import StateSource
from autopar.schedules import generate, lower
from autopar.schedules.weight_moves import WeightMoves

_WIDTH: Final = 64
_TOKENS: Final = 8
_LAYERS: Final = 12
_STEPS: Final = 5
"""Of a run."""

OPS, GRADIENTS, WEIGHTS, COPIES = 25, 41, 12, 8
"""Of a layer: ops, gradients that these make of their operands, and weights, of which some are copied; each gradient of
a weight is added up, and each weight updated."""


SHAPES: Final = {
    "norm_1.weight": (_WIDTH,),
    "norm_1.bias": (_WIDTH,),
    "attn.qkv.weight": (_WIDTH, 3 * _WIDTH),
    "attn.qkv.bias": (3 * _WIDTH,),
    "attn.out.weight": (_WIDTH, _WIDTH),
    "attn.out.bias": (_WIDTH,),
    "norm_2.weight": (_WIDTH,),
    "norm_2.bias": (_WIDTH,),
    "mlp.inner.weight": (_WIDTH, 4 * _WIDTH),
    "mlp.inner.bias": (4 * _WIDTH,),
    "mlp.outer.weight": (4 * _WIDTH, _WIDTH),
    "mlp.outer.bias": (_WIDTH,),
}
"""Of the weights of a layer; norms are computed in float32, all else in bfloat16."""


def _dtype(name: str) -> str:
    return "float32" if name.startswith("norm") else "bfloat16"


class Layer(nn.Module):
    """``[1, tokens, width] -> [1, tokens, width]``, float32 between the branches, bfloat16 in them."""

    norm_1: Any
    norm_2: Any
    attn: Any
    mlp: Any

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            declare(self, name, shape, getattr(torch, _dtype(name)))

    def forward(self, x: Tensor) -> Tensor:
        aten = torch.ops.aten
        h = aten.layer_norm(x, [_WIDTH], self.norm_1.weight, self.norm_1.bias)
        h = aten.to.dtype(h, torch.bfloat16)
        h = h @ self.attn.qkv.weight
        h = h + self.attn.qkv.bias
        q, k, v = aten.split(h, _WIDTH, dim=2)
        q = aten.transpose(aten.reshape(q, [1, _TOKENS, 1, _WIDTH]), 1, 2)
        k = aten.transpose(aten.reshape(k, [1, _TOKENS, 1, _WIDTH]), 1, 2)
        v = aten.transpose(aten.reshape(v, [1, _TOKENS, 1, _WIDTH]), 1, 2)
        h = aten.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = aten.reshape(aten.transpose(h, 1, 2), [1, _TOKENS, _WIDTH])
        h = h @ self.attn.out.weight
        h = h + self.attn.out.bias
        x = x + h
        h = aten.layer_norm(x, [_WIDTH], self.norm_2.weight, self.norm_2.bias)
        h = aten.to.dtype(h, torch.bfloat16)
        h = h @ self.mlp.inner.weight
        h = h + self.mlp.inner.bias
        h = aten.gelu(h)
        h = h @ self.mlp.outer.weight
        h = h + self.mlp.outer.bias
        result: Tensor = x + h
        return result


class _Stage(nn.Module):
    layers: Any

    def __init__(self) -> None:
        super().__init__()
        for number in range(_LAYERS):
            declare(self, f"layers.{number}", Layer())

    def forward(self, x: Tensor) -> Tensor:
        for number in range(_LAYERS):
            x = self.layers[number](x)
        loss: Tensor = torch.ops.aten.mean(x)
        return loss


_CALLS: Final = _LAYERS * (OPS + GRADIENTS + COPIES + 2 * WEIGHTS) + 1 + 1 - 2
"""With the mean, which is the loss; but the two ops that read what enters make no gradient of it."""


def _program() -> Program:
    names = [(number, name) for number in range(_LAYERS) for name in SHAPES]
    return Program(
        stage=0,
        stages=1,
        mesh={"pp": 1, "dp": 1, "tp": 1},
        microbatches=1,
        receives=(),
        inputs=(Input("x", "x", (1, _TOKENS, _WIDTH), "float32", 0),),
        totals=(),
        sends=(),
        parameters=tuple(
            Parameter(f"layers.{number}.{name}", SHAPES[name], SHAPES[name], _dtype(name), master="float32")
            for number, name in names
        ),
        loss_axes=(),
        plan_digest="",
    )


def _executor(device: torch.device) -> Executor:
    """Of one rank, with weights that are all the same."""
    module, program, axes = _Stage(), _program(), Axes.build(Mesh(), 0, device, own=True)
    weights = {each.name: torch.full(each.shape, 1 / _WIDTH) for each in program.parameters}
    store = Store.load(module, program, axes, StateSource(weights))
    schedule = lower(generate("1f1b", 1, 1), None, WeightMoves("step", False))
    return Executor({0: module}, {0: program}, schedule, axes, adamw(store.masters.values()), stores={0: store})


def host_call_seconds(clock: Clock) -> float:
    """Of steps that are issued one after the other, without waiting for any; on a CPU, of computing them as well."""
    executor, batch = _executor(clock.device), {"x": torch.ones(1, _TOKENS, _WIDTH, device=clock.device)}

    def run(steps: int) -> float:
        if clock.device.type == "cuda":
            torch.cuda.synchronize(clock.device)
        start = time.perf_counter()
        for _ in range(steps):
            executor.step(batch)
        return (time.perf_counter() - start) / steps

    run(3)
    return median(run(_STEPS) for _ in range(clock.repeats)) / _CALLS
