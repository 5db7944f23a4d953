"""Where does a compiled model go wrong? The first op whose value differs from the one-device model's, by source line.

The one-device values come from running the captured graph, op by op, on the whole batch. The ranks' values are read off
the emitted text itself while it runs on simulated ranks: a trace function looks at what each line assigned. A rank's
value should be the part of the one-device value that its types say; pending sums have no such part and are passed over.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from autopar import runtime, simulate
from autopar.batch import flatten
from autopar.capture import Loss
from autopar.codegen import EmittedStage
from autopar.codegen.text import Origin
from autopar.graph import INPUT_CALL, Model, RuntimeOp, info, is_unset, op_name, operands, where
from autopar.mesh import AXES
from autopar.plan import Plan
from autopar.rules.experts import COMBINE, DISPATCH, DISPATCH_END
from autopar.runtime.axes import Axes
from autopar.runtime.job import Job, start
from autopar.spmd import Type

Place = tuple[int, str]
"""(call, node): one op of the model."""


class Emitted(Protocol):
    """The programs of a job; those of its stages are looked at, vocabulary layers split over them are not."""

    @property
    def stages(self) -> tuple[EmittedStage, ...]: ...


class Compiled(Protocol):
    """What is looked at of a compiled model; :class:`autopar.ParallelModel` is one."""

    @property
    def plan(self) -> Plan: ...

    @property
    def job(self) -> Job: ...

    @property
    def programs(self) -> Emitted: ...

    @property
    def lowered(self) -> Model: ...

    @property
    def constants(self) -> Mapping[str, Tensor]: ...

    @property
    def loss(self) -> Loss | None: ...

    def reference(self) -> nn.Module: ...

    def whole_graph(self, batch: Any) -> Model: ...

    def simulate(self, batch: Any, steps: int = 1, *, device: str = "cpu", track_memory: bool = True) -> Any: ...


@dataclass(frozen=True)
class Seen:
    """A value that a rank computed: which op, in which microbatch."""

    place: Place
    microbatch: int
    value: Tensor


def first_divergence(job: Compiled, batch: Any, tolerance: float) -> str:
    """A sentence naming the first op that differs, or saying that only gradients do."""
    tensors = flatten(batch)[0]
    expected = one_device_values(job, batch)
    model = job.lowered
    order = {place: i for i, place in enumerate(_places(model))}
    worst: tuple[int, int, float] | None = None
    for rank, values in enumerate(_rank_values(job, tensors)):
        for seen in values:
            error = _error(job, model, rank, seen, expected)
            if error is not None and error > tolerance:
                worst = min(worst or (len(order), 0, 0.0), (order[seen.place], rank, error))
    if worst is None:
        return "all forward values agree: a gradient is wrong, look at the backward of the ops of the parameters above"
    position, rank, error = worst
    call, name = list(order)[position]
    node = _node(model, call, name)
    path = model.calls[call].path
    place = f"{where(node)} of {path}" if path else where(node)
    return f"first different value: {place}, on rank {rank}, relative error {error:.1e}"


def _places(model: Model) -> Iterator[Place]:
    for index, call in enumerate(model.calls):
        for node in model.block_of(call).graph.nodes:
            if node.op == "call_function":
                yield index, node.name


def _node(model: Model, call: int, name: str) -> fx.Node:
    block = model.block_of(model.calls[call])
    return next(n for n in block.ops if n.name == name)


def one_device_values(job: Compiled, batch: Any) -> dict[Place, Tensor]:
    """Every value of the captured graph on the whole batch, from the model's weights."""
    tensors = flatten(batch)[0]
    model = job.whole_graph(batch)
    twin = job.reference()
    state = {**dict(twin.named_parameters(remove_duplicate=False)), **dict(twin.named_buffers(remove_duplicate=False))}
    state |= job.constants
    state |= {p.name: torch.stack([state[n] for n in p.stacked]) for p in model.parameters.values() if p.stacked}
    values: dict[Place, Tensor] = {}
    outputs: dict[tuple[int, int], Any] = {(INPUT_CALL, i): tensors[item.path] for i, item in enumerate(model.inputs)}
    with torch.no_grad():
        for index, call in enumerate(model.calls):
            block = model.block_of(call)
            given = [outputs[v.call, v.output] for v in call.operands]
            stored = ((node, state[name]) for node, name in zip(block.parameters, call.parameters, strict=True))
            env: dict[fx.Node, Any] = {node: tensor.to(info(node).meta.dtype) for node, tensor in stored}
            env |= dict(zip(block.inputs, given, strict=True))
            for node in block.ops:
                env[node] = _run(node, env)
                if isinstance(env[node], Tensor):
                    values[index, node.name] = env[node]
            for k, node in enumerate(block.outputs):
                outputs[index, k] = env[node]
    return values


def _run(node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
    """Memory that nothing was written to yet is NaN here, which :func:`_error` passes over."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
    target = getattr(runtime, str(node.target)) if isinstance(node.target, RuntimeOp) else node.target
    assert callable(target)
    made = target(*args, **kwargs)
    return made.fill_(torch.nan) if is_unset(node) and made.is_floating_point() else made


def _rank_values(job: Compiled, tensors: Mapping[str, Tensor]) -> list[list[Seen]]:
    lines = {f"stage_{program.stage}.py": program.lines for program in job.programs.stages}
    paths = {call.path: i for i, call in enumerate(job.lowered.calls) if call.path}

    def rank_program(rank: int) -> list[Seen]:
        return _watched_step(job.job, rank, tensors, lines, paths)

    return list(simulate.run(rank_program, job.plan.mesh.world, track_memory=False).results)


def _watched_step(
    job: Job,
    rank: int,
    tensors: Mapping[str, Tensor],
    lines: Mapping[str, Mapping[int, Origin]],
    paths: Mapping[str, int],
) -> list[Seen]:
    """One step of this rank, with what every emitted line assigned."""
    axes = Axes.build(job.mesh, rank, "cpu", job.seed)
    executor = start(job, axes)
    seen: list[Seen] = []
    calls = {m: paths[n] for stage in executor.stages.values() for n, m in stage.named_modules() if n in paths}
    tracer = _tracer(lines, calls, axes, seen)
    sys.settrace(tracer)
    try:
        executor.step(tensors)
    finally:
        sys.settrace(None)
    return seen


def _tracer(
    lines: Mapping[str, Mapping[int, Origin]], calls: Mapping[nn.Module, int], axes: Axes, seen: list[Seen]
) -> Callable[[FrameType, str, Any], Any]:
    """``calls`` says which call of the model a module is; others (the stage) are told by the line."""
    last: dict[FrameType, int] = {}

    def note(frame: FrameType) -> None:
        number, known = last.get(frame), lines[frame.f_code.co_filename]
        if number is None or number not in known:
            return
        origin = known[number]
        value = frame.f_locals.get(origin.variable)
        if isinstance(value, Tensor):
            place = (calls.get(frame.f_locals["self"], origin.call), origin.node)
            seen.append(Seen(place, axes.stream.microbatch, value.detach().clone()))

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event in ("line", "return"):
            note(frame)
            last[frame] = frame.f_lineno
        if event == "return":
            last.pop(frame, None)
        return local

    def outer(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in lines or not frame.f_code.co_name.startswith(("forward", "recomputed")):
            return None
        return local

    return outer


def _error(job: Compiled, model: Model, rank: int, seen: Seen, expected: Mapping[Place, Tensor]) -> float | None:
    """Relative error of a rank's value; None where it can't be compared (pending sums, collectives, rows by expert)."""
    whole = expected.get(seen.place)
    if whole is None:
        return None
    node = _node(model, *seen.place)
    types = info(node).types()
    if any(kind.kind == "P" or kind.is_ragged for kind in types.values()):
        return None
    if any(kind.is_shard and kind.dim == 0 for kind in types.values()) and _is_by_expert(node):
        return None
    mesh = job.plan.mesh
    axes = Axes.alone(mesh, rank, "cpu")
    place: dict[str, tuple[tuple[int, ...], int]] = {"mb": ((seen.microbatch,), job.plan.microbatches)}
    place |= {axis: (axes[axis].parts_of(axes[axis].index), axes[axis].parts) for axis in AXES[1:]}
    want = whole
    for axis, kind in types.items():
        want = _part(want, kind, *place[axis])
    if want.shape != seen.value.shape:
        return float("inf")
    if not want.is_floating_point():
        return 0.0 if torch.equal(want, seen.value) else float("inf")
    if not want.numel():
        return 0.0
    scale = max(float(whole.detach().nan_to_num().abs().max()), 1e-300)
    differences = (want - seen.value).detach().abs()
    return float(torch.where(want.isnan(), 0.0, differences).max()) / scale


def _part(whole: Tensor, kind: Type, own: Sequence[int], parts: int) -> Tensor:
    """The ``own`` ones of the ``parts`` of a tensor of type ``kind``."""
    if not kind.is_shard:
        return whole
    shape = whole.shape
    inner = shape[kind.dim] // (kind.outer * parts)
    view = whole.reshape(*shape[: kind.dim], kind.outer, parts, inner, *shape[kind.dim + 1 :])
    part = view.index_select(kind.dim + 1, torch.tensor(own))
    return part.reshape(*shape[: kind.dim], kind.outer * len(own) * inner, *shape[kind.dim + 1 :])


def _is_by_expert(node: fx.Node) -> bool:
    """Whether rows are in the order of the experts that tokens got: those of some tokens lie anywhere in them."""
    waiting, seen = [node], {node}
    while waiting:
        last = waiting.pop()
        if op_name(last) in (DISPATCH, DISPATCH_END):
            return True
        if last.op == "call_function" and op_name(last) != COMBINE:
            fresh = set(operands(last)) - seen
            seen |= fresh
            waiting += fresh
    return False
