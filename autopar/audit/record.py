"""What a program does, seen while it runs: every op of its text, every message, and which pass each belongs to.

Nothing here knows the graph that the text was written from. Ops are seen where the emitted text calls them
(:class:`Calls`), with the shapes that they really have on a rank; products are counted in the kernels below them
(:class:`Kernels`), by torch's own formulas, forward and backward; messages are those that process groups are asked for.
What a backward does is told by the autograd node that is running: a node belongs to the op that made it.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from autopar.audit.matrices import Matrices
from autopar.graph import AxisRef, Meta
from autopar.pieces import is_apart
from autopar.rules.base import Op
from autopar.rules.experts import COMBINE, DISPATCH, DISPATCH_END, DISPATCH_START
from autopar.runtime.axes import Axes, Axis
from autopar.runtime.experts import Dispatched
from autopar.schedules.flow import VOCABULARY_KINDS
from autopar.shapes import ShapeTensor
from autopar.simulate.calls import Call
from autopar.storages import DispatchMode, address

_BETWEEN: Final = frozenset(
    str(Path(torch.__file__).parent / name) for name in ("_ops.py", "_tensor.py", "overrides.py")
)
"""Torch's own code between a call in the text and what is called."""

_MEASURED_LATER: Final = frozenset({"all_reduce", "all_gather", "reduce_scatter"})
"""What reductions of gradients and gathers of weights are, which are started and not waited for."""

_LARGER: Final = frozenset({"all_gather", "reduce_scatter", "all_to_all"})
"""Kinds of which the larger of what is given and what comes counts."""

_BACKWARDS: Final = ("B", "I", "W")
_COPYING: Final = ("OFFLOAD", "FETCH")

_ADDS: Final = ("add_.Tensor", "add.Tensor")
_COPIES: Final = ("copy_.default", "_to_copy.default")
"""What sums of gradients are made by, where products don't add to them."""

TOTALS, LOADS, LOSS = "totals of the batch", "loads of experts", "loss"
"""What a step sums before its first action and after its last, as phases of their own."""

MADE, PUT_OFF, SENT, ENDED = PLACES = "made", "put off", "sent", "sent at the end"
"""Gradients move as the backward makes them, as what was put off is made, and as they are sent: in each backward, or
once a step."""

_TRAVELS: Final = frozenset({DISPATCH, DISPATCH_START, DISPATCH_END, COMBINE})
_TURNS: Final = ("index.Tensor", "index_put_.default")
"""Ops in which rows travel to experts or back, and the kernels that make rows of slots between two hops, and put sums
of them in their places."""

PACKS, UNPACKS = "cat.default", "copy_.default"
"""Kernels that lay weights out to travel together, and that copy them from where they arrive."""

_COMPOSITE: Final = {"matmul": "aten.matmul.default", "__matmul__": "aten.matmul.default"}
"""Operators that are several kernels: the others are called by the name of theirs."""

_OBJECT: Final = Meta((0,), torch.uint8)
"""What an op made that gives no tensor: a routing, or rows on their way."""

_TRANSPARENT: Final = frozenset({"declare", "recompute", "rng"})
"""Functions of the runtime that are no ops: the text's own ops run inside of ``recompute`` and ``rng``."""


@dataclass(frozen=True)
class Message:
    """One collective or send, as this rank's process group is asked for it: ``ranks`` are the group's (of an all-to-all
    those with whom it exchanges anything), ``bytes_`` as :func:`autopar.cost_models.collective.seconds` counts them."""

    kind: str
    bytes_: int
    ranks: tuple[int, ...]
    is_started: bool
    """Whether the rank goes on before it is done."""

    @classmethod
    def of(cls, call: Call) -> Message:
        kind, ranks = call.terms.operation, call.group.ranks
        sizes = [(_bytes(part.inputs), _bytes(part.outputs)) for part in call.parts]
        bytes_ = sum(max(pair) if kind in _LARGER else pair[0] for pair in sizes)
        peers = {ranks[place] for part in call.parts for place in part.peers}
        return cls(
            kind, bytes_, tuple(r for r in ranks if r in peers or r == call.rank) if peers else ranks, call.is_async
        )


@dataclass(eq=False)
class Ran:
    """One op of the text that ran. ``place`` is its line. ``is_view``: the result is an operand, by the op's schema;
    ``copied_bytes``: of a view that had to be copied all the same. ``is_operator``: the text has an operator (``+``).

    ``flops`` are those of the kernels below it; ``again``: it is part of a recomputation; ``is_done``: it was not
    stopped there, as the last op of a recomputation is once nothing more is needed (``started``: after its kernel);
    ``is_reached``: a gradient came to it.
    ``turned_bytes`` are read and written to lay out rows of experts for the next hop, and their sums. ``objects`` are
    the ops that made what it takes beside tensors: a routing, or rows on their way.
    """

    op: Op
    place: str
    is_view: bool
    is_operator: bool
    again: bool
    flops: int = 0
    back_flops: int = 0
    copied_bytes: int = 0
    is_done: bool = False
    started: bool = False
    is_reached: bool = False
    messages: list[Message] = field(default_factory=list)
    back_messages: list[Message] = field(default_factory=list)
    turned_bytes: int = 0
    back_turned_bytes: int = 0
    objects: tuple[Ran, ...] = ()

    def made_by(self, name: str) -> Ran | None:
        """The op of this name that made one of its objects."""
        return next((ran for ran in self.objects if ran.op.name == name), None)

    @property
    def began(self) -> Ran | None:
        """Of the second half of a dispatch, the first."""
        return self.made_by(DISPATCH_START)


class Moved(NamedTuple):
    """What happened to elements of gradients beside products: whether one was added to the sum of those before, or
    copied; where (:data:`PLACES`); bytes of an element before, and of one of the sum or the copy; whether it is of what
    each backward sends."""

    is_added: bool
    place: str
    before: int
    after: int
    in_pass: bool = False

    @property
    def is_cast(self) -> bool:
        return not self.is_added and self.before != self.after


class Where(NamedTuple):
    """Where gradients moved: of which stage (-1: a split vocabulary), in which kind of action, and of which microbatch
    (-1: none)."""

    stage: int
    kind: str
    microbatch: int


class Kernel(NamedTuple):
    """What a pass of a split vocabulary computes beside forwards of the text's ops: ``flops`` of a product (0: it is
    none) in ``dtype``, bytes of matrices that it reads and writes, elements that it makes; whether their rows begin at
    multiples of 16 bytes, where they are in 16 bits."""

    name: str
    flops: int
    bytes_: int
    dtype: str
    made: int
    is_aligned: bool


Use = tuple[int, int]
"""A tensor that has a gradient: the id of the autograd node that takes it, and its place there."""


@dataclass(eq=False)
class Phase:
    """What one action did: ops of the text, and messages and products that are no op's; of a split vocabulary's passes
    all ``kernels`` beside; bytes that go to the host or come back; ``casts``, elements of masters of which copies of
    another dtype are made, by bytes of an element before and after; ``fetched`` the same of all masters on the host of
    which there are copies on the device; ``packed_bytes`` of weights that were copied to travel together, or from where
    they did. ``copies`` of weights were made, ``sums`` begun of gradients of weights. ``takers``: the ops, and messages
    to the next stage (None), that took a tensor that has a gradient and is no parameter; and its bytes."""

    ops: list[Ran] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    flops: int = 0
    kernels: list[Kernel] = field(default_factory=list)
    copied_bytes: int = 0
    casts: Counter[tuple[int, int]] = field(default_factory=Counter)
    fetched: Counter[tuple[int, int]] = field(default_factory=Counter)
    packed_bytes: int = 0
    copies: int = 0
    sums: int = 0
    takers: dict[Use, tuple[list[Ran | None], int]] = field(default_factory=dict)

    def take(self, edge: Use, bytes_: int, taker: Ran | None) -> None:
        """A gradient may come back along ``edge``, from ``taker``."""
        self.takers.setdefault(edge, ([], bytes_))[0].append(taker)

    def uses(self) -> Iterator[tuple[int, int]]:
        """How many gradients came to a tensor, and its bytes."""
        for takers, bytes_ in self.takers.values():
            yield sum(taker is None or taker.is_reached for taker in takers), bytes_


class Log:
    """What a rank did, by action; "" is before the first one and after the last."""

    def __init__(self, files: Collection[str]) -> None:
        self.files = frozenset(files)
        self.phases: dict[str, Phase] = {"": Phase()}
        self.kind, self._at = "", (-1, -1)
        self.gradients: defaultdict[Where, Counter[Moved]] = defaultdict(Counter)
        self._casting = False
        self._packing = ""  # the kernel that packs, or unpacks
        self._summing: list[tuple[int, str, bool]] = []  # stages whose gradients are added up, the innermost last
        self._phase = self.phases[""]
        self.matrices = Matrices()
        """Of a split vocabulary, as its first pass on a head says."""
        self._running: Ran | None = None  # in a forward
        self._origin: Ran | None = None  # of the autograd node that runs
        self._done: dict[tuple[str, str, tuple[Meta, ...]], Ran] = {}  # by line, name and operands
        self._known: set[int] = set()
        self._nodes: list[object] = []  # kept, so that no two have one id
        self._objects: dict[int, Ran] = {}  # what made them, by id

    def begin(self, action: object) -> None:
        """What is seen from here on is of ``action``."""
        self.kind = getattr(action, "kind", "")
        self._at = getattr(action, "stage", -1), getattr(action, "microbatch", -1)
        self._phase = self.phases.setdefault(str(action) if action else "", Phase())
        self._origin = None

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Within, what is seen is of ``name``, and of no action."""
        phase, self._phase = self._phase, self.phases.setdefault(name, Phase())
        try:
            yield
        finally:
            self._phase = phase

    @property
    def is_open(self) -> bool:
        """Whether an op of the text is running: what it calls is part of it."""
        return self._running is not None

    def run(self, op: Op, function: Callable[[], Any], given: Any, *, is_view: bool, is_operator: bool = False) -> Any:
        """Run one op of the text, of tensors that are somewhere in what it is ``given``."""
        objects = tuple(self._objects[id(given)] for given in op.args if id(given) in self._objects)
        ran = Ran(op, _place(self.files), is_view, is_operator, again=self.kind in _BACKWARDS, objects=objects)
        self._phase.ops.append(ran)
        self._running = ran
        key = ran.place, op.name, op.operands
        try:
            result = function()
        except BaseException:
            first = self._done.get(key)
            if ran.started and first is not None:  # stopped before it gave anything: it makes what it made first
                ran.op, ran.started = first.op, ran.flops > 0 or not first.flops  # of a product, maybe a copy only
            raise
        finally:
            self._running = None
        ran.is_done = True
        made = list(_tensors(result))
        if not made:
            self._nodes.append(result)
            self._objects[id(result)] = ran
        ran.op, self._done[key] = replace(ran.op, outputs=tuple(map(_meta, made)) or (_OBJECT,)), ran
        made = [result.token] if isinstance(result, Dispatched) and result.token is not None else made
        self._own(ran, made)
        if any(tensor.requires_grad for tensor in made) and not ran.again:
            for tensor in {id(tensor): tensor for tensor in _tensors(given)}.values():
                self.used(tensor, ran)
        return result

    def used(self, tensor: Tensor, taker: Ran | None = None) -> None:
        """It may get a gradient from ``taker`` in this phase, or from the next stage."""
        if not tensor.requires_grad or isinstance(tensor, nn.Parameter):
            return
        edge = get_gradient_edge(tensor)
        self._nodes.append(edge.node)
        self._phase.take((id(edge.node), edge.output_nr), tensor.nbytes, taker)

    def _own(self, ran: Ran, made: Iterable[Tensor]) -> None:
        """The nodes of results belong to ``ran``, but for those of an operand that is given back."""
        for tensor in made:
            node = tensor.grad_fn
            if node is not None and id(node) not in self._known:
                self._known.add(id(node))
                self._nodes.append(node)
                node.register_prehook(lambda _, ran=ran: self._enter(ran))

    def _enter(self, ran: Ran) -> None:
        self._origin, ran.is_reached = ran, True

    def products(self, flops: int) -> None:
        """A kernel ran, with so many operations of products."""
        if self._running is not None:
            self._running.flops += flops
        elif self._origin is not None:
            self._origin.back_flops += flops
        else:
            self._phase.flops += flops

    def kernel(self, name: str, made: Sequence[Tensor], *, copied: bool) -> None:
        """A kernel made something new, maybe of what it was given. An operator (``+``) is called by its name."""
        ran = self._running
        if ran is None:
            return
        ran.started = True
        if copied and ran.is_view:
            ran.copied_bytes += 2 * made[0].nbytes
        if not ran.op.outputs:
            ran.op = replace(ran.op, name=name if ran.is_operator else ran.op.name, outputs=tuple(map(_meta, made)))

    def computed(self, func: Any, flops: int, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """A kernel ran: of a pass of a split vocabulary, it counts, unless it is of an op of the text, or a view."""
        if self.kind in _COPYING and func.overloadpacket.__name__ == "copy_":
            self._phase.copied_bytes += made[0].nbytes
        beside = self._running is None and not self._summing
        if not beside or self.kind not in VOCABULARY_KINDS or not made:
            return
        returns = func._schema.returns
        if any(each.alias_info is not None and not each.alias_info.is_write for each in returns):
            return
        bytes_ = self.matrices.bytes(func.overloadpacket.__name__, given, made)
        if flops or bytes_:
            name, dtype = func.overloadpacket.__name__, str(made[0].dtype).removeprefix("torch.")
            is_aligned = all(map(_is_aligned, (*given, *made)))
            self._phase.kernels.append(Kernel(name, flops, bytes_, dtype, made[0].numel(), is_aligned))

    def turned(self, name: str, made: Sequence[Tensor]) -> None:
        """A kernel ran: of rows of experts that are laid out for the next hop, or added up before it, it counts."""
        ran = self._running or self._origin
        if made and name in _TURNS and ran is not None and ran.op.name in _TRAVELS:
            if ran is self._running:
                ran.turned_bytes += 2 * made[0].nbytes
            else:
                ran.back_turned_bytes += 2 * made[0].nbytes

    def keep(self, node: object) -> None:
        """An autograd node that is watched lives as long as the log."""
        self._nodes.append(node)

    @contextmanager
    def casting(self) -> Iterator[None]:
        """Within, copies of masters are made."""
        self._casting = True
        try:
            yield
        finally:
            self._casting = False

    @contextmanager
    def packing(self, kernel: str) -> Iterator[None]:
        """Within, ``kernel`` copies weights that travel together."""
        self._packing = kernel
        try:
            yield
        finally:
            self._packing = ""

    def packed(self, name: str, made: Sequence[Tensor]) -> None:
        """A kernel ran: of one that copies weights that travel together, bytes count."""
        if self._packing and name == self._packing and made:
            self._phase.packed_bytes += made[0].nbytes

    def copy(self, count: int) -> None:
        """So many copies of weights are made."""
        self._phase.copies += count

    def fetch(self, master: Tensor, copy: Tensor) -> None:
        """A copy of a master on the host is made."""
        self._phase.fetched[master.element_size(), copy.element_size()] += master.numel()

    def cast(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """A kernel ran: of one that makes a copy of a master in another dtype, elements count."""
        if self._casting and name in _COPIES and made and given[-1].dtype != made[0].dtype:
            self._phase.casts[given[-1].element_size(), made[0].element_size()] += made[0].numel()

    def summing(self, stage: int, place: str, count: int = 0, *, in_pass: bool = False) -> None:
        """From here on, until :meth:`summed`, gradients of ``stage`` are added up in ``place``: so many new ones, of
        those that are sent ``in_pass`` or not."""
        self._summing.append((stage, place, in_pass))
        self._phase.sums += count

    def summed(self) -> None:
        """That is over."""
        self._summing.pop()

    def moved(self, name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """A kernel ran: of gradients that are added up, it counts."""
        if not self._summing or not made or name not in (*_ADDS, *_COPIES):
            return
        stage, place, in_pass = self._summing[-1]
        before, after = given[-1], made[0]
        moved = Moved(name in _ADDS, place, before.element_size(), after.element_size(), in_pass)
        self.gradients[self._where(stage)][moved] += after.numel()

    def _where(self, stage: int) -> Where:
        """What happens to a gradient that ``stage`` sums is of the stage whose action runs, if it has one."""
        running, microbatch = self._at
        return Where(running if running >= 0 else stage, self.kind, microbatch)

    def sent(self, call: Call) -> None:
        """An operation that a process group is asked for."""
        if call.terms.operation == "recv":
            return
        message = Message.of(call)
        later = message.is_started and message.kind in _MEASURED_LATER
        if self._running is not None:
            self._running.messages.append(message)
        elif self._origin is not None and not later and self.kind in _BACKWARDS:
            self._origin.back_messages.append(message)
        else:
            self._phase.messages.append(message)


class Calls(TorchFunctionMode):
    """Sees the torch functions that the emitted text calls by itself; those of the runtime are :func:`watched`."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._log.is_open or not _is_called_by(sys._getframe(1), self._log.files):
            return func(*args, **kwargs)
        name, is_view = _name(func)
        op = _op(name, args, kwargs)
        run = partial(func, *args, **kwargs)
        return self._log.run(op, run, (args, kwargs), is_view=is_view, is_operator="." not in name)


def _is_aligned(matrix: Tensor) -> bool:
    """A row is as long as the least stride between its neighbours, whichever way it is turned."""
    pitch = min((stride for stride in matrix.stride() if stride > 1), default=0)
    return matrix.dim() < 2 or matrix.itemsize != 2 or pitch * matrix.itemsize % 16 == 0


class Kernels(DispatchMode):  # type: ignore[misc]
    """Counts the products of kernels by torch's own formulas (``torch.utils.flop_counter``), and bytes of gradients."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = [tensor for tensor in _tensors(result) if isinstance(tensor, ShapeTensor)]
        given = list(_tensors([args, list(kwargs.values())]))
        self._log.turned(func.__name__, made)
        self._log.moved(func.__name__, given, made)
        self._log.cast(func.__name__, given, made)
        self._log.packed(func.__name__, made)
        formula = _formula(func)
        flops = formula(*args, **kwargs, out_val=result) if formula else 0
        self._log.products(flops)
        self._log.computed(func, flops, given, made)
        read = {address(tensor.untyped_storage()) for tensor in _tensors([args, kwargs])}
        if made and address(made[0].untyped_storage()) not in read:
            self._log.kernel(f"{func.namespace}.{func.__name__}", made, copied=bool(read))
        return result


def _formula(func: Any) -> Callable[..., int] | None:
    """Of a product's operations: torch knows those of ``addmm``, which ``addmm_`` are, too. What it says of gradients
    of convolutions is of one group."""
    packet = func.overloadpacket
    if packet is torch.ops.aten.convolution_backward:
        return _of_convolution_backward
    return flop_registry.get(packet) or flop_registry.get(getattr(torch.ops.aten, packet.__name__.rstrip("_"), None))


def _of_convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *args: Any, **_: Any) -> int:
    """As many for each factor's gradient as the forward has: of each element that is made, or is read where it is
    transposed, with all taps of a channel."""
    is_transposed, wanted = args[4], args[7]
    points = x if is_transposed else grad
    return 2 * int(sum(wanted[:2])) * points.numel() * math.prod(weight.shape[1:])


def watched(namespace: Mapping[str, Any], log: Log) -> dict[str, Any]:
    """The functions of ``autopar.runtime`` in an emitted module, each as one that ``log`` sees."""
    return {
        name: _watch(item, log)
        for name, item in namespace.items()
        if isinstance(item, FunctionType) and item.__module__.startswith("autopar.runtime") and name not in _TRANSPARENT
    }


def _watch(function: FunctionType, log: Log) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        if log.is_open:
            return function(*args, **kwargs)
        op = _op(function.__name__, args, kwargs)
        return log.run(op, partial(function, *args, **kwargs), (args, kwargs), is_view=False)

    return called


def _name(func: Any) -> tuple[str, bool]:
    """``aten.linear.default``, and whether that gives back an operand; of a method, its own name."""
    overload = func
    if isinstance(func, type(torch.ops.aten.add)):
        overload = getattr(func, func.overloads()[0])  # type: ignore[no-untyped-call]  # the text names any other
    schema = getattr(overload, "_schema", None)
    if schema is None:
        name = getattr(func, "__name__", str(func))
        return _COMPOSITE.get(name, name), name == "__getitem__"
    aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    return f"{overload.namespace}.{overload.__name__}", aliases


def _op(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Op:
    tensors = list(_tensors([args, list(kwargs.values())]))
    named = {key: _shown(value) for key, value in kwargs.items()}
    apart = tuple(i for i, tensor in enumerate(tensors) if is_apart(tensor))
    return Op(name, tuple(_shown(a) for a in args), named, tuple(map(_meta, tensors)), (), apart)


def _shown(value: Any) -> Any:
    """As a rule sees it: metadata for tensors, a reference for an axis."""
    if isinstance(value, Tensor):
        return _meta(value)
    if isinstance(value, Axis):
        return AxisRef(value.name, value.size, value.paired)
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    return None if isinstance(value, Axes) else value


def _meta(tensor: Tensor) -> Meta:
    return Meta(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _tensors(value: Any) -> Iterator[Tensor]:
    """In order of appearance, one for each use."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _is_called_by(frame: FrameType | None, files: frozenset[str]) -> bool:
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    # a lambda in the text is an argument: what it does is part of the op that it is given to
    return frame is not None and frame.f_code.co_filename in files and frame.f_code.co_name != "<lambda>"


def _place(files: frozenset[str]) -> str:
    """The innermost line of the text that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in files:
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
