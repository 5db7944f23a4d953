"""A placed model written down by hand: Megatron's two products with sequence parallelism, vocabulary parallelism.

Two microbatches, dp 2, tp 2. Shapes are those of one rank; of types only results, which is all that codegen reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.graph import (
    INPUT_CALL,
    AxisRef,
    Block,
    Call,
    Choice,
    Info,
    InputInfo,
    Meta,
    Model,
    ParameterInfo,
    RuntimeOp,
    Value,
    set_info,
)
from autopar.spmd import I, P, R, S, Type

aten = torch.ops.aten
BATCH, SEQUENCE, WIDTH, WORDS = 8, 16, 32, 64
LOCAL, HALF = BATCH // 4, SEQUENCE // 2
TP = AxisRef("tp")
SEQUENCE_SPLIT = S(1)
ROWS = {"mb": S(0), "dp": S(0)}


class Writer:
    """Makes the nodes of one block; types are given for tp, the rest follows from ``rest``."""

    def __init__(self, name: str, kind: str) -> None:
        self.block = Block(name, kind, fx.Graph())

    def stored(self, name: str, shape: tuple[int, ...], tp: Type) -> fx.Node:
        data = Info((Meta(shape, torch.float32, True),), role="parameter", name=name)
        return self._done(self.block.graph.placeholder(name.replace(".", "_")), data, {"mb": R, "dp": I, "tp": tp})

    def given(self, name: str, meta: Meta, tp: Type = R, rest: dict[str, Type] | None = None) -> fx.Node:
        node = self.block.graph.placeholder(name)
        return self._done(node, Info((meta,), role="input", name=name), (rest or ROWS) | {"tp": tp})

    def op(
        self, target: Any, args: tuple[Any, ...], meta: Meta, tp: Type, rest: dict[str, Type] | None = None, **more: Any
    ) -> fx.Node:
        """``more``: keyword arguments of the op, and ``module``, ``source``, ``random`` of its metadata."""
        known = {key: more.pop(key) for key in ("module", "source", "random") if key in more}
        node = self.block.graph.call_function(target, args, more)
        return self._done(node, Info((meta,), **known), (rest or ROWS) | {"tp": tp})

    def use(self, weight: fx.Node, meta: Meta, tp: Type) -> fx.Node:
        """The parameter as data parallelism takes it."""
        kinds = {"mb": R, "dp": R}
        return self.op(RuntimeOp("convert"), (weight, AxisRef("dp")), meta, tp, kinds, src=I, dst=R)

    def change(self, function: str, x: fx.Node, meta: Meta, src: Type, dst: Type) -> fx.Node:
        return self.op(RuntimeOp(function), (x, TP), meta, dst, src=src, dst=dst)

    def done(self, *outputs: fx.Node) -> Block:
        self.block.graph.output(outputs)
        return self.block

    def _done(self, node: fx.Node, data: Info, types: dict[str, Type]) -> fx.Node:
        data.choices = {axis: Choice((), kind) for axis, kind in types.items()}
        return set_info(node, data)


def hidden(*shape: int) -> Meta:
    return Meta(shape, torch.float32, True)


def ids(*shape: int) -> Meta:
    return Meta(shape, torch.int64)


def tables() -> Block:
    make = Writer("tables", "tables")
    labels = make.given("labels", ids(LOCAL, SEQUENCE))
    flat = make.op(aten.reshape.default, (labels, [LOCAL * SEQUENCE]), ids(LOCAL * SEQUENCE), R)
    valid = make.op(aten.ne.Scalar, (flat, -100), Meta((LOCAL * SEQUENCE,), torch.bool), R)
    count = make.op(aten.sum.default, (valid,), ids(), R, {"mb": P, "dp": P})
    return make.done(flat, count)


def embedding() -> Block:
    make = Writer("glue", "glue")
    weight = make.stored("embed.weight", (WORDS // 2, WIDTH), S(0))
    tokens = make.given("ids", ids(LOCAL, SEQUENCE))
    used = make.use(weight, hidden(WORDS // 2, WIDTH), S(0))
    x = make.op(
        *(RuntimeOp("embedding_sharded"), (used, tokens, TP), hidden(LOCAL, SEQUENCE, WIDTH), P),
        module="embed",
        source="model.py:30",
    )
    return make.done(x)


def layer(takes: Type = SEQUENCE_SPLIT) -> Block:
    """``h + down(dropout(relu(up(norm(h)))))``; it takes ``h`` as ``takes`` (S(1) or R) and gives it as S(1)."""
    make = Writer("Layer", "layer")
    scale = make.stored("norm.weight", (WIDTH,), I)
    up = make.stored("up.weight", (WIDTH, WIDTH), S(0))
    down = make.stored("down.weight", (WIDTH, WIDTH), S(1))
    x = make.given("x", hidden(LOCAL, HALF if takes.is_shard else SEQUENCE, WIDTH), takes)
    split, full = hidden(LOCAL, HALF, WIDTH), hidden(LOCAL, SEQUENCE, WIDTH)
    if not takes.is_shard:
        x = make.change("convert", x, split, R, S(1))
    weight = make.change("convert", make.use(scale, hidden(WIDTH), I), hidden(WIDTH), I, R)
    h = make.op(aten.rms_norm.default, (x, [WIDTH], weight), split, S(1), module="norm", source="model.py:10")
    h = make.change("all_gather", h, full, S(1), R)
    used = make.use(up, hidden(WIDTH, WIDTH), S(0))
    h = make.op(aten.linear.default, (h, used), full, S(2), module="up", source="model.py:11")
    h = make.op(aten.relu.default, (h,), full, S(2), source="model.py:11")
    h = make.op(aten.dropout.default, (h, 0.1, True), full, S(2), random=True, source="model.py:11")
    used = make.use(down, hidden(WIDTH, WIDTH), S(1))
    h = make.op(aten.linear.default, (h, used), full, P, module="down", source="model.py:11")
    h = make.change("reduce_scatter", h, split, P, S(1))
    return make.done(make.op(aten.add.Tensor, (x, h), split, S(1), source="model.py:12"))


def head() -> Block:
    make = Writer("glue2", "glue")
    weight = make.stored("head.weight", (WORDS // 2, WIDTH), S(0))
    x = make.given("x", hidden(LOCAL, HALF, WIDTH), S(1))
    target = make.given("target", ids(LOCAL * SEQUENCE))
    count = make.given("count", ids(), R, {"mb": R, "dp": R})
    full = make.change("all_gather", x, hidden(LOCAL, SEQUENCE, WIDTH), S(1), R)
    used = make.use(weight, hidden(WORDS // 2, WIDTH), S(0))
    logits = make.op(aten.linear.default, (full, used), hidden(LOCAL, SEQUENCE, WORDS // 2), S(2), module="head")
    flat = [LOCAL * SEQUENCE, WORDS // 2]
    logits = make.op(aten.reshape.default, (logits, flat), hidden(*flat), S(1))
    sums = {"mb": P, "dp": P}
    loss = make.op(
        *(RuntimeOp("cross_entropy_sharded"), (logits, target, TP), hidden(), I, sums),
        ignore_index=-100,
        label_smoothing=0.0,
        source="model.py:40",
    )
    return make.done(make.op(aten.div.Tensor, (loss, count), hidden(), I, sums))


def model(depth: int = 3, takes: Type = SEQUENCE_SPLIT) -> Model:
    """Calls: 0 tables, 1 embedding, then ``depth`` layers, then the head."""
    names = ("norm.weight", "up.weight", "down.weight")
    calls = [
        Call(0, "", (), (Value(INPUT_CALL, 1),)),
        Call(1, "", ("embed.weight",), (Value(INPUT_CALL, 0),)),
    ]
    for i in range(depth):
        path = f"layers.{i}"
        calls.append(Call(2, path, tuple(f"{path}.{n}" for n in names), (Value(len(calls) - 1, 0),)))
    last = Value(len(calls) - 1, 0)
    calls.append(Call(3, "", ("head.weight",), (last, Value(0, 0), Value(0, 1))))
    full = {"embed.weight": (WORDS, WIDTH), "head.weight": (WORDS, WIDTH)}
    shapes = {"norm": (WIDTH,), "up": (2 * WIDTH, WIDTH), "down": (WIDTH, 2 * WIDTH)}
    full |= {n: shapes[n.split(".")[-2]] for call in calls for n in call.parameters if n not in full}
    parameters = {name: ParameterInfo(name, hidden(*shape)) for name, shape in full.items()}
    whole = ids(BATCH, SEQUENCE)
    inputs = [InputInfo("ids", "ids", whole, 0), InputInfo("labels", "labels", whole, 0)]
    blocks = [tables(), embedding(), layer(takes), head()]
    return Model("Megatron", blocks, calls, parameters, inputs, Value(len(calls) - 1, 0), BATCH)
