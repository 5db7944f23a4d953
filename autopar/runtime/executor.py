"""Runs one rank's share of a training step: its action list, one small handler per kind of action."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from autopar.errors import ArgumentError, DeadRankError, MismatchError, ScheduleError
from autopar.options import Options, masters_on_host
from autopar.runtime import batches
from autopar.runtime.axes import Axes
from autopar.runtime.buckets import Bucket
from autopar.runtime.clip import clip_
from autopar.runtime.collectives import broadcast_, lost_peer, reduce_sum_
from autopar.runtime.grads import Reducer, launch_shared, reduce_groups
from autopar.runtime.host import host_memory
from autopar.runtime.later import Spans, lent_memory
from autopar.runtime.loads import Load, distinct, to_lists, total_load, update_bias_
from autopar.runtime.modules import dtype_of
from autopar.runtime.offload import ActivationOffload
from autopar.runtime.pipe import Message, Outbox, Pipe
from autopar.runtime.powersgd import relative_error
from autopar.runtime.program import Program, Router, VocabularyProgram
from autopar.runtime.saved_memory import storages
from autopar.runtime.scaling import LossScaler
from autopar.runtime.step import Place, Step, root_of
from autopar.runtime.store import Store
from autopar.runtime.streaming import Streaming
from autopar.runtime.versions import WeightVersions
from autopar.runtime.vocabulary import VOCABULARY, VocabularyPasses
from autopar.schedules import Action, Schedule
from autopar.schedules.flow import VOCABULARY_KINDS
from autopar.schedules.weight_moves import MESSAGES, MessageSizes, followers, moves_of

Gradients = dict[str, Tensor]
_BACKWARDS = ("B", "I", "W")


class Executor:
    """Runs the stages of one rank, step after step. All ranks must make theirs, and step together.

    ``stages`` (modules with weights) and ``programs`` by stage number, those of this rank; ``schedule`` is
    lowered, ``optimizer`` over its :attr:`masters` (None: the rank has none). ``stores`` by stage number hold those
    (without: the modules' parameters are their own masters). ``vocabulary`` is this rank's
    part of vocabulary layers that are split over the pipeline. ``clip_norm`` bounds the norm of the whole model's
    gradient. ``on_gradients`` gets name -> local gradient once per step (asynchronous schedules: per update), summed
    over ranks, before clipping; the attribute ``on_action`` each action before it runs. Raises ScheduleError where the
    actions are about other stages than those given. ``scaler`` scales the loss; a step that it finds not finite
    changes nothing. ``routers`` are those of all stages (None: of this rank's, which then are all there are).
    ``streams`` are by stage number, of those whose weights are gathered for each pass. ``sizes`` are those of messages
    in which gradients travel.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        programs: Mapping[int, Program],
        schedule: Schedule,
        axes: Axes,
        optimizer: torch.optim.Optimizer | None,
        *,
        vocabulary: tuple[nn.Module, VocabularyProgram] | None = None,
        stores: Mapping[int, Store] | None = None,
        clip_norm: float | None = None,
        options: Options | None = None,
        scaler: LossScaler | None = None,
        sizes: MessageSizes = MESSAGES,
        on_gradients: Callable[[Gradients], None] | None = None,
        routers: Sequence[Router] | None = None,
    ) -> None:
        self.actions = schedule.lists[axes["pp"].index]
        _check_actions(stages, programs, self.actions, schedule.head, vocabulary is not None)
        self.stages, self.programs = dict(stages), dict(programs)
        self.axes, self.optimizer = axes, optimizer
        self.clip_norm, self.on_gradients = clip_norm, on_gradients
        self.on_action: Callable[[Action], None] | None = None
        self.options, self.scaler = options or Options(), scaler
        self._placement = schedule.placement
        self._asynchronous = schedule.is_asynchronous
        self.vocabulary = vocabulary
        self.stores = dict(stores or {stage: Store(module) for stage, module in self._modules().items()})
        self.streams = {stage: Streaming(store) for stage, store in self.stores.items() if not store.resident}
        self._following = followers(self.actions)
        self.reducers = self._reducers(schedule, sizes)
        self._owners: dict[Tensor, Reducer] = {p: r for r in self.reducers.values() for p in r.parameters.values()}
        self._outbox = Outbox()
        self._pipe = Pipe(axes, schedule.placement, self._outbox)
        self._passes = VocabularyPasses(*vocabulary, schedule, axes, self._outbox, scaler) if vocabulary else None
        self._versions = {s: WeightVersions(m) for s, m in stages.items()} if schedule.is_asynchronous else {}
        self.offload = ActivationOffload({_place(a) for a in self.actions if a.kind == "OFFLOAD"}, axes.device)
        own = [router for program in programs.values() for router in program.routers]
        self._routers = distinct(own if routers is None else routers)
        axes.routers.declare(own, axes.device)
        self._load: dict[str, Tensor] = {}
        self._loads_first = any(router.skips for router in self._routers) and not self._asynchronous
        self._last_backward = {a.stage: a for a in self.actions if a.kind in _BACKWARDS}
        self._handlers = self._all_handlers()

    def step(self, batch: Mapping[str, Tensor], *, accumulate: bool = False) -> Tensor:
        """One training step on the whole global batch (path -> tensor), of which the rank takes its part.

        ``accumulate``: only add to the gradients; the next step without updates by the sum, as several
        ``loss.backward()`` before one ``optimizer.step()``. All ranks must say the same.
        Returns the model's loss, a float64 scalar, equal on all ranks. Raises BatchError; ArgumentError where an
        asynchronous schedule should accumulate.
        """
        if accumulate and self._asynchronous:
            raise ArgumentError("accumulate=True, but an asynchronous schedule updates within a step; use another one")
        for program in self._all_programs():
            batches.check(batch, program.inputs)
        step = Step.begin(batch, self._totals(batch), self.axes.device, accumulate=accumulate)
        # Backwards run here: on a thread of their own, as autograd has for a GPU, kernels are in no action's range.
        with torch.autograd.set_multithreading_enabled(False):
            for action in self.actions:
                self._run(step, action)
        self._outbox.flush()
        self.axes.later.require_done()
        if self._routers and not accumulate:
            self._settle_routers(step)
        self.axes.stream.step += 1
        return self._loss(step)

    @property
    def expert_load(self) -> Load:
        """Layer -> the slots that each expert got in the last step that updated, over the whole batch of it (of those
        that it accumulated too), equal on all ranks; empty before, and where there are no routers."""
        return to_lists(self._load)

    @property
    def selection_biases(self) -> dict[str, Tensor]:
        """Name -> the bias ``[experts]`` of each of this rank's routers that has one."""
        return {router.bias: bias for router, bias in self._biases()}

    @property
    def averages(self) -> dict[str, Tensor]:
        """Name -> the running average ``[c]`` of each of this rank's layers that moves one."""
        return {n: self.stages[stage].get_buffer(n) for stage, p in self.programs.items() for n in p.averages}

    @property
    def masters(self) -> dict[str, nn.Parameter]:
        """What this rank stores and trains, under the model's own names, each once."""
        return {name: master for store in self.stores.values() for name, master in store.masters.items()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """:attr:`masters`."""
        return self.masters

    def lost_share(self) -> float:
        """What PowerSGD did not send of this rank's gradients in the last step, relative to them; 0 without it."""
        return relative_error(sums for reducer in self.reducers.values() for sums in reducer.low_rank_sums())

    def _all_handlers(self) -> dict[str, Callable[[Step, Action], None]]:
        return {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_of_input,
            "W": self._backward_of_weights,
            "UPDATE": self._update,
            "SEND_F": self._send_forward,
            "RECV_F": self._receive_forward,
            "SEND_B": self._send_backward,
            "RECV_B": self._receive_backward,
            "OFFLOAD": self._offload_activations,
            "FREE": self._free_activations,
            "FETCH": self._fetch_activations,
            "GATHER": self._gather,
            "GATHER_V": self._gather,
            "GATHER_F": self._gather_ahead,
            "GATHER_B": self._gather_ahead,
            "SCATTER": self._scatter,
            "REDUCE": self._reduce,
            "REDUCE_V": self._reduce,
            "STEP": self._optimize,
            **(self._passes.handlers if self._passes else {}),
        }

    def _modules(self) -> dict[int, nn.Module]:
        return {**self.stages, **({VOCABULARY: self.vocabulary[0]} if self.vocabulary else {})}

    def _all_programs(self) -> list[Program | VocabularyProgram]:
        return [*self.programs.values(), *([self.vocabulary[1]] if self.vocabulary else [])]

    def _reducers(self, schedule: Schedule, sizes: MessageSizes) -> dict[int, Reducer]:
        """One per stage, and one for the vocabulary. A weight of several stages here belongs to that reduced last."""
        numbers = list(dict.fromkeys(action.stage for action in self.actions if action.stage in self.stages))
        for action in self.actions:
            if action.kind == "REDUCE":
                numbers.remove(action.stage)
                numbers.append(action.stage)
        programs: dict[int, Program | VocabularyProgram] = {number: self.programs[number] for number in numbers}
        if self.vocabulary:
            programs[VOCABULARY] = self.vocabulary[1]
        groups = reduce_groups(programs.values(), self.axes, schedule.placement)
        found, flying = dict[int, Reducer](), deque[Bucket]()
        taken: set[nn.Parameter] = set()
        for number, program in reversed(programs.items()):
            found[number] = Reducer(
                self._modules()[number],
                program,
                groups,
                self.axes,
                schedule.placement,
                sizes,
                without=taken,
                masters=self.stores[number].masters,
                scatters=moves_of(schedule).scatters and number != VOCABULARY,
                reduce_dtype=dtype_of(self.options.reduce_dtype) if self.options.reduce_dtype else None,
                powersgd=self.options.powersgd,
                flying=flying,
            )
            taken |= set(found[number].parameters.values())
        return {number: found[number] for number in programs}

    def _run(self, step: Step, action: Action) -> None:
        """One action. Raises DeadRankError where a peer is gone, naming the action that needed it."""
        if self.on_action is not None:
            self.on_action(action)
        try:
            with record_function(str(action)):
                if action.kind in VOCABULARY_KINDS:
                    self.stores[VOCABULARY].ready()
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
        modules: dict[int, tuple[nn.Module, Program | VocabularyProgram]] = {
            stage: (self.stages[stage], program) for stage, program in self.programs.items()
        }
        if self.vocabulary:
            modules[VOCABULARY] = self.vocabulary
        return {
            stage: self._sums(module, program, batch) for stage, (module, program) in modules.items() if program.totals
        }

    def _sums(
        self, module: nn.Module, program: Program | VocabularyProgram, batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, ...]:
        each: list[tuple[Tensor, ...]] = []
        with torch.no_grad():
            for microbatch in range(program.microbatches):
                each.append(module.totals(*batches.parts(batch, program, microbatch, self.axes)))  # type: ignore[operator]
        sums = tuple(torch.stack(values).sum(0) for values in zip(*each, strict=True))
        for total, value in zip(program.totals, sums, strict=True):
            for name in total.axes:
                reduce_sum_(value, self.axes[name].meant_for("what losses are divided by"))
        return sums

    def _forward(self, step: Step, action: Action) -> None:
        place, program, axes = _place(action), self.programs[action.stage], self.axes
        axes.stream.microbatch = action.microbatch
        received = step.arriving.pop(place).wait() if program.receives else ()
        for tensor, spec in zip(received, program.receives, strict=True):
            tensor.requires_grad_(spec.needs_grad)
        inputs = batches.parts(step.batch, program, action.microbatch, axes)
        offload = self.offload.keeping(place, self.stages[action.stage], inputs)
        with self._weights(action), offload, axes.routers.counting():
            made = self._call(action, (*received, *inputs, *step.totals.get(action.stage, ())))
        result = made if isinstance(made, tuple) else (made,)
        step.leaves[place] = leaves = [tensor for tensor in received if tensor.requires_grad]
        self.offload.leave(place, [*step.shared.pop(place, ()), *_handed_on(leaves, result)])
        if program.is_last and program.returns_loss:
            (loss,) = result
            step.loss += loss.detach()
            step.roots[place] = [root_of(loss)]
            step.returning[place] = Message((self.scaler.root(loss) if self.scaler else torch.ones_like(loss),))
            return
        _check_outputs(result, program, action)
        outputs = zip(result, program.sends, strict=True)
        step.roots[place] = [root_of(tensor) for tensor, spec in outputs if spec.needs_grad]
        sent = tuple(tensor.detach() for tensor in result)
        if self._is_here(action.stage + 1):
            following = action.stage + 1, action.microbatch
            step.arriving[following] = Message(sent)
            step.shared[following] = [*self.offload.kept_of(place, sent), *_handed_on(leaves, sent)]
        else:
            step.outputs[place] = sent

    def _offload_activations(self, step: Step, action: Action) -> None:
        self.offload.offload(_place(action))

    def _free_activations(self, step: Step, action: Action) -> None:
        self.offload.free(_place(action), step.leaves[_place(action)])

    def _fetch_activations(self, step: Step, action: Action) -> None:
        self.offload.fetch(_place(action))

    def _weights(self, action: Action) -> AbstractContextManager[None]:
        """Within, the weights of the action's stage are there when they are used."""
        if action.stage in self.streams:
            following = self._following[action]
            return self.streams[action.stage].running(action.kind, following.kind if following else "")
        if action.kind == "F":
            return self.stores[action.stage].arriving()
        self.stores[action.stage].ready()
        return nullcontext()

    def _gather(self, step: Step, action: Action) -> None:
        self.stores[action.stage if action.kind == "GATHER" else VOCABULARY].gather()

    def _gather_ahead(self, step: Step, action: Action) -> None:
        if action.stage in self.streams:
            self.streams[action.stage].prefetch("F" if action.kind == "GATHER_F" else "B")

    def _scatter(self, step: Step, action: Action) -> None:
        self.reducers[action.stage].scatter()

    def _call(self, action: Action, arguments: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        result: Tensor | tuple[Tensor, ...]
        if self._versions:
            result = self._versions[action.stage].forward(action.microbatch, arguments)
        else:
            result = self.stages[action.stage](*arguments)
        return result

    def _backward(self, step: Step, action: Action) -> None:
        if not self._asynchronous:
            self.reducers[action.stage].expect(last=self._is_last(step, action))
        self._run_backward(step, action)
        if self._versions:
            self._versions[action.stage].take_gradients(action.microbatch, self.reducers[action.stage].put)

    def _backward_of_input(self, step: Step, action: Action) -> None:
        lent = lent_memory(self.stages[action.stage]) if action.stage in self.streams else frozenset[int]()
        with self.axes.later.putting_off(_place(action), lent):
            self._run_backward(step, action)

    def _backward_of_weights(self, step: Step, action: Action) -> None:
        reducer = self.reducers[action.stage]
        last = self._is_last(step, action)
        reducer.expect_products(self.axes.later.parameters(_place(action)), last=last)
        self.axes.later.run(_place(action), self._accumulate)

    def _is_last(self, step: Step, action: Action) -> bool:
        """Whether the stage's gradients of the whole update are complete after ``action``."""
        return action is self._last_backward[action.stage] and not step.accumulate

    def _accumulate(self, parameter: Tensor, left: Tensor, right: Tensor, groups: Spans | None = None) -> None:
        self._owners[parameter].accumulate(parameter, left, right, groups)

    def _run_backward(self, step: Step, action: Action) -> None:
        place = _place(action)
        self.axes.stream.microbatch = action.microbatch
        pairs = zip(step.roots.pop(place), step.returning.pop(place).wait(), strict=True)
        starts = [(root, gradient) for root, gradient in pairs if root is not None]
        with self._weights(action):
            torch.autograd.backward([root for root, _ in starts], [gradient for _, gradient in starts])
        leaves = step.leaves.pop(place)
        gradients = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)
        if self._is_here(action.stage - 1):
            step.returning[action.stage - 1, action.microbatch] = Message(gradients)
        elif self.programs[action.stage].receives:
            step.gradients[place] = gradients

    def _send_forward(self, step: Step, action: Action) -> None:
        self._pipe.send(step.outputs.pop(_place(action)), "F", action.peer)

    def _receive_forward(self, step: Step, action: Action) -> None:
        specs = self.programs[action.stage].receives
        step.arriving[_place(action)] = self._pipe.receive(specs, "F", action.peer)

    def _send_backward(self, step: Step, action: Action) -> None:
        self._pipe.send(step.gradients.pop(_place(action)), "B", action.peer)

    def _receive_backward(self, step: Step, action: Action) -> None:
        specs = [spec for spec in self.programs[action.stage].sends if spec.needs_grad]
        step.returning[_place(action)] = self._pipe.receive(specs, "B", action.peer)

    def _reduce(self, step: Step, action: Action) -> None:
        if not step.accumulate:
            self.reducers[action.stage if action.kind == "REDUCE" else VOCABULARY].launch()

    def _update(self, step: Step, action: Action) -> None:
        """The optimizer's step by the gradient of one microbatch."""
        reducer = self.reducers[action.stage]
        reducer.launch()
        reducer.wait()
        if self.on_gradients is not None:
            self.on_gradients(reducer.gradients())
        if self.optimizer is not None:
            self.optimizer.step()
        reducer.zero()
        self._versions[action.stage].updated()

    def _optimize(self, step: Step, action: Action) -> None:
        if self._asynchronous or step.accumulate:
            return
        launch_shared(self.reducers.values())
        for reducer in self.reducers.values():
            reducer.wait()
        gradients = {n: g for r in self.reducers.values() for n, g in r.gradients().items()}
        finite = self.scaler is None or self.scaler.settle([*gradients.values()], self.axes.world, self.axes.device)
        step.updates = finite
        if self._loads_first:
            self._count_loads()
        if self.on_gradients is not None:
            self.on_gradients(gradients)
        if self.clip_norm is not None and finite:
            clip_(self.reducers, self.axes, self.clip_norm)
        if self.optimizer is not None and finite:
            with self._where_masters_lie():
                self.optimizer.step()
        for reducer in self.reducers.values():
            reducer.zero()
        for store in self.stores.values():
            store.expire()

    def _settle_routers(self, step: Step) -> None:
        """Sum the step's loads over all ranks, and move selection biases by them, if the step changed anything."""
        if not self._loads_first:
            self._count_loads()
        if self.options.expert_bias_rate and step.updates:
            for router, bias in self._biases():
                update_bias_(bias, self._load[router.layer], self.options.expert_bias_rate)

    def _count_loads(self) -> None:
        self._load = self.axes.routers.total = total_load(self._routers, self.axes.routers.take(), self.axes)

    def _biases(self) -> Iterator[tuple[Router, Tensor]]:
        for stage, program in self.programs.items():
            yield from ((r, self.stages[stage].get_buffer(r.bias)) for r in program.routers if r.bias)

    def _where_masters_lie(self) -> AbstractContextManager[None]:
        """What an optimizer makes, its state above all, lies beside what it updates."""
        return host_memory() if masters_on_host(self.options.offload) else nullcontext()

    def _loss(self, step: Step) -> Tensor:
        last = len(self._placement) - 1
        if last in self.programs:
            program = self.vocabulary[1] if self.vocabulary else self.programs[last]
            for name in program.loss_axes:
                reduce_sum_(step.loss, self.axes[name].meant_for("the loss"))
        broadcast_(step.loss, self.axes["pp"].meant_for("the loss"), self._placement[last])
        return step.loss

    def _is_here(self, stage: int) -> bool:
        """Whether another stage is on this rank too: what goes there needs no message."""
        return stage in self.stages


def _place(action: Action) -> Place:
    return action.stage, action.microbatch


def _handed_on(received: Sequence[Tensor], result: Sequence[Tensor]) -> list[Tensor]:
    """What of a message goes on to the next stage in the same memory, which may be on its way, or kept there too."""
    there = storages(result)
    return [tensor for tensor in received if id(tensor.untyped_storage()) in there]


def _check_actions(
    stages: Mapping[int, nn.Module],
    programs: Mapping[int, Program],
    actions: Sequence[Action],
    head: str,
    has_vocabulary: bool,
) -> None:
    used = {action.stage for action in actions if action.stage >= 0}
    if not used or used != set(stages) or used != set(programs):
        raise ScheduleError(
            f"the actions run stages {sorted(used)}, but this rank has modules for {sorted(stages)} and "
            f"programs for {sorted(programs)}; give the action list of this pipeline rank"
        )
    if bool(head) != has_vocabulary:
        raise ScheduleError(
            f"the schedule has head {head!r}, but this rank has {'a' if has_vocabulary else 'no'} vocabulary program; "
            "the actions and the programs are not from the same plan"
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
