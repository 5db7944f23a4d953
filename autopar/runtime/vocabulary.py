"""One rank's part of vocabulary layers that are split over the pipeline: its passes and exchanges.

Every pipeline rank holds some rows of the embedding and of the head; :mod:`autopar.runtime.logits` has the arithmetic
of its passes ``S``, ``U`` and ``T``. Between them:

* ``STATS``: all ranks get all statistics, 16 bytes a token and rank. So each knows the entropy, and by running the
  model's own tail, the gradient of the loss by each token's entropy: that is never sent.
* ``SUM_X``: the terms of the gradient of the last stage's output, summed for that stage.
* ``MAX``: the maximum, before exponentials are taken (``naive``).

(Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", arXiv 2411.05288, sections 4 and 5 and
appendix C.) Exchanges run on communicators of their own, on CUDA beside the compute stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from autopar.runtime import batches
from autopar.runtime.axes import Axes, Axis
from autopar.runtime.chunked_logits import ChunkedHead
from autopar.runtime.collectives import gather_stack, reduce_max_, reduce_to_, start_broadcast_, subgroups
from autopar.runtime.logits import ShardedHead
from autopar.runtime.modules import dtype_of
from autopar.runtime.pipe import Message, Outbox, wait_all
from autopar.runtime.program import Tensor as Wire
from autopar.runtime.program import VocabularyProgram
from autopar.runtime.scaling import LossScaler
from autopar.runtime.step import Step, root_of
from autopar.schedules import Action, Schedule

VOCABULARY = -1
"""The vocabulary layers' number where others have their stage's."""


@dataclass
class _State:
    """Microbatches under way; what an entry is for is done when it is taken out."""

    parts: dict[int, Tensor] = field(default_factory=dict)  # of the embedding, until sent
    roots: dict[int, GradientEdge | None] = field(default_factory=dict)  # where the backward of such a part begins
    returning: dict[int, Message] = field(default_factory=dict)  # gradients of the embedding
    hidden: dict[int, Message] = field(default_factory=dict)  # what the last stage made
    entered: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # the same, and as [t, h]
    logits: dict[int, Any] = field(default_factory=dict)  # of the kind that the head makes
    tops: dict[int, dist.Work | None] = field(default_factory=dict)
    statistics: dict[int, Tensor] = field(default_factory=dict)  # of this rank
    gathered: dict[int, tuple[Tensor, dist.Work | None]] = field(default_factory=dict)  # of all
    gradients: dict[int, Tensor] = field(default_factory=dict)  # [t, h]: this rank's term


class VocabularyPasses:
    """Handlers of the vocabulary's actions. All ranks of the world must make theirs."""

    def __init__(
        self,
        module: nn.Module,
        program: VocabularyProgram,
        schedule: Schedule,
        axes: Axes,
        outbox: Outbox,
        scaler: LossScaler | None = None,
    ) -> None:
        self._module: Any = module
        self._scaler, self._outbox = scaler, outbox
        self._program, self._axes, self._algorithm = program, axes, schedule.head
        self._is_early = schedule.head == "vocab-2" and program.hidden.needs_grad
        self._first, self._last = schedule.placement[0], schedule.placement[-1]
        self._last_stage = schedule.stages - 1
        self._index, tp = axes["pp"].index, axes["tp"]
        start = (self._index * tp.size + tp.index) * program.rows
        self._head: ShardedHead | ChunkedHead = ShardedHead(module, program, start)
        if program.chunks > 1:
            self._head = ChunkedHead(module, program, start, early=self._is_early)
        self._line, self._plane = _groups(axes)
        self._aside = _stream(axes.device)
        self._state = _State()
        self.handlers: dict[str, Callable[[Step, Action], None]] = {
            "E": self._embed,
            "SUM_E": self._sum_embedding,
            "CAST_E": self._cast_gradient,
            "G": self._embedding_gradient,
            "CAST_X": self._cast_hidden,
            "S": self._scores,
            "MAX": self._exchange_top,
            "U": self._exponentials,
            "STATS": self._exchange_statistics,
            "T": self._table_gradient,
            "SUM_X": self._sum_gradient,
        }

    def _embed(self, step: Step, action: Action) -> None:
        self._axes.stream.microbatch = action.microbatch
        part = self._module.embed_ids(*self._inputs(step, action))
        self._state.parts[action.microbatch], self._state.roots[action.microbatch] = part.detach(), root_of(part)

    def _sum_embedding(self, step: Step, action: Action) -> None:
        total = self._state.parts.pop(action.microbatch).contiguous()
        message = self._reduce(total, self._first, action)
        if self._index == self._first:
            step.arriving[0, action.microbatch] = message

    def _cast_gradient(self, step: Step, action: Action) -> None:
        """To all ranks, if the embedding is trained."""
        wire = self._program.embedding
        assert wire is not None
        found = step.gradients.pop((0, action.microbatch)) if self._index == self._first else ()
        if wire.needs_grad:
            own = found[0] if found else None
            self._state.returning[action.microbatch] = self._broadcast(own, wire, self._first, action)

    def _embedding_gradient(self, step: Step, action: Action) -> None:
        root = self._state.roots.pop(action.microbatch)
        if action.microbatch in self._state.returning:
            assert root is not None
            (gradient,) = self._received(self._state.returning.pop(action.microbatch))
            torch.autograd.backward([root], [gradient])

    def _cast_hidden(self, step: Step, action: Action) -> None:
        own = None
        if self._index == self._last:
            (own,) = step.outputs.pop((self._last_stage, action.microbatch))
        self._state.hidden[action.microbatch] = self._broadcast(own, self._program.hidden, self._last, action)

    def _scores(self, step: Step, action: Action) -> None:
        """Logits, and what this rank can say of them alone."""
        microbatch, state = action.microbatch, self._state
        self._axes.stream.microbatch = microbatch
        (hidden,) = self._received(state.hidden.pop(microbatch))
        entered = self._module.enter(hidden.requires_grad_())
        state.entered[microbatch] = hidden, entered
        state.logits[microbatch] = self._head.logits(entered, self._module.targets(*self._inputs(step, action)))
        if self._algorithm == "naive":
            return
        state.statistics[microbatch] = self._head.statistics(state.logits[microbatch])
        if self._is_early:
            self._head.input_gradient_terms(state.logits[microbatch])

    def _exchange_top(self, step: Step, action: Action) -> None:
        with self._beside():
            top = self._state.logits[action.microbatch].top
            self._state.tops[action.microbatch] = reduce_max_(top, self._plane.meant_for(action), async_op=True)

    def _exponentials(self, step: Step, action: Action) -> None:
        self._join(self._state.tops.pop(action.microbatch))
        logits = self._state.logits[action.microbatch]
        self._state.statistics[action.microbatch] = self._head.statistics(logits)

    def _exchange_statistics(self, step: Step, action: Action) -> None:
        with self._beside():
            own = self._state.statistics.pop(action.microbatch)
            self._state.gathered[action.microbatch] = gather_stack(own, self._plane.meant_for(action))

    def _table_gradient(self, step: Step, action: Action) -> None:
        microbatch = action.microbatch
        self._settle(step, action)
        with_input = self._program.hidden.needs_grad and self._algorithm != "vocab-2"
        term = self._head.backward(self._state.logits.pop(microbatch), with_input=with_input)
        if term is not None:
            self._state.gradients[microbatch] = term

    def _sum_gradient(self, step: Step, action: Action) -> None:
        """Sum the terms of the input's gradient, pulled back to how the last stage made it, if anything of what makes
        it is trained."""
        with self._beside():
            if self._algorithm == "vocab-2":
                self._settle(step, action)
            hidden, entered = self._state.entered.pop(action.microbatch)
            term = self._state.gradients.pop(action.microbatch, None)
            message = Message(())
            if self._program.hidden.needs_grad:
                (gradient,) = torch.autograd.grad(entered, hidden, term)
                message = self._reduce(gradient.contiguous(), self._last, action)
        if self._index == self._last:
            step.returning[self._last_stage, action.microbatch] = message

    def _settle(self, step: Step, action: Action) -> None:
        """Once the statistics are there, on every rank: the loss, and its gradient by each token's entropy."""
        self._join()
        if action.microbatch not in self._state.gathered:
            return
        gathered, work = self._state.gathered.pop(action.microbatch)
        wait_all([work])
        logits = self._state.logits[action.microbatch]
        entropy = self._head.entropy(logits, gathered).requires_grad_()
        loss = self._module.tail(entropy, *self._inputs(step, action), *step.totals.get(VOCABULARY, ()))
        (slope,) = torch.autograd.grad(loss, entropy, self._scaler.root(loss) if self._scaler else None)
        logits.scale = slope.to(gathered.dtype) * logits.counts
        if self._index == self._last:
            step.loss += loss.detach()
        if self._is_early:
            self._state.gradients[action.microbatch] = self._head.corrected(logits)

    def _inputs(self, step: Step, action: Action) -> tuple[Tensor, ...]:
        return batches.parts(step.batch, self._program, action.microbatch, self._axes)

    def _broadcast(self, own: Tensor | None, wire: Wire, source: int, action: Action) -> Message:
        if own is None:
            own = torch.empty(wire.shape, dtype=dtype_of(wire.dtype), device=self._axes.device)
        whole = own.contiguous()
        with self._beside():
            return _message(whole, start_broadcast_(whole, self._line.meant_for(action), source))

    def _reduce(self, term: Tensor, destination: int, action: Action) -> Message:
        """The sum over the pipeline, at its index ``destination``; others keep their term until it is sent."""
        with self._beside():
            work = reduce_to_(term, self._line.meant_for(action), destination)
        if self._index != destination and work is not None:
            self._outbox.add(work, term)
        return _message(term, work)

    def _received(self, message: Message) -> tuple[Tensor, ...]:
        self._join()
        return message.wait()

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On CUDA, run on the stream of exchanges, after what is on the current stream so far."""
        if self._aside is None or torch.cuda.current_stream(self._axes.device) == self._aside:
            yield
            return
        self._aside.wait_stream(torch.cuda.current_stream(self._axes.device))
        with torch.cuda.stream(self._aside):
            yield

    def _join(self, work: dist.Work | None = None) -> None:
        """The current stream goes on after ``work`` and after the stream of exchanges, if it is another."""
        wait_all([work])
        if self._aside is not None:
            current = torch.cuda.current_stream(self._axes.device)
            if current != self._aside:
                current.wait_stream(self._aside)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _message(tensor: Tensor, work: dist.Work | None) -> Message:
    return Message((tensor,), () if work is None else (work,))


def _groups(axes: Axes) -> tuple[Axis, Axis]:
    """Communicators of the vocabulary: this rank's pipeline, and all ranks that hold rows (pipeline x tp)."""
    line, plane = axes["pp"].ranks, axes.mesh.group(axes.rank, "pp", "tp")
    own = subgroups(axes, {line: "mesh_pp_vocabulary"})[line]
    return own, own if plane == line else subgroups(axes, {plane: "mesh_pp_tp_vocabulary"})[plane]
