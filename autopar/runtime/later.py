"""Weight gradients that are put off: the pass W of a backward that is split in two.

A zero-bubble schedule runs the backward of one microbatch as I (gradients of the stage's inputs, for which the
stage before waits) and W (gradients of weights, at any later time) (Qi et al., "Zero Bubble Pipeline
Parallelism", ICLR 2024, section 2). A product with a weight needs two tensors for its W: the factor ``x`` and
the gradient of the result. Those are all that is kept between the two. Autograd's graph is freed by I, and with
it what else the forward saved; gradients of other parameters (norms, biases, embeddings) are made in I.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from autopar.errors import ScheduleError
from autopar.storages import address

Place = tuple[int, int]
"""(stage, microbatch)."""

Spans = Sequence[tuple[int, int, int]]
"""``(matrix, first, end)``: of a stack of matrices, those whose gradient is the sum over some rows, first to end."""

Accumulate = Callable[..., None]
"""``(parameter, left [m, t], right [t, n])``: adds ``left @ right`` to the gradient of ``parameter [m, n]``; and with
``groups``, to each matrix of ``parameter [e, m, n]`` the product of its rows."""


class _Product(NamedTuple):
    """The gradient of ``parameter [m, n]``: ``left [..., m]`` times ``right [..., n]``, summed over rows.

    ``groups`` (None: one matrix): ``parameter [e, m, n]``, each matrix with its rows.
    """

    parameter: Tensor
    left: Tensor
    right: Tensor
    groups: Spans | None = None

    def rows(self) -> tuple[Tensor, Tensor]:
        return _rows(self.left).t(), _rows(self.right)


class Later:
    """The weight gradients that one rank has put off.

    I is a backward within :meth:`putting_off`, W is :meth:`run`. A backward outside of it is a whole one (B).
    """

    def __init__(self) -> None:
        self._place: Place | None = None
        self._lent: frozenset[int] = frozenset()
        self._waiting: dict[Place, deque[_Product]] = {}

    @contextmanager
    def putting_off(self, place: Place, lent: frozenset[int] = frozenset()) -> Iterator[None]:
        """Within, a backward leaves the gradients of weights to ``run(place)``; a second one adds to the first. Factors
        in memory that is ``lent`` (:func:`lent_memory`), as of a product of two weights, are copied."""
        before = self._place, self._lent
        self._place, self._lent = place, lent
        self._waiting.setdefault(place, deque())
        try:
            yield
        finally:
            self._place, self._lent = before

    def gradient(self, parameter: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
        """The gradient of ``parameter [m, n]`` from ``left [..., m]`` and ``right [..., n]``; None: put off.

        Only that of a leaf can be put off: another tensor's has to go on through the graph now.
        """
        if self._place is None or not parameter.is_leaf:
            return torch.mm(*_Product(parameter, left, right).rows())
        self._waiting[self._place].append(_Product(parameter, self._own(left), self._own(right)))
        return None

    def put_off(self, parameter: Tensor, left: Tensor, right: Tensor, groups: Spans) -> bool:
        """Leave the gradient of ``parameter [e, m, n]``, by ``groups`` of rows, to later; False: it is needed now."""
        if self._place is None or not parameter.is_leaf:
            return False
        self._waiting[self._place].append(_Product(parameter, self._own(left), self._own(right), groups))
        return True

    def _own(self, factor: Tensor) -> Tensor:
        return factor.clone() if self._lent and address(factor.untyped_storage()) in self._lent else factor

    def parameters(self, place: Place) -> tuple[Tensor, ...]:
        """The parameters that :meth:`run` will add to, in order, once per product. Raises ScheduleError."""
        return tuple(product.parameter for product in self._products(place))

    def run(self, place: Place, accumulate: Accumulate) -> None:
        """Compute what was put off for ``place``, in the order of the backward, each part freed once it is used.

        Raises ScheduleError where no I has run for ``place``, or its W has run already.
        """
        products = self._products(place)
        del self._waiting[place]
        with torch.no_grad():
            while products:
                product = products.popleft()
                grouped = {} if product.groups is None else {"groups": product.groups}
                accumulate(product.parameter, *product.rows(), **grouped)

    def require_done(self) -> None:
        """Raise ScheduleError where something is still put off: the step would end without those gradients."""
        if self._waiting:
            places = ", ".join(f"stage {stage} microbatch {microbatch}" for stage, microbatch in sorted(self._waiting))
            raise ScheduleError(
                f"weight gradients of {places} were put off and never computed; "
                "every I of the action list needs its W before the stage's REDUCE"
            )

    def _products(self, place: Place) -> deque[_Product]:
        if place not in self._waiting:
            raise ScheduleError(
                f"no weight gradients were put off for stage {place[0]} microbatch {place[1]}; "
                "W runs once, after the I of the same stage and microbatch"
            )
        return self._waiting[place]


def lent_memory(module: nn.Module) -> frozenset[int]:
    """That of weights that are there for a pass alone."""
    return frozenset(address(parameter.untyped_storage()) for parameter in module.parameters())


def accumulate(
    parameter: Tensor, left: Tensor, right: Tensor, groups: Spans | None = None, into: Tensor | None = None
) -> None:
    """``parameter.grad += left [m, t] @ right [t, n]`` without a temporary; the first one is made in ``into``.

    With ``groups``, of each matrix of a stack.
    """
    if groups is not None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter) if into is None else into.zero_()
        for matrix, first, end in groups:
            parameter.grad[matrix].addmm_(left[:, first:end], right[first:end])
    elif parameter.grad is None:
        parameter.grad = torch.mm(left, right) if into is None else torch.mm(left, right, out=into)
    else:
        parameter.grad.addmm_(left, right)


def _rows(x: Tensor) -> Tensor:
    """``[..., n]`` as ``[t, n]``."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
