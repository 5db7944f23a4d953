"""Adafactor whose statistics of rows and columns are those of the whole matrix, however it is stored.

(Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", ICML 2018, algorithms 4 and 5,
as :class:`torch.optim.Adafactor` computes it: its update rule, options and state.)

With ``G`` the gradient, of ``r x c``, ``b = 1 - t ** beta2_decay`` and ``R``, ``C`` the running means of ``G²`` by row
and by column, the update is ``U = G / sqrt(R C / mean(R))``, bounded by its own root mean square. A rank stores some
rows or columns. It needs from others: sums of ``G²`` over its rows and columns, ``mean(R)``, and the norms of parameter
and update. ``mean(R)`` follows the same running mean as ``R``, from the sum of all of ``G²``: so there are two rounds,
one before the update and one for its norm, each one all-reduce per axis for all parameters together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adafactor

from autopar.errors import ArgumentError
from autopar.runtime.axes import Axis
from autopar.runtime.optimizers.layout import Layout, add_up

Term = tuple[Tensor, tuple[Axis, ...]]


class ShardedAdafactor(Adafactor):
    """:class:`torch.optim.Adafactor` for parameters that are split over ranks.

    ``groups`` are parameter groups of one; ``layouts`` say how each parameter that can have a gradient is stored. All
    ranks must step together. ``row_var`` is ``[…, r, 1]`` and ``col_var`` ``[…, 1, c]`` of the rank's own part.
    Raises ArgumentError where a part is no rectangle of its matrices.
    """

    def __init__(self, groups: list[dict[str, Any]], layouts: Mapping[nn.Parameter, Layout]) -> None:
        super().__init__(groups)
        for layout in layouts.values():
            if any(split.merged for split in layout.splits):
                raise ArgumentError(
                    f"Adafactor keeps means of rows and columns, but of a parameter of shape {list(layout.shape)}, "
                    "which has fewer rows than ranks share it, ZeRO splits rows within; use zero=0, or fewer zero_ranks"
                )
        self.layouts = layouts

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        updates = [
            _Update(parameter, group, self.state[parameter], self.layouts[parameter])
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not updates:
            return
        device = updates[0].layout.device
        add_up([term for update in updates for term in update.statistics()], device)
        add_up([update.squares() for update in updates], device)
        for update in updates:
            update.apply()


@dataclass
class _Update:
    """One parameter's step. The update itself is computed twice, for its norm and to be applied: it is never kept."""

    parameter: nn.Parameter
    group: Mapping[str, Any]
    state: dict[str, Any]
    layout: Layout
    gradient: Tensor = field(init=False)
    wide: torch.dtype = field(init=False)
    weight: float = field(init=False)  # of this step in the running means
    sums: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.parameter.grad is not None
        self.gradient = -self.parameter.grad if self.group["maximize"] else self.parameter.grad
        self.wide = torch.promote_types(self.gradient.dtype, torch.float32)
        if not self.state:
            self.state["step"] = torch.tensor(0.0)
            self.state |= self._no_variance()
        self.state["step"] += 1
        self.weight = float(self.state["step"]) ** self.group["beta2_decay"]

    def _no_variance(self) -> dict[str, Tensor]:
        if not self._is_factored:
            return {"variance": torch.zeros_like(self.gradient)}
        rows, columns = self.gradient[..., :1], self.gradient[..., :1, :]
        return {
            "row_var": torch.zeros_like(rows, memory_format=torch.contiguous_format),
            "col_var": torch.zeros_like(columns, memory_format=torch.contiguous_format),
        }

    @property
    def _is_factored(self) -> bool:
        return len(self.layout.shape) > 1

    def statistics(self) -> list[Term]:
        """What the update needs, as this rank's terms: summed over the axes that split what they sum."""
        self.sums = {"parameter": self._squares_of(self.parameter)}
        terms = [(self.sums["parameter"], self.layout.axes())]
        if self._is_factored:
            rows = torch.linalg.vector_norm(self.gradient, dim=-1, keepdim=True, dtype=self.wide).square_()
            columns = torch.linalg.vector_norm(self.gradient, dim=-2, keepdim=True, dtype=self.wide).square_()
            of_rows, of_columns = self.layout.axes(-1), self.layout.axes(-2)
            self.sums["all"] = rows.sum(-2, keepdim=True)
            self.sums["before"] = self.state["row_var"].sum(-2, keepdim=True, dtype=self.wide)
            self.sums |= {"rows": rows, "columns": columns}
            terms += [(rows, of_rows), (columns, of_columns)]
            terms += [(self.sums["all"], self.layout.axes(-1, -2)), (self.sums["before"], of_columns)]
        return terms

    def squares(self) -> Term:
        """The sum of the update's squares, once the statistics are complete."""
        if self._is_factored:
            r, c = self.layout.shape[-2:]
            self.state["row_var"].lerp_(self.sums["rows"].div_(c).to(self.gradient.dtype), self.weight)
            self.state["col_var"].lerp_(self.sums["columns"].div_(r).to(self.gradient.dtype), self.weight)
        else:
            self.state["variance"].lerp_(self.gradient * self.gradient, self.weight)
        self.sums["update"] = self._squares_of(self._update())
        return self.sums["update"], self.layout.axes()

    def apply(self) -> None:
        group, count = self.group, self.layout.elements**0.5
        lr = float(group["lr"])
        size = (self.sums["parameter"].sqrt() / count).clamp_(min=group["eps"][1])
        excess = (self.sums["update"].sqrt() / (count * group["d"])).clamp_(min=1.0)
        step = min(lr, float(self.state["step"]) ** -0.5)
        if group["weight_decay"] != 0:
            self.parameter.mul_(1 - lr * group["weight_decay"])
        self.parameter.sub_(self._update().mul_((size / excess * step).to(self.gradient.dtype)))

    def _update(self) -> Tensor:
        eps = self.group["eps"][0]
        least = torch.finfo(self.parameter.dtype).eps if eps is None else eps
        if self._is_factored:
            r, c = self.layout.shape[-2:]
            mean = torch.lerp(self.sums["before"] / r, self.sums["all"] / (r * c), self.weight).clamp_(min=least)
            variance: Tensor = (self.state["row_var"] @ self.state["col_var"]).div_(mean.to(self.gradient.dtype))
        else:
            variance = self.state["variance"].clone()
        return variance.clamp_(min=least * least).rsqrt_().mul_(self.gradient)

    def _squares_of(self, tensor: Tensor) -> Tensor:
        square: Tensor = torch.linalg.vector_norm(tensor, dtype=self.wide).square_()
        return square
