"""The costs of a cut, of which its timeline is made: what its passes, moves and updates take on each stage and rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

from torch import fx

from autopar.cost_models import step
from autopar.graph import Model
from autopar.options import Options, activations_on_host, masters_on_host
from autopar.passes.vocabulary import VOCABULARY
from autopar.planner.activations import Activations, Alternative
from autopar.planner.between import BetweenCalls
from autopar.planner.block_costs import BlockCost, Machine
from autopar.planner.contention import Contention, Passes, Slowed
from autopar.planner.gradients import Accumulation, GradientCosts
from autopar.planner.host import Issued, Waited
from autopar.planner.rank_memory import Storage
from autopar.planner.scalars import scalars
from autopar.planner.table_gradients import with_gradients
from autopar.planner.vocabulary_costs import VocabularyCost
from autopar.planner.zero import MoveCosts
from autopar.schedules import Costs, Schedule
from autopar.schedules.backwards import Backwards, mixed_backwards, sent_terms
from autopar.schedules.offloads import LEAST_BYTES
from autopar.schedules.registry import swaps_both_ways


@dataclass(frozen=True)
class Work:
    """What passes are made of: a ``model`` that is local on all axes, the costs of its ``blocks``, and the vocabulary,
    if the pipeline splits it, with its head in ``head_chunks``. ``between`` says what stages do beside their calls;
    ``split``: backwards are two passes."""

    model: Model
    blocks: Sequence[BlockCost]
    machine: Machine
    options: Options
    microbatches: int
    vocabulary: VocabularyCost | None
    head_chunks: int
    activations: Activations
    between: BetweenCalls
    split: bool

    def backwards(self, draft: Schedule) -> list[Backwards]:
        """By stage of a draft, which may have other numbers of microbatches where all of its backwards are alike: then
        as if each ended before the next one."""
        mixed, count = mixed_backwards(draft), 1 if draft.is_asynchronous else self.microbatches
        found = [Backwards.alike(count, split=self.split)] * draft.stages
        if mixed:
            whole, late = (Backwards.alike(count, split=split) for split in (False, True))
            split = {stage for _, stage in draft.split}
            found = [mixed.get(stage, late if stage in split else whole) for stage in range(draft.stages)]
        if self._in_turn(draft):
            return found
        return [each._replace(terms=sent_terms(draft, stage)) for stage, each in enumerate(found)]

    @property
    def idle(self) -> frozenset[fx.Node]:
        """Parameters to which no gradient comes."""
        return frozenset[fx.Node]().union(*(block.idle for block in self.blocks))

    def _in_turn(self, draft: Schedule) -> bool:
        """Whether it makes no difference to gradients in which order the passes of a draft come, or it doesn't say."""
        return self.options.zero < 2 or not draft.split or draft.microbatches != self.microbatches


class Casts(NamedTuple):
    """Seconds of making copies of masters in another dtype, and of weights because they travel together: by pipeline
    rank, those that are made ``once`` a step, before its first action; by stage, those of each pass that gathers its
    weights."""

    once: tuple[float, ...]
    passes: tuple[float, ...]


class Priced(NamedTuple):
    """``costs`` of all stages; by stage, what of its passes is adding up gradients, and waiting for multiprocessors
    that collectives hold; ``casts``, which are part of passes, or come before them; by stage, what its passes are
    ``waiting`` for the host; by pipeline rank, bytes of gradients on their way at the end (``summing_bytes``)."""

    costs: Costs
    accumulations: tuple[Accumulation, ...]
    slowed: tuple[Slowed, ...]
    casts: Casts
    waiting: tuple[Waited, ...]
    summing_bytes: tuple[int, ...]


def priced(work: Work, draft: Schedule, stages: Sequence[Sequence[int]], chosen: Mapping[int, Alternative]) -> Priced:
    """Of ``stages``, placed as in ``draft``, whose calls recompute what is ``chosen``."""
    model, machine, vocabulary, placement = work.model, work.machine, work.vocabulary, draft.placement
    moves = MoveCosts(model, work.options, machine, stages, placement)
    # An asynchronous schedule updates by the gradient of each microbatch.
    count = 1 if draft.is_asynchronous else work.microbatches
    backwards = work.backwards(draft)
    gradients = GradientCosts(moves, count, split=work.split, idle=work.idle)
    accumulations = tuple(map(gradients.accumulation, stages, backwards))
    tables = [i for i, call in enumerate(model.calls) if model.block_of(call).kind == VOCABULARY]
    per_stage = [[work.blocks[model.calls[i].block] for i in stage] for stage in stages]
    beside = work.between.of(stages, placement)
    casts = _casts(moves, tables, work.machine.sizes["pp"])
    forward = tuple(
        sum(c.forward_seconds for c in s) + b.forward_seconds + cast
        for s, b, cast in zip(per_stage, beside, casts.passes, strict=True)
    )
    weights = tuple(sum(c.weight_seconds for c in s) + a.put_off for s, a in zip(per_stage, accumulations, strict=True))
    again = [math.fsum(chosen[i].rerun_seconds(split=work.split) for i in stage) for stage in stages]
    backward, whole = (
        tuple(
            sum(c.backward_seconds for c in s) + again_ + b.backward_seconds + added + cast
            for s, again_, b, added, cast in zip(per_stage, again, beside, kind, casts.passes, strict=True)
        )
        for kind in ([a.seconds for a in accumulations], [a.whole for a in accumulations])
    )
    completing = [w if kinds.ends_split else b for w, b, kinds in zip(weights, whole, backwards, strict=True)]
    passes = map(Passes, forward, backward, weights, whole)
    slowed = tuple(map(Contention(moves, count).slowed, stages, passes, per_stage, backwards))
    issued = Issued.of(moves, work.blocks, beside, chosen, tables, split=work.split)
    own = zip(forward, backward, whole, slowed, strict=True)
    taken = [(f + s.forward, b + s.backward, w + s.whole) for f, b, w, s in own]
    waiting = tuple(issued.waited(stage, *seconds) for stage, seconds in enumerate(taken))
    begin, end = scalars(model, stages, work.blocks, machine, placement, work.microbatches)
    costs = Costs(
        forward_seconds=tuple(f + waited.forward for (f, _, _), waited in zip(taken, waiting, strict=True)),
        backward_seconds=tuple(b + waited.backward for (_, b, _), waited in zip(taken, waiting, strict=True)),
        joined_seconds=tuple((w - b) + (p.whole - p.backward) for (_, b, w), p in zip(taken, waiting, strict=True)),
        send_forward_seconds=tuple(b.send_forward_seconds for b in beside),
        send_backward_seconds=tuple(b.send_backward_seconds for b in beside),
        reduce_seconds=tuple(map(moves.left_to_reduce, stages, completing)),
        gather_seconds=moves.arrivals(forward),
        scatter_seconds=tuple(map(moves.left_to_scatter, stages, completing)),
        reducing_seconds=tuple(map(moves.reduce_seconds, stages)),
        scattering_seconds=tuple(map(moves.scatter_seconds, stages)),
        gather_vocabulary_seconds=moves.gather_seconds(tables, machine.sizes["pp"]),
        reduce_vocabulary_seconds=moves.reduce_seconds(tables, machine.sizes["pp"]),
        activation_bytes=tuple(work.activations.stage_bytes(stage, chosen) for stage in stages),
        step_seconds=_step_seconds(work, tables, moves),
        weight_seconds=tuple(w + s.weights for w, s in zip(weights, slowed, strict=True)),
        later_bytes=tuple(sum(c.later_bytes for c in s) for s in per_stage),
        vocabulary_seconds=with_gradients(vocabulary, moves, work.microbatches, work.head_chunks),
        logits_bytes=vocabulary.logits_bytes if vocabulary else 0,
        begin_seconds=tuple(b + cast for b, cast in zip(begin, casts.once, strict=True)),
        end_seconds=end,
        host_seconds=issued.step_seconds(work.microbatches, work.microbatches if draft.is_asynchronous else 1),
        **_offload_costs(work, stages, draft, chosen),
    )
    mine = ([s for home, s in zip(placement, stages, strict=True) if home == rank] for rank in range(draft.ranks))
    return Priced(costs, accumulations, slowed, casts, waiting, tuple(map(gradients.summing_bytes, mine)))


def _casts(moves: MoveCosts, tables: Sequence[int], ranks: int) -> Casts:
    """A split vocabulary's are made once a step."""
    each = tuple(moves.cast_seconds(stage) + moves.unpack_seconds(stage) for stage in moves.stages)
    once = [moves.cast_seconds(tables, ranks) + moves.unpack_seconds(tables, ranks) if tables else 0.0] * ranks
    if moves.streams:
        return Casts(tuple(once), each)
    for home, seconds in zip(moves.placement, each, strict=True):
        once[home] += seconds
    return Casts(tuple(once), (0.0,) * len(each))


def _step_seconds(work: Work, tables: Sequence[int], moves: MoveCosts) -> tuple[float, ...]:
    """Of each pipeline rank's update: of its stages, and of its rows of ``tables``; after the sums of weights that
    several of them hold."""
    ranks, storage = work.machine.sizes["pp"], Storage(work.options, work.machine.mesh)
    split = storage.elements(work.model, tables, ranks) if work.vocabulary else 0
    held: list[list[Sequence[int]]] = [[] for _ in range(ranks)]
    for home, stage in zip(moves.placement, moves.stages, strict=True):
        held[home].append(stage)
    elements = [split + storage.elements(work.model, list(chain.from_iterable(mine))) for mine in held]
    device, away = work.machine.device, masters_on_host(work.options.offload)
    updates = [step.optimizer_seconds(count, device, on_host=away) for count in elements]
    return tuple(moves.shared_seconds(mine) + update for mine, update in zip(held, updates, strict=True))


def _offload_costs(
    work: Work, stages: Sequence[Sequence[int]], draft: Schedule, chosen: Mapping[int, Alternative]
) -> dict[str, Any]:
    both_ways = swaps_both_ways(draft.name, work.microbatches)
    rate = work.machine.device.swap_bytes_per_second(both_ways=both_ways)
    if not activations_on_host(work.options.offload) or not rate:
        return {}
    pairs = zip(pairwise(draft.placement), stages, strict=False)
    before = [(), *(stage if here == there else () for (here, there), stage in pairs)]
    moved = tuple(
        work.activations.movable_bytes(stage, chosen, LEAST_BYTES, before=calls)
        for stage, calls in zip(stages, before, strict=True)
    )
    return {"offload_bytes": moved, "offload_seconds": tuple(bytes_ / rate for bytes_ in moved)}
