"""From an unmodified model to the graph that planning starts from: captured, made functional, folded, canonical."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
from torch import nn

from autopar.batch import Structure, flatten
from autopar.capture import Flat, Loss, capture
from autopar.graph import Model, verify
from autopar.mesh import check_count
from autopar.passes.batch_statistics import batch_statistics
from autopar.passes.canonicalize import canonicalize
from autopar.passes.captured_loops import check_loops
from autopar.passes.check_indices import check_indices
from autopar.passes.check_products import check_products
from autopar.passes.composites import composites
from autopar.passes.embedding_bags import embedding_bags
from autopar.passes.expert_loops import expert_loops
from autopar.passes.experts import experts
from autopar.passes.fold import fold
from autopar.passes.functionalize import functionalize
from autopar.passes.mixed_precision import LOWER, has_autocast, mixed_precision
from autopar.passes.normalize_losses import normalize_losses
from autopar.passes.paired_rows import paired_rows
from autopar.passes.place_casts import place_casts
from autopar.passes.row_lookups import row_lookups
from autopar.passes.shifted_losses import has_shifted_losses, shifted_losses
from autopar.passes.untrained import untrained
from autopar.passes.working_copies import working_copies

_COLLECTED: Final = 20_000
"""So many more objects are made than freed between two collections, of which Python's own settings make one every 700.
Graphs that planning is through with are cycles of fewer, and together take some megabytes."""
_AGAIN: Final = 200
"""So many collections later what was left by them is walked a second time, of Python's own settings ten."""


@contextmanager
def settled() -> Iterator[None]:
    """Within, Python's cyclic collector leaves alone what is there already, and walks what is made within more rarely:
    most of both lives on, and walking it again and again is a tenth of capture and planning. Afterwards all of it is
    old, which nothing but a full collection walks."""
    if gc.get_freeze_count():  # somebody else's, who will want it to stay so
        yield
        return
    young, middle, old = gc.get_threshold()
    gc.freeze()
    if young:  # 0: somebody turned it off
        gc.set_threshold(max(young, _COLLECTED), max(middle, _AGAIN), old)
    try:
        yield
    finally:
        gc.freeze()  # what was made within
        gc.set_threshold(young, middle, old)
        gc.unfreeze()


@dataclass
class Captured:
    """A model traced once, to be planned any number of times: for other GPUs, clusters and pins.

    :func:`autopar.compile` and :func:`autopar.plan` take it in the place of the model, its sample and its loss. What
    is kept is the graph alone: weights are the model's when a job is compiled. ``dims`` of the batch's tensors are rows
    and positions of sequences. ``precision`` ("bf16", "fp16"; "model": as the model is written) is that of an autocast
    around the call, whose dtypes the model's code may see, so that another one is another capture. Raises ArgumentError
    for ``dims`` that no tensor has.
    """

    model: nn.Module
    sample: Any
    loss: Loss | None = None
    dims: tuple[int, int] = (0, 1)
    precision: str = "model"
    _prepared: dict[str, Prepared] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, dim in zip(("batch_dim", "seq_dim"), self.dims, strict=True):
            check_count(f"{name}=", dim, least=0)

    @cached_property
    def flat(self) -> Flat:
        """The loss as one graph without writes to tensors, traced when first asked for. Passes work on copies.

        Raises CaptureError and BatchError.
        """
        dtype = LOWER.get(self.precision)
        rows, positions = self.dims
        with settled():
            flat = capture(self.model, self.sample, loss=self.loss, batch_dim=rows, seq_dim=positions, autocast=dtype)
            flat = check_indices(check_products(embedding_bags(functionalize(flat))), flatten(self.sample)[0])
            return composites(normalize_losses(row_lookups(expert_loops(check_loops(flat)))))

    @cached_property
    def shifts(self) -> bool:
        """Whether ranks that share sequences need a graph of their own (:mod:`autopar.passes.shifted_losses`)."""
        return has_shifted_losses(self.flat)

    @property
    def constants(self) -> dict[str, torch.Tensor]:
        """Tensors that the model makes at trace time and that are no parameters or buffers of it."""
        return self.flat.constants

    @property
    def structure(self) -> Structure:
        return flatten(self.sample)[1]

    def on(self, device: str) -> Prepared:
        """As planning for this kind of device starts from it: casts are those of its autocast."""
        if device not in self._prepared:
            self._prepared[device] = Prepared(self, device)
        return self._prepared[device]


@dataclass
class Prepared:
    """The graphs that planning starts from, ``[False]`` for ranks that have whole sequences, ``[True]`` for ranks that
    share them (``cp > 1``); made when first asked for, and the same graph unless losses are shifted.

    Casts are those of an autocast on ``device`` ("cuda" or "cpu"), or of the model's own regions alone.
    """

    captured: Captured
    device: str
    _made: dict[bool, Model] = field(default_factory=dict, init=False, repr=False)

    def __getitem__(self, splits_sequences: bool) -> Model:
        """Not to be changed: passes work on a :meth:`~autopar.graph.Model.copy`."""
        splits = splits_sequences and self.captured.shifts
        if splits not in self._made:
            self._made[splits] = self._folded(splits)
        return self._made[splits]

    def _folded(self, splits_sequences: bool) -> Model:
        flat, precision = self.captured.flat.copy(), self.captured.precision
        if splits_sequences:
            flat = shifted_losses(flat)
        casts = has_autocast(flat, precision)
        if casts:
            flat = mixed_precision(flat, self.device, precision)
        folded = untrained(fold(paired_rows(flat, flatten(self.captured.sample)[0])))
        folded = working_copies(canonicalize(place_casts(folded))) if casts else canonicalize(folded)
        verify(experts(batch_statistics(folded)), "experts")
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
    """One of the graphs of :class:`Prepared`, constants of the trace, and the batch's structure."""
    captured = Captured(model, sample, loss, dims, precision)
    return captured.on(device)[splits_sequences], captured.constants, captured.structure
