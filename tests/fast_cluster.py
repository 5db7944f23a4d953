"""Clusters on which communication is nearly free, so that small models are really split and every layout occurs."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from autopar import Cluster

_CPU = Cluster.load("cpu")
_LINK = replace(_CPU.intra_node, latency_seconds=1e-9, bytes_per_second=1e10)
FAST: Final = replace(_CPU, device=replace(_CPU.device, host_call_seconds=1e-7), intra_node=_LINK, inter_node=_LINK)

NODES: Final = replace(
    FAST, devices_per_node=2, inter_node=replace(_LINK, latency_seconds=1e-6, bytes_per_second=0.4e10)
)
"""Nodes of two: a message between them takes longer."""

SLOW_NETWORK: Final = replace(
    NODES,
    intra_node=replace(_LINK, bytes_per_second=1e12),
    inter_node=replace(_LINK, bytes_per_second=1e9),
)
"""Nodes of two, between which bytes count more than messages: tokens of several choices rather go once to each node."""

BUSY: Final = replace(
    NODES,
    device=replace(
        NODES.device,
        multiprocessors=10,
        element_seconds=1e-10,
        host_duplex_bytes_per_second=5e9,
        host_memory_bytes_per_second=6e9,
    ),
    intra_node=replace(_LINK, bytes_per_second=1e8, held_multiprocessors=4),
    inter_node=replace(NODES.inter_node, bytes_per_second=0.5e8, held_multiprocessors=1),
)
"""Collectives hold 4 of 10 multiprocessors within a node, and one or two between nodes; hosts compute, too; copies to
them and back get in each other's way; and some elements are loaded one at a time."""
