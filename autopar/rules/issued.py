"""What the host issues for the functions of experts (:mod:`autopar.runtime.experts`): many kernels each.

Counted are kernels, copies and messages, as :mod:`autopar.runtime.routing`, ``experts`` and ``hops`` issue them; not
views, which cost the host as little as what autograd adds to an op of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from autopar.graph import Meta
from autopar.rules.base import Op
from autopar.rules.experts import COMBINE, DISPATCH, DISPATCH_END, EXCHANGE, FILTER, ROUTE

Calls = tuple[int, int]
"""Forward and backward."""


@dataclass(frozen=True)
class _Way:
    """How rows of ``choices`` slots for each token come to their experts: whether they travel, or some rank has the
    same tokens and other experts (``picks``), over how many ``axes``, and whether by way of ``nodes``."""

    choices: int
    travels: bool
    picks: bool
    axes: int
    nodes: bool

    @classmethod
    def of(cls, route: Op) -> _Way:
        exchanged, filtered = (route.kwargs.get(form, ()) for form in (EXCHANGE, FILTER))
        axes, nodes = len(exchanged) + len(filtered), route.kwargs.get("nodes", 1) > 1
        return cls(route.operands[0].shape[-1], bool(exchanged), bool(filtered), axes, nodes)


def _route(operands: Sequence[Meta], way: _Way) -> Calls:
    """Slots of each expert are counted; slots sorted, and their numbers read; ranks tell each other theirs."""
    split = 4 + 4 * way.axes if way.axes else 0
    told = 88 if way.nodes else 8 if way.travels else 0
    return 16 + split + told, 0


def _dispatch(operands: Sequence[Meta], way: _Way) -> Calls:
    if way.nodes:
        return 5, 6 + 2 * way.choices
    sent = 2 * way.travels
    return 2 + sent, 1 + (way.choices > 1) + way.picks + sent


def _combine(operands: Sequence[Meta], way: _Way) -> Calls:
    """Slot by slot: in the backward its rows, products with these, and the products' sums."""
    if way.nodes:
        return 10 + 3 * way.choices, 10 + 3 * way.choices
    rows, weights = (meta.needs_grad for meta in operands[:2])
    back = rows * (2 * way.choices + 2 + 2 * way.travels) + weights * (2 * way.choices + 1)
    return 3 + way.choices + 4 * way.travels - way.picks, back


_ISSUED: Final[Mapping[str, Callable[[Sequence[Meta], _Way], Calls]]] = {
    ROUTE: _route,
    DISPATCH: _dispatch,
    DISPATCH_END: _dispatch,
    COMBINE: _combine,
}


def issued(name: str, operands: Sequence[Meta], *, back: bool, route: Op | None) -> Calls:
    """Of the op of this ``name``, which is local, whose result has a gradient (``back``) or not, with the ``route``
    (local too) that says where its rows are. Without one, of an op of the text: itself, and a gradient of each operand
    that has one."""
    if route is None or name not in _ISSUED:
        return 1, back * sum(meta.needs_grad for meta in operands)
    forward, gradients = _ISSUED[name](operands, _Way.of(route))
    return forward, back * gradients
