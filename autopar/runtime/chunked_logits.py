"""A head of which each rank holds some classes, in chunks of tokens: a rank never has logits of all its tokens.

:class:`ChunkedHead` runs the passes of :class:`~autopar.runtime.logits.ShardedHead` chunk by chunk. ``S`` makes a
chunk's logits, takes its statistics (for ``vocab-2``, the terms of the input's gradient too) and drops them; ``T``
makes them again, one product more. From the one to the other only ``[t, h]`` and numbers per token are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.runtime.entropy import Targets, slices, wide_dtype
from autopar.runtime.logits import ShardedHead, Tokens
from autopar.runtime.program import VocabularyProgram


@dataclass(kw_only=True)
class ChunkedLogits(Tokens):
    """What one microbatch keeps from ``S`` to ``T``."""

    entered: Tensor  # [t, h]
    statistics: Tensor  # [4, t]; the sums are under this rank's own maximum


class ChunkedHead:
    """A :class:`~autopar.runtime.logits.ShardedHead` in ``program.chunks`` parts of the tokens, with the same passes.

    ``early``: the terms of the input's gradient are made with the logits.
    """

    def __init__(self, module: nn.Module, program: VocabularyProgram, start: int, *, early: bool) -> None:
        self._part = ShardedHead(module, program, start)
        self._chunks, self._early = program.chunks, early
        self.entropy, self.corrected = self._part.entropy, self._part.corrected

    def logits(self, entered: Tensor, targets: Tensor) -> ChunkedLogits:
        """From ``[t, h]`` and ``[t]``. Raises IndexError or RuntimeError for a target that is no class."""
        entered, found = entered.detach(), self._part.targets(targets)
        chunks = slices(len(entered), self._chunks)
        parts, statistics = zip(*(self._scores(entered[c], found[c]) for c in chunks), strict=True)
        whole = torch.cat(statistics, 1)
        return ChunkedLogits(
            targets=found,
            dtype=parts[0].dtype,
            top=whole[0].clone(),
            weighted=torch.cat([part.weighted for part in parts]) if self._early else None,
            fixed=torch.cat([part.fixed for part in parts]) if self._early else None,
            entered=entered,
            statistics=whole,
        )

    def _scores(self, entered: Tensor, targets: Targets) -> tuple[Tokens, Tensor]:
        """What remains of a chunk, and its statistics; the logits are gone when this returns."""
        part = self._part.logits_of(entered, targets)
        statistics = self._part.statistics(part)
        if self._early:
            self._part.input_gradient_terms(part)
        rest = Tokens(targets=targets, dtype=part.dtype, top=part.top, weighted=part.weighted, fixed=part.fixed)
        return rest, statistics

    def statistics(self, logits: ChunkedLogits) -> Tensor:
        """``[4, t]``: ``logits.top``, maybe of all ranks by now; sums under it; the target's logit; logits' sum."""
        own, sums, *others = logits.statistics
        return torch.stack([logits.top, sums * (own - logits.top).exp(), *others])

    def input_gradient_terms(self, logits: ChunkedLogits) -> None:
        """They were made with the logits."""

    def backward(self, logits: ChunkedLogits, *, with_input: bool) -> Tensor | None:
        """Gradients of the table; ``[t, h]``, this rank's term of the input's, if asked for.

        The table's are added up in float32 at least, and given to autograd at once, as if there were no chunks.
        """
        trained = self._part.trained
        totals = [torch.zeros_like(p, dtype=wide_dtype(p.dtype)) for p in trained]
        chunks = slices(len(logits.entered), self._chunks)
        terms = [self._add_gradients_(logits, chunk, totals, with_input=with_input) for chunk in chunks]
        for parameter, total in zip(trained, totals, strict=True):
            torch.autograd.backward([parameter], [total.to(parameter.dtype)])
        return torch.cat([term for term in terms if term is not None]) if with_input else None

    def _add_gradients_(
        self, logits: ChunkedLogits, chunk: slice, totals: Sequence[Tensor], *, with_input: bool
    ) -> Tensor | None:
        """A chunk's part of the table's gradients, added to ``totals``; its term of the input's."""
        part = self._part.logits_of(logits.entered[chunk], logits.targets[chunk])
        self._part.exponentials(part, logits, chunk)
        term, *gradients = self._part.gradients(part, with_input=with_input)
        for total, gradient in zip(totals, gradients, strict=True):
            assert gradient is not None
            total += gradient
        return term
