"""The arithmetic of a head of which each rank holds some classes; no communication here.

Notation of Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism" (arXiv 2411.05288, section 4),
for one microbatch of t tokens: logits ``y [t, rows]`` of this rank's classes, per token their maximum m',
``e = exp(y - m')``, s' = sum e. Over all ranks, m is the maximum and s the sum of ``s' exp(m' - m)``. With q the
gradient of the loss by a token's entropy and smoothing ε over C classes,

    entropy = log s + m - (1 - ε) y[target] - ε/C sum y          dy = q (e exp(m' - m) / s - (1 - ε) [target] - ε/C)

The product with the table and what shapes its result element by element are the model's own ops, and their
derivatives autograd's: soft-capped or scaled logits need nothing of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from autopar.runtime.entropy import Targets, gradient_, statistics_, wide_dtype
from autopar.runtime.program import VocabularyProgram


@dataclass(kw_only=True)
class Tokens:
    """What one microbatch keeps of its tokens between its passes. ``[t]`` is a number per token."""

    targets: Targets
    dtype: torch.dtype  # of the logits
    top: Tensor  # [t], the maximum that the exponentials are taken under
    weighted: Tensor | None = None  # [t, h]: e W
    fixed: Tensor | None = None  # [t, h]: what is subtracted from it
    correction: Tensor | None = None  # [t]: exp(m' - m) / s
    scale: Tensor | None = None  # [t]: q, zero for tokens without a target

    @property
    def counts(self) -> Tensor:
        """``[t]``: whether the token has a target."""
        return self.targets.counts


@dataclass(kw_only=True)
class Logits(Tokens):
    """The same with all logits, ``[t, c]``: a number per token and class of this rank."""

    leaf: Tensor  # [t, h], where the product's graph begins
    product: GradientEdge  # where it ends, at [t, c]
    inner: Tensor | None  # [t, c], where the graph of what shapes the product begins, if anything does
    made: GradientEdge  # where it ends, at the logits
    wide: Tensor  # [t, c], logits in float32 at least, then their exponentials


class ShardedHead:
    """Computes with the rows ``start`` to ``start + program.rows`` of the table, of which ``valid`` are no padding."""

    def __init__(self, module: nn.Module, program: VocabularyProgram, start: int) -> None:
        self._module: Any = module
        self._program = program
        self._start, self._valid = start, min(max(program.classes - start, 0), program.rows)
        self._shapes = hasattr(module, "shape")
        self.trained = [p for p in self._parameters() if p.requires_grad]

    def _parameters(self) -> Iterator[nn.Parameter]:
        for name in (self._program.weight, self._program.bias):
            if name is not None:
                yield self._module.get_parameter(name)

    def logits(self, entered: Tensor, targets: Tensor) -> Logits:
        """From ``[t, h]`` and ``[t]``. Raises IndexError or RuntimeError for a target that is no class."""
        return self.logits_of(entered, self.targets(targets))

    def targets(self, targets: Tensor) -> Targets:
        """From ``[t]`` classes of the whole vocabulary."""
        program = self._program
        return Targets.of(targets, self._start, program.rows, program.classes, program.ignore_index)

    def logits_of(self, entered: Tensor, targets: Targets) -> Logits:
        """As :meth:`logits`."""
        leaf = entered.detach().requires_grad_()
        product = self._module.product(leaf)
        inner = product.detach().requires_grad_() if self._shapes else None
        made = product if inner is None else self._module.shape(inner)
        edges = get_gradient_edge(product), get_gradient_edge(made)
        wide = self._own(made)
        wide[:, self._valid :] = torch.finfo(wide.dtype).min
        return Logits(
            targets=targets,
            dtype=made.dtype,
            top=wide.amax(1),
            leaf=leaf,
            product=edges[0],
            inner=inner,
            made=edges[1],
            wide=wide,
        )

    def _own(self, made: Tensor) -> Tensor:
        """The logits in float32 at least, to be overwritten: in their own memory where no backward reads that.

        That of a product doesn't; what shapes it (a tanh) may.
        """
        return made.detach().to(wide_dtype(made.dtype), copy=self._shapes)

    def statistics(self, logits: Logits) -> Tensor:
        """Take the exponentials; ``[4, t]``: maximum, their sum, the target's logit, the sum of logits."""
        smooth = bool(self._program.label_smoothing)
        return statistics_(logits.wide, logits.top, logits.targets, smooth=smooth, valid=self._valid)

    def input_gradient_terms(self, logits: Logits) -> None:
        """The terms of the input's gradient that need no other rank: ``e W``, and the rows of targets."""
        narrow = logits.wide.to(logits.dtype)
        logits.weighted = self._pull_back(logits, narrow)
        smoothing = self._program.label_smoothing
        logits.fixed = (1 - smoothing) * self._target_rows(logits)
        if smoothing:
            even = torch.zeros_like(narrow)
            even[:, : self._valid] = smoothing / self._program.classes
            logits.fixed += self._pull_back(logits, even)

    def entropy(self, logits: Tokens, gathered: Tensor) -> Tensor:
        """From all ranks' statistics ``[ranks, 4, t]``: the sum over tokens, or ``[t]``, as the model has it."""
        tops, sums, hits, smooths = gathered.unbind(1)
        top = tops.amax(0)
        total = (sums * (tops - top).exp()).sum(0)
        logits.correction = (logits.top - top).exp() / total
        smoothing = self._program.label_smoothing
        each = total.log() + top - (1 - smoothing) * hits.sum(0)
        if smoothing:
            each -= smoothing / self._program.classes * smooths.sum(0)
        each = each.masked_fill(~logits.counts, 0).to(logits.dtype)
        return each.sum() if self._program.reduction == "sum" else each

    def corrected(self, logits: Tokens) -> Tensor:
        """``[t, h]``: this rank's term of the input's gradient, from :meth:`input_gradient_terms`."""
        weighted, fixed = _there(logits.weighted), _there(logits.fixed)
        logits.weighted = logits.fixed = None
        term = weighted * _there(logits.correction).unsqueeze(1) - fixed
        return (term * _there(logits.scale).unsqueeze(1)).to(weighted.dtype)

    def backward(self, logits: Logits, *, with_input: bool) -> Tensor | None:
        """Gradients of the table; ``[t, h]``, this rank's term of the input's, if asked for. Ends ``logits``."""
        gradient = self._product_gradient(logits)
        into = [*([logits.leaf] if with_input else []), *self.trained]
        if into:
            torch.autograd.backward([logits.product], [gradient], inputs=into)
        return logits.leaf.grad if with_input else None

    def gradients(self, logits: Logits, *, with_input: bool) -> tuple[Tensor | None, ...]:
        """The same as values: the input's term (None unless asked for), then those of :attr:`trained`."""
        gradient = self._product_gradient(logits)
        into = [*([logits.leaf] if with_input else []), *self.trained]
        found = torch.autograd.grad([logits.product], into, [gradient]) if into else ()
        return found if with_input else (None, *found)

    def exponentials(self, part: Logits, whole: Tokens, chunk: slice) -> None:
        """Logits of a ``chunk`` of tokens become what ``S`` left of them in ``whole``, for :meth:`gradients`."""
        part.wide.sub_(whole.top[chunk].unsqueeze(1)).exp_()
        part.correction, part.scale = _there(whole.correction)[chunk], _there(whole.scale)[chunk]

    def _product_gradient(self, logits: Logits) -> Tensor:
        """Of the loss by the product, in the memory of the exponentials as far as that goes."""
        scale, program = _there(logits.scale), self._program
        wide = logits.wide.mul_((scale * _there(logits.correction)).unsqueeze(1))
        gradient = gradient_(wide, logits.targets, scale, program.label_smoothing, program.classes, self._valid)
        return self._shaped(logits, gradient.to(logits.dtype), keep=False)

    def _pull_back(self, logits: Logits, gradient: Tensor) -> Tensor:
        """From the logits to the input."""
        at_product = self._shaped(logits, gradient, keep=True)
        (pulled,) = torch.autograd.grad(logits.product, logits.leaf, at_product, retain_graph=True)
        return pulled

    def _shaped(self, logits: Logits, gradient: Tensor, *, keep: bool) -> Tensor:
        """From the logits to the product."""
        if logits.inner is None:
            return gradient
        (inner,) = torch.autograd.grad(logits.made, logits.inner, gradient, retain_graph=keep)
        return inner

    def _target_rows(self, logits: Logits) -> Tensor:
        """The gradient of the target's logit by the input: its row of the table, and the slope of its shape."""
        weight = self._module.get_parameter(self._program.weight).detach()
        rows = weight.index_select(self._program.weight_dim, logits.targets.rows).to(logits.leaf.dtype)
        rows = rows if self._program.weight_dim == 0 else rows.t()
        slope = logits.targets.here.to(rows.dtype)
        if logits.inner is not None:
            at = logits.inner.detach().gather(1, logits.targets.rows.unsqueeze(1)).requires_grad_()
            (inner,) = torch.autograd.grad(self._module.shape(at).sum(), at)
            slope = slope * inner.squeeze(1)
        made: Tensor = rows * slope.unsqueeze(1)
        return made


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "a pass ran before the one it needs"
    return tensor
