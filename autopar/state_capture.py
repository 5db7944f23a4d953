"""What a model keeps from one step to the next elsewhere than in buffers: refused where it computes with that.

A graph begins anew with each step. Where a model's code assigns a tensor or a number to a module's name, another
capture begins with what the next step would find there, and shows whether anything reads it. What is made of numbers
alone (tables of a rotary embedding) is the same at each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import torch
from torch import Tensor, fx, nn

from autopar.errors import CaptureError
from autopar.graph import info, op_name
from autopar.value_capture import KnownValues

_NOTHING: Final = object()


class Graph(Protocol):
    """Of what was captured, what is looked at here."""

    graph: fx.Graph
    nodes: list[fx.Node]
    constants: dict[str, Tensor]


class Kept:
    """What the forward pass between :meth:`begin` and :meth:`end` assigns to names of the model's modules."""

    def __init__(self, model: nn.Module, known: KnownValues) -> None:
        self._model, self._known = model, known
        self._before: dict[tuple[str, str], Any] = {}
        self._found: dict[tuple[str, str], Any] = {}

    def begin(self) -> None:
        self._before = _attributes(self._model)

    def end(self) -> None:
        after = _attributes(self._model)
        self._found = {at: value for at, value in after.items() if _differ(value, self._before.get(at))}
        tables = {at: x for at, x in self._found.items() if isinstance(x, Tensor) and self._known.tells(x)}
        numbers = {at for at, value in self._found.items() if not isinstance(value, Tensor)}
        for at in (*tables, *(numbers if tables else ())):  # numbers beside tables say for what these were made
            del self._found[at]

    def forget(self) -> None:
        """Let the modules have no tensors by names that the pass gave them: these have no values."""
        modules = dict(self._model.named_modules())
        for (path, name), value in _attributes(self._model).items():
            if isinstance(value, Tensor) and (path, name) not in self._before and self._before:
                delattr(modules[path], name)

    def check(self, first: Graph, again: Callable[[], Graph]) -> None:
        """``again`` captures once more. Raises CaptureError where a later step would compute with what one kept."""
        if not self._found:
            return
        modules = dict(self._model.named_modules())
        device = next(self._model.parameters()).device
        before = {at: getattr(modules[at[0]], at[1], _NOTHING) for at in self._found}
        placed = {
            at: torch.zeros(value.shape, dtype=value.dtype, device=device) if isinstance(value, Tensor) else value
            for at, value in self._found.items()
        }
        for (path, name), value in placed.items():
            setattr(modules[path], name, value)
        try:
            second = again()
        finally:
            for (path, name), value in before.items():
                delattr(modules[path], name) if value is _NOTHING else setattr(modules[path], name, value)
        used = {x.untyped_storage() for x in _read_constants(second)}
        for (path, name), value in placed.items():
            is_read = isinstance(value, Tensor) and value.untyped_storage() in used
            if is_read or (not isinstance(value, Tensor) and _text(first) != _text(second)):
                raise CaptureError(
                    f"{type(modules[path]).__name__} {path!r} keeps {name!r} for the next step and computes with it, "
                    "which a step that is compiled doesn't see; make it a part of the batch, or compute without it"
                )


def check_averages(model: nn.Module) -> None:
    """Raise CaptureError where a norm counts its batches, and computes with that."""
    for name, module in model.named_modules():
        is_norm = isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm)
        if is_norm and module.training and module.track_running_stats and module.momentum is None:
            raise CaptureError(
                f"{type(module).__name__} {name!r} has momentum=None: its averages count batches so far, which isn't "
                "done here; give it a number (momentum=0.1)"
            )


def _attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Tensors, numbers and None that modules have by names of their own, by path and name."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if value is None or isinstance(value, Tensor | int | float)
    }


def _differ(value: Any, before: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(before, Tensor):
        return value is not before
    return bool(value != before)


def _read_constants(graph: Graph) -> list[Tensor]:
    read = {operand for node in graph.nodes for operand in node.all_input_nodes if operand.op == "placeholder"}
    names = {info(node).name for node in read}
    return [constant for name, constant in graph.constants.items() if name in names]


def _text(graph: Graph) -> list[tuple[str, str, str, str]]:
    return [(node.name, op_name(node), str(node.args), str(node.kwargs)) for node in graph.nodes]
