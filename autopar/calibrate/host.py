"""What the host takes to issue a call of a program: a step of tiny layers, of which the device makes short work.

A layer has what one of a transformer has in an emitted program: views, casts, products, attention; masters in float32,
of which copies in bfloat16 are made once a step, and gradients that are added up as they come. Calls are counted as the
cost model does (:data:`autopar.cost_models.step.HOST_SECONDS`).
"""

from __future__ import annotations

import time
from statistics import median
from typing import Final

import torch
from torch import Tensor, nn

from autopar.calibrate.clock import Clock

_WIDTH: Final = 64
_TOKENS: Final = 8
_LAYERS: Final = 12
_STEPS: Final = 5
"""Of a run."""

OPS, GRADIENTS, WEIGHTS, COPIES = 25, 41, 12, 8
"""Of a layer: ops, gradients that these make of their operands, and weights, of which some are copied; each gradient of
a weight is added up, and each weight updated."""


class Layer(nn.Module):
    """``[1, tokens, width] -> [1, tokens, width]``, float32 between the branches, bfloat16 in them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = _product(_WIDTH, 3 * _WIDTH), _product(_WIDTH, _WIDTH)
        self.inner, self.outer = _product(_WIDTH, 4 * _WIDTH), _product(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        aten = torch.ops.aten
        h = aten.layer_norm(x, [_WIDTH], self.norm_1.weight, self.norm_1.bias)
        h = aten.to.dtype(h, torch.bfloat16)
        h = h @ self.qkv.weight
        h = h + self.qkv.bias
        q, k, v = aten.split(h, _WIDTH, dim=2)
        q = aten.transpose(aten.reshape(q, [1, _TOKENS, 1, _WIDTH]), 1, 2)
        k = aten.transpose(aten.reshape(k, [1, _TOKENS, 1, _WIDTH]), 1, 2)
        v = aten.transpose(aten.reshape(v, [1, _TOKENS, 1, _WIDTH]), 1, 2)
        h = aten.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = aten.reshape(aten.transpose(h, 1, 2), [1, _TOKENS, _WIDTH])
        h = h @ self.out.weight
        h = h + self.out.bias
        x = x + h
        h = aten.layer_norm(x, [_WIDTH], self.norm_2.weight, self.norm_2.bias)
        h = aten.to.dtype(h, torch.bfloat16)
        h = h @ self.inner.weight
        h = h + self.inner.bias
        h = aten.gelu(h)
        h = h @ self.outer.weight
        h = h + self.outer.bias
        result: Tensor = x + h
        return result


def _product(rows: int, columns: int) -> nn.ParameterDict:
    weight = torch.randn(rows, columns, dtype=torch.bfloat16) / rows
    return nn.ParameterDict({"weight": weight, "bias": torch.zeros(columns, dtype=torch.bfloat16)})


class Training:
    """Steps of layers as a rank takes them."""

    def __init__(self, device: torch.device) -> None:
        with device:
            self.layers = nn.Sequential(*(Layer() for _ in range(_LAYERS)))
            self.x, self.gradient = (torch.ones(1, _TOKENS, _WIDTH) for _ in range(2))
        self.masters = {weight: nn.Parameter(weight.detach().float()) for weight in self.layers.parameters()}
        self.sums = {weight: torch.zeros_like(master) for weight, master in self.masters.items()}
        for weight in self.masters:
            weight.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]
        self.optimizer = torch.optim.AdamW(self.masters.values(), fused=True)

    def _add(self, weight: Tensor) -> None:
        assert isinstance(weight, nn.Parameter)
        assert weight.grad is not None
        self.sums[weight].add_(weight.grad)
        weight.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for weight, master in self.masters.items():
                if weight.dtype != master.dtype:
                    weight.copy_(master)
        made = self.layers(self.x.detach().requires_grad_())
        torch.autograd.backward([made], [self.gradient])
        for weight, master in self.masters.items():
            master.grad = self.sums[weight]
        self.optimizer.step()


def host_call_seconds(clock: Clock) -> float:
    """Of steps that are issued one after the other, without waiting for any; on a CPU, of computing them as well."""
    training = Training(clock.device)

    def run(steps: int) -> float:
        if clock.device.type == "cuda":
            torch.cuda.synchronize(clock.device)
        start = time.perf_counter()
        with torch.autograd.set_multithreading_enabled(False):
            for _ in range(steps):
                training.step()
        return (time.perf_counter() - start) / steps

    run(3)
    return median(run(_STEPS) for _ in range(clock.repeats)) / (_LAYERS * (OPS + GRADIENTS + COPIES + 2 * WEIGHTS))
