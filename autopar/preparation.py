"""From an unmodified model to the graph that planning starts from: captured, made functional, folded, canonical."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopar.batch import Structure, flatten
from autopar.capture import Flat, Loss, capture
from autopar.graph import Model, verify
from autopar.passes.canonicalize import canonicalize
from autopar.passes.captured_loops import check_loops
from autopar.passes.check_products import check_products
from autopar.passes.expert_loops import expert_loops
from autopar.passes.experts import experts
from autopar.passes.fold import fold
from autopar.passes.functionalize import functionalize
from autopar.passes.mixed_precision import LOWER, has_autocast, mixed_precision
from autopar.passes.normalize_losses import normalize_losses
from autopar.passes.place_casts import place_casts
from autopar.passes.shifted_losses import has_shifted_losses, shifted_losses
from autopar.passes.working_copies import working_copies


@dataclass
class Prepared:
    """A model as planning starts from it, ``[False]`` for ranks that have whole sequences, ``[True]`` for ranks that
    share them (``cp > 1``); made when first asked for, and the same graph unless losses are shifted.

    ``dims`` of the batch's tensors are rows and positions of sequences. Casts are those of an autocast in ``precision``
    ("bf16", "fp16"; "model": of the model's own regions alone) on ``device`` ("cuda" or "cpu").
    """

    model: nn.Module
    sample: Any
    loss: Loss | None
    dims: tuple[int, int]
    device: str
    precision: str
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    _made: dict[bool, Model] = field(default_factory=dict)
    _shifts: bool = False

    def __getitem__(self, splits_sequences: bool) -> Model:
        """Not to be changed: passes work on a :meth:`~autopar.graph.Model.copy`."""
        if splits_sequences not in self._made:
            other = self._made.get(not splits_sequences)
            self._made[splits_sequences] = other if other and not self._shifts else self._folded(splits_sequences)
        return self._made[splits_sequences]

    @property
    def structure(self) -> Structure:
        return flatten(self.sample)[1]

    def _captured(self) -> Flat:
        dtype = LOWER.get(self.precision)
        rows, positions = self.dims
        flat = capture(self.model, self.sample, loss=self.loss, batch_dim=rows, seq_dim=positions, autocast=dtype)
        self.constants = flat.constants
        return normalize_losses(expert_loops(check_loops(check_products(functionalize(flat)))))

    def _folded(self, splits_sequences: bool) -> Model:
        flat = self._captured()
        self._shifts = has_shifted_losses(flat)
        if splits_sequences:
            flat = shifted_losses(flat)
        if has_autocast(flat, self.precision):
            flat = mixed_precision(flat, self.device, self.precision)
            folded = working_copies(canonicalize(place_casts(fold(flat))))
        else:
            folded = canonicalize(fold(flat))
        verify(experts(folded), "experts")
        return folded


def prepare(
    model: nn.Module,
    sample: Any,
    loss: Loss | None = None,
    dims: tuple[int, int] = (0, 1),
    device: str = "cpu",
    precision: str = "model",
    splits_sequences: bool = False,
) -> tuple[Model, dict[str, torch.Tensor], Structure]:
    """One of the graphs of :class:`Prepared`, lifted constants, and the batch's structure."""
    prepared = Prepared(model, sample, loss, dims, device, precision)
    return prepared[splits_sequences], prepared.constants, prepared.structure
