"""Compiling what was traced before: tracing is most of what a test of a small model takes.

Two models are the same where all that they hold is (classes and functions by name, tensors by value), and what they are
called with is. What can't be said so (a class that a test defines within itself) is traced each time.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import OrderedDict
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import autopar
from autopar.graph import Model
from autopar.preparation import Captured

_MOST: Final = 64  # that are remembered
_known: OrderedDict[bytes, Captured] = OrderedDict()


def compile_shared(model: nn.Module, gpus: int, **given: Any) -> autopar.ParallelModel:
    """:func:`autopar.compile`, which traces no model that is the same as another one."""
    if torch.is_autocast_enabled("cpu"):
        return autopar.compile(model, gpus, **given)  # it says what it takes of that
    plan, sample, loss = given.get("plan"), given.pop("sample"), given.pop("loss", None)
    dims = given.pop("batch_dim", 0), given.pop("seq_dim", 1)
    precision = given.get("precision", plan.options.precision if plan is not None else "model")
    return autopar.compile(captured(model, sample, loss, dims, precision), gpus, **given)


def captured(
    model: nn.Module, sample: Any, loss: Any = None, dims: tuple[int, int] = (0, 1), precision: str = "model"
) -> Captured:
    """Of this very model, with the graphs of one that was the same; traced when first asked for."""
    found = Captured(model, sample, loss, dims, precision)
    key = _key(model, sample, loss, dims, precision)
    if key is None:
        return found
    known = _known.pop(key, found)
    _known[key] = known
    while len(_known) > _MOST:
        _known.popitem(last=False)
    if known is not found and "flat" in vars(known):
        vars(found)["flat"] = known.flat
        found._prepared.update(known._prepared)
    return found


def graph_of(model: nn.Module, sample: Any, loss: Any = None, *, splits_sequences: bool = False) -> Model:
    """What :func:`autopar.api.prepare` makes, as planning starts from it; it may be changed."""
    return captured(model, sample, loss).on("cpu")[splits_sequences].copy()


def _key(*given: Any) -> bytes | None:
    """None where something can't be told from what is like it. Modes that see torch's functions change what is
    traced."""
    modes = [type(mode) for mode in _get_current_function_mode_stack()]
    content = io.BytesIO()
    try:
        _Content(content).dump((given, torch.get_default_dtype(), modes))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):
        return None
    return hashlib.sha256(content.getvalue()).digest()


class _Content(pickle.Pickler):
    """Tensors by their values; one that is there twice is told from two that are equal."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._numbers: dict[int, int] = {}
        self._tensors: list[torch.Tensor] = []  # alive, so that no other one has the same number

    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return None
        if id(item) in self._numbers:
            return self._numbers[id(item)]
        self._numbers[id(item)] = len(self._numbers)
        self._tensors.append(item)
        plain = item.detach()
        values = b"" if plain.is_meta else plain.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        kind = (type(item).__name__, tuple(item.shape), item.stride(), str(item.dtype), str(item.device))
        return (*kind, item.requires_grad, hashlib.sha256(values).digest())
