"""How many rows tokens are that travel to experts by way of nodes: what the planner counts, and ranks without values.

A token goes once to each node that has any of its experts. Where a token takes k experts of E, each as likely as any, a
node of e of them gets it with probability ``1 - C(E - e, k) / C(E, k)``: with n nodes, n times that are its rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeRows:
    """Of a rank with so many ``tokens``, on the average: ``sent`` rows, one for each node that a token goes to, and
    ``slots`` that they stand for; ``got`` and ``passed`` are the same of what comes to it and it passes on."""

    tokens: int
    sent: int
    slots: int
    got: int
    passed: int


def node_rows(
    tokens: int, choices: int, experts: int, kept: int, nodes: int, ranks: int, imbalance: float = 1.0
) -> NodeRows:
    """Of ``tokens`` that take ``choices`` of ``experts``, of which ``kept`` are on the ``ranks`` of so many ``nodes``.

    ``imbalance``: as many times its share comes to the rank with the most rows. Who passes rows on has as many as all,
    but where it has a node for itself.
    """
    slots = math.ceil(tokens * choices * kept / experts)
    reached = nodes * _hit(choices, experts, kept // nodes)
    sent = min(slots, math.ceil(round(tokens * reached, 6)))  # not one more because of how 1 / 3 is rounded
    times = imbalance if ranks == nodes else 1.0
    return NodeRows(tokens, sent, slots, math.ceil(sent * times), math.ceil(slots * times))


def _hit(choices: int, experts: int, own: int) -> float:
    """Of ``choices`` different ones of ``experts``, how likely any is among the ``own``."""
    missed = 1.0
    for before in range(min(choices, experts)):
        missed *= max(0, experts - own - before) / (experts - before)
    return 1.0 - missed
