"""Tokens to the rows of experts and back: what a mixture of experts does around its products.

Shazeer et al., "Outrageously Large Neural Networks", ICLR 2017, section 2; without capacity as in Gale et al.,
"MegaBlocks", MLSys 2023. All communication is that of :class:`~autopar.runtime.routing.Routing`: an all-to-all of rows
each way in the forward, and each way in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from autopar.errors import ShardingError
from autopar.runtime.collectives import fresh
from autopar.runtime.exchange import Flight
from autopar.runtime.hops import Hops
from autopar.runtime.routing import Routing


def dispatch(x: Tensor, routing: Routing) -> Tensor:
    """``x [n, h]``, this rank's tokens; ``[rows, h]``, a row for each slot of this rank's experts, by expert.

    Raises ShardingError where ``routing`` was made for another number of tokens.
    """
    _check_tokens(x, routing)
    return cast(Tensor, _Dispatch.apply(x, routing))  # type: ignore[no-untyped-call]


def _check_tokens(x: Tensor, routing: Routing) -> None:
    if x.dim() != 2 or x.shape[0] != routing.tokens:
        raise ShardingError(f"dispatch: the router chose experts for {routing.tokens} tokens, x is {tuple(x.shape)}")


@dataclass(eq=False)
class Dispatched:
    """Rows of experts that :func:`dispatch_start` has sent for, and what autograd knows of them meanwhile."""

    routing: Routing
    token: Tensor | None = None
    rows: Flight | None = None
    gradients: Flight | None = None


def dispatch_start(x: Tensor, routing: Routing) -> Dispatched:
    """:func:`dispatch` until rows are on their way; :func:`dispatch_end` waits for them. In the backward their
    gradients are sent by the latter, and waited for by this one. Raises ShardingError."""
    _check_tokens(x, routing)
    dispatched = Dispatched(routing)
    dispatched.token = cast(Tensor, _Start.apply(x, dispatched))  # type: ignore[no-untyped-call]
    return dispatched


def dispatch_end(dispatched: Dispatched) -> Tensor:
    """The rows, ``[rows, h]`` by expert."""
    token, dispatched.token = dispatched.token, None  # or autograd's graph would hold itself
    return cast(Tensor, _End.apply(token, dispatched))  # type: ignore[no-untyped-call]


def combine(rows: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    """``rows [rows, h]`` by expert and ``weights [n, k]`` of slots; ``[n, h]``, the weighted sum of each token's slots.

    Rows go back to their tokens, are multiplied there, and added in the order of a token's slots; by way of nodes, in
    each node first. The result has the wider of the two dtypes. Raises ShardingError where shapes don't fit
    ``routing``.
    """
    wanted = (routing.tokens, routing.choices)
    if tuple(weights.shape) != wanted or rows.shape[0] != routing.rows:
        raise ShardingError(
            f"combine: routing is of {wanted} slots and {routing.rows} rows here, "
            f"weights are {tuple(weights.shape)} and rows {tuple(rows.shape)}"
        )
    function = _Combine if routing.hops is None else _CombineByNodes
    return cast(Tensor, function.apply(rows, weights, routing))  # type: ignore[no-untyped-call]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return fresh(routing.at_experts(routing.start_to_experts(x)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        routing: Routing = ctx.routing
        return routing.at_tokens(routing.start_to_tokens(grads[0]), grads[0].dtype), None


class _Start(torch.autograd.Function):
    """What autograd sees is an empty tensor, whose gradient says only that those of the rows are on their way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dispatched: Dispatched) -> Tensor:
        ctx.dispatched, ctx.dtype = dispatched, x.dtype
        dispatched.rows = dispatched.routing.start_to_experts(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        dispatched: Dispatched = ctx.dispatched
        flight, dispatched.gradients = dispatched.gradients, None
        assert flight is not None, "gradients of rows that were never sent"
        return dispatched.routing.at_tokens(flight, ctx.dtype), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, dispatched: Dispatched) -> Tensor:
        ctx.dispatched = dispatched
        flight, dispatched.rows = dispatched.rows, None
        assert flight is not None, "rows that were never sent"
        return fresh(dispatched.routing.at_experts(flight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        dispatched: Dispatched = ctx.dispatched
        dispatched.gradients = dispatched.routing.start_to_tokens(grads[0])
        return grads[0].new_empty(0), None


class _Combine(torch.autograd.Function):
    """Saves the returned rows for the gradient of ``weights``, and ``weights`` for that of ``rows``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        for_rows, for_weights = ctx.needs_input_grad[:2]
        returned = _by_token(routing.to_tokens(rows), routing)
        ctx.save_for_backward(weights if for_rows else None, returned if for_weights else None)
        ctx.routing, ctx.dtypes = routing, (rows.dtype, weights.dtype)
        return _weighted(returned, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weights, returned = ctx.saved_tensors
        routing: Routing = ctx.routing
        (grad,) = grads
        for_rows = for_weights = None
        if weights is not None:
            for_rows = routing.to_experts(_weighted_leaving(grad, weights, routing, ctx.dtypes[0]))
        if returned is not None:
            for_weights = torch.stack([(slot * grad).sum(-1) for slot in returned.unbind(1)], 1).to(ctx.dtypes[1])
        return for_rows, for_weights, None


class _CombineByNodes(torch.autograd.Function):
    """Saves on the rank that adds them up the rows of a node, and ``weights`` as they came there."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        for_rows, for_weights = ctx.needs_input_grad[:2]
        hops = _hops(routing)
        came = hops.weights_there(weights)
        gathered = hops.gathered(routing.as_come(rows))
        ctx.save_for_backward(came if for_rows else None, gathered if for_weights else None)
        ctx.routing, ctx.dtypes = routing, (rows.dtype, weights.dtype)
        return hops.back(hops.start_home(gathered, came), torch.promote_types(rows.dtype, weights.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        came, gathered = ctx.saved_tensors
        routing: Routing = ctx.routing
        hops, for_rows, for_weights = _hops(routing), None, None
        spread = hops.spread(hops.start_there(grads[0].to(ctx.dtypes[0])).wait())
        if gathered is not None:
            terms = _terms(gathered, spread, routing.choices)
            for_weights = hops.weights_back(terms.to(ctx.dtypes[1]), (routing.tokens, routing.choices))
        if came is not None:
            for part, factor in zip(spread.chunk(routing.choices), came.chunk(routing.choices), strict=True):
                part.mul_(factor.unsqueeze(1))
            for_rows = routing.in_order(hops.road.within(spread, hops.near_sent, hops.near_got))
        return for_rows, for_weights, None


def _hops(routing: Routing) -> Hops:
    assert routing.hops is not None, "rows that don't go by way of nodes"
    return routing.hops


def _terms(left: Tensor, right: Tensor, pieces: int) -> Tensor:
    """``[m]``, of each row of ``left [m, h]`` its product with that of ``right``: some rows at a time, in float32 at
    least."""
    wide = torch.promote_types(left.dtype, torch.float32)
    parts = zip(left.chunk(pieces), right.chunk(pieces), strict=True)
    return torch.cat([torch.linalg.vecdot(a.to(wide), b.to(wide)) for a, b in parts])


def _weighted(slots: Tensor, weights: Tensor) -> Tensor:
    """``[n, h]``, of ``slots [n, k, h]`` the sum by ``weights [n, k]``: slot by slot, or products of all slots, in the
    wider dtype, would be the most that a layer of experts holds."""
    total = slots[:, 0] * weights[:, :1]
    for slot in range(1, slots.shape[1]):
        total.addcmul_(slots[:, slot], weights[:, slot, None])
    return total


def _weighted_leaving(x: Tensor, weights: Tensor, routing: Routing, dtype: torch.dtype) -> Tensor:
    """:func:`_leaving`, each row by the weight of its slot: some rows at a time, as in :func:`_weighted`."""
    made = x.new_empty((len(routing.order), *x.shape[1:]), dtype=dtype)
    factors = weights.flatten().index_select(0, routing.order).unsqueeze(1)
    pieces = (all_.chunk(routing.choices) for all_ in (routing.sources, factors, made))
    for tokens, by, piece in zip(*pieces, strict=True):
        torch.mul(x.index_select(0, tokens), by, out=piece)
    return made


def _by_token(slots: Tensor, routing: Routing) -> Tensor:
    """``[n k, h]`` as ``[n, k, h]``."""
    return slots.view(routing.tokens, routing.choices, *slots.shape[1:])
