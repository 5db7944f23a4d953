"""What calls keep from forward to backward under each choice of what to recompute: of one call, and of a stage.

A stage's bytes are those of distinct storages (:mod:`autopar.planner.saved`). For the solvers, which add up bytes of
calls, every storage has one call to which it counts: the one that keeps it as an input, or its maker where that keeps
it anyway. What several calls keep as inputs (rotary tables, masks, an encoder's output) counts once per stage
(``shared_bytes``); so sums are never below the truth, and equal it for a chain of layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autopar.errors import PlanError
from autopar.graph import INPUT_CALL, Model, info
from autopar.passes.hoist import unhoisted
from autopar.passes.recompute import groups
from autopar.passes.vocabulary import staged_calls
from autopar.planner.compression import kept_in_8_bits
from autopar.planner.knapsack import Option
from autopar.planner.recompute import Point, Regions, evaluate, frontier, problem_of, whole
from autopar.planner.saved import BlockSaved, Storage, saved_tensors, storage_bytes, storage_of_input, storages_of
from autopar.planner.saved_by_op import SavedByOp
from autopar.planner.stages import FoundCuts
from autopar.planner.working import working


@dataclass(frozen=True)
class Alternative:
    """One way to run a block: its regions as ops by position, what it keeps (values by their owners, bytes of each
    tensor that was made ``inside`` of an op, and of those hidden in objects), what it costs. See
    :class:`~autopar.planner.recompute.Point`."""

    regions: Regions
    owners: frozenset[fx.Node]
    inside: tuple[int, ...]
    saved_bytes: int
    seconds: float
    transient_bytes: int
    late_seconds: float = 0.0
    hidden_bytes: int = 0
    calls: int = 0
    late_calls: int = 0

    @property
    def extra_bytes(self) -> int:
        return sum(self.inside) + self.hidden_bytes

    def rerun_seconds(self, *, split: bool) -> float:
        """Of recomputation, where backwards are two passes or one."""
        return self.seconds + (self.late_seconds if split else 0.0)

    def rerun_calls(self, *, split: bool) -> int:
        """Ops that run again, likewise."""
        return self.calls + (self.late_calls if split else 0)


class BlockChoices:
    """The alternatives of one block: the first recomputes nothing, the last the whole block; solved for when asked."""

    def __init__(
        self, model: Model, index: int, found: BlockSaved, seconds: Mapping[fx.Node, float], stays: frozenset[fx.Node]
    ) -> None:
        self._block = model.blocks[index]
        self._problem, self._owners = problem_of(self._block, found, seconds, _free(model, index), stays)
        self._found = found

    @cached_property
    def none(self) -> Alternative:
        return self.alternative(())

    @cached_property
    def whole(self) -> Alternative:
        return self._of(whole(self._problem, self._block, self._found))

    @cached_property
    def frontier(self) -> tuple[Alternative, ...]:
        """Nothing, then the frontier by falling bytes, then the whole block if it isn't one of them."""
        points = frontier(self._problem)
        full = whole(self._problem, self._block, self._found)
        if full.regions not in [p.regions for p in points]:
            points.append(full)
        return tuple(self._of(p) for p in points)

    @cached_property
    def selective(self) -> Alternative:
        """What is cheap to recompute and large to keep: of all that communicates nothing again, whatever frees more
        bytes per second than recomputing the whole block does (the knee: the point farthest from the line between
        nothing and everything)."""
        full = self.whole
        freed, spent = self.none.saved_bytes - full.saved_bytes, full.seconds
        if freed <= 0 or spent <= 0:
            return self.none

        def gain(point: Alternative) -> float:
            return (self.none.saved_bytes - point.saved_bytes) / freed - point.seconds / spent

        return max((self._of(p) for p in frontier(self._problem, silent=True)), key=gain)

    def alternative(self, regions: Regions) -> Alternative:
        return self._of(evaluate(self._problem, regions))

    def named(self, ends: Sequence[Sequence[str]]) -> Alternative:
        """The alternative whose regions begin and end with the ops of these names. Raises PlanError."""
        place = {group[0].name: i for i, group in enumerate(groups(self._block))}
        missing = [name for pair in ends for name in pair if name not in place]
        if missing:
            raise PlanError(f"the plan recomputes from or to {missing}, which {self._block.name} hasn't: plan again")
        return self.alternative(tuple((place[first], place[last]) for first, last in ends))

    def ends(self, alternative: Alternative) -> list[tuple[str, str]]:
        """The first and last op of each region, by name."""
        order = groups(self._block)
        return [(order[first][0].name, order[last][0].name) for first, last in alternative.regions]

    def _of(self, point: Point) -> Alternative:
        again = {i for first, last in point.regions for i in range(first, last + 1)}
        outside = [node for i, group in enumerate(groups(self._block)) if i not in again for node in group]
        return Alternative(
            regions=point.regions,
            owners=frozenset(self._owners[m] for m in point.memories),
            inside=tuple(bytes_ for node in outside for bytes_ in self._found.ops[node].inside),
            saved_bytes=point.saved_bytes,
            seconds=point.seconds,
            transient_bytes=point.transient_bytes,
            late_seconds=point.late_seconds,
            hidden_bytes=sum(each.hidden_bytes for each in self._found.ops.values()),
            calls=point.calls,
            late_calls=point.late_calls,
        )


def _free(model: Model, index: int) -> frozenset[fx.Node]:
    """Inputs of a block that are kept whatever its calls do: of the batch, or made of it alone."""
    block = model.blocks[index]
    values = [call.operands for call in model.calls if call.block == index]

    def is_table(position: int) -> bool:
        makers = {operands[position].call for operands in values}
        return all(m == INPUT_CALL or model.block_of(model.calls[m]).kind == "tables" for m in makers)

    return frozenset(node for position, node in enumerate(block.inputs) if is_table(position))


class Activations:
    """A model's calls and their alternatives (``choices`` by block). ``eight_bits``: layers keep what they keep so.

    ``workings``, by block: what its passes hold beside what it keeps (:mod:`autopar.planner.working`), at most
    ``working_bytes``. ``taken``: what was found for ranks that hold some calls within some bytes
    (:func:`autopar.planner.knapsack.choose`). ``cuts``: those of these calls.
    """

    def __init__(
        self,
        model: Model,
        device: str,
        seconds: Sequence[Mapping[fx.Node, float]],
        *,
        eight_bits: bool = False,
        by_op: SavedByOp | None = None,
    ) -> None:
        self.model, by_op = model, by_op or SavedByOp()
        self.found = [saved_tensors(block, device, by_op) for block in model.blocks]
        if eight_bits:
            self.found = [kept_in_8_bits(b, f) for b, f in zip(model.blocks, self.found, strict=True)]
        stays = unhoisted(model)
        self.choices = [BlockChoices(model, i, f, seconds[i], stays) for i, f in enumerate(self.found)]
        self.workings = [working(b, f) for b, f in zip(model.blocks, self.found, strict=True)]
        self.working_bytes = [each.bytes_ for each in self.workings]
        self.taken: dict[Hashable, list[list[int]] | None] = {}
        self.cuts = FoundCuts()
        self._places: dict[int, dict[fx.Node, Storage]] = {}
        self._bytes: dict[tuple[int, Regions], int] = {}
        self._rows: dict[tuple[int, tuple[Regions, ...], int], tuple[Option, ...]] = {}
        self._different: dict[tuple[Option, ...], tuple[Option, ...]] = {}

    def call_bytes(self, index: int, alternative: Alternative) -> int:
        """What counts to one call, a microbatch."""
        key = index, alternative.regions
        if key not in self._bytes:
            sizes = self._storages([index], {index: alternative}, self._staged)
            own = sum(size for storage, size in sizes.items() if self._payer(storage, index) == index)
            self._bytes[key] = own + alternative.extra_bytes
        return self._bytes[key]

    def row(self, index: int, alternatives: Sequence[Alternative], beside: int) -> tuple[Option, ...]:
        """The alternatives of one call as the knapsack has them, whose passes hold so much ``beside`` what the rank
        keeps at the end of a forward and what they make again; one object for calls of which they are equal."""
        key = index, tuple(alternative.regions for alternative in alternatives), beside
        if key not in self._rows:
            made = tuple(
                Option(self.call_bytes(index, a), a.seconds, max(0, beside + a.transient_bytes)) for a in alternatives
            )
            self._rows[key] = self._different.setdefault(made, made)
        return self._rows[key]

    def _payer(self, storage: Storage, index: int) -> int | None:
        """The call that a storage counts to; None: all of a stage together."""
        if storage in self._shared:
            return None
        maker = storage[0]
        return maker if storage in self._made_and_kept else index

    @cached_property
    def shared_bytes(self) -> int:
        """What the calls of a stage keep together, at most."""
        borders = [size for storage, size in self._made_and_kept.items() if storage in self._inputs]
        return sum(self._shared.values()) + max(borders, default=0)

    @cached_property
    def _inputs(self) -> Counter[Storage]:
        """How many calls keep a storage that another one made, with nothing recomputed."""
        found: Counter[Storage] = Counter()
        for index in self._staged:
            for storage in self._storages([index], {index: self._none(index)}):
                found[storage] += storage[0] != index or bool(storage[2])
        return +found

    @cached_property
    def _shared(self) -> dict[Storage, int]:
        sizes = self._storages(self._staged, {i: self._none(i) for i in self._staged})
        return {
            storage: size
            for storage, size in sizes.items()
            if self._inputs[storage] > 1 or self.model.block_of(self.model.calls[storage[0]]).kind == "tables"
        }

    @cached_property
    def _made_and_kept(self) -> dict[Storage, int]:
        """What calls keep of their own results, which others keep too."""
        found: dict[Storage, int] = {}
        for index in self._staged:
            for storage, size in self._storages([index], {index: self._none(index)}).items():
                if storage[0] == index and storage in self._inputs and storage not in self._shared:
                    found[storage] = size
        return found

    @cached_property
    def _staged(self) -> list[int]:
        return staged_calls(self.model)

    def _none(self, index: int) -> Alternative:
        return self.choices[self.model.calls[index].block].none

    def stage_bytes(self, calls: Sequence[int], chosen: Mapping[int, Alternative]) -> int:
        """Exactly what a stage keeps of a microbatch, with what it received from the stage before."""
        sizes = self._storages(calls, chosen)
        received = {s: size for s, size in self._received(calls).items() if s not in sizes}
        return sum(sizes.values()) + sum(received.values()) + sum(chosen[i].extra_bytes for i in calls)

    def movable_bytes(
        self, calls: Sequence[int], chosen: Mapping[int, Alternative], least: int, *, before: Sequence[int] = ()
    ) -> int:
        """Of what a stage keeps of a microbatch: tensors of ``least`` bytes and more, without what others hold as well.
        That is what it hands on as it received it, and what the stage ``before`` keeps too, if that is on its rank."""
        last, kept_before = max(calls), {*self._received(before), *self._storages(before, chosen)}
        held = {s for s in self._received(calls) if s in kept_before or self._last_read.get(s, last) > last}
        kept = [size for storage, size in self._storages(calls, chosen).items() if storage not in held]
        return sum(size for size in (*kept, *(size for i in calls for size in chosen[i].inside)) if size >= least)

    @cached_property
    def _last_read(self) -> dict[Storage, int]:
        """The last call that reads what a call made."""
        found: dict[Storage, int] = {}
        for index, call in enumerate(self.model.calls):
            for position in range(len(call.operands)):
                storage = storage_of_input(self.model, self.found, index, position)
                if storage is not None:
                    found[storage] = index
        return found

    def _received(self, calls: Sequence[int]) -> dict[Storage, int]:
        inside, found = set(calls), {}
        for index in calls:
            for position, value in enumerate(self.model.calls[index].operands):
                node = self.model.block_of(self.model.calls[index]).inputs[position]
                if value.call in inside or not info(node).meta.needs_grad:
                    continue
                storage = storage_of_input(self.model, self.found, index, position)
                if storage is not None:
                    found[storage] = info(node).meta.bytes
        return found

    def _storages(
        self, calls: Sequence[int], chosen: Mapping[int, Alternative], stage: Sequence[int] | None = None
    ) -> dict[Storage, int]:
        """All that calls of a ``stage`` (these) keep, each once (:func:`~autopar.planner.saved.kept_storages`)."""
        sizes: dict[Storage, int] = {}
        inside = frozenset(calls if stage is None else stage)
        for index in calls:
            places, bytes_ = self._places_of(index), self.found[self.model.calls[index].block].owned_bytes
            for owner in chosen[index].owners:
                if owner in places:
                    storage = places[owner]
                    sizes[storage] = storage_bytes(self.model, self.found, storage, bytes_[owner], inside)
        return sizes

    def _places_of(self, index: int) -> dict[fx.Node, Storage]:
        """Where the memory lies that a call may keep: what the step holds anyway isn't there."""
        if index not in self._places:
            owned = frozenset(self.found[self.model.calls[index].block].owned_bytes)
            self._places[index] = storages_of(self.model, self.found, index, owned)
        return self._places[index]
