"""Synthesis: never worse than a named schedule, inside the limit, above the bound, optimal where orders are few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import ScheduleError
from autopar.planner.makespan_bounds import makespan_bound
from autopar.planner.repeating_block import Pass, repeating_block
from autopar.planner.synthesis import Synthesis, synthesize
from autopar.schedules import Action, Costs, check, generate, lower, simulate_timeline
from autopar.schedules.greedy import RULES, Job, Rule, greedy, replay


def straight(ranks: int) -> tuple[int, ...]:
    return tuple(range(ranks))


def vee(ranks: int) -> tuple[int, ...]:
    return (*range(ranks), *reversed(range(ranks)))


def costs_of(
    placement: tuple[int, ...], forward: tuple[float, ...], backward: tuple[float, ...], send: float = 0.0
) -> Costs:
    stages, ranks = len(placement), max(placement) + 1
    vocabulary = {"S": 0.5, "U": 0.2, "T": 0.25, "E": 0.05, "G": 0.05, "STATS": 0.01, "SUM_X": 0.04, "CAST_X": 0.04}
    return Costs(
        forward_seconds=forward,
        backward_seconds=backward,
        weight_seconds=tuple(0.45 * seconds for seconds in backward),
        send_forward_seconds=(send,) * stages,
        send_backward_seconds=(send,) * stages,
        reduce_seconds=(0.1,) * stages,
        activation_bytes=(10,) * stages,
        step_seconds=(0.1,) * ranks,
        vocabulary_seconds={kind: (seconds,) * ranks for kind, seconds in vocabulary.items()},
        logits_bytes=2,
    )


def uneven(placement: tuple[int, ...], send: float = 0.05) -> Costs:
    """Pass times that differ from stage to stage."""
    stages = range(len(placement))
    return costs_of(placement, tuple(1 + 0.1 * (s % 3) for s in stages), tuple(2 + 0.3 * (s % 2) for s in stages), send)


@pytest.mark.parametrize("head", ["", "vocab-2"])
@pytest.mark.parametrize(
    ("placement", "limit", "names"),
    [
        (straight(3), None, {"1f1b", "gpipe", "zb-h2"}),
        (straight(3), 42, {"1f1b", "naive"}),
        (vee(3), 84, {"v-half", "v-min"}),
    ],
)
def test_never_worse_than_a_named_schedule(
    placement: tuple[int, ...], limit: int | None, names: set[str], head: str
) -> None:
    costs = uneven(placement)
    found = synthesize(placement, 9, costs, limit_bytes=limit, head=head, embedding=bool(head), solver_seconds=0.1)
    assert names & set(found.candidates)
    for name in names & set(found.candidates):
        named = generate(name, max(placement) + 1, 9, head=head, embedding=bool(head))
        timeline = simulate_timeline(lower(named), costs)
        if limit is None or max(timeline.peak_activation_bytes) <= limit:
            assert found.timeline.makespan_seconds <= timeline.makespan_seconds * (1 + 1e-9)
    check(found.schedule)
    assert found.timeline.makespan_seconds >= found.bound_seconds * (1 - 1e-9)
    assert found.timeline.makespan_seconds == simulate_timeline(found.schedule, costs).makespan_seconds
    if limit is not None:
        assert max(found.timeline.peak_activation_bytes) <= limit


def test_better_than_the_named_ones_where_stages_differ() -> None:
    """Rank 0 is slow and memory is short: no named order fits these times."""
    placement = straight(4)
    costs = costs_of(placement, (1.6, 0.8, 1.0, 0.7), (2.4, 2.2, 1.6, 2.0), 0.3)
    limits = (30, 30, 20, 20)
    found = synthesize(placement, 16, costs, limit_bytes=limits, split=False, solver_seconds=0.1)
    named = min(found.candidates[name] for name in ("1f1b", "naive") if name in found.candidates)
    assert found.timeline.makespan_seconds < 0.99 * named
    assert all(peak <= limit for peak, limit in zip(found.timeline.peak_activation_bytes, limits, strict=True))


@pytest.mark.parametrize("limit", [None, 20, 10])
@pytest.mark.parametrize("send", [0.0, 0.4])
def test_two_ranks_and_two_microbatches_are_solved_to_optimality(limit: int | None, send: float) -> None:
    placement = straight(2)
    costs = costs_of(placement, (1.0, 1.3), (2.2, 1.7), send)
    limits = None if limit is None else (limit, limit)
    job = Job(placement, 2, costs, split=True, limit_bytes=limits)
    optimum = min(every_makespan(job))
    found = synthesize(placement, 2, costs, limit_bytes=limits, solver_seconds=0.1)
    assert found.timeline.makespan_seconds == pytest.approx(optimum)
    assert makespan_bound(job) <= optimum * (1 + 1e-9)


def every_makespan(job: Job) -> Iterator[float]:
    """Of all orders of the passes, up to the numbering of microbatches."""
    rows = []
    for rank in range(job.ranks):
        passes = [Action(kind, j, rank) for j in range(job.microbatches) for kind in ("F", "I", "W")]
        orders = permutations(range(len(passes)))
        rows.append([tuple(passes[k] for k in order) for order in orders if in_order(order)])
    rows[0] = [row for row in rows[0] if row.index(Action("F", 0, 0)) < row.index(Action("F", 1, 0))]
    for lists in product(*rows):
        try:
            yield replay(job, job.schedule("one", lists)).makespan_seconds
        except ScheduleError:
            continue


def in_order(order: tuple[int, ...]) -> bool:
    """F before I before W of the same microbatch."""
    place = {k: index for index, k in enumerate(order)}
    return all(place[k] < place[k + 1] for k in range(len(order)) if k % 3 < 2)


@settings(max_examples=60)
@given(
    placement=st.sampled_from([straight(1), straight(3), vee(2), (0, 1, 0, 1)]),
    microbatches=st.integers(1, 6),
    times=st.lists(st.floats(0.1, 3.0), min_size=8, max_size=8),
    head=st.sampled_from(["", "naive", "vocab-1", "vocab-2"]),
    split=st.booleans(),
    extra=st.one_of(st.none(), st.integers(0, 30)),
    rule=st.sampled_from(RULES),
)
def test_no_run_is_below_the_bound(
    placement: tuple[int, ...],
    microbatches: int,
    times: list[float],
    head: str,
    split: bool,
    extra: int | None,
    rule: Rule,
) -> None:
    stages = len(placement)
    costs = costs_of(placement, tuple(times[:stages]), tuple(times[-stages:]), 0.1)
    job = Job(placement, microbatches, costs, head, bool(head), split)
    if extra is not None:
        job = replace(job, limit_bytes=tuple(least + extra for least in job.least_bytes))
    run = greedy(job, rule)
    assert makespan_bound(job) <= run.makespan_seconds * (1 + 1e-9)
    if split:  # also bounds whole backwards
        assert makespan_bound(job) <= greedy(replace(job, split=False), rule).makespan_seconds * (1 + 1e-9)


def test_the_bound_is_met_where_a_formula_gives_the_optimum() -> None:
    """1F1B with whole backwards: (m + p - 1)(F + B), and the optimizer."""
    placement = straight(4)
    costs = costs_of(placement, (1.0,) * 4, (2.0,) * 4)
    job = Job(placement, 8, costs)
    assert makespan_bound(job) == pytest.approx(11 * 3 + 0.2)
    assert simulate_timeline(lower(generate("1f1b", 4, 8)), costs).makespan_seconds == pytest.approx(11 * 3 + 0.2)


def test_memory_bounds_the_step_where_one_microbatch_fits() -> None:
    """One at a time: m times there and back."""
    placement = straight(4)
    costs = costs_of(placement, (1.0,) * 4, (2.0,) * 4)
    bound = makespan_bound(Job(placement, 8, costs, limit_bytes=(10,) * 4))
    assert bound == pytest.approx(8 * 12 + 0.2)
    assert simulate_timeline(lower(generate("naive", 4, 8)), costs).makespan_seconds == pytest.approx(bound)


def test_a_block_repeats_within_the_limit() -> None:
    """Two chunks in V placement in half of 1F1B's memory: every interval the busiest rank is busy all the time."""
    placement = vee(4)
    costs = costs_of(placement, (0.5,) * 8, (1.0,) * 8)
    job = Job(placement, 12, costs, split=True, limit_bytes=(60,) * 4)
    block = repeating_block(job, greedy(job, RULES[0]), deterministic_seconds=0.5)
    assert block is not None
    assert 3.0 * 0.99 <= block.interval_seconds <= 3.0 * 1.16
    for stage in range(7):
        forward = Pass(placement[stage], "F", stage)
        after = Pass(placement[stage + 1], "F", stage + 1)
        assert block.starts[after] >= block.starts[forward] + 0.49
    run = greedy(job, Rule("block", plan=block.plan(job)))
    assert run.makespan_seconds >= 12 * 3.0


def test_a_limit_below_any_schedule_names_the_smallest() -> None:
    with pytest.raises(ScheduleError, match=r"one microbatch alone needs 22; .* \[22, 22\]"):
        synthesize(vee(2), 4, uneven(vee(2)), limit_bytes=21, head="vocab-2")


def test_the_smallest_limit_works() -> None:
    found = synthesize(vee(2), 3, uneven(vee(2)), limit_bytes=22, head="vocab-2", solver_seconds=0.1)
    assert max(found.timeline.peak_activation_bytes) == 22


def test_a_named_schedule_beyond_the_limit_is_no_candidate() -> None:
    """DualPipeV splits only some backwards, so that its memory is known once it is timed."""
    without = synthesize(vee(3), 9, uneven(vee(3)), solver_seconds=0.1)
    within = synthesize(vee(3), 9, uneven(vee(3)), limit_bytes=50, solver_seconds=0.1)
    assert "dualpipe-v" in without.candidates
    assert "dualpipe-v" not in within.candidates


def test_it_prints_every_candidate_and_the_gap() -> None:
    found = synthesize(straight(2), 4, uneven(straight(2)), split=False, solver_seconds=0.1)
    lines = str(found).splitlines()
    assert lines[0] == f"{found.best}, of {len(found.candidates)} candidates"
    assert len(lines) == len(found.candidates) + 2
    assert lines[-1].endswith(f"the best is within {found.gap:.2%} of it")
    assert "best" in lines[1]


def test_the_same_twice() -> None:
    def once() -> Synthesis:
        return synthesize(vee(2), 5, uneven(vee(2)), limit_bytes=50, solver_seconds=0.1)

    assert once().schedule == once().schedule
