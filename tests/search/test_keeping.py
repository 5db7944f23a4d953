"""What ranks keep under schedules."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest

from autopar.schedules import Costs, generate, lower, simulate_timeline
from autopar.schedules.offloads import ALL, with_offloads
from autopar.schedules.registry import SCHEDULES
from autopar.search.keeping import Keeping, Ratios, folded_least


def test_one_forward_one_backward() -> None:
    keeping = Keeping()
    assert [rank.most for rank in keeping.here("1f1b", 4, 16)] == [4, 3, 2, 1]
    assert [rank.most for rank in keeping.here("1f1b", 4, 2)] == [2, 2, 2, 1], "there are no more"
    assert [rank.most for rank in keeping.here("1f1b", 1, 16)] == [1]


def test_passes_of_lists_that_are_read_are_counted_once() -> None:
    keeping = Keeping()
    for microbatches in (16, 32):  # more than twice the ranks keep no more
        keeping.here("v-half", 4, microbatches)
        assert keeping.read == 8 * 8
    keeping.here("v-half", 2, 16)
    assert keeping.read == 8 * 8 + 4 * 4
    other = keeping.aside()
    other.here("v-half", 4, 16)
    assert (keeping.read, other.read) == (8 * 8 + 4 * 4, 8 * 8), "for each who asks"


def test_several_stages_of_a_rank_count_by_their_share() -> None:
    """If they are as long; the first rank keeps three microbatches of one, and two of the other."""
    assert Keeping().average("interleaved", 2, 8, 2, "").tolist() == [2.5, 1.5]
    assert Keeping().average("interleaved", 2, 3, 2, "").tolist() == [3, 2], "of one round, which all have"
    assert [rank.most for rank in Keeping().here("interleaved", 2, 8, 2)] == [2, 1], "the second may be the longer one"


INTERLEAVED = [("interleaved", chunks) for chunks in (1, 2, 3, 5)]
FOLDED = [(name, None) for name in ("v-min", "v-half", "zb-v", "dualpipe-v")]


@pytest.mark.parametrize(("name", "chunks"), INTERLEAVED + FOLDED)
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 6, 8, 13, 24])
def test_no_cut_keeps_less_than_every_stage_does(name: str, chunks: int | None, ranks: int, microbatches: int) -> None:
    """However many layers each stage of a rank has; nor less than is said of all schedules with its placement."""
    keeping = Keeping()
    if microbatches < SCHEDULES[name].least_per_rank * ranks:
        return
    schedule = generate(name, ranks, microbatches, chunks=chunks)
    found = keeping.here(name, ranks, microbatches, chunks)
    least = keeping.least(name, ranks, microbatches, chunks, "") if chunks else folded_least(ranks, microbatches)
    for rank, row in enumerate(schedule.lists):
        stages = [stage for stage, home in enumerate(schedule.placement) if home == rank]
        waiting, most = dict.fromkeys(stages, 0), 0.0
        shares = [np.eye(len(stages)), np.full((1, len(stages)), 1 / len(stages))]
        kept = np.zeros(len(stages) + 1)
        for action in row:
            waiting[action.stage] += {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
            most = max(most, min(waiting.values()))
            kept = np.maximum(kept, np.concatenate(shares) @ list(waiting.values()))
        assert least[rank] <= found[rank].most <= most <= kept.min()


def test_a_rank_alone_keeps_one_microbatch_or_a_few_of_its_stages() -> None:
    keeping = Keeping()
    assert [rank.most for rank in keeping.here("1f1b", 1, 8)] == [1]
    assert [rank.most for rank in keeping.here("interleaved", 1, 8, 6)] == [1]
    (away,) = keeping.away("interleaved", 1, 8, 6, "", 1e9)
    assert away.most == 0, "not of all stages at once"
    assert away.spills[-1].kept == away.spills[-1].forwards == 1
    (even,) = keeping.away("interleaved", 1, 8, 6, "", 1e9, even=True)
    assert even.most == 2 / 6, "one that runs, and one that comes back"
    assert even.spills[-1].kept == even.spills[-1].forwards == even.spills[-1].most_forwards == 1
    (one,) = keeping.away("1f1b", 1, 8, None, "", 1e9)
    assert one.most == 1, "no other pass runs meanwhile"


def test_what_waits_for_weights_gradients_alone_counts_apart() -> None:
    keeping = Keeping()
    assert [rank.most for rank in keeping.here("zb-h1", 4, 16)] == [4, 3, 2, 1], "as of 1F1B"
    assert keeping.later("zb-h1", 4, 16, None, "") == 4, "of the last rank"
    assert keeping.later("1f1b", 4, 16, None, "") == 0


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize(("name", "head"), [("zb-h1", ""), ("zb-v", ""), ("v-min", "vocab-2"), ("dualpipe-v", "")])
def test_of_each_stage_a_backward_leaves_something_beside_others(name: str, head: str, *, away: bool) -> None:
    """In the list itself: of each stage there is a backward after which as many others wait, or more."""
    ranks, microbatches = 4, 12
    beside = Keeping().beside(name, ranks, microbatches, None, head, away=away)
    assert beside is not None
    schedule = generate(name, ranks, microbatches, head=head)
    for rank, row in enumerate(schedule.lists):
        stages = [stage for stage, home in enumerate(schedule.placement) if home == rank]
        actions = list(with_offloads(row, dict.fromkeys(stages, ALL))) if away else row
        changes = {"F": 1, "FETCH": 1, "B": -1, "I": -1, "OFFLOAD": -1}
        each = [list(accumulate(changes.get(a.kind, 0) * (a.stage == stage) for a in actions)) for stage in stages]
        waiting = list(map(min, zip(*each, strict=True)))
        most = [
            max((n for n, a in zip(waiting, actions, strict=True) if a.kind == "I" and a.stage == stage), default=0)
            for stage in stages
        ]
        assert beside[rank] == min(most)


def test_whole_backwards_leave_nothing() -> None:
    assert Keeping().beside("1f1b", 4, 16, None, "", away=False) is None
    assert Keeping().beside("zb-h1", 1, 16, None, "", away=False) is None


def test_of_one_stage_all_others_wait() -> None:
    beside = Keeping().beside("zb-h1", 4, 16, None, "", away=False)
    assert beside is not None
    assert beside.tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "v-half"])
def test_less_is_on_the_device_where_copies_may_go_to_the_host(name: str, even: bool) -> None:
    keeping = Keeping()
    here = keeping.average(name, 4, 16, None, "") if even else [rank.most for rank in keeping.here(name, 4, 16)]
    away = keeping.away(name, 4, 16, None, "", 1e9, even=even)
    assert all(a.most <= h for a, h in zip(away, here, strict=True))
    assert sum(a.most for a in away) < sum(here)
    for rank, kept in zip(away, here, strict=True):
        most = rank.spills[-1]
        assert most.kept == kept, "what would be there"
        assert most.forwards - most.backwards <= kept <= most.most_forwards - most.backwards
        assert even <= (most.forwards == most.most_forwards)
        assert most.seconds == 1e-9 / 16
    if name == "interleaved" and not even:  # the last rank's second stage has run once, its first all of a round
        assert (away[-1].spills[-1].forwards, away[-1].spills[-1].most_forwards) == (1, 4)


def test_one_runs_while_another_is_on_its_way() -> None:
    """Of 1F1B: one that computes, and one that comes back. Its first rank begins five of eight microbatches while four
    wait for a backward, and each of them is away while two do."""
    away = Keeping().away("1f1b", 4, 16, None, "", 1e9)
    assert [rank.most for rank in away] == [2, 2, 2, 1]
    assert away[0].spills[-1].times == pytest.approx(16 * 5 / 8 / 2)


def test_a_microbatch_whose_backward_follows_stays() -> None:
    """The last rank of 1F1B: what is too much there can't be copied in any time."""
    last = Keeping().away("1f1b", 4, 16, None, "", 1e9)[-1]
    assert last.most == 1
    assert last.spills[-1].times > 1e6


@pytest.mark.parametrize("name", ["naive", "v-half", "v-min", "zb-h1", "zb-v"])
def test_what_grows_with_microbatches_is_read_off_short_lists(name: str) -> None:
    schedule = generate(name, 4, 20)

    def step(message: float) -> float:
        passes = {"forward_seconds": 1.0, "backward_seconds": 2.0, "weight_seconds": 1.0}
        costs = Costs.uniform(schedule, **passes, send_seconds=message)
        return simulate_timeline(lower(schedule, costs.seconds), costs).makespan_seconds

    passes, messages = Keeping().waits(name, 4, 20, None, "")

    assert passes == pytest.approx(step(0.0) / 3 / schedule.chunks - 20)
    assert messages == pytest.approx((step(1e-3) - step(0.0)) / 1e-3)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "v-half", "v-min"])
def test_ranks_wait_for_backwards_that_leave_little_to_later(name: str) -> None:
    """Passes of weights' gradients fill the time that others wait: the shorter they are, the less of it."""
    waits = [Keeping().waits(name, 4, 8, None, "", Ratios(2.0, weights))[0] for weights in (0.5, 0.4, 0.2)]
    assert waits == sorted(waits)
    assert waits[0] < waits[-1]
    assert Keeping().waits("1f1b", 4, 3, None, "", Ratios(2.0, 0.2)) == Keeping().waits("1f1b", 4, 3, None, "")


def test_ratios_of_passes_are_rounded() -> None:
    assert Ratios.of(1.0, 2.04, 0.83) == Ratios.of(10.0, 19.9, 8.0) == Ratios(2.0, 0.4)
    assert Ratios.of(0.0, 1.0, 0.5) == Ratios(5.0, 0.5)
    assert Ratios.of(0.0, 0.0, 0.0) == Ratios(0.0, 0.0)
