"""How long a collective takes, and what it sends: latency and bandwidth over rings, and over trees.

Every kind is two counts: messages that follow one another on a rank, and bytes that a rank sends. Seconds are
messages × latency + bytes / bandwidth, on the slowest link that the group crosses (``Cluster.link``), after what
starting a collective takes. An all-reduce over several nodes takes the faster of a ring and a tree, whose messages grow
with the logarithm of the nodes. Seconds grow with bytes and ranks, and a part of the bytes takes at least that part of
the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import sympy

from autopar.cluster import Crossing, Link
from autopar.cost_models.formula import Formula, Quantity
from autopar.errors import ArgumentError

_tensor, _size, _call, _latency, _bandwidth = sympy.symbols(
    "tensor_bytes size call_seconds latency_seconds bytes_per_second"
)

_SIZE: Final = {"size": Quantity("1", "ranks of the group, 2 or more")}
_LINK: Final = {
    "call_seconds": Quantity("s", "what a collective takes beyond its messages"),
    "latency_seconds": Quantity("s", "latency of one message on the link"),
    "bytes_per_second": Quantity("B/s", "bandwidth that the collective reaches, per rank and direction"),
}


@dataclass(frozen=True)
class _Kind:
    """Messages one after another and bytes sent, of a tensor of ``tensor_bytes`` on ``size`` ranks."""

    messages: sympy.Expr
    sent_bytes: sympy.Expr
    tensor: str  # which tensor is meant
    source: str

    def formula(self, name: str, unit: str, expression: sympy.Expr) -> Formula:
        quantities = {"tensor_bytes": Quantity("B", self.tensor), **_SIZE, **_LINK}
        used = {symbol.name for symbol in expression.free_symbols}
        symbols = {key: quantity for key, quantity in quantities.items() if key in used}
        return Formula(name, unit, expression, symbols, self.source)


_others = _size - 1
_THAKUR = "R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19(1), 2005"
_RING = f"a ring, each message 1/size of the tensor ({_THAKUR})"
_KINDS: Final = {
    "all_gather": _Kind(_others, _tensor * _others / _size, "the gathered tensor", _RING),
    "reduce_scatter": _Kind(_others, _tensor * _others / _size, "the tensor before it is scattered", _RING),
    "all_reduce": _Kind(
        sympy.Mul(2, _others, evaluate=False),  # else it prints as 2*size - 2
        2 * _tensor * _others / _size,
        "the tensor that every rank holds",
        "a reduce-scatter, then an all-gather, on a ring (P. Patarasuk, X. Yuan, JPDC 69(2), 2009)",
    ),
    "all_to_all": _Kind(
        _others,
        _tensor * _others / _size,
        "the local tensor, of which 1/size goes to each rank",
        f"a message to each other rank, 1/size of the tensor ({_THAKUR})",
    ),
    "broadcast": _Kind(_others, _tensor, "the tensor", "a chain that passes the tensor on in small pieces"),
    "reduce": _Kind(_others, _tensor, "the tensor that every rank holds", "the same chain, the other way round"),
    "send": _Kind(
        sympy.Integer(1), _tensor, "the tensor", "one message (R. W. Hockney, Parallel Computing 20(3), 1994)"
    ),
}

KINDS: Final = tuple(_KINDS)
RINGS: Final = frozenset({"all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"})
"""Kinds whose messages go round a ring (or down a chain): between nodes, several rings share the work."""

SECONDS: Final = {
    name: kind.formula(f"{name}_seconds", "s", _call + kind.messages * _latency + kind.sent_bytes / _bandwidth)
    for name, kind in _KINDS.items()
}
_near, _far, _local, _share = sympy.symbols("near_latency_seconds far_latency_seconds local tree_share")
TREE_SHARE: Final = 0.92
"""Of a ring's bandwidth, what NCCL expects of its trees (``busBw * .92`` in src/graph/tuning.cc)."""

TREE_SECONDS: Final = Formula(
    "all_reduce_tree_seconds",
    "s",
    _call
    + 2 * (_near * (_local - 1) + _far * sympy.log(_size / _local) / sympy.log(2))
    + 2 * _tensor / (_share * _bandwidth),
    {
        "tensor_bytes": Quantity("B", _KINDS["all_reduce"].tensor),
        **_SIZE,
        "local": Quantity("1", "ranks of the group in each node"),
        "call_seconds": _LINK["call_seconds"],
        "near_latency_seconds": Quantity("s", "latency of one message within a node"),
        "far_latency_seconds": Quantity("s", "latency of one message between nodes"),
        "bytes_per_second": Quantity("B/s", "bandwidth that a ring reaches, per rank and direction"),
        "tree_share": Quantity("1", "of that, what trees reach"),
    },
    "a chain in each node, and over the nodes two binary trees of which each sums half, up and down again (P. Sanders, "
    "J. Speck, J. L. Träff, Parallel Computing 35(12), 2009; S. Jeaugey, Massively Scale Your Deep Learning Training "
    "with NCCL 2.4, 2019; latencies as in NCCL's src/graph/tuning.cc)",
)

SENT_BYTES: Final = {name: kind.formula(f"{name}_sent_bytes", "B", kind.sent_bytes) for name, kind in _KINDS.items()}
FORMULAS: Final = (*SECONDS.values(), TREE_SECONDS, *SENT_BYTES.values())


def seconds(kind: str, bytes_: float, size: int, link: Link) -> float:
    """Seconds of one collective of ``kind`` on ``size`` ranks; nothing for one rank.

    ``bytes_`` are those of a rank's larger tensor: the gathered one of an all_gather, the one before a
    reduce_scatter, and for the other kinds, where tensors stay as large as they are, that of one rank.
    Raises ArgumentError for an unknown ``kind``.
    """
    _formula(SECONDS, kind)
    if size == 1:
        return 0.0
    is_alone = kind in RINGS or kind == "send"
    latency = link.latency_seconds if is_alone else link.exchange_latency_seconds(size)
    found = _one_way(kind, bytes_, size, link, link.call_seconds, latency)
    if kind == "all_reduce" and isinstance(link, Crossing):
        return min(found, _tree_seconds(bytes_, size, link))
    return found


def marginal_seconds(kind: str, bytes_: float, size: int, link: Link) -> float:
    """What ``bytes_`` add to a long message of :func:`seconds`, whose latencies count anyway. Raises ArgumentError."""
    _formula(SECONDS, kind)
    return 0.0 if size == 1 else _one_way(kind, bytes_, size, link, 0.0, 0.0)


def _one_way(kind: str, bytes_: float, size: int, link: Link, call: float, latency: float) -> float:
    """By ring, or as messages that go their way by themselves."""
    if kind == "send":
        return SECONDS[kind].number(bytes_, call, latency, link.achievable_bytes_per_second(2))
    rate = (link.ring_bytes_per_second if kind in RINGS else link.exchange_bytes_per_second)(size)
    return SECONDS[kind].number(bytes_, size, call, latency, rate)


def _tree_seconds(bytes_: float, size: int, link: Crossing) -> float:
    latencies = link.near_latency_seconds, link.far_latency_seconds
    rate = link.ring_bytes_per_second(size)
    return TREE_SECONDS.number(bytes_, size, link.local, link.call_seconds, *latencies, rate, TREE_SHARE)


def sent_bytes(kind: str, bytes_: int, size: int) -> int:
    """Bytes that a rank sends in one collective of ``kind``, ``bytes_`` as in :func:`seconds`.

    In a broadcast the last rank of the chain sends nothing. Raises ArgumentError for an unknown ``kind``.
    """
    formula = _formula(SENT_BYTES, kind)
    if size == 1:
        return 0
    return math.ceil(formula.number(*(bytes_, size)[: len(formula.symbols)]))


def messages(kind: str, size: int) -> int:
    """Messages of one collective that follow one another on a rank. Raises ArgumentError for an unknown ``kind``."""
    _formula(SECONDS, kind)
    if size == 1:
        return 0
    return int(_KINDS[kind].messages.subs({_size: size}))


def _formula(formulas: dict[str, Formula], kind: str) -> Formula:
    if kind not in formulas:
        raise ArgumentError(f"{kind!r} is not a kind of collective; known kinds are {', '.join(KINDS)}")
    return formulas[kind]
