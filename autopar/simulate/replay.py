"""Layers that were recorded before take and free the same memory again, without running.

Equal layers (of the same code, with operands and parameters of the same shapes) have one tape
(:mod:`autopar.simulate.tapes`). In the place of the layer's forward comes one that plays it; autograd sees two nodes:
one takes the gradient that arrives and lets go of it, as autograd's own first node would, the other plays the backward.
Gradients of parameters are handed over where the layer's own would be, so that all that follows from them (sums,
buckets, optimizer) happens as it would. A layer that does what tapes don't say runs as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from autopar.runtime.axes import Axes
from autopar.runtime.executor import Executor
from autopar.runtime.job import Job
from autopar.runtime.offload import ActivationOffload, Kept, restored
from autopar.runtime.program import Program
from autopar.runtime.units import layers
from autopar.shapes import Memory, ShapeTensor
from autopar.simulate.call_sites import unshared_operands
from autopar.simulate.memory import ShapeTracker
from autopar.simulate.tapes import (
    INCOMING,
    Counts,
    Drops,
    Forgets,
    Gives,
    Keeps,
    Made,
    Moment,
    NoTapeError,
    Returns,
    Stretch,
    Tape,
    Uses,
    parameters,
    record,
    slot,
    token,
)
from autopar.simulate.torch_private import complete_gradient, without_function_modes

_CLASS: Final = re.compile(r"^class (\w+)\(nn\.Module\):.*?(?=^\S)", re.MULTILINE | re.DOTALL)
_COMMENT: Final = re.compile(r"#.*")


class UnlikeError(Exception):
    """A backward begins with another gradient than was reckoned with when its forward was played."""


@dataclass
class Tapes:
    """Of jobs that differ in their stages and schedules alone."""

    known: dict[Hashable, Tape | None] = field(default_factory=dict)


def replay_layers(executor: Executor, job: Job, tapes: Tapes, tracker: ShapeTracker) -> None:
    """From now on, the layers of the executor's stages play their tapes, where they can."""
    if job.options.activations == "8bit" or any(a.kind == "I" for a in executor.actions):
        return  # others keep what layers make
    for stage, module in executor.stages.items():
        text, program = job.texts[stage], executor.programs[stage]
        sources = {found[1]: _COMMENT.sub("", found[0]) for found in _CLASS.finditer(text)}
        unshared = unshared_operands(text)
        for path, layer in layers(module):
            axes = getattr(layer, "axes", executor.axes.within(path))
            names = {f"{path}.{name}" for name, _ in layer.named_parameters()}
            alone = names.isdisjoint((*program.spanning, *program.readers))
            if path in unshared and type(layer).__name__ in sources and alone:
                form = sources[type(layer).__name__], _routers(program, path), _described(layer)
                layer.forward = _Player(
                    layer, layer.forward, form, unshared[path], axes, tapes, tracker, executor.offload
                )


def _routers(program: Program, path: str) -> Hashable:
    """What the layer's routers are told, but for names."""
    own = [router for router in program.routers if f"{router.layer}.".startswith(f"{path}.")]
    return tuple((r.layer[len(path) :], r.imbalance, bool(r.order)) for r in own)


def _described(layer: nn.Module) -> Hashable:
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return tuple((name, _layout(tensor), tensor.requires_grad) for name, tensor in tensors)


def _layout(tensor: Tensor) -> Hashable:
    return tensor.layout_number if isinstance(tensor, ShapeTensor) else (tuple(tensor.shape), tensor.dtype)


@dataclass
class _Player:
    """In the place of the forward of ``layer``. ``form`` is what its tape depends on beside operands; those that
    nothing else uses are ``unshared``."""

    layer: nn.Module
    forward: Callable[..., Any]
    form: Hashable
    unshared: frozenset[int]
    axes: Axes
    tapes: Tapes
    tracker: ShapeTracker
    offload: ActivationOffload
    parameters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = [parameter for _, _, parameter in parameters(self.layer)]

    def __call__(self, *operands: Any) -> Any:
        tape = self._tape(operands)
        if tape is None:
            return self.forward(*operands)
        with without_function_modes():  # the tape says which kernels ran
            return _Pass(self, tape, operands).output(operands)

    def _tape(self, operands: Sequence[Any]) -> Tape | None:
        """None where the layer has to run."""
        trained = _trained(operands)
        if not trained or not self.unshared.issuperset(trained) or not torch.is_grad_enabled():
            return None
        hooked = self.offload.keep is not None
        key = self.form, tuple(map(_operand, operands)), hooked
        if key not in self.tapes.known:
            try:
                self.tapes.known[key] = record(
                    self.layer, self.forward, operands, self.axes, self.tracker, hooked=hooked
                )
            except NoTapeError:
                self.tapes.known[key] = None
        return self.tapes.known[key]


def _trained(operands: Sequence[Any]) -> list[int]:
    """Positions of those that have a gradient."""
    return [n for n, operand in enumerate(operands) if isinstance(operand, Tensor) and operand.requires_grad]


def _operand(operand: Any) -> Hashable:
    if isinstance(operand, Tensor):
        return _layout(operand), operand.requires_grad
    return type(operand), operand


class _Pass:
    """One microbatch in one layer: the memory that the layer holds of it."""

    def __init__(self, player: _Player, tape: Tape, operands: Sequence[Any]) -> None:
        self._player, self._tape, self._shapes = player, tape, player.tracker.shapes
        self._held: dict[int | str, Any] = {}
        self._begins: dict[int | str, int] = {}
        for position, operand in enumerate(operands):
            if isinstance(operand, Tensor):
                self._hold(slot(position), operand)
        self._trained = [
            n for n, operand in enumerate(operands) if isinstance(operand, Tensor) and operand.requires_grad
        ]
        self._made: list[ShapeTensor] = []
        self._kept: dict[int, Kept] = {}

    def output(self, operands: Sequence[Any]) -> Any:
        """What the forward gives."""
        tape = self._tape
        self._play(tape.forward)
        outputs = [self._tensor(made) for made in tape.outputs]
        for place in tape.loose:
            del self._held[place]
        self._made = [outputs[tape.trained]]
        trained = [operands[n] for n in self._trained]
        outputs[tape.trained] = _Leave.apply(_Arrive.apply(self, *trained), self)  # type: ignore[no-untyped-call]
        return tuple(outputs) if tape.is_tuple else outputs[0]

    def take(self) -> ShapeTensor:
        """What was made, for autograd."""
        return self._made.pop()

    def token(self) -> ShapeTensor:
        return token(self._player.tracker)

    def arrive(self, gradient: Tensor) -> None:
        """The backward begins. Raises UnlikeError."""
        if _layout(gradient) != self._shapes.number(self._tape.incoming):
            raise UnlikeError
        self._hold(INCOMING, gradient)

    def returned(self) -> list[Tensor | None]:
        """Of operands that have one, the gradient."""
        with without_function_modes():
            found = self._play(self._tape.backward)
        return [found.get(position) for position in self._trained]

    def _play(self, moments: Iterable[Moment]) -> dict[int, Tensor]:
        """The gradients of operands, by position."""
        found: dict[int, Tensor] = {}
        for moment in moments:
            if isinstance(moment, Stretch):
                self._stretch(moment)
            elif isinstance(moment, Drops):
                del self._held[moment.place]
            elif isinstance(moment, Gives):
                complete_gradient(self._player.parameters[moment.parameter], [self._given(moment)])
            elif isinstance(moment, Returns):
                found[moment.operand] = self._tensor(moment.gradient)
            elif isinstance(moment, Counts):
                self._count(moment)
            else:
                self._remember(moment)
        return found

    def _remember(self, moment: Keeps | Uses | Forgets) -> None:
        """What autograd would ask of hooks on saved tensors."""
        if isinstance(moment, Keeps):
            keep = self._player.offload.keep
            assert keep is not None
            self._kept[moment.kept] = keep(self._tensor(moment.tensor))
        elif isinstance(moment, Uses):
            self._hold(moment.place, restored(self._kept[moment.kept]))
        else:
            del self._kept[moment.kept]

    def _stretch(self, stretch: Stretch) -> None:
        held = self._held
        for piece in stretch.freed:
            del held[piece]
        for piece, bytes_ in stretch.made:
            held[piece] = self._memory(bytes_)
        if stretch.passing:
            self._memory(stretch.passing)
        for piece in stretch.freed_after:
            del held[piece]
        for piece, bytes_ in stretch.made_after:
            held[piece] = self._memory(bytes_)

    def _memory(self, bytes_: int) -> Memory:
        memory = Memory(bytes_, self._shapes)
        self._shapes.on_memory(memory)
        return memory

    def _given(self, moment: Gives) -> ShapeTensor:
        gradient = self._tensor(moment.gradient)
        del self._held[moment.gradient.place]
        return gradient

    def _hold(self, place: str, tensor: Tensor) -> None:
        self._held[place], self._begins[place] = tensor.untyped_storage(), int(tensor.storage_offset())

    def _tensor(self, made: Made) -> ShapeTensor:
        return self._shapes.tensor(made.layout, made.offset + self._begins.get(made.place, 0), self._held[made.place])

    def _count(self, counts: Counts) -> None:
        axes = self._player.axes
        index = self._shapes.tensor(counts.chosen.layout, 0, Memory(0, self._shapes))
        axes.routers.count(f"{axes.scope}{counts.router}", index, counts.experts)


class _Arrive(torch.autograd.Function):
    """The layer, for autograd. What it gives is a token, since what a node got is held until it is through."""

    @staticmethod
    def forward(ctx: Any, layer: _Pass, *operands: Tensor) -> Tensor:
        ctx.layer = layer
        return layer.token()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.layer.returned()


class _Leave(torch.autograd.Function):
    """The layer's output, of which the token stands for the layer."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, layer: _Pass) -> Tensor:
        ctx.layer = layer
        return layer.take()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.layer.arrive(grads[0])
        return ctx.layer.token(), None
