"""How evenly a model's experts were used, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from autopar.plan import ExpertsPlan

_COLUMNS = ("experts of", "experts", "slots", "busiest / mean", "unused", "fullest rank / mean")


def load_table(load: Mapping[str, Sequence[int]], experts: Sequence[ExpertsPlan] = (), rows: int = 12) -> Table:
    """The ``rows`` layers whose busiest expert is farthest above the mean, in the model's order.

    ``load`` is by layer the slots of each expert; ``experts`` of a plan say which of them one rank has.
    """
    plans = {row.layer: row for row in experts}
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == _COLUMNS[0] else "right")
    worst = sorted(load, key=lambda layer: -_excess(load[layer]))[:rows]
    for layer, counts in load.items():
        if layer in worst:
            ranks = _fullest_rank(counts, plans[layer]) if layer in plans else 1.0
            unused = sum(count == 0 for count in counts)
            figures = (f"{_excess(counts):.2f}", str(unused or ""), f"{ranks:.2f}")
            table.add_row(layer, str(len(counts)), str(sum(counts)), *figures)
    if len(load) > len(worst):
        rest = max(_excess(counts) for layer, counts in load.items() if layer not in worst)
        table.add_row(f"… {len(load) - len(worst)} more, none above {rest:.2f}")
    return table


def _excess(counts: Sequence[float]) -> float:
    """The largest of ``counts`` over their mean."""
    return max(counts) * len(counts) / max(1, sum(counts))


def _fullest_rank(counts: Sequence[int], plan: ExpertsPlan) -> float:
    """The slots of the fullest rank over the mean of all ranks."""
    order = plan.order or range(plan.experts)
    each = plan.experts // plan.ranks
    stored = [counts[expert] for expert in order]
    return _excess([sum(stored[first : first + each]) for first in range(0, plan.experts, each)])
