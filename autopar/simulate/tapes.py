"""What a layer's forward and backward make and free, in order: recorded once, apart from everything else.

The layer runs on operands and parameters that stand in for its own, so that the tape says also when it holds memory
from outside no longer. Of what lies between two moments at which others have a part in what happens (a gradient is
handed to a parameter, say), only the peak counts: memory that is made and freed on the same sides of the same peaks is
one piece.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from autopar.runtime.axes import Axes
from autopar.runtime.saved_memory import as_it_is
from autopar.shapes import Layout, Memory, ShapeTensor, layout_of
from autopar.simulate.memory import ShapeTracker
from autopar.storages import address

INCOMING: Final = "incoming"
"""The memory of the gradient with which a backward begins."""

Place = int | str
"""Memory: a piece that the layer makes; or, from outside, :data:`INCOMING` or that of an operand (:func:`slot`)."""


class Made(NamedTuple):
    """A tensor of ``layout``, ``offset`` elements behind the beginning of a piece, or behind where a tensor begins."""

    layout: Layout
    place: Place
    offset: int


class Stretch(NamedTuple):
    """Between two other moments: pieces that are freed and made (with their bytes) until the peak; bytes of what comes
    and goes and is there at the peak; pieces that are freed and made after it."""

    freed: tuple[int, ...]
    made: tuple[tuple[int, int], ...]
    passing: int
    freed_after: tuple[int, ...]
    made_after: tuple[tuple[int, int], ...]


class Gives(NamedTuple):
    """The gradient of a parameter, by number, is complete. The layer holds its memory no longer."""

    parameter: int
    gradient: Made


class Returns(NamedTuple):
    """The gradient of the operand at this position is complete."""

    operand: int
    gradient: Made


class Drops(NamedTuple):
    """Memory from outside is held no longer."""

    place: str


class Counts(NamedTuple):
    """The layer's router of this name below it tells which experts it chose."""

    router: str
    chosen: Made
    experts: int


class Keeps(NamedTuple):
    """A hook on saved tensors takes this one, number ``kept``."""

    kept: int
    tensor: Made


class Uses(NamedTuple):
    """The backward needs what was kept under this number, in memory that it calls ``place``."""

    kept: int
    place: str


class Forgets(NamedTuple):
    """Nothing needs what was kept under this number any more."""

    kept: int


Moment = Stretch | Gives | Returns | Drops | Counts | Keeps | Uses | Forgets


@dataclass(frozen=True)
class Tape:
    """``outputs`` of the forward; that of number ``trained`` has a gradient, of ``incoming`` layout. ``loose``: what
    the layer holds no longer once the forward is over."""

    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    outputs: tuple[Made, ...]
    is_tuple: bool
    trained: int
    incoming: Layout
    loose: tuple[Place, ...]


class NoTapeError(Exception):
    """The layer does what tapes don't say."""


def record(
    layer: nn.Module,
    forward: Callable[..., Any],
    operands: Sequence[Any],
    axes: Axes,
    tracker: ShapeTracker,
    *,
    hooked: bool = False,
) -> Tape:
    """The tape of ``forward(*operands)`` of ``layer``; nothing that is there changes. ``hooked``: it runs under hooks
    on saved tensors, which the tape calls in their place. Raises NoTapeError."""
    recorder, trained = _Recorder(tracker, axes.scope), parameters(layer)
    if len({parameter for _, _, parameter in trained}) < len(trained):
        raise NoTapeError  # one of several names has one gradient
    with ExitStack() as stack:
        stack.enter_context(tracker.diverted(recorder.born))
        for number, (owner, name, parameter) in enumerate(trained):
            stack.callback(setattr, owner, name, parameter)
            setattr(owner, name, recorder.parameter(number, parameter))
        given = [recorder.operand(position, operand) for position, operand in enumerate(operands)]
        hooks = saved_tensors_hooks(recorder.keep, recorder.use) if hooked else nullcontext()
        with axes.routers.counting(recorder.counted), hooks:
            made = forward(*given)
        recorder.end_forward(made)
        root = recorder.root(made)
        given.clear()
        del made
        recorder.begin_backward()
        with axes.routers.counting(counts=False):
            torch.autograd.backward([root], [token(tracker)])
        recorder.end_backward()
        del root
    return recorder.tape()


def parameters(layer: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """What ``layer`` trains: module, name in it, parameter."""
    return [
        (module, name, parameter)
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
    ]


def slot(position: int) -> str:
    """The memory of an operand."""
    return f"operand {position}"


def token(tracker: ShapeTracker) -> ShapeTensor:
    """A tensor that stands for nothing, in the place of values that autograd asks for."""
    layout = torch.Size([0]), (1,), torch.float32, torch.device("cpu"), False, False
    return tracker.shapes.tensor(layout, 0, Memory(0, tracker.shapes))


class _Born(NamedTuple):
    piece: int


class _Died(NamedTuple):
    piece: int


@dataclass(eq=False)
class _Kept:
    """In the place of a tensor that a hook took: holds no memory."""

    number: int
    layout: Layout
    bytes: int


@dataclass
class _Recorder:
    """Notes what happens, in order, and where in it the forward ends and the backward begins and ends."""

    tracker: ShapeTracker
    scope: str
    events: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    _kept: int = 0  # tensors, by hooks
    _result: tuple[tuple[Made, ...], bool, int] = ((), False, 0)
    _places: dict[int, Place] = field(default_factory=dict)  # of what is alive, by address
    _references: list[Any] = field(default_factory=list)

    def born(self, memory: UntypedStorage | Memory) -> None:
        """Memory is new. Raises NoTapeError where it is known, and has another size now."""
        if address(memory) in self._places:
            raise NoTapeError
        piece = len(self.sizes)
        self.sizes.append(memory.nbytes())
        self.events.append(_Born(piece))
        self._watch(memory, piece, _Died(piece))

    def parameter(self, number: int, parameter: nn.Parameter) -> nn.Parameter:
        """In the place of ``parameter``; tells of its gradient."""
        own = nn.Parameter(self._unseen(parameter), requires_grad=True)

        def gives(gradient: Tensor) -> None:
            self.events.append(Gives(number, self._made(gradient)))

        def given(own: Tensor) -> None:
            last = self.events[-1]
            if own.grad is None or not isinstance(last, Gives) or self._made(own.grad) != last.gradient:
                raise NoTapeError  # it was copied
            own.grad = None
            if self.events.pop() is last:
                raise NoTapeError  # somebody holds it

        own.register_hook(gives)  # type: ignore[no-untyped-call]
        own.register_post_accumulate_grad_hook(given)  # type: ignore[no-untyped-call]
        return own

    def operand(self, position: int, operand: Any) -> Any:
        """In the place of ``operand``."""
        if not isinstance(operand, Tensor):
            return operand
        own = self._watched(operand, slot(position))
        if not operand.requires_grad:
            return own
        start = self._unseen(operand).requires_grad_()
        return _Start.apply(start, [own], position, self)  # type: ignore[no-untyped-call]

    def counted(self, path: str, index: Tensor, experts: int) -> None:
        self.events.append(Counts(path[len(self.scope) :], self._made(index), experts))

    def keep(self, tensor: Tensor) -> Tensor | _Kept:
        """The hook on saved tensors. Weights are in nobody's way."""
        storage = tensor.untyped_storage()
        if address(storage) not in self._places:
            return as_it_is(tensor)
        number, self._kept = self._kept, self._kept + 1
        kept = _Kept(number, layout_of(tensor), storage.nbytes())
        self.events.append(Keeps(number, self._made(tensor)))
        self._references.append(weakref.ref(kept, lambda _: self.events.append(Forgets(number))))
        return kept

    def use(self, kept: Tensor | _Kept) -> Tensor:
        """What :meth:`keep` took."""
        if isinstance(kept, Tensor):
            return kept
        shapes = self.tracker.shapes
        own = shapes.tensor(kept.layout, 0, Memory(kept.bytes, shapes))
        place = f"kept {kept.number} at {len(self.events)}"
        self.events.append(Uses(kept.number, place))
        self._watch(own.memory, place, Drops(place))
        return own

    def end_forward(self, result: Any) -> None:
        """``result`` is what it made. Raises NoTapeError where not just one tensor of it has a gradient."""
        found = result if isinstance(result, tuple) else (result,)
        if not all(isinstance(item, ShapeTensor) for item in found):
            raise NoTapeError
        trained = [number for number, item in enumerate(found) if item.requires_grad]
        if len(trained) != 1:
            raise NoTapeError
        self._result = tuple(self._made(item) for item in found), isinstance(result, tuple), trained[0]
        self.marks.append(len(self.events))

    def root(self, result: Any) -> GradientEdge:
        """Where the backward begins; holds nothing that the forward made."""
        output = result[self._result[2]] if self._result[1] else result
        return get_gradient_edge(_End.apply(output, [self._watched(output, INCOMING)], self.tracker))  # type: ignore[no-untyped-call]

    def begin_backward(self) -> None:
        self.marks.append(len(self.events))

    def returns(self, position: int, gradient: Tensor) -> None:
        self.events.append(Returns(position, self._made(gradient)))

    def end_backward(self) -> None:
        self.marks.append(len(self.events))

    def tape(self) -> Tape:
        """Once nothing of it is left. Raises NoTapeError where something is."""
        if any(isinstance(place, int) for place in self._places.values()):
            raise NoTapeError
        (outputs, is_tuple, trained), (end, begin, last) = self._result, self.marks
        pieces = _Pieces(self.events, self.sizes, [(0, end), (begin, last)], outputs)
        forward, backward = ([*pieces.moments(*part)] for part in ((0, end), (begin, last)))
        between = self.events[end:begin]
        if any(isinstance(event, Forgets) for event in between):
            raise NoTapeError
        loose = [pieces.whole(e.piece) if isinstance(e, _Died) else e.place for e in between]
        incoming = outputs[trained].layout
        return Tape(tuple(forward), tuple(backward), outputs, is_tuple, trained, incoming, tuple(loose))

    def _made(self, tensor: Tensor) -> Made:
        place = self._places.get(address(tensor.untyped_storage()))
        if place is None or not isinstance(tensor, ShapeTensor):
            raise NoTapeError
        return Made(layout_of(tensor), place, int(tensor.storage_offset()))

    def _watched(self, like: Tensor, place: str) -> ShapeTensor:
        own = self._unseen(like)
        self._watch(own.memory, place, Drops(place))
        return own

    def _unseen(self, like: Tensor) -> ShapeTensor:
        """Of the same layout, in memory that doesn't count. Raises NoTapeError for a tensor that has values."""
        if not isinstance(like, ShapeTensor):
            raise NoTapeError
        shapes = self.tracker.shapes
        return shapes.tensor(layout_of(like), 0, Memory(like.memory.nbytes(), shapes))

    def _watch(self, memory: UntypedStorage | Memory, place: Place, event: _Died | Drops) -> None:
        key = address(memory)
        self._places[key] = place

        def gone(_: object) -> None:
            del self._places[key]
            self.events.append(event)

        self._references.append(weakref.ref(memory, gone))


class _Start(torch.autograd.Function):
    """An operand comes from outside."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, operand: list[Tensor], position: int, recorder: _Recorder) -> Tensor:
        ctx.position, ctx.recorder = position, recorder
        return operand.pop()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        ctx.recorder.returns(ctx.position, grads[0])
        return None, None, None, None


class _End(torch.autograd.Function):
    """A gradient comes from outside, which nobody there holds."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: list[Tensor], tracker: ShapeTracker) -> Tensor:
        ctx.gradient = gradient
        return token(tracker)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient.pop(), None, None


class _Pieces:
    """Puts together what is made, and what is freed, on the same side of the same peak."""

    def __init__(
        self, events: Sequence[Any], sizes: Sequence[int], parts: Iterable[tuple[int, int]], outputs: Iterable[Made]
    ) -> None:
        self._events, self._sizes = events, sizes
        self._peaks = {start: (end, self._peak(start, end)) for part in parts for start, end in self._stretches(*part)}
        self._side: dict[int, Hashable] = {
            place: (start, place <= peak) for start, (end, peak) in self._peaks.items() for place in range(start, end)
        }  # of what happens between parts, and behind them, it doesn't matter when
        self._named = {made.place for made in outputs}
        self._named |= {e.gradient.place for e in events if isinstance(e, Gives | Returns)}
        self._named |= {e.chosen.place for e in events if isinstance(e, Counts)}
        self._named |= {e.tensor.place for e in events if isinstance(e, Keeps)}
        self._dies = {e.piece: place for place, e in enumerate(events) if isinstance(e, _Died)}
        self._whole: dict[int, int] = {}
        self._bytes: dict[int, int] = defaultdict(int)
        first: dict[Hashable, int] = {}
        for place, event in enumerate(events):
            if isinstance(event, _Born):
                piece = event.piece
                lives = self._side.get(place), self._side.get(self._dies.get(piece, -1))
                self._whole[piece] = piece if piece in self._named else first.setdefault(lives, piece)
                self._bytes[self._whole[piece]] += sizes[piece]

    def whole(self, piece: int) -> int:
        """What this piece is a part of: named by the first that is made and freed where it is."""
        return self._whole[piece]

    def moments(self, start: int, end: int) -> Iterator[Moment]:
        place = start
        while place < end:
            if place in self._peaks:
                yield self._stretch(place, *self._peaks[place])
                place = self._peaks[place][0]
            else:
                yield self._events[place]
                place += 1

    def _stretches(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The longest runs in which memory is made and freed, and nothing else happens."""
        first = start
        for place in range(start, end + 1):
            if place == end or not isinstance(self._events[place], _Born | _Died):
                if place > first:
                    yield first, place
                first = place + 1

    def _peak(self, start: int, end: int) -> int:
        """The event after which there is most, the first of equals; the one before ``start`` where there never is
        more."""
        most = level = 0
        peak = start - 1
        for place in range(start, end):
            event = self._events[place]
            level += self._sizes[event.piece] * (1 if isinstance(event, _Born) else -1)
            if level > most:
                most, peak = level, place
        return peak

    def _stretch(self, start: int, end: int, peak: int) -> Stretch:
        freed: tuple[dict[int, None], dict[int, None]] = {}, {}
        made: tuple[dict[int, int], dict[int, int]] = {}, {}
        passing = 0
        born: dict[int, int] = {}
        for place in range(start, end):
            event, after = self._events[place], place > peak
            if isinstance(event, _Born):
                born[event.piece] = place
                if not start <= self._dies.get(event.piece, -1) < end:
                    made[after][self._whole[event.piece]] = self._bytes[self._whole[event.piece]]
            elif event.piece not in born:
                freed[after][self._whole[event.piece]] = None
            elif born[event.piece] <= peak < place:
                passing += self._sizes[event.piece]
        return Stretch(tuple(freed[0]), tuple(made[0].items()), passing, tuple(freed[1]), tuple(made[1].items()))
