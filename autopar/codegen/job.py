"""What every part of code generation looks at: the solved model, where it is cut, and names decided once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from torch import fx

from autopar.codegen.function import PYTHON_NAMES, identifier
from autopar.codegen.names import value_names
from autopar.errors import StageError
from autopar.graph import INPUT_CALL, Call, Meta, Model, RuntimeOp, Value, info
from autopar.mesh import AXES, Mesh
from autopar.options import Options
from autopar.passes.recompute import Regions, own_modules
from autopar.passes.routers import RouterCall, router_calls, weights_of
from autopar.passes.vocabulary import VocabularyCalls, staged_calls, vocabulary_calls
from autopar.plan import ExpertsPlan

RUNTIME_NAMES: Final = (
    *("Axes", "Container", "I", "Input", "P", "Parameter", "Program", "R", "Router", "S", "Tensor", "Total"),
    "VocabularyProgram",
    *("all_gather", "all_reduce", "all_to_all", "convert", "declare", "kept_in_8_bits", "recompute"),
    *("reduce_scatter", "rng"),
)
_OWN_NAMES: Final = ("Stage", "Vocabulary", "PROGRAM", "aten", "nn", "torch", "self", "i")


@dataclass(frozen=True)
class Job:
    """``stages`` are the calls of each pipeline stage, those that belong to none left out; ``reduce`` is what hoisting
    found; ``regions`` are what calls of a block recompute; ``experts``, by layer, how they are stored; ``placement`` is
    each stage's index on pp."""

    model: Model
    stages: tuple[tuple[int, ...], ...]
    mesh: Mesh
    microbatches: int
    digest: str
    reduce: Mapping[str, tuple[str, ...]]
    options: Options
    regions: Mapping[int, Regions]
    experts: Mapping[str, ExpertsPlan]
    placement: tuple[int, ...]

    @cached_property
    def names(self) -> dict[Value, str]:
        return value_names(self.model)

    @cached_property
    def runtime_names(self) -> frozenset[str]:
        """What the text may import from the runtime."""
        ops = {str(n.target) for b in self.model.blocks for n in b.ops if isinstance(n.target, RuntimeOp)}
        return frozenset(RUNTIME_NAMES) | ops

    @cached_property
    def class_names(self) -> dict[int, str]:
        """Block -> its class; never a name that the module has already."""
        taken = {*self.runtime_names, *_OWN_NAMES, *PYTHON_NAMES}
        names: dict[int, str] = {}
        for block in sorted({self.model.calls[c].block for c in self.stage_of if c not in self.inlined}):
            base = identifier(self.model.blocks[block].name)
            name = base if base not in taken else f"{base}Layer"
            while name in taken:
                name += "_"
            names[block] = name
            taken.add(name)
        return names

    @cached_property
    def reserved(self) -> frozenset[str]:
        """What no variable may be called."""
        return self.runtime_names.union(_OWN_NAMES, PYTHON_NAMES, self.class_names.values())

    @cached_property
    def routers(self) -> tuple[RouterCall, ...]:
        """Where tokens are given to experts, in the model's order."""
        return tuple(router_calls(self.model))

    @cached_property
    def stage_of(self) -> dict[int, int]:
        """Call -> its stage. Calls that compute tables have none, nor have those of a vocabulary that is split."""
        return {call: stage for stage, calls in enumerate(self.stages) for call in calls}

    @cached_property
    def vocabulary(self) -> VocabularyCalls | None:
        """The calls that all pipeline ranks have a part of."""
        return vocabulary_calls(self.model)

    def is_table(self, call: int) -> bool:
        return self.model.block_of(self.model.calls[call]).kind == "tables"

    @cached_property
    def places(self) -> dict[int, int]:
        """Call -> where it is in the pipeline: a split embedding is before the first stage, the head after the last."""
        places = dict(self.stage_of)
        if self.vocabulary is not None:
            places[self.vocabulary.head] = len(self.stages)
            if self.vocabulary.embedding is not None:
                places[self.vocabulary.embedding] = -1
        return places

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes that emitted code may communicate on."""
        return tuple(axis for axis in AXES if axis != "pp" and self.mesh.size(axis) > 1)

    @cached_property
    def inlined(self) -> frozenset[int]:
        """Calls written into the stage itself: glue, and modules that are called more than once."""
        return frozenset(range(len(self.model.calls))) - own_modules(self.model)

    @cached_property
    def borrowed(self) -> dict[int, frozenset[int]]:
        """Block -> positions of parameters that some call has outside of its module: they are arguments."""
        found: dict[int, set[int]] = {}
        for index, call in enumerate(self.model.calls):
            if index not in self.inlined:
                outside = {k for k, name in enumerate(call.parameters) if not name.startswith(f"{call.path}.")}
                found.setdefault(call.block, set()).update(outside)
        return {block: frozenset(positions) for block, positions in found.items()}

    @cached_property
    def order_of(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> the order of its rows, where that isn't the model's."""
        found: dict[str, tuple[int, ...]] = {}
        for router in self.routers if self.experts else ():
            if router.layer in self.experts:
                found |= dict.fromkeys(weights_of(self.model, router), tuple(self.experts[router.layer].order))
        return found

    @cached_property
    def readers(self) -> dict[Value, list[tuple[int, int]]]:
        """Value -> the (call, input position) that read it."""
        found: dict[Value, list[tuple[int, int]]] = {}
        for index, call in enumerate(self.model.calls):
            for position, value in enumerate(call.operands):
                found.setdefault(value, []).append((index, position))
        return found

    def is_read(self, value: Value) -> bool:
        return value in self.readers or value == self.model.loss

    @cached_property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> the stages that read it."""
        found: dict[str, set[int]] = {}
        for index, stage in self.stage_of.items():
            for name in self.model.calls[index].parameters:
                found.setdefault(name, set()).add(stage)
        return {name: tuple(sorted(stages)) for name, stages in found.items()}

    @cached_property
    def random_offsets(self) -> dict[int, int]:
        """Inlined call -> the number of its first random op, counted over the whole model."""
        offsets, number = {}, 0
        for index, call in enumerate(self.model.calls):
            if index in self.inlined:
                offsets[index] = number
                number += sum(info(node).random for node in self.model.block_of(call).ops)
        return offsets

    def meta(self, value: Value) -> Meta:
        """Shape on one rank and in one microbatch."""
        if value.call != INPUT_CALL:
            return info(self.model.block_of(self.model.calls[value.call]).outputs[value.output]).meta
        item = self.model.inputs[value.output]
        if item.batch_dim is None:
            return item.meta
        shape = list(item.meta.shape)
        shape[item.batch_dim] //= self.microbatches * self.mesh.replicas
        return replace(item.meta, shape=tuple(shape))

    def parameter(self, call: Call, position: int) -> fx.Node:
        return self.model.block_of(call).parameters[position]


def make_job(
    model: Model,
    stages: Sequence[Sequence[int]],
    mesh: Mesh,
    *,
    microbatches: int,
    digest: str,
    reduce: Mapping[str, tuple[str, ...]],
    options: Options | None = None,
    regions: Mapping[int, Regions] | None = None,
    experts: Mapping[str, ExpertsPlan] | None = None,
    placement: Sequence[int] = (),
) -> Job:
    """Raises StageError where the cut is not the model's calls in order, or doesn't fit the mesh."""
    expected = staged_calls(model)
    left_out = set(range(len(model.calls))) - set(expected)
    cut = tuple(tuple(call for call in stage if call not in left_out) for stage in stages)
    calls = [call for stage in cut for call in stage]
    if calls != expected or not all(cut):
        raise StageError(f"stages {cut} are not the calls {expected} in order, cut into parts that are not empty")
    if len(cut) % mesh.pp:
        raise StageError(f"{len(cut)} stages can't run on {mesh.pp} pipeline ranks; give as many for each")
    homes = tuple(placement) or tuple(stage % mesh.pp for stage in range(len(cut)))
    return Job(
        model, cut, mesh, microbatches, digest, reduce, options or Options(), regions or {}, experts or {}, homes
    )
