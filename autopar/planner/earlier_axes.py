"""What nodes send on the axes that were solved before, priced while another axis is.

Axes are solved one after another. By then the graph has the collectives of those before, and ops whose forms
communicate there. What they send depends on what this axis splits: keys are gathered over ``cp`` for the heads that
``tp`` leaves to a rank. So each choice is priced with it, as :mod:`autopar.planner.block_costs` prices what it becomes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.cluster import Link
from autopar.graph import info
from autopar.planner.block_costs import OpCost, add_change, add_form
from autopar.planner.transitions import changed_axis
from autopar.rules.base import Op
from autopar.rules.experts import EXCHANGE, FILTER


@dataclass(frozen=True)
class EarlierAxes:
    """``links``: ranks of each of these axes, and the slowest link that they cross."""

    links: Mapping[str, tuple[int, Link]] = field(default_factory=dict)

    def change_seconds(self, node: fx.Node, part: Op) -> float:
        """Seconds per microbatch of a change of type on one of these axes, of the ``part`` of its tensor that a rank
        has."""
        axis = changed_axis(node)
        if axis not in self.links:
            return 0.0
        cost = OpCost(0.0, 0.0)
        add_change(cost, node, part.operands[0], part.result, *self.links[axis])
        return cost.seconds(0) + cost.seconds(1)

    def add_forms(self, cost: OpCost, node: fx.Node, local: Op) -> None:
        """To the ``cost`` of a ``local`` op, what its forms on these axes send; rows that travel to experts are priced
        apart (:mod:`autopar.planner.exchange_prices`)."""
        for axis, taken in info(node).choices.items():
            if axis in self.links and taken.form not in ("", EXCHANGE, FILTER):
                add_form(cost, local, axis, taken, *self.links[axis])

    def send_by_form(self, node: fx.Node) -> bool:
        """Whether the form of ``node`` on one of these axes communicates, beside rows of experts."""
        return any(
            axis in self.links and taken.form not in ("", EXCHANGE, FILTER)
            for axis, taken in info(node).choices.items()
        )
