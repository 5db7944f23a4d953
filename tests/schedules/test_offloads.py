"""When copies to the host come back: as late as they can; and what a list with them keeps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from autopar.schedules import Costs, generate
from autopar.schedules.offloads import ALL, LEAST_BETWEEN, Copy, Passes


def passes_of(chance: random.Random, ranks: int, microbatches: int, chunks: int) -> Passes:
    """Of one rank of an interleaved schedule, with passes and copies that take any time, of any bytes."""
    schedule = generate("interleaved", ranks, microbatches, chunks=chunks)
    stages = range(schedule.stages)
    kept = tuple(chance.randint(1, 100) for _ in stages)
    costs = replace(
        Costs.uniform(schedule, forward_seconds=chance.uniform(0.5, 2), backward_seconds=chance.uniform(0.5, 4)),
        activation_bytes=kept,
        offload_bytes=tuple(chance.randint(0, bytes_) for bytes_ in kept),
        offload_seconds=tuple(chance.choice([0.0, chance.uniform(0.1, 9)]) for _ in stages),
    )
    rank = chance.randrange(ranks)
    return Passes.of(schedule.lists[rank], rank, costs)


def some_of(passes: Passes, chance: random.Random) -> dict[int, int]:
    """A share of each stage."""
    return {action.stage: chance.randint(0, ALL) for action in passes.actions}


def one_by_one(passes: Passes, going: Sequence[tuple[int, int, float]]) -> list[int]:
    """The passes that copies back stand after: each is begun in time for all that have to be over by then, of as many
    as a microbatch has on the rank."""
    window = len({passes.actions[forward].stage for _, forward, _ in going})
    found = []
    for number, (back, forward, seconds) in enumerate(going):
        until = inf
        for other, _, taken in reversed(going[number : number + window]):
            until = min(until, passes.begins[other]) - taken
        begun = sum(begin <= until for begin in passes.begins) - LEAST_BETWEEN if seconds else back
        found.append(min(back - LEAST_BETWEEN, max(forward + LEAST_BETWEEN, begun)))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_copies_back_come_as_late_as_they_can(seed: int) -> None:
    chance = random.Random(seed)
    passes = passes_of(chance, chance.choice([1, 2, 4]), chance.choice([1, 2, 4, 8]), chance.choice([2, 3, 8, 20]))
    copies = passes.copies(some_of(passes, chance), inf)
    gone = {copy.forward for copy in copies if copy.kind == "OFFLOAD"}
    back = {copy.forward: copy.place for copy in copies if copy.kind == "FETCH"}
    needed = zip(passes.back.tolist(), passes.forward.tolist(), passes.seconds.tolist(), strict=True)
    going = [each for each in needed if each[1] in gone]
    assert [back[forward] for _, forward, _ in going] == one_by_one(passes, going)
    assert len(back) == len(gone)


def most_bytes(passes: Passes, copies: Sequence[Copy]) -> int:
    """That a list with these keeps, one action after the other."""
    moved = dict(zip(passes.forward.tolist(), passes.moved.tolist(), strict=True))
    change = {"OFFLOAD": 0, "FREE": -1, "FETCH": 1}
    kept = most = 0
    for place, own in enumerate(passes.changes.tolist()):
        mine = [copy for copy in copies if copy.place == place]
        before, after = ([c for c in mine if c.is_after == is_after] for is_after in (False, True))
        for each in (*(change[c.kind] * moved[c.forward] for c in before), own):
            most = max(most, kept := kept + each)
        for copy in after:
            most = max(most, kept := kept + change[copy.kind] * moved[copy.forward])
    return most


@pytest.mark.parametrize("seed", range(20))
def test_a_list_keeps_no_more_than_any_room_above_the_least(seed: int) -> None:
    chance = random.Random(seed)
    passes = passes_of(chance, chance.choice([1, 2, 4]), chance.choice([1, 2, 4, 8]), chance.choice([2, 3, 8, 20]))
    shares = some_of(passes, chance)
    least, plain = passes.least_bytes(shares), passes.least_bytes({})
    assert most_bytes(passes, passes.copies(shares, 0)) == least
    assert most_bytes(passes, []) == plain
    for room in (least, (least + plain) // 2, plain):
        assert most_bytes(passes, passes.copies(shares, room)) <= max(least, room)
