"""What placements take at least by scaling: all at once as one by one, and below what they take."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.cost_models.collective import marginal_seconds
from autopar.mesh import Mesh
from autopar.passes.expert_roads import exchange_axes, travelling
from autopar.planner.block_costs import Machine, block_cost
from autopar.search.bounds import scaled
from autopar.search.profiles import Key, Profile
from autopar.search.proof import Tried
from autopar.search.scaling import Scaling, alone, thin
from autopar.search.search import Search
from autopar.search.space import Region, regions
from tests.fast_cluster import BUSY, FAST, NODES
from tests.search.spaces import experts_on, search_of


def sent_seconds(profile: Profile, axis: str, stride: int) -> float:
    """Of all calls, messages between ranks that are so far apart."""
    sent = profile.sent_between(axis, stride)
    return math.fsum(sum(sent[unit.block]) for unit in profile.units)


def one_by_one(search: Search, key: Key) -> float:
    """By the definition: the largest that any profile says, with messages of axes that are known alone."""
    known = {axis: search.profiler.known.get(alone(axis, key, search.sizes.batch)) for axis in key.axes()}
    whole = [(axis, profile) for axis, profile in known.items() if profile is not None]
    sent = math.fsum(sent_seconds(p, axis, 1) * (scaled(p.key, key) or 0.0) for axis, p in whole)
    found = 0.0
    for other in search.references.known():
        does_more = (other.key.several and not key.several) or (other.key.copies and not key.copies)
        if (share := scaled(other.key, key)) and not does_more:
            beside = 0.0 if other.key.axes() else sent
            found = max(found, share * (other.seconds - other.fixed_seconds) + other.fixed_seconds + beside)
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_all_at_once_as_one_by_one(name: str) -> None:
    search = search_of(name, 8, 8, FAST)
    search.glance()
    found = regions(search.sizes, search.pins)
    assert len({region.key for region in found}) > 20
    for region in found:
        assert search.scaling.seconds(region.key) == pytest.approx(one_by_one(search, region.key), rel=1e-12)


def test_no_placement_is_below() -> None:
    search = search_of("gpt2", 8, 8, FAST)
    search.glance()
    for key, profile in search.profiler.known.items():
        if not (key.stages or key.head or key.chunks > 1 or key.streamed):
            assert search.scaling.seconds(key) <= profile.seconds * (1 + 1e-9)


def test_placements_on_tp_bound_others_by_their_fastest_passes_alone() -> None:
    """Where a step has few microbatches to share what it does once, tp may split weights though passes are slower."""
    search = search_of("gpt2", 64, 8, BUSY)
    search.glance()
    few, more = Region(Mesh(dp=4, tp=2), 8, 2), Region(Mesh(pp=2, dp=2, tp=2), 4, 8)
    own = [search.place(few), search.place(more)]
    assert not [profile for profile in search.references.known() if profile in own]
    fastest = search.profiler.of(alone("tp", few.key, 64), Mesh(tp=2), 1)
    assert fastest is not None
    assert fastest in search.references.known()
    assert fastest.placed.request.shared_by == math.inf
    assert search.references.wanted(few) is None, "it is made"
    for region, profile in zip((few, more), own, strict=True):
        assert profile is not None
        assert search.scaling.seconds(region.key) <= profile.seconds * (1 + 1e-9)


def test_variants_of_a_placement_count_what_a_step_does_once_alike() -> None:
    """So that none has faster passes than the one that bounds it, whatever it was asked for first."""
    search = search_of("gpt2", 64, 8, BUSY)
    search.glance()
    region = Region(Mesh(pp=2, dp=2, tp=2), 16, 2)
    assert search.place(region) is not None
    for key in (region.key._replace(head=2), region.key._replace(chunks=8), region.key._replace(streamed=True)):
        variant = search.profiler.of(key, Mesh(pp=2, dp=1, tp=2, cp=2), 64)
        assert variant is not None
        assert variant.placed.request.shared_by == region.key.counted == 4


def is_part(known: Key, key: Key) -> bool:
    """Whether ranks of ``known`` could do what those of ``key`` do, that are as many on each axis or several times as
    many: some of the rows, with experts over the same axes or over fewer."""
    axes = known.axes()
    inside = set(known.borrowed) <= set(key.borrowed) and not set(axes) & (set(key.borrowed) - set(known.borrowed))
    parts = (key.rows * key.ep, known.rows * known.ep), *((getattr(known, a), getattr(key, a)) for a in axes)
    return inside and all(whole % part == 0 for part, whole in parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "known",
    [
        Key(8, 1, 1, 2, ("tp",), counted=math.inf),
        Key(8, 1, 2, 1, ("cp",)),
        Key(4, 2, 1, 1),
        Key(4, 2, 1, 2, counted=math.inf),
        Key(4, 2, 1, 2, ("tp",), counted=math.inf),
    ],
    ids=["tp", "cp", "ep", "ep and tp", "ep and tp, experts over both"],
)
def test_no_placement_on_more_ranks_with_experts_is_below(known: Key) -> None:
    """Those on as many ranks of each axis, or several times as many, are bounded; no others are."""
    search = experts_on(NODES, 8)
    search.glance()
    found = {region.key: region for region in regions(search.sizes, search.pins) if region.key.plain == region.key}
    mesh = Mesh(ep=known.ep, cp=known.cp, tp=known.tp, borrowed=known.borrowed)
    profile = search.profiler.of(known, mesh, 1)
    assert profile is not None
    scaling = Scaling(found, search.root)
    scaling.learn([search.root])
    before = {key: scaling.seconds(key) for key in found}
    scaling.learn([profile])
    bounded = {key for key, share in zip(found, scaling._shares(known), strict=True) if share}
    assert bounded == {key for key in found if is_part(known, key)}
    raised = {key for key in bounded if scaling.seconds(key) > before[key]}
    assert any(key.cp * key.tp * key.ep > known.cp * known.tp * known.ep for key in raised)
    for key in sorted(raised)[::3]:
        fastest = key._replace(counted=math.inf if key.tp > 1 else 0)
        other = search.profiler.of(fastest, found[key].mesh, found[key].microbatches)
        assert other is None or scaling.seconds(key) <= other.seconds * (1 + 1e-9)


def test_pairs_of_ranks_with_few_wires_bound_more_ranks_as_if_they_had_all() -> None:
    """Of what a rank sends to three others, each wire carries half as much as of what it sends to one."""
    wires = replace(FAST.intra_node, peer_bytes_per_second=FAST.intra_node.bytes_per_second / 1000)
    search = experts_on(replace(FAST, intra_node=wires), 8, 1)
    search.glance()
    keys = [search.root.key._replace(rows=8 // ep, ep=ep) for ep in (2, 4, 8)]
    pair, *more = [search.profiler.of(key, Mesh(ep=key.ep), 1) for key in keys]
    assert pair is not None
    scaling = Scaling(keys, search.root)
    scaling.learn([search.root, pair])
    assert scaling.seconds(pair.key) == pytest.approx(pair.seconds), "as many, with as few wires"
    for key, placed in zip(keys[1:], more, strict=True):
        assert placed is not None
        assert search.root.seconds / key.ep < scaling.seconds(key) <= placed.seconds * (1 + 1e-9)


@pytest.mark.parametrize("ep", [2, 4])
def test_experts_of_several_ranks_get_tokens_of_all_their_rows(ep: int) -> None:
    """Where memory is slow, one rank that reads all experts for its own rows takes longer than one of those that share
    them."""
    slow = replace(FAST.device, memory_bytes_per_second=FAST.device.memory_bytes_per_second / 100)
    search = experts_on(replace(FAST, device=slow), 4)
    search._begin()
    region = Region(Mesh(dp=4 // ep, ep=ep), 1, 2)
    placed, root = search.place(region), search.root
    assert placed is not None
    plain = [search.profiler.of(Key(rows, 1, 1, 1, several=True), Mesh(), 8 // rows) for rows in (1, 2, 4)]
    known = [profile for profile in plain if profile is not None]
    assert len(known) == 3
    assert known[0].seconds > placed.seconds
    scaling = Scaling([region.key], root)
    scaling.learn([root, *known])
    assert 0.0 < scaling.seconds(region.key) <= placed.seconds * (1 + 1e-9)


def test_what_waits_is_raised_by_all_that_is_placed() -> None:
    search = search_of("llama", 8, 8, FAST, recompute="none")
    search.glance()
    proof = search._proof(search.profiler.aside())
    proof.most_work = 1.0
    proof.run(lambda: Tried(search.outcomes, {}))
    waiting = [item for item in proof._waiting if isinstance(item.what, Region)]
    assert waiting
    assert all(item.bound >= proof.at_first(item.what) * (1 - 1e-9) for item in waiting)


def test_keys_that_were_not_announced_are_answered_the_same() -> None:
    search = search_of("gpt2", 8, 8, FAST)
    search.glance()
    other = Scaling([], search.root)
    other.learn(search.references.known())
    for region in regions(search.sizes, search.pins):
        assert other.seconds(region.key) == search.scaling.seconds(region.key)
        assert (other.layers(region.key) == search.scaling.layers(region.key)).all()


def test_what_is_learned_later_counts() -> None:
    search = search_of("gpt2", 8, 8, FAST)
    search.glance()
    region = max(regions(search.sizes, search.pins), key=lambda region: region.mesh.tp)
    before = Scaling([region.key], search.root)
    before.learn([search.root])
    first = before.seconds(region.key)
    slow = replace(search.root, key=region.key, units=[replace(u, forward=2 * u.forward) for u in search.root.units])
    before.learn([slow])
    assert before.seconds(region.key) == pytest.approx(slow.seconds)
    assert before.seconds(region.key) > first


def test_in_whatever_order_what_is_sent_is_the_most_that_any_size_of_an_axis_says() -> None:
    search = search_of("llama", 8, 8, NODES)
    search.glance()
    both = [search.profiler.of(Key(8, 1, size, 1), Mesh(cp=size), 1) for size in (2, 4)]
    keys = [Key(8, 1, size, 1, several=False) for size in (2, 4, 8)]
    found = []
    for order in (both, both[::-1]):
        scaling = Scaling(keys, search.root)
        scaling.learn([search.root, *(profile for profile in order if profile is not None)])
        found.append([scaling._sent[place].tolist() for place in range(len(keys))])
    assert found[0] == found[1]
    totals = [figures[-1] for figures in found[0]]
    least = [sent_seconds(profile, "cp", 1) for profile in both if profile is not None]
    assert totals[0] == pytest.approx(least[0])
    assert totals[1] == pytest.approx(max(least[0] / 2, least[1]))
    assert totals[2] == pytest.approx(max(least[0] / 4, least[1] / 2))


def test_messages_are_likely_to_take_longer_between_nodes() -> None:
    """Which bounds don't say."""
    search = search_of("llama", 8, 8, NODES)
    search.glance()
    keys = {region.key for region in regions(search.sizes, search.pins)}
    near, far = next(
        (key._replace(tp=1), key)
        for key in sorted(keys)
        if key.cp == 2 and key.tp == 2 and key.ep == 1 and not key.head
    )
    cp = alone("cp", far, search.sizes.batch)
    profile = search.profiler.of(cp, Mesh(cp=2), 1)
    assert profile is not None
    assert sent_seconds(profile, "cp", 2) > sent_seconds(profile, "cp", 1) > 0, "on nodes of two"
    for key, stride in ((near, 1), (far, 2)):
        scaling = Scaling([key], search.root)
        scaling.learn([search.root])
        plain = scaling.seconds(key)
        scaling.learn([search.root, profile])
        share = scaled(cp, key) or 0.0
        assert scaling.seconds(key) >= plain + share * sent_seconds(profile, "cp", 1) * (1 - 1e-9)
        likely = plain + share * sent_seconds(profile, "cp", stride)
        assert scaling.seconds(key, likely=True) == pytest.approx(max(scaling.seconds(key), likely))


def test_a_few_rows_say_what_tp_is_likely_to_send() -> None:
    """For each row, of any number of rows; bounds know only of rows that are part of theirs."""
    search = search_of("llama", 8, 8, FAST)
    search.glance()
    key = thin(search.root.key._replace(tp=4), 8)
    assert (key.rows, key.tp, key.several) == (2, 4, True)
    profile = search.profiler.of(key, Mesh(tp=4), 4)
    assert profile is not None
    more = key._replace(rows=4)
    scaling = Scaling([more], search.root)
    scaling.learn([search.root])
    before = scaling.seconds(more)
    scaling.learn([search.root, profile])
    assert scaling.seconds(more) == before
    assert scaling.seconds(more, likely=True) == pytest.approx(before + 2 * sent_seconds(profile, "tp", 1))


@pytest.mark.slow
def test_another_number_of_experts_ranks_says_what_ep_is_likely_to_send() -> None:
    """For each row as much, at the pace of the links that so many ranks have; bounds know of no other pace."""
    search = experts_on(NODES, 8)
    search.glance()
    few, many = (search.root.key._replace(rows=8 // ep, ep=ep) for ep in (2, 4))
    profile = search.profiler.of(few, Mesh(ep=2), 1)
    assert profile is not None
    scaling = Scaling([many], search.root)
    scaling.learn([search.root])
    before = scaling.seconds(many)
    scaling.learn([search.root, profile])
    sent = many.rows / few.rows * sent_seconds(profile, "ep", 1)
    placed = search.profiler.of(many, Mesh(ep=4), 1)
    assert placed is not None
    assert before + sent <= scaling.seconds(many) <= placed.seconds * (1 + 1e-9)
    near, far = (NODES.link(ep, 1) for ep in (2, 4))
    slower = marginal_seconds("all_to_all", 1.0, 4, far) / marginal_seconds("all_to_all", 1.0, 2, near)
    assert slower > 1, "on nodes of two"
    assert scaling.seconds(many, likely=True) == pytest.approx(max(scaling.seconds(many), before + slower * sent))


@pytest.mark.slow
def test_tokens_by_way_of_more_nodes_may_take_less() -> None:
    """Where links between nodes are as fast as those within: which bounds of ranks that are further apart allow for."""
    link = replace(NODES.intra_node, bytes_per_second=1e8)
    search = experts_on(replace(NODES, devices_per_node=4, intra_node=link, inter_node=link), 16)
    search.glance()
    profile = search.profiler.of(search.root.key._replace(rows=2, ep=4), Mesh(ep=4), 1)
    assert profile is not None
    machine, gained = Machine.of(search.costing.cluster, Mesh(ep=4)), 0
    for number, own in enumerate(profile.costs):
        less, back = profile.slack[number]
        for nodes in (2, 4):  # of ranks that are two apart, and of those with a node each
            other = block_cost(profile.model.blocks[number], machine.by_way_of(nodes), profile.computed[number])
            assert other.forward_seconds >= (own.forward_seconds - less) * (1 - 1e-12)
            assert other.backward_seconds >= (own.backward_seconds - back) * (1 - 1e-12)
            gained += other.forward_seconds < own.forward_seconds
    assert gained


@pytest.mark.slow
def test_between_nodes_bounds_of_experts_stay_as_they_are() -> None:
    search = experts_on(NODES, 8)
    search.glance()
    for ep in (2, 4):
        profile = search.profiler.of(search.root.key._replace(rows=8 // ep, ep=ep), Mesh(ep=ep), 1)
        assert profile is not None
        assert not any(any(less) for less in profile.slack)


def test_tokens_that_travel_along_tp_alone_stay_within_their_node() -> None:
    """With most experts of a token on the ranks of ep, tokens are gathered there: no other nodes are in between."""
    near, far = (replace(link, bytes_per_second=1e8) for link in (NODES.intra_node, NODES.inter_node))
    search = experts_on(replace(NODES, intra_node=near, inter_node=far), 8, 4)
    search.glance()
    key = search.root.key._replace(rows=1, ep=4, tp=2, borrowed=("tp",), counted=16)
    profile = search.profiler.of(key, Mesh(ep=4, tp=2, borrowed=("tp",)), 2)
    assert profile is not None
    assert {exchange_axes(node) for block in profile.model.blocks for node in travelling(block)} == {("tp",)}
    assert not any(any(less) for less in profile.slack)
    ways = {axes: list(profile._ways_along(set(axes))) for axes in (("tp",), ("ep",), ("ep", "tp"))}
    assert ways == {("tp",): [1], ("ep",): [4], ("ep", "tp"): [4]}
