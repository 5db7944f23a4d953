"""Collectives: against hand computation, against a ring played message by message, and for their shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster, Link
from autopar.cost_models import collective
from autopar.errors import ArgumentError

LINK = Link("round numbers", latency_seconds=1.0, bytes_per_second=10.0)
kinds = st.sampled_from(collective.KINDS)
ranks = st.integers(2, 64)


@pytest.mark.parametrize(
    ("kind", "seconds", "sent"),
    [
        ("all_gather", 3 * (1 + 100 / 10), 300),
        ("reduce_scatter", 3 * (1 + 100 / 10), 300),
        ("all_reduce", 6 * (1 + 100 / 10), 600),
        ("all_to_all", 3 * (1 + 100 / 10), 300),
        ("broadcast", 3 * 1 + 400 / 10, 400),
        ("reduce", 3 * 1 + 400 / 10, 400),
        ("send", 1 + 400 / 10, 400),
    ],
)
def test_400_bytes_on_4_ranks_by_hand(kind: str, seconds: float, sent: int) -> None:
    assert collective.seconds(kind, 400, 4, LINK) == pytest.approx(seconds, rel=1e-15)
    assert collective.sent_bytes(kind, 400, 4) == sent
    assert isinstance(collective.sent_bytes(kind, 400, 4), int)


def test_every_kind_is_tested_by_hand() -> None:
    assert collective.KINDS == (
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
        "broadcast",
        "reduce",
        "send",
    )


def ring_all_reduce(size: int, chunk_bytes: int) -> tuple[list[int], int]:
    """Bytes that each rank sends, and rounds, until every rank has the sum of each of ``size`` chunks."""
    held = [[{rank} for _ in range(size)] for rank in range(size)]  # [rank][chunk]: whose terms are in it
    sent = [0] * size
    everyone = set(range(size))
    rounds = 0
    while any(terms != everyone for chunks in held for terms in chunks):
        moves = []
        for rank in range(size):
            chunk = (rank - rounds) % size
            moves.append(((rank + 1) % size, chunk, held[rank][chunk]))
            sent[rank] += chunk_bytes
        for rank, chunk, terms in moves:
            held[rank][chunk] = held[rank][chunk] | terms
        rounds += 1
    return sent, rounds


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
def test_all_reduce_is_what_a_ring_does(size: int) -> None:
    sent, rounds = ring_all_reduce(size, 5)
    assert set(sent) == {collective.sent_bytes("all_reduce", 5 * size, size)}
    expected = rounds * (LINK.latency_seconds + 5 / LINK.bytes_per_second)
    assert collective.seconds("all_reduce", 5 * size, size, LINK) == pytest.approx(expected)


@pytest.mark.parametrize("kind", collective.KINDS)
def test_one_rank_has_nobody_to_talk_to(kind: str) -> None:
    assert collective.seconds(kind, 10**9, 1, LINK) == 0
    assert collective.sent_bytes(kind, 10**9, 1) == 0


@given(kinds, st.integers(0, 10**15), ranks)
def test_seconds_and_sent_bytes_tell_the_same(kind: str, tensor_bytes: int, size: int) -> None:
    """Without latency, seconds are the bytes sent over the bandwidth."""
    link = Link("no latency", 0, 7.0)
    expected = pytest.approx(collective.sent_bytes(kind, tensor_bytes, size) / 7.0, abs=1 / 7.0)
    assert collective.seconds(kind, tensor_bytes, size, link) == expected


@given(st.integers(0, 2**40), ranks)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(share: int, size: int) -> None:
    total = share * size
    parts = ("reduce_scatter", "all_gather")
    assert collective.sent_bytes("all_reduce", total, size) == 2 * share * (size - 1)
    assert collective.sent_bytes("all_reduce", total, size) == sum(
        collective.sent_bytes(kind, total, size) for kind in parts
    )
    assert collective.seconds("all_reduce", total, size, LINK) == pytest.approx(
        sum(collective.seconds(kind, total, size, LINK) for kind in parts)
    )


@given(kinds, st.floats(0, 1e15), st.floats(0, 1e15), ranks, ranks)
def test_more_bytes_or_ranks_never_take_less_time(kind: str, a: float, b: float, n: int, m: int) -> None:
    def seconds(tensor_bytes: float, size: int) -> float:
        return collective.seconds(kind, tensor_bytes, size, LINK)

    assert seconds(min(a, b), n) <= seconds(max(a, b), n)
    assert seconds(a, min(n, m)) <= seconds(a, max(n, m)) * (1 + 1e-12)


@given(kinds, st.integers(0, 10**12), ranks)
def test_a_faster_link_is_faster(kind: str, tensor_bytes: int, size: int) -> None:
    faster = Link("faster", LINK.latency_seconds / 2, LINK.bytes_per_second * 2)
    half = collective.seconds(kind, tensor_bytes, size, LINK) / 2
    assert collective.seconds(kind, tensor_bytes, size, faster) == pytest.approx(half)


def test_a_part_of_a_byte_counts_as_one() -> None:
    assert collective.sent_bytes("all_gather", 10, 4) == 8


def test_whole_petabytes_stay_exact() -> None:
    assert collective.sent_bytes("all_gather", 8 * (2**50 + 1), 8) == 7 * (2**50 + 1)


def test_formulas_take_many_sizes_at_once() -> None:
    sizes = np.array([2, 4, 8])
    many = collective.SECONDS["all_reduce"](
        tensor_bytes=800, size=sizes, call_seconds=0, latency_seconds=1, bytes_per_second=10
    )
    assert many.tolist() == pytest.approx([collective.seconds("all_reduce", 800, n, LINK) for n in (2, 4, 8)])


def test_rings_between_nodes_use_the_cards_of_all_their_ranks() -> None:
    """Of eight ranks in each of two nodes, eight rings; where one rank of each node is in a group, one card."""
    cluster = Cluster.load("a100")
    card = cluster.inter_node.achievable_bytes_per_second(2)
    whole, strided, alone = (cluster.link(*group, 16) for group in ((16, 1), (4, 4), (2, 8)))
    assert whole.ring_bytes_per_second(16) == pytest.approx(8 * card)
    assert strided.ring_bytes_per_second(4) == pytest.approx(2 * card)
    assert alone.ring_bytes_per_second(2) == card
    assert whole.achievable_bytes_per_second(2) == card  # of a message
    assert alone.latency_seconds > strided.latency_seconds > whole.latency_seconds > cluster.intra_node.latency_seconds


@given(kinds, st.floats(1, 1e12), ranks, st.integers(1, 64))
def test_a_part_of_the_bytes_takes_at_least_that_part_of_the_time(
    kind: str, tensor_bytes: float, size: int, parts: int
) -> None:
    link = Cluster.load("h100").link(size, 1)
    whole, part = (collective.seconds(kind, tensor_bytes / n, size, link) for n in (1, parts))
    assert whole * (1 - 1e-9) / parts <= part <= whole * (1 + 1e-9)


NEAR, FAR = Link("near", 0.1, 1000.0), Link("far", 1.0, 100.0)
NODES = replace(Cluster.load("a100"), devices_per_node=2, intra_node=NEAR, inter_node=FAR)


def test_a_small_all_reduce_over_nodes_goes_up_a_tree_and_down_again() -> None:
    """Two GPUs in each of eight nodes: one message in the node, three between nodes, each way."""
    link = NODES.link(16, 1)
    assert collective.seconds("all_reduce", 0, 16, link) == pytest.approx(2 * (0.1 + 3))
    assert collective.seconds("all_reduce", 92, 16, link) == pytest.approx(6.2 + 2 * 92 / (0.92 * 200))
    large = 10**9
    assert collective.seconds("all_reduce", large, 16, link) == pytest.approx(30 * 0.55 + 30 / 16 * large / 200)
    assert collective.seconds("all_gather", 0, 16, link) == pytest.approx(15 * 0.55), "rings only"
    assert collective.seconds("all_reduce", 0, 2, NODES.link(2, 1)) == 0.2, "in a node"


@pytest.mark.parametrize("nodes", [2, 4, 8, 64])
def test_a_tree_has_as_many_levels_as_counted(nodes: int) -> None:
    """A root with one child, below it a binary tree (NCCL's): nodes that are equally far from it are one level."""

    def parent(node: int) -> int:
        bit = node & -node
        above = (node ^ bit) | (bit << 1)
        return above if above < nodes else node ^ bit

    def level(node: int) -> int:
        return 1 + level(parent(node)) if node else 0

    messages = 2 * max(map(level, range(nodes)))
    assert collective.seconds("all_reduce", 0, nodes, NODES.link(nodes, 2)) == pytest.approx(messages)


@given(st.floats(0, 1e12), st.integers(1, 12), st.sampled_from([1, 2, 4, 8, 3]))
def test_an_all_reduce_over_nodes_is_no_slower_than_a_ring(tensor_bytes: float, blocks: int, stride: int) -> None:
    size = 8 * blocks
    link = Cluster.load("h100").link(size, stride, size * stride)
    names = ("latency_seconds", "bytes_per_second", "achievable_fraction", "call_seconds")
    ring = Link("ring", **{name: getattr(link, name) for name in names})
    slowest = collective.seconds("all_reduce", tensor_bytes, size, ring)
    assert collective.seconds("all_reduce", tensor_bytes, size, link) <= slowest * (1 + 1e-12)


def test_what_bytes_add_to_a_long_message() -> None:
    for kind in collective.KINDS:
        link = replace(LINK, call_seconds=0.5)
        both = [collective.seconds(kind, n, 4, link) for n in (400, 0)]
        assert collective.marginal_seconds(kind, 400, 4, link) == pytest.approx(both[0] - both[1])
        assert collective.marginal_seconds(kind, 400, 1, link) == 0


def test_what_a_collective_takes_beyond_its_messages() -> None:
    slow = replace(LINK, call_seconds=0.5)
    for kind in collective.KINDS:
        assert collective.seconds(kind, 400, 4, slow) == collective.seconds(kind, 400, 4, LINK) + 0.5
        assert collective.messages(kind, 1) == 0
    assert collective.messages("all_reduce", 4) == 6


def test_an_unknown_kind_is_refused() -> None:
    for call in (
        lambda: collective.seconds("gather", 1, 1, LINK),
        lambda: collective.sent_bytes("gather", 1, 1),
    ):
        with pytest.raises(ArgumentError, match="'gather' is not a kind of collective; known kinds are all_gat"):
            call()
