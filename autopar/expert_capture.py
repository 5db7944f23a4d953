"""How mixtures of experts are captured: as five operations, whatever an expert layer's own form is.

``transformers`` lets an implementation of expert layers be registered by name (``ALL_EXPERTS_FUNCTIONS``) and names
the one that a model uses in its config. During capture that is ours, which leaves in the graph what
:mod:`autopar.passes.experts` makes functions of the runtime of::

    routing = route(index, experts)                  index [n, k]: the experts of each token
    rows = dispatch(x, routing)                      x [n, h] -> rows [n * k, h], sorted by expert
    rows = grouped_linear(rows, weight, routing)     weight [experts, out, in], or [experts, in, out] if transposed
    rows = grouped_bias(rows, bias, routing)         bias [experts, out]
    y = combine(rows, weights, routing)              weights [n, k] -> y [n, h], the sum of a token's rows

The operations have shapes and dtypes only; nothing computes them here. An index outside of 0 … experts - 1 has no row.
The overrides are scoped and restored; the model is never changed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.source_lines import calling_line

NAMESPACE: Final = "autopar"
_FORM: Final = "autopar"
"""The name in transformers' registry."""


def _nothing_computes(*args: Any, **kwargs: Any) -> Tensor:
    raise CaptureError("the operations of captured experts have shapes only; they run as functions of the runtime")


def _declared(schema: str, shape: Any) -> Any:
    """A custom operation without a kernel: ``shape`` makes its result without values."""
    name, parenthesis, rest = schema.partition("(")
    made = torch.library.custom_op(
        f"{NAMESPACE}::{name}", _nothing_computes, mutates_args=(), schema=parenthesis + rest
    )
    made.register_fake(shape)
    made.register_autograd(_nothing_computes)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _route(index: Tensor, experts: int, of: int = 0) -> Tensor:
    """The assignment of slots (token and position in its choice) to experts; others of the router's, ``of`` which there
    are so many, have a routing of their own."""
    return index.new_empty((index.numel(), experts))


def _dispatch(x: Tensor, routing: Tensor) -> Tensor:
    return x.new_empty((routing.shape[0], x.shape[1]))


def _grouped_linear(rows: Tensor, weight: Tensor, routing: Tensor, transposed: bool = False) -> Tensor:
    dtype = weight.dtype
    known = rows.device.type != "meta"  # which knows no autocast
    if known and torch.is_autocast_enabled(rows.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(rows.device.type)
    return rows.new_empty((rows.shape[0], weight.shape[2 if transposed else 1]), dtype=dtype)


def _grouped_bias(rows: Tensor, bias: Tensor, routing: Tensor) -> Tensor:
    return torch.empty_like(rows)


def _combine(rows: Tensor, weights: Tensor, routing: Tensor) -> Tensor:
    dtype = torch.promote_types(rows.dtype, weights.dtype)
    return rows.new_empty((weights.shape[0], rows.shape[1]), dtype=dtype)


route: Final = _declared("route(Tensor index, int experts, int of=0) -> Tensor", _route)
dispatch: Final = _declared("dispatch(Tensor x, Tensor routing) -> Tensor", _dispatch)
grouped_linear: Final = _declared(
    "grouped_linear(Tensor rows, Tensor weight, Tensor routing, bool transposed=False) -> Tensor", _grouped_linear
)
grouped_bias: Final = _declared("grouped_bias(Tensor rows, Tensor bias, Tensor routing) -> Tensor", _grouped_bias)
combine: Final = _declared("combine(Tensor rows, Tensor weights, Tensor routing) -> Tensor", _combine)


@contextlib.contextmanager
def expert_operations(model: nn.Module) -> Iterator[None]:
    """Let the expert layers of ``model`` that go by transformers' registry be the five operations in here.

    Raises CaptureError, from inside, where a router gives an expert layer what it can't take.
    """
    integration = sys.modules.get("transformers.integrations.moe")
    registry = getattr(integration, "ALL_EXPERTS_FUNCTIONS", None)
    if registry is None:
        yield
        return
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if _is_registered(m)}
    saved = [(config, config._experts_implementation_internal) for config in configs.values()]
    registry[_FORM] = _experts
    try:
        for config, _ in saved:
            config._experts_implementation_internal = _FORM
        yield
    finally:
        del registry[_FORM]
        for config, name in saved:
            config._experts_implementation_internal = name


def _is_registered(module: nn.Module) -> bool:
    """Whether transformers' decorator made the module's forward one of the registry."""
    marks = ("has_gate", "has_bias", "is_transposed", "_apply_gate")
    return all(hasattr(module, mark) for mark in marks) and hasattr(
        getattr(module, "config", None), "_experts_implementation_internal"
    )


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What an expert layer computes, by the attributes that transformers gives all of them."""
    _check(module, hidden_states, top_k_index, top_k_weights)
    routing = route(top_k_index, module.num_experts)
    rows = dispatch(hidden_states, routing)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    rows = _projected(module, first, rows, routing)
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = _projected(module, "down_proj", rows, routing)
    if getattr(module, "has_post_expert_norm", False):
        rows = module.post_expert_norm(rows)
    y: Tensor = combine(rows, top_k_weights, routing)
    return y.to(hidden_states.dtype)


def _projected(module: Any, name: str, rows: Tensor, routing: Tensor) -> Tensor:
    rows = grouped_linear(rows, getattr(module, name), routing, module.is_transposed)
    return grouped_bias(rows, getattr(module, f"{name}_bias"), routing) if module.has_bias else rows


def _check(module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> None:
    kind = type(module).__name__
    shapes = f"index {list(index.shape)} and weights {list(weights.shape)} for tokens {list(x.shape)}"
    if x.dim() != 2 or index.dim() != 2 or index.shape != weights.shape or index.shape[0] != x.shape[0]:
        raise CaptureError(
            f"the router gives {kind} {shapes}\n  at {calling_line()}\n"
            "It must give each token of [tokens, width] its experts and their weights, both [tokens, k]."
        )
    if index.dtype.is_floating_point or index.dtype == torch.bool:
        raise CaptureError(
            f"the router gives {kind} an index of {index.dtype}\n  at {calling_line()}\n"
            "It must be integers, the numbers of experts."
        )
