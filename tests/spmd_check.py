"""The types of an emitted program, checked by another project's checker: ``spmd_types``.

:func:`check` runs the program of one rank on that package's fake process group. ``aten`` and the names that
the text imports from autopar.runtime are replaced, in its own namespace only, by functions the package knows.
In strict mode, with global types, it then

- infers the type of every result from those of the operands: which dim is split, for which it asks DTensor,
  and that a contraction of split dims is a pending sum;
- compares what a collective says it takes with what it is given;
- refuses to mix what doesn't mix: a pending sum and a whole value, I and R (a gradient that nobody sums);
- says whether the loss may be differentiated.

Taken from the program are the types of parameters (R on the axes in ``reduce``, where their gradient is
summed after the backward) and of the batch. Sharded forms and attention, into which DTensor can't see, are
written out in ops and collectives that it knows, and so inferred as well; attention without its causal mask
and its dropout, which change no type. Only strided shards need declarations: :mod:`tests.spmd_strides`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import isfunction
from typing import Any

import spmd_types as spmd
import torch
from spmd_types._testing import fake_pg
from spmd_types.checker import typecheck
from torch import Tensor, nn

from autopar.mesh import Mesh
from autopar.runtime import Axes, Axis, I, Input, P, Parameter, Program, R, S
from autopar.runtime.modules import dtype_of
from autopar.spmd import Type, parse
from tests import spmd_experts
from tests.spmd_strides import OneOrder, Strides, cat, reshape, split

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "convert", "reduce_scatter")
LOCAL = {"declare", "mean_of_whole", "rng"}


def check(text: str) -> None:
    """Raises SpmdTypeError where the checker refuses the program, of one stage.

    The gradients are computed, too, which the checker allows where the loss is I or P on every axis. Sizes on
    a rank must not be 1 where dims are divided or joined: such shapes don't tell what becomes of a split.
    """
    namespace: dict[str, Any] = {"__name__": "emitted"}
    exec(compile(text, "<emitted>", "exec"), namespace)
    program: Program = namespace["PROGRAM"]
    mesh = Mesh.from_json(program.mesh)
    with fake_pg(mesh.world):
        axes = Axes.build(mesh, 0, "cpu")
        strides = Strides(tuple(axis for axis in axes.values() if axis.size > 1))
        namespace.update(_replacements(strides, namespace))
        stage = _filled(namespace["Stage"](axes), program)
        batch = [_input(item, program, mesh) for item in program.inputs]
        with (
            spmd.set_current_mesh(strides.mesh),
            typecheck(strict_mode="strict", local=False),
            OneOrder(strides),
        ):
            for parameter in program.parameters:
                strides.declare(_tensor(stage, parameter), _parameter_types(parameter, strides))
            for tensor, item in zip(batch, program.inputs, strict=True):
                split = R if item.batch_dim is None else S(item.batch_dim)
                strides.declare(tensor, {"dp": split, "ep": split})
            loss = strides.result(stage(*batch, *_totals(stage, batch, program, axes, strides)))
            loss.backward()
            strides.expect(loss, program.loss_axes)


def _filled(stage: nn.Module, program: Program) -> nn.Module:
    stage = stage.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*stage.parameters(), *stage.buffers()):
            tensor.fill_(0.01)
    return stage


def _tensor(stage: nn.Module, parameter: Parameter) -> Tensor:
    return stage.get_buffer(parameter.name) if parameter.is_buffer else stage.get_parameter(parameter.name)


def _parameter_types(parameter: Parameter, strides: Strides) -> dict[str, Type]:
    stored = {axis.name: parse(parameter.types.get(axis.name, "I")) for axis in strides.axes}
    return {name: R if kind == I and name in parameter.reduce else kind for name, kind in stored.items()}


def _input(item: Input, program: Program, mesh: Mesh) -> Tensor:
    shape = list(item.shape)
    if item.batch_dim is not None:
        shape[item.batch_dim] //= program.microbatches * mesh.replicas
    return torch.zeros(shape, dtype=dtype_of(item.dtype))


def _totals(
    stage: nn.Module, batch: Sequence[Tensor], program: Program, axes: Axes, strides: Strides
) -> Iterator[Tensor]:
    """Summed over their axes, as the executor does before the step."""
    if not program.totals:
        return
    for value, total in zip(stage.totals(*batch), program.totals, strict=True):
        for axis in (axes[name] for name in total.axes if axes[name].size > 1):
            value = strides.collective("all_reduce", value, axis, src=P, dst=R)
        yield value


def _replacements(strides: Strides, names: dict[str, Any]) -> dict[str, Any]:
    def collective(function: str) -> Callable[..., Tensor]:
        return lambda x, axis, *, src, dst: strides.collective(function, x, axis, src=src, dst=dst)

    made: dict[str, Any] = {name: collective(name) for name in COLLECTIVES}
    made["embedding_sharded"] = lambda *args: embedding_sharded(strides, *args)
    made["cross_entropy_sharded"] = lambda *args, **named: cross_entropy_sharded(strides, *args, **named)
    made["chunked_cross_entropy"] = lambda *args, **named: chunked_cross_entropy(strides, *args, **named)
    made["attention_with_offset"] = lambda q, k, v, axis, **named: attention(q, k, v, **named)
    made["ring_attention"] = lambda *args, **named: ring_attention(strides, *args, **named)
    made["route"] = lambda *args, **named: spmd_experts.Routing.of(strides, *args, **named)
    made |= {name: getattr(spmd_experts, name) for name in spmd_experts.FUNCTIONS}
    made["aten"] = Aten(strides)
    imported = {n for n, f in names.items() if isfunction(f) and f.__module__.startswith("autopar.runtime")}
    unknown = imported - made.keys() - LOCAL
    assert not unknown, f"{unknown}: name those that communicate nothing in LOCAL, write out the others"
    return {name: function for name, function in made.items() if name in names}


def embedding_sharded(strides: Strides, weight: Tensor, ids: Tensor, axis: Axis, padding_idx: int = -1) -> Tensor:
    """As a contraction over the rows of the table, which are split."""
    rows = strides.collective("convert", torch.arange(axis.size * weight.shape[0]), axis, src=R, dst=S(0))
    return (ids.unsqueeze(-1) == rows).to(weight.dtype) @ weight


def cross_entropy_sharded(strides: Strides, logits: Tensor, target: Tensor, axis: Axis, **named: Any) -> Tensor:
    """As if the logits were gathered, and the loss computed by all ranks alike."""
    whole = strides.collective("all_gather", logits, axis, src=S(min(logits.dim() - 1, 1)), dst=I)
    return torch.ops.aten.cross_entropy_loss(whole, target, reduction=2, **named)


def chunked_cross_entropy(
    strides: Strides,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    chunks: int,
    axis: Axis | None = None,
    weight_dim: int = 0,
    logits: Callable[[Tensor], Tensor] | None = None,
    **named: Any,
) -> Tensor:
    """As the ops that it stands for, on all logits."""
    z = linear(x, weight.t() if weight_dim else weight, bias)
    y = z if logits is None else logits(z)
    y, target = reshape(strides, y, [target.numel(), y.shape[-1]]), reshape(strides, target, [target.numel()])
    if axis is not None:
        return cross_entropy_sharded(strides, y, target, axis, **named)
    return torch.ops.aten.cross_entropy_loss(y, target, reduction=2, **named)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """In ops that the checker knows to be linear: a pending sum may pass."""
    y = x @ weight.t()
    return y if bias is None else y + bias


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``[b, h, s, d]``, grouped as ``[b, kv heads, h / kv heads, s, d]``, in products, sums and a softmax."""
    q = q.unflatten(1, (-1, q.shape[1] // k.shape[1]))
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    scores = (q.unsqueeze(4) * k.unsqueeze(3)).sum(-1) * (scale or 1.0)
    if attn_mask is not None:
        scores = scores + attn_mask.unsqueeze(2)
    return (scores.softmax(-1).unsqueeze(-1) * v.unsqueeze(3)).sum(4).flatten(1, 2)


def ring_attention(
    strides: Strides, q: Tensor, k: Tensor, v: Tensor, axis: Axis, *, mask: Tensor | None = None, **named: Any
) -> Tensor:
    """As if keys and values were gathered."""
    k, v = (strides.collective("all_gather", x, axis, src=S(x.dim() - 2), dst=R) for x in (k, v))
    return attention(q, k, v, mask, scale=named.get("scale"))


@dataclass
class Aten:
    """``aten.op`` and ``aten.op.overload`` as the function ``torch.op``: those are what the checker knows."""

    strides: Strides

    def __getattr__(self, name: str) -> Any:
        if name in ("reshape", "view", "_unsafe_view"):
            return _Op(lambda x, shape: reshape(self.strides, x, shape))
        if name == "cat":
            return _Op(lambda tensors, dim=0: cat(self.strides, tensors, dim))
        if name == "linear":
            return _Op(linear)
        if name in ("split", "split_with_sizes"):
            return _Op(lambda x, sizes, dim=0: split(self.strides, x, sizes, dim))
        if name == "scaled_dot_product_attention":
            return _Op(attention)
        packet = getattr(torch.ops.aten, name)
        public = next((f for f in (getattr(place, name, None) for place in (torch, Tensor)) if f), None)
        return packet if public is None else _Op(public)


@dataclass
class _Op:
    function: Callable[..., Any]

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    def __getattr__(self, overload: str) -> Callable[..., Any]:
        return self.function
