"""The choice of what is offloaded: as little as fits, nothing where there is room, whatever copies take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from autopar import Cluster
from autopar.errors import ArgumentError, BudgetError, ScheduleError
from autopar.options import Options
from autopar.plan.parts import EIGHTHS
from autopar.planner.offload import choose, host_peak_bytes, offloaded, require_host
from autopar.schedules import Action, Costs, Schedule, check, generate, lower, simulate_timeline
from autopar.schedules.offloads import ALL, COPIES, Away, goes, offload_activations
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


ALL_AWAY = dict.fromkeys(range(80), ALL)


def peaks_of(schedule: Schedule, shares: dict[int, int], costs: Costs, free: Sequence[int]) -> tuple[int, ...]:
    return simulate_timeline(offload_activations(schedule, Away(shares, free), costs), costs).peak_activation_bytes


JOBS = [
    ("1f1b", 4, None, (100, 60, 80, 40), 0.85),
    ("1f1b", 8, None, (100,) * 8, 0.5),
    ("gpipe", 2, None, (30, 40), 0.6),
    ("zb-v", 4, None, (100, 60, 80, 40, 30, 20, 30, 80), 0.9),
    ("v-half", 4, None, (100, 60, 80, 40, 30, 20, 30, 80), 0.9),
    ("interleaved", 2, 3, (10, 20, 100, 20, 60, 20), 1.0),
    ("interleaved", 2, 3, (40, 50, 60, 20, 60, 20), 0.8),
    ("interleaved", 2, 3, (30,) * 6, 0.7),
]


@pytest.mark.parametrize(("name", "ranks", "chunks", "kept", "share"), JOBS)
def test_as_little_goes_as_leaves_room_for_a_copy(
    name: str, ranks: int, chunks: int | None, kept: tuple[int, ...], share: float
) -> None:
    """Every rank has ``share`` of what the fullest one would keep; ranks that have room send nothing."""
    schedule = lower(generate(name, ranks, 16, chunks=chunks))
    costs = costs_of(schedule, 0.5, kept)
    plain = simulate_timeline(schedule, costs).peak_activation_bytes
    free = [int(max(plain) * share)] * ranks
    found = choose(schedule, costs, free)
    assert found is not None
    assert all(peak <= free[0] for peak in peaks_of(schedule, dict(found.shares), costs, free))
    for rank, peak in enumerate(plain):
        own = [stage for stage, home in enumerate(schedule.placement) if home == rank and stage in found.shares]
        if peak <= free[0]:
            assert not own
            continue
        spare = max(costs.offload_bytes[stage] for stage, home in enumerate(schedule.placement) if home == rank)
        smaller = [room - spare for room in free]
        assert peaks_of(schedule, dict(found.shares), costs, smaller)[rank] <= smaller[rank]
        less = {**found.shares, max(own): found.shares[max(own)] - 1}  # it waits the shortest
        assert peaks_of(schedule, less, costs, smaller)[rank] > smaller[rank]


def test_without_room_for_a_copy_what_fits_is_taken() -> None:
    """Down to the least that a list of this schedule can keep with all stages' copies; below, nothing fits."""
    schedule = lower(generate("1f1b", 4, 8))
    costs = costs_of(schedule, 0.5, (100,) * 4)
    least = peaks_of(schedule, ALL_AWAY, costs, [0] * 4)
    assert least[0] < simulate_timeline(schedule, costs).peak_activation_bytes[0]
    found = choose(schedule, costs, least)
    assert found is not None
    assert peaks_of(schedule, dict(found.shares), costs, least) == least
    assert choose(schedule, costs, [least[0] - 1, *least[1:]]) is None
    several = lower(generate("interleaved", 1, 8, chunks=4))
    costs = costs_of(several, 0.5, (100, 20, 20, 20))
    fewest = peaks_of(several, ALL_AWAY, costs, [0])[0]
    for room, shares in ((fewest, {0: ALL, 1: ALL}), (fewest + 18, {0: ALL})):  # of a copy of the first, 90 bytes
        assert choose(several, costs, [room]) == Away(shares, [room]), "no more than it takes"


def test_refusal_says_what_the_fullest_rank_needs() -> None:
    schedule = lower(generate("1f1b", 4, 8))
    costs = costs_of(schedule, 0.5, (100,) * 4)
    least = peaks_of(schedule, ALL_AWAY, costs, [0] * 4)
    with pytest.raises(BudgetError, match="pipeline rank 0 still keeps") as caught:
        offloaded(schedule, costs, [least[0] - 7, *least[1:]], 1000)
    assert caught.value.needed_bytes == 1007
    assert offloaded(schedule, costs, least, 1000).shares


def test_first_stages_offload_and_hidden_copies_cost_nothing() -> None:
    """The first ranks of 1F1B keep the most microbatches; the budget is what the last ones have."""
    schedule = lower(generate("1f1b", 8, 16))
    costs = costs_of(schedule, 0.5, (100,) * 8)
    plain = simulate_timeline(schedule, costs)
    assert plain.peak_activation_bytes == (800, 700, 600, 500, 400, 300, 200, 100)
    away = choose(schedule, costs, [450] * 8)
    assert away is not None
    assert set(away.shares) == {0, 1, 2, 3}
    shares = [away.shares[stage] for stage in range(4)]
    assert shares == sorted(shares, reverse=True)
    offloaded = simulate_timeline(offload_activations(schedule, away, costs), costs)
    assert offloaded.makespan_seconds == plain.makespan_seconds
    assert max(offloaded.peak_activation_bytes) <= 450


def test_what_comes_back_is_started_as_far_ahead_as_it_takes() -> None:
    """Copies of 5 s behind passes of 1 and 2 s: the last backward, which nothing delays, doesn't wait for its own."""
    schedule = lower(generate("1f1b", 8, 16))
    costs = costs_of(schedule, 5.0, (100,) * 8)
    away = Away({0: 2})
    found = simulate_timeline(offload_activations(schedule, away, costs), costs)
    assert found.makespan_seconds == simulate_timeline(schedule, costs).makespan_seconds
    near = simulate_timeline(offload_activations(schedule, away), costs)
    assert near.makespan_seconds > found.makespan_seconds


def test_copies_begin_early_enough_for_all_that_a_microbatch_needs() -> None:
    """Of a rank alone: three that take as long as two backwards each, one after the other. By itself each would begin
    two passes ahead, when the one before it isn't over."""
    schedule = lower(generate("interleaved", 1, 4, chunks=12))
    costs = costs_of(schedule, 4.0, (100,) * 12)
    plain = simulate_timeline(schedule, costs).makespan_seconds
    away = Away(dict.fromkeys(range(3), ALL), [1200])
    found = simulate_timeline(offload_activations(schedule, away, costs), costs)
    assert found.makespan_seconds == plain
    assert max(found.peak_activation_bytes) <= 1200


def test_of_many_stages_those_that_wait_the_longest_go() -> None:
    """Each rank takes as few stages as fit, the first ones."""
    bare = generate("interleaved", 2, 8, chunks=40)
    costs = costs_of(bare, 0.01, (10,) * bare.stages)
    schedule = lower(bare, costs.seconds)
    peaks = simulate_timeline(schedule, costs).peak_activation_bytes
    free = [peak * 9 // 10 for peak in peaks]
    found = choose(schedule, costs, free)
    assert found is not None
    assert all(
        peak <= room for peak, room in zip(peaks_of(schedule, dict(found.shares), costs, free), free, strict=True)
    )
    assert 0 < len(found.shares) < bare.stages / 2
    assert max(found.shares) < bare.stages / 2, "early stages wait the longest"
    assert choose(schedule, costs, [0, 0]) is None


def test_copies_that_nothing_hides_are_seen() -> None:
    schedule = lower(generate("1f1b", 4, 8))
    plain = simulate_timeline(schedule, costs_of(schedule, 0.0)).makespan_seconds
    all_ = offload_activations(schedule, Away(ALL_AWAY))
    slow = simulate_timeline(all_, costs_of(schedule, 6.0))
    assert slow.makespan_seconds > plain
    # Forward, offload and fetch of the slowest stage's second microbatch, one after the other.
    fetches = {e.action: e for e in slow.events if e.action.kind == "FETCH" and e.rank == 0}
    offloads = {e.action.microbatch: e for e in slow.events if e.action.kind == "OFFLOAD" and e.rank == 0}
    backwards = {e.action.microbatch: e for e in slow.events if e.action.kind == "B" and e.rank == 0}
    for action, fetch in fetches.items():
        assert fetch.start_seconds >= offloads[action.microbatch].end_seconds
        assert backwards[action.microbatch].start_seconds >= fetch.end_seconds


def test_a_share_is_spread_evenly() -> None:
    for share in range(ALL + 1):
        gone = goes(np.arange(3 * ALL), np.array(share)).tolist()
        assert all(sum(gone[start : start + ALL]) == share for start in range(2 * ALL))
    assert EIGHTHS == ALL


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "v-half", "zb-v", "interleaved"])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_lists_with_copies_are_right(name: str, microbatches: int) -> None:
    schedule = lower(generate(name, 4, microbatches))
    costs = costs_of(schedule, 4.0, (10,) * schedule.stages)
    for room in (0, 30, 1000):
        for share in (1, 5, ALL):
            both = offload_activations(schedule, Away(dict.fromkeys(ALL_AWAY, share), [room] * 4), costs)
            check(both)
            assert Schedule.from_text(both.to_text()) == both
            for rank in range(schedule.ranks):
                kinds = [action.kind for action in both.lists[rank]]
                assert kinds.count("OFFLOAD") == kinds.count("FREE") == kinds.count("FETCH")
                assert [a for a in both.lists[rank] if a.kind not in COPIES] == list(schedule.lists[rank])
    assert offload_activations(schedule, Away({})) == schedule


@pytest.mark.parametrize("moved", ["FREE", "FETCH"])
def test_lists_with_copies_in_the_wrong_order_are_refused(moved: str) -> None:
    """A FREE before its OFFLOAD, a FETCH before its FREE."""
    schedule = offload_activations(lower(generate("gpipe", 2, 4)), Away({0: ALL}))
    row = [action for action in schedule.lists[0] if str(action) != f"{moved}1@0"]
    row.insert(row.index(Action(COPIES[COPIES.index(moved) - 1], 1, 0)), Action(moved, 1, 0))
    with pytest.raises(ScheduleError, match=rf"{moved}1@0 comes before"):
        check(replace(schedule, lists=(tuple(row), *schedule.lists[1:])))


def test_lists_that_lack_a_free_are_refused() -> None:
    schedule = offload_activations(lower(generate("gpipe", 2, 4)), Away({0: ALL}))
    rows = tuple(tuple(a for a in row if str(a) != "FREE1@0") for row in schedule.lists)
    with pytest.raises(ScheduleError, match="lacks FREE1@0"):
        check(replace(schedule, lists=rows))


@pytest.mark.parametrize(("share", "message"), [(ALL, "repeats FREE1@0"), (1, "doesn't need FREE1@0")])
def test_lists_with_a_free_too_many_are_refused(share: int, message: str) -> None:
    """Twice, or of activations that stay."""
    schedule = offload_activations(lower(generate("gpipe", 2, 8)), Away({0: share}))
    row = list(schedule.lists[0])
    row.insert(row.index(Action("F", 6, 0)), Action("FREE", 1, 0))
    with pytest.raises(ScheduleError, match=message):
        check(replace(schedule, lists=(tuple(row), *schedule.lists[1:])))


def test_host_bytes_are_those_between_offload_and_fetch() -> None:
    schedule = lower(generate("gpipe", 2, 6))
    costs = costs_of(schedule, 0.1)
    timeline = simulate_timeline(offload_activations(schedule, Away({0: ALL}), costs), costs)
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
