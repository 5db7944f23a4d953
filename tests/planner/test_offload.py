"""The choice of what is offloaded: equal to brute force, and nothing where there is room."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import pytest

from autopar import Cluster
from autopar.errors import ArgumentError
from autopar.options import Options
from autopar.planner.offload import choose, host_peak_bytes, require_host
from autopar.schedules import Costs, Schedule, check, generate, lower, simulate_timeline
from autopar.schedules.offloads import offload_activations
from tests.fast_cluster import FAST
from tests.search.spaces import search_of


def costs_of(schedule: Schedule, copy_seconds: float, kept: tuple[int, ...] = (100, 60, 80, 40)) -> Costs:
    base = Costs.uniform(schedule, forward_seconds=1.0, backward_seconds=2.0, send_seconds=0.1)
    kept = kept[: schedule.stages]
    moved = tuple(bytes_ * 9 // 10 for bytes_ in kept)
    return replace(
        base,
        activation_bytes=kept,
        later_bytes=kept,
        offload_bytes=moved,
        offload_seconds=tuple(bytes_ / 90 * copy_seconds for bytes_ in moved),
    )


def brute_force(schedule: Schedule, costs: Costs, free: list[int]) -> tuple[float, int] | None:
    """Over all subsets of the stages of ranks that are over their memory."""
    peaks = simulate_timeline(schedule, costs).peak_activation_bytes
    own = [s for s, home in enumerate(schedule.placement) if peaks[home] > free[home]]
    found = []
    for some in chain(*(combinations(own, n) for n in range(len(own) + 1))):
        timeline = simulate_timeline(offload_activations(schedule, some), costs)
        if all(p <= f for p, f in zip(timeline.peak_activation_bytes, free, strict=True)):
            found.append((timeline.makespan_seconds, sum(costs.offload_bytes[s] for s in some)))
    return min(found, default=None)


JOBS = [
    ("1f1b", 4, None, (100, 60, 80, 40), 0.1, 0.85, (0,)),
    ("gpipe", 2, None, (30, 40), 4.0, 0.9, (1,)),
    ("zb-v", 2, None, (100, 60, 80, 40), 0.9, 0.3, None),
    ("interleaved", 2, 3, (10, 20, 100, 20, 60, 20), 0.9, 1.0, ()),
    ("interleaved", 2, 3, (10, 20, 100, 20, 60, 20), 0.9, 0.95, (0,)),
    ("interleaved", 2, 3, (10, 20, 100, 20, 60, 20), 0.9, 0.8, (2,)),
    ("interleaved", 2, 3, (10, 20, 100, 20, 60, 20), 0.9, 0.65, (0, 2)),
    ("interleaved", 2, 3, (10, 20, 100, 20, 60, 20), 3.0, 0.8, None),
]


@pytest.mark.parametrize(("name", "ranks", "chunks", "kept", "copy_seconds", "share", "expected"), JOBS)
def test_the_choice_is_the_best(
    name: str,
    ranks: int,
    chunks: int | None,
    kept: tuple[int, ...],
    copy_seconds: float,
    share: float,
    expected: tuple[int, ...] | None,
) -> None:
    """Every rank has ``share`` of what the fullest one would keep."""
    schedule = lower(generate(name, ranks, 6, chunks=chunks))
    costs = costs_of(schedule, copy_seconds, kept)
    free = [int(max(simulate_timeline(schedule, costs).peak_activation_bytes) * share)] * ranks
    chosen, best = choose(schedule, costs, free), brute_force(schedule, costs, free)
    assert chosen == expected
    assert (chosen is None) == (best is None)
    if chosen is not None:
        timeline = simulate_timeline(offload_activations(schedule, chosen), costs)
        assert max(timeline.peak_activation_bytes) <= free[0]
        assert (timeline.makespan_seconds, sum(costs.offload_bytes[s] for s in chosen)) == best


def test_a_copy_that_delays_nothing_is_preferred_to_a_smaller_one() -> None:
    """Either of the first rank's stages alone would do; the one that keeps less is copied slowly."""
    schedule = lower(generate("interleaved", 4, 12, chunks=2))
    kept = (60, 10, 10, 10, 80, 10, 10, 10)
    costs = replace(costs_of(schedule, 0.0, kept), offload_seconds=(2.5, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0))
    plain = simulate_timeline(schedule, costs)
    free = [650, *plain.peak_activation_bytes[1:]]
    assert plain.peak_activation_bytes[0] > free[0]
    smaller = simulate_timeline(offload_activations(schedule, (0,)), costs)
    assert smaller.peak_activation_bytes[0] <= free[0]
    assert smaller.makespan_seconds > plain.makespan_seconds
    assert choose(schedule, costs, free) == (4,)


def test_first_stages_offload_and_hidden_copies_cost_nothing() -> None:
    """The first ranks of 1F1B keep the most microbatches; the budget is what the last ones have."""
    schedule = lower(generate("1f1b", 8, 16))
    costs = costs_of(schedule, 0.5, (100,) * 8)
    plain = simulate_timeline(schedule, costs)
    assert plain.peak_activation_bytes == (800, 700, 600, 500, 400, 300, 200, 100)
    stages = choose(schedule, costs, [350] * 8)
    assert stages == (0, 1, 2, 3, 4)
    offloaded = simulate_timeline(offload_activations(schedule, stages), costs)
    assert offloaded.makespan_seconds == plain.makespan_seconds
    # One in use, one on its way out, one on its way back; and of the others a tenth that is too small to be moved.
    assert offloaded.peak_activation_bytes[0] == 3 * 100 + 5 * 10


def test_of_many_stages_those_that_wait_the_longest_go() -> None:
    """More subsets than could be listed: each rank takes as few stages as fit, the first ones."""
    bare = generate("interleaved", 2, 8, chunks=40)
    costs = costs_of(bare, 0.01, (10,) * bare.stages)
    schedule = lower(bare, costs.seconds)
    peaks = simulate_timeline(schedule, costs).peak_activation_bytes
    free = [peak * 9 // 10 for peak in peaks]
    found = choose(schedule, costs, free)
    assert found is not None
    offloaded = simulate_timeline(offload_activations(schedule, found), costs)
    assert all(peak <= room for peak, room in zip(offloaded.peak_activation_bytes, free, strict=True))
    assert 0 < len(found) < bare.stages / 2
    assert max(found) < bare.stages / 2, "early stages wait the longest"
    assert choose(schedule, costs, [0, 0]) is None


def test_copies_that_nothing_hides_are_seen() -> None:
    schedule = lower(generate("1f1b", 4, 8))
    plain = simulate_timeline(schedule, costs_of(schedule, 0.0)).makespan_seconds
    all_ = offload_activations(schedule, range(4))
    slow = simulate_timeline(all_, costs_of(schedule, 6.0))
    assert slow.makespan_seconds > plain
    # Forward, offload and fetch of the slowest stage's second microbatch, one after the other.
    fetches = {e.action: e for e in slow.events if e.action.kind == "FETCH" and e.rank == 0}
    backwards = {e.action.microbatch: e for e in slow.events if e.action.kind == "B" and e.rank == 0}
    for action, fetch in fetches.items():
        assert backwards[action.microbatch].start_seconds >= fetch.end_seconds


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "v-half", "zb-v", "interleaved"])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_lists_with_copies_are_right(name: str, microbatches: int) -> None:
    schedule = lower(generate(name, 4, microbatches))
    both = offload_activations(schedule, range(schedule.stages))
    check(both)
    assert Schedule.from_text(both.to_text()) == both
    for rank in range(schedule.ranks):
        kinds = [action.kind for action in both.lists[rank]]
        assert kinds.count("OFFLOAD") == kinds.count("FETCH")
        assert [a for a in both.lists[rank] if a.kind not in ("OFFLOAD", "FETCH")] == list(schedule.lists[rank])
    assert offload_activations(schedule, ()) == schedule


def test_host_bytes_are_those_between_offload_and_fetch() -> None:
    schedule = lower(generate("gpipe", 2, 6))
    costs = costs_of(schedule, 0.1)
    timeline = simulate_timeline(offload_activations(schedule, [0]), costs)
    assert host_peak_bytes(timeline, 0) == 5 * 90  # the first comes back when the last has not gone yet
    assert host_peak_bytes(timeline, 1) == 0


def test_without_host_memory() -> None:
    device = Cluster.load("h100").device
    options = Options(offload=("activations",))
    require_host(options, device, 100 * 2**30)
    require_host(Options(), replace(device, host_memory_bytes=0))
    with pytest.raises(ArgumentError, match="no host memory belongs to it; give its share"):
        require_host(options, replace(device, host_memory_bytes=0))
    with pytest.raises(ArgumentError, match=r"needs 500 GiB of host memory for each rank.*has 233 GiB; offload less"):
        require_host(options, device, 500 * 2**30)


def test_what_ops_make_inside_goes_to_the_host_too() -> None:
    """Each tensor by its own size: of attention, what its softmax was divided by, a number for each row and head."""
    search = search_of("gpt2", 8, 2, FAST)
    search.glance()
    profile = search.root
    layer = next(unit.block for unit in profile.units if profile.units.count(unit) > 1)
    call = next(i for i, one in enumerate(profile.model.calls) if one.block == layer)
    none = profile.activations.choices[layer].none
    assert none.extra_bytes == sum(none.inside) > 0
    chosen = {call: none}
    all_of_it = profile.activations.movable_bytes([call], chosen, 0)
    above = max(none.inside) + 1
    values = list(profile.activations._storages([call], chosen).values())
    assert all_of_it == sum(values) + none.extra_bytes
    assert profile.activations.movable_bytes([call], chosen, above) == sum(b for b in values if b >= above)
