"""Runs one rank's share of a training step: its action list, one small handler per kind of action."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar.errors import DeadRankError, MismatchError, ScheduleError
from autopar.runtime import batches
from autopar.runtime.axes import Axes
from autopar.runtime.clip import clip_
from autopar.runtime.collectives import broadcast_, lost_peer, reduce_sum_
from autopar.runtime.grads import BUCKET_BYTES, Reducer, reduce_groups
from autopar.runtime.modules import dtype_of
from autopar.runtime.pipe import Message, Pipe
from autopar.runtime.program import Program
from autopar.schedules import Action

Gradients = dict[str, Tensor]
_Place = tuple[int, int]  # (stage, microbatch)


@dataclass
class _Step:
    """What lives within one step. All is taken out once it has been used: memory follows the schedule."""

    batch: Mapping[str, Tensor]
    totals: dict[int, tuple[Tensor, ...]]
    loss: Tensor
    arriving: dict[_Place, Message] = field(default_factory=dict)  # what a stage receives
    outputs: dict[_Place, tuple[Tensor, ...]] = field(default_factory=dict)  # what it makes, until sent
    leaves: dict[_Place, list[Tensor]] = field(default_factory=dict)  # received, waiting for gradients
    roots: dict[_Place, list[GradientEdge | None]] = field(default_factory=dict)  # where its backward begins
    returning: dict[_Place, Message] = field(default_factory=dict)  # the gradients it begins with
    gradients: dict[_Place, tuple[Tensor, ...]] = field(default_factory=dict)  # of received, until sent


class Executor:
    """Runs the stages of one rank, step after step. All ranks must make theirs, and step together.

    ``stages`` (modules with weights) and ``programs`` by stage number, those of this rank; ``actions`` its
    complete list; ``optimizer`` over its trainable parameters (None: the rank has none). ``placement[stage]``
    is the stage's index on ``pp`` (None: stage s on index s). ``clip_norm`` bounds the norm of the whole
    model's gradient. ``on_gradients`` gets name -> local gradient once per step, summed over ranks, before
    clipping. Raises ScheduleError where the actions are about other stages than those given.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        programs: Mapping[int, Program],
        actions: Sequence[Action],
        axes: Axes,
        optimizer: torch.optim.Optimizer | None,
        *,
        placement: Sequence[int] | None = None,
        clip_norm: float | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        on_gradients: Callable[[Gradients], None] | None = None,
    ) -> None:
        _check_actions(stages, programs, actions)
        self.stages, self.programs, self.actions = dict(stages), dict(programs), tuple(actions)
        self.axes, self.optimizer = axes, optimizer
        self.clip_norm, self.on_gradients = clip_norm, on_gradients
        count = next(iter(programs.values())).stages
        self._placement = tuple(range(count)) if placement is None else tuple(placement)
        groups = reduce_groups(programs, axes, self._placement)
        self.reducers = {
            stage: Reducer(module, programs[stage], groups, axes, self._placement, bucket_bytes)
            for stage, module in stages.items()
        }
        self._pipe = Pipe(axes)
        self._last_backward = {action.stage: action for action in self.actions if action.kind == "B"}
        self._handlers: dict[str, Callable[[_Step, Action], None]] = {
            "F": self._forward,
            "B": self._backward,
            "SEND_F": self._send_forward,
            "RECV_F": self._receive_forward,
            "SEND_B": self._send_backward,
            "RECV_B": self._receive_backward,
            "REDUCE": self._reduce,
            "STEP": self._optimize,
        }

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One training step on the whole global batch (path -> tensor), of which the rank takes its part.

        Returns the model's loss, a float64 scalar, equal on all ranks. Raises BatchError.
        """
        for program in self.programs.values():
            batches.check(batch, program.inputs)
        step = _Step(batch, self._totals(batch), torch.zeros((), dtype=torch.float64, device=self.axes.device))
        for action in self.actions:
            self._run(step, action)
        self._pipe.flush()
        self.axes.stream.step += 1
        return self._loss(step)

    def _run(self, step: _Step, action: Action) -> None:
        """One action. Raises DeadRankError where a peer is gone, naming the action that needed it."""
        try:
            self._handlers[action.kind](step, action)
        except RuntimeError as error:
            if not lost_peer(error):
                raise
            raise DeadRankError(
                f"rank {self.axes.rank}: a rank that {action} needs is gone ({str(error).splitlines()[0]}); "
                "the first error of another rank says why. Start the job again from the last checkpoint"
            ) from error

    def _totals(self, batch: Mapping[str, Tensor]) -> dict[int, tuple[Tensor, ...]]:
        """Per stage, its scalars of the whole batch: summed over microbatches, then over their axes."""
        totals = {}
        for stage, program in self.programs.items():
            if not program.totals:
                continue
            with torch.no_grad():
                each = [self._local_totals(stage, batch, m) for m in range(program.microbatches)]
            sums = tuple(torch.stack(values).sum(0) for values in zip(*each, strict=True))
            for total, value in zip(program.totals, sums, strict=True):
                for name in total.axes:
                    reduce_sum_(value, self.axes[name])
            totals[stage] = sums
        return totals

    def _local_totals(self, stage: int, batch: Mapping[str, Tensor], microbatch: int) -> tuple[Tensor, ...]:
        inputs = batches.parts(batch, self.programs[stage], microbatch, self.axes)
        values: tuple[Tensor, ...] = self.stages[stage].totals(*inputs)  # type: ignore[operator]
        return values

    def _forward(self, step: _Step, action: Action) -> None:
        place, program = _place(action), self.programs[action.stage]
        self.axes.stream.microbatch = action.microbatch
        received = step.arriving.pop(place).wait() if program.receives else ()
        for tensor, spec in zip(received, program.receives, strict=True):
            tensor.requires_grad_(spec.needs_grad)
        inputs = batches.parts(step.batch, program, action.microbatch, self.axes)
        result = self.stages[action.stage](*received, *inputs, *step.totals.get(action.stage, ()))
        step.leaves[place] = [tensor for tensor in received if tensor.requires_grad]
        if program.is_last:
            step.loss += result.detach()
            step.roots[place] = [_root(result)]
            step.returning[place] = Message((torch.ones_like(result),), ())
            return
        _check_outputs(result, program, action)
        outputs = zip(result, program.sends, strict=True)
        step.roots[place] = [_root(tensor) for tensor, spec in outputs if spec.needs_grad]
        sent = tuple(tensor.detach() for tensor in result)
        if self._is_here(action.stage + 1):
            step.arriving[action.stage + 1, action.microbatch] = Message(sent, ())
        else:
            step.outputs[place] = sent

    def _backward(self, step: _Step, action: Action) -> None:
        place = _place(action)
        self.axes.stream.microbatch = action.microbatch
        if action is self._last_backward[action.stage]:
            self.reducers[action.stage].expect_last()
        pairs = zip(step.roots.pop(place), step.returning.pop(place).wait(), strict=True)
        starts = [(root, gradient) for root, gradient in pairs if root is not None]
        torch.autograd.backward([root for root, _ in starts], [gradient for _, gradient in starts])
        leaves = step.leaves.pop(place)
        gradients = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)
        if self._is_here(action.stage - 1):
            step.returning[action.stage - 1, action.microbatch] = Message(gradients, ())
        elif self.programs[action.stage].receives:
            step.gradients[place] = gradients

    def _send_forward(self, step: _Step, action: Action) -> None:
        self._pipe.send(step.outputs.pop(_place(action)), self._pipe.forward, action.peer)

    def _receive_forward(self, step: _Step, action: Action) -> None:
        specs = self.programs[action.stage].receives
        step.arriving[_place(action)] = self._pipe.receive(specs, self._pipe.forward, action.peer)

    def _send_backward(self, step: _Step, action: Action) -> None:
        self._pipe.send(step.gradients.pop(_place(action)), self._pipe.backward, action.peer)

    def _receive_backward(self, step: _Step, action: Action) -> None:
        specs = [spec for spec in self.programs[action.stage].sends if spec.needs_grad]
        step.returning[_place(action)] = self._pipe.receive(specs, self._pipe.backward, action.peer)

    def _reduce(self, step: _Step, action: Action) -> None:
        self.reducers[action.stage].launch()

    def _optimize(self, step: _Step, action: Action) -> None:
        for reducer in self.reducers.values():
            reducer.wait()
        if self.on_gradients is not None:
            self.on_gradients({n: g for r in self.reducers.values() for n, g in r.gradients().items()})
        if self.clip_norm is not None:
            clip_(self.reducers, self.axes, self.clip_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        for reducer in self.reducers.values():
            reducer.zero()

    def _loss(self, step: _Step) -> Tensor:
        last = len(self._placement) - 1
        if last in self.programs:
            for name in self.programs[last].loss_axes:
                reduce_sum_(step.loss, self.axes[name])
        broadcast_(step.loss, self.axes["pp"], self._placement[last])
        return step.loss

    def _is_here(self, stage: int) -> bool:
        """Whether another stage is on this rank too: what goes there needs no message."""
        return stage in self.stages


def _place(action: Action) -> _Place:
    return action.stage, action.microbatch


def _root(tensor: Tensor) -> GradientEdge | None:
    """Where the backward of ``tensor`` begins, without keeping its memory; None where it has no gradient."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _check_actions(stages: Mapping[int, nn.Module], programs: Mapping[int, Program], actions: Sequence[Action]) -> None:
    used = {action.stage for action in actions if action.kind != "STEP"}
    if not used or used != set(stages) or used != set(programs):
        raise ScheduleError(
            f"the actions run stages {sorted(used)}, but this rank has modules for {sorted(stages)} and "
            f"programs for {sorted(programs)}; give the action list of this pipeline rank"
        )


def _check_outputs(outputs: tuple[Tensor, ...], program: Program, action: Action) -> None:
    """The peer receives what the program says; anything else would arrive as garbage."""
    made = [(tuple(tensor.shape), tensor.dtype) for tensor in outputs]
    told = [(tuple(spec.shape), dtype_of(spec.dtype)) for spec in program.sends]
    if made != told:
        raise MismatchError(
            f"{action} made {made}, but the program of stage {program.stage} sends {told}; "
            "the module and its PROGRAM are not from the same plan"
        )
