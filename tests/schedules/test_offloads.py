"""When copies to the host come back: as late as they can."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection
from math import inf

import pytest

from autopar.schedules import generate
from autopar.schedules.offloads import LEAST_BETWEEN, Passes


def passes_of(chance: random.Random, ranks: int, microbatches: int, chunks: int) -> Passes:
    """Of one rank of an interleaved schedule, with passes and copies that take any time."""
    actions = list(chance.choice(generate("interleaved", ranks, microbatches, chunks=chunks).lists))
    seconds = {action.stage: chance.choice([0.0, chance.uniform(0.1, 4)]) for action in actions}
    forwards, needed, begins = dict[tuple[int, int], int](), list[tuple[int, int, float]](), [0.0]
    for index, action in enumerate(actions):
        begins.append(begins[-1] + chance.uniform(0.5, 2))
        place = action.microbatch, action.stage
        if action.kind == "F":
            forwards[place] = index
        elif index - forwards[place] > LEAST_BETWEEN:
            needed.append((index, forwards[place], seconds[action.stage]))
    return Passes(actions, [0] * len(actions), begins, {forward: 1 for _, forward, _ in needed}, needed)


def one_by_one(passes: Passes, going: Collection[int]) -> dict[int, list[int]]:
    """By pass, whose copies back stand after it: each is begun in time for all that have to be over by then, of as many
    as a microbatch has on the rank."""
    needed = [each for each in passes.needed if each[1] in going]
    window = len({passes.actions[forward].stage for _, forward, _ in needed})
    found: defaultdict[int, list[int]] = defaultdict(list)
    for number, (index, forward, seconds) in enumerate(needed):
        until = inf
        for other, _, taken in reversed(needed[number : number + window]):
            until = min(until, passes.begins[other]) - taken
        begun = sum(begin <= until for begin in passes.begins) - LEAST_BETWEEN if seconds else index
        found[min(index - LEAST_BETWEEN, max(forward + LEAST_BETWEEN, begun))].append(forward)
    return dict(found)


@pytest.mark.parametrize("seed", range(20))
def test_copies_back_come_as_late_as_they_can(seed: int) -> None:
    chance = random.Random(seed)
    passes = passes_of(chance, chance.choice([1, 2, 4]), chance.choice([1, 2, 4, 8]), chance.choice([2, 3, 8, 20]))
    going = {forward for forward in passes.moved if chance.random() < 0.8}
    assert passes._fetched(going) == one_by_one(passes, going)
