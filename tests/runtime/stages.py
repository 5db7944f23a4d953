"""A small language model, once on one device and once as the stage modules that a compiler would emit for it.

Embedding and head are tied and split by rows over tp, the layers are a column/row pair with sequence parallelism;
``scale`` crosses all stages and has no gradient; ``unused`` is a parameter that nothing uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor as Tensor_
from torch import nn

from autopar.mesh import Mesh
from autopar.runtime import (
    Axes,
    Input,
    P,
    Parameter,
    Program,
    R,
    S,
    Tensor,
    Total,
    all_gather,
    cross_entropy_sharded,
    declare,
    embedding_sharded,
    reduce_scatter,
)
from autopar.runtime.executor import Executor
from autopar.schedules import generate, lower
from autopar.schedules.weight_moves import MessageSizes
from autopar.spmd import parse
from tests.runtime.ranks import part

aten = torch.ops.aten

BATCH, SEQ, VOCAB, WIDTH, LAYERS = 16, 8, 16, 8, 4
EMBED = "model.embed.weight"


class OneDevice(nn.Module):
    """The model as a user would write it; ``weights`` in float64, by name."""

    def __init__(self, weights: dict[str, Tensor_]) -> None:
        super().__init__()
        self.weights = {name: nn.Parameter(weight.clone()) for name, weight in weights.items()}

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self.weights.values())

    def forward(self, ids: Tensor_, labels: Tensor_, scale: Tensor_) -> Tensor_:
        w = self.weights
        h = F.embedding(ids, w[EMBED])
        for i in range(LAYERS):
            x = F.layer_norm(h, (WIDTH,), w[f"model.layers.{i}.norm.weight"])
            x = torch.tanh(F.linear(x, w[f"model.layers.{i}.up.weight"]))
            h = h + F.linear(x, w[f"model.layers.{i}.down.weight"])
        logits = F.linear(h * scale[:, None, None], w[EMBED])
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make_weights() -> dict[str, Tensor_]:
    random = torch.Generator().manual_seed(0)
    shapes = {EMBED: (VOCAB, WIDTH), "model.unused.weight": (3,)}
    for i in range(LAYERS):
        layer = {"norm": (WIDTH,), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}


def make_batch(step: int) -> dict[str, Tensor_]:
    random = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(0, VOCAB, (BATCH, SEQ), generator=random) for _ in range(2))
    labels[::3, : SEQ // 2] = -100  # every microbatch and dp rank has another number of tokens
    return {
        "ids": ids,
        "0.labels": labels,
        "scale": torch.rand(BATCH, generator=random, dtype=torch.float64),
    }


class Layer(nn.Module):
    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.tp = axes["tp"]
        self.axes = axes
        inner = 4 * WIDTH // self.tp.size
        declare(self, "norm.weight", (WIDTH,), torch.float64)
        declare(self, "up.weight", (inner, WIDTH), torch.float64)
        declare(self, "down.weight", (WIDTH, inner), torch.float64)

    def forward(self, h: Tensor_) -> Tensor_:
        x = aten.layer_norm(h, [WIDTH], self.norm.weight)
        x = all_gather(x, self.tp, src=S(1), dst=R)
        x = aten.tanh(aten.linear(x, self.up.weight))
        x = reduce_scatter(aten.linear(x, self.down.weight), self.tp, src=P, dst=S(1))
        return h + x


class Stage(nn.Module):
    """Stage ``stage`` of ``stages``: all kinds in one class, so that one stage can be first and last."""

    def __init__(self, axes: Axes, stage: int, stages: int) -> None:
        super().__init__()
        self.tp = axes["tp"]
        self.first, self.last = stage == 0, stage == stages - 1
        self.layers = layers_of(stage, stages)
        if self.first or self.last:
            declare(self, EMBED, (VOCAB // self.tp.size, WIDTH), torch.float64)
        if self.first:
            declare(self, "model.unused.weight", (3,), torch.float64)
        for i in self.layers:
            declare(self, f"model.layers.{i}", Layer(axes))

    def totals(self, *inputs: Tensor_) -> tuple[Tensor_]:
        return ((inputs[-1] != -100).sum(),)

    def forward(self, *values: Tensor_) -> Tensor_ | tuple[Tensor_, ...]:
        if self.first:
            ids, scale, *rest = values
            h = embedding_sharded(self.model.embed.weight, ids, self.tp)
            h = reduce_scatter(h, self.tp, src=P, dst=S(1))
        else:
            h, scale, *rest = values
        for i in self.layers:
            h = self.model.layers[i](h)
        if not self.last:
            return h, scale
        labels, tokens = rest
        h = all_gather(h * scale[:, None, None], self.tp, src=S(1), dst=R)
        logits = aten.linear(h, self.model.embed.weight)
        total = cross_entropy_sharded(logits.flatten(0, 1), labels.flatten(), self.tp)
        return total / tokens


def layers_of(stage: int, stages: int) -> range:
    each = LAYERS // stages
    return range(stage * each, (stage + 1) * each)


def make_program(mesh: Mesh, microbatches: int, stage: int, stages: int) -> Program:
    first, last, tp = stage == 0, stage == stages - 1, mesh.tp
    rows = BATCH // microbatches // mesh.dp
    boundary = (
        Tensor("h", (rows, SEQ // tp, WIDTH), "float64"),
        Tensor("scale", (rows,), "float64", needs_grad=False),
    )
    ids = Input("ids", "ids", (BATCH, SEQ), "int64", 0)
    scale = Input("scale", "scale", (BATCH,), "float64", 0)
    labels = Input("labels", "0.labels", (BATCH, SEQ), "int64", 0)
    return Program(
        stage=stage,
        stages=stages,
        mesh=mesh.to_json(),
        microbatches=microbatches,
        receives=() if first else boundary,
        inputs=(*([ids, scale] if first else []), *([labels] if last else [])),
        totals=(Total("tokens", ("dp",)),) if last else (),
        sends=() if last else boundary,
        parameters=tuple(parameters(mesh, stage, stages)),
        loss_axes=("dp",),
    )


def parameters(mesh: Mesh, stage: int, stages: int) -> Iterator[Parameter]:
    tp, ends = mesh.tp, (0, stages - 1)

    def parameter(name: str, shape: tuple[int, ...], kind: str, *reduce: str, **more: object) -> Parameter:
        local = list(shape)
        if parse(kind).is_shard:
            local[parse(kind).dim] //= tp
        types = {"tp": kind} if kind != "I" else {}
        return Parameter(name, tuple(local), shape, "float64", types, reduce, **more)  # type: ignore[arg-type]

    shared = ends if stages > 1 else ()
    if stage == 0:
        yield parameter(EMBED, (VOCAB, WIDTH), "S(0)", "dp", shared_stages=shared)
        yield parameter("model.unused.weight", (3,), "I", "dp")
    for i in layers_of(stage, stages):
        yield parameter(f"model.layers.{i}.norm.weight", (WIDTH,), "I", "dp", "tp")
        yield parameter(f"model.layers.{i}.up.weight", (4 * WIDTH, WIDTH), "S(0)", "dp")
        yield parameter(f"model.layers.{i}.down.weight", (WIDTH, 4 * WIDTH), "S(1)", "dp")
    if stage == stages - 1 > 0:
        yield parameter(EMBED, (VOCAB, WIDTH), "S(0)", "dp", shared_stages=shared)


def make_stage(axes: Axes, program: Program) -> Stage:
    """The stage with this rank's part of the weights."""
    stage, weights = Stage(axes, program.stage, program.stages), make_weights()
    for spec in program.parameters:
        path, _, name = spec.name.rpartition(".")
        tp = axes["tp"]
        local = part(weights[spec.name], parse(spec.types.get("tp", "I")), tp.index, tp.size).clone()
        assert local.shape == spec.shape == stage.get_parameter(spec.name).shape
        setattr(stage.get_submodule(path), name, nn.Parameter(local))
    return stage


def make_executor(
    axes: Axes,
    microbatches: int,
    schedule: str = "1f1b",
    *,
    clip_norm: float | None = 0.1,
    bucket_bytes: int = 1500,
    on_gradients: Callable[[dict[str, Tensor_]], None] | None = None,
) -> Executor:
    """This rank's executor, with AdamW and buckets so small that there are several."""
    pp = axes["pp"]
    program = make_program(axes.mesh, microbatches, pp.index, pp.size)
    module = make_stage(axes, program)
    plan = lower(generate(schedule, pp.size, microbatches))
    return Executor(
        {pp.index: module},
        {pp.index: program},
        plan,
        axes,
        torch.optim.AdamW(module.parameters(), lr=1e-2),
        clip_norm=clip_norm,
        sizes=MessageSizes(part_bytes=1, bucket_bytes=bucket_bytes),
        on_gradients=on_gradients,
    )
