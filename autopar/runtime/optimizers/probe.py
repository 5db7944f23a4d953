"""What an optimizer's class does, found out by trying it on two small random matrices.

Whether it may be run on parts of a parameter is asked of its results: a matrix is trained whole, then in halves of rows
and in halves of columns, each half by an optimizer of its own, as ranks would. A table of names would not know the
classes that users write, nor what options change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from autopar.errors import ArgumentError
from autopar.runtime.optimizers.likeness import Likeness, options
from autopar.storages import unobserved

STEPS: Final = 2
"""The second sees the state that the first leaves."""

TOLERANCES: Final = {torch.float64: 1e-12, torch.float32: 1e-4}
"""Largest relative difference that is rounding. float32 for classes that can't do float64."""

QUANTIZED_TOLERANCE: Final = 2e-2
"""For classes that keep moments in 8 bits, blocks of which share a scale: a part has other blocks than the whole, so
results differ by the rounding of 8 bits, which the user has chosen. Relative, in the 2-norm of the change."""

_ROWS, _COLUMNS = 8, 12
_LR = 0.1  # a schedule may begin with a learning rate of 0, which would hide everything


@dataclass(frozen=True)
class Traits:
    """Of one optimizer.

    ``elementwise``: right on any part of a parameter. ``independent``: right where other parameters are another
    optimizer's. ``separable``: right where its parameters are stepped one after another. ``moments``: names of state
    tensors of the parameter's shape; ``strange``: name and shape (for a parameter of 8 x 12) of those that are neither
    that, nor scalars, nor 8-bit moments and their scales.
    """

    elementwise: bool
    independent: bool
    separable: bool
    moments: frozenset[str]
    strange: Mapping[str, tuple[int, ...]]


class UntriedError(ArgumentError):
    """A class that this machine can't try: one that needs another device, or other tensors than small matrices."""


def refuse(optimizer: Optimizer) -> None:
    """Raise ArgumentError for a class that can't train a compiled model on any mesh."""
    title = type(optimizer).__name__
    needed = [
        name
        for name, parameter in list(inspect.signature(type(optimizer).step).parameters.items())[1:]
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if parameter.kind is not parameter.VAR_POSITIONAL
    ]
    if isinstance(optimizer, LBFGS) or needed:
        raise ArgumentError(
            f"optimizer {title} evaluates the model again within a step (step needs {needed or ['closure']}), which a "
            "compiled step can't do; use one that steps by the gradient, such as AdamW"
        )
    if isinstance(optimizer, SparseAdam):
        raise ArgumentError(
            f"optimizer {title} takes sparse gradients only, and ranks sum dense ones; use Adam or AdamW instead"
        )


def traits(optimizer: Optimizer, device: torch.device) -> Traits:
    """Those that hold for all parameter groups, tried on ``device``. Raises UntriedError."""
    distinct = {_signature(group): group for group in optimizer.param_groups}
    likeness = Likeness.of(optimizer)
    with unobserved():  # the rank's own tensors may be fake ones, or counted
        found = [_try(likeness, group, device) for group in distinct.values()]
    return Traits(
        elementwise=all(one.elementwise for one in found),
        independent=all(one.independent for one in found),
        separable=all(one.separable for one in found),
        moments=frozenset(name for one in found for name in one.moments),
        strange={name: shape for one in found for name, shape in one.strange.items()},
    )


def _signature(group: Mapping[str, Any]) -> str:
    """Equal for groups that differ in figures only that can't change what depends on what."""
    return repr(sorted((name, value) for name, value in options(group).items() if name not in ("lr", "weight_decay")))


def _try(likeness: Likeness, group: Mapping[str, Any], device: torch.device) -> Traits:
    chosen = options(group)
    if isinstance(chosen.get("lr"), float | Tensor):
        chosen["lr"] = torch.full_like(chosen["lr"], _LR) if isinstance(chosen["lr"], Tensor) else _LR
    problem: Exception | None = None
    for dtype, tolerance in TOLERANCES.items():
        matrices = _matrices(dtype, device)
        try:
            with torch.random.fork_rng(devices=[]):
                return _measure(lambda tensors: likeness.over([{**chosen, "params": tensors}]), matrices, tolerance)
        except Exception as error:  # whatever a user's class raises
            problem = problem or error
    title = likeness.kind.__name__
    why = next(iter(str(problem).splitlines()), type(problem).__name__)
    raise UntriedError(
        f"optimizer {title} doesn't step on a small dense matrix ({why}), so it is not known "
        "whether it may be run on parts of parameters; use another one, or a mesh where no rank stores parts: tp=1, "
        "zero=0"
    ) from problem


def _matrices(dtype: torch.dtype, device: torch.device) -> list[list[Tensor]]:
    """Two matrices, each followed by its gradient in every step, no row or column of which is like another."""
    random = torch.Generator().manual_seed(0)
    slope = torch.outer(torch.arange(1.0, _ROWS + 1), torch.arange(1.0, _COLUMNS + 1)) / _COLUMNS
    drawn = [
        [torch.randn(_ROWS, _COLUMNS, generator=random) * (slope if step else 0.1) for step in range(STEPS + 1)]
        for _ in range(2)
    ]
    return [[tensor.to(device, dtype) for tensor in matrix] for matrix in drawn]


Make = Callable[[Sequence[nn.Parameter]], Optimizer]


def _measure(make: Make, matrices: list[list[Tensor]], tolerance: float) -> Traits:
    first, second = matrices
    alone, state = _train(make, [first])
    other, _ = _train(make, [second])
    moments, strange, quantized = _kinds(state)
    limit = QUANTIZED_TOLERANCE if quantized else tolerance

    def same(found: list[Tensor], expected: list[Tensor]) -> bool:
        return all(_distance(a, b) <= limit for a, b in zip(found, expected, strict=True))

    halves = [_cut(first, 0), _cut(first, 1)]
    parts = [torch.cat([_train(make, [half])[0][0] for half in pair], dim) for dim, pair in enumerate(halves)]
    return Traits(
        elementwise=same(parts, alone * 2) and not strange,
        independent=same(_train(make, matrices)[0], alone + other),
        separable=same(_train(make, matrices, one_by_one=True)[0], alone + other),
        moments=moments,
        strange=strange,
    )


def _train(
    make: Make, matrices: Sequence[Sequence[Tensor]], *, one_by_one: bool = False
) -> tuple[list[Tensor], Mapping[str, Any]]:
    """How each matrix has changed, and the state of the first. ``one_by_one``: only one has a gradient at a time."""
    parameters = [nn.Parameter(start.clone()) for start, *_ in matrices]
    optimizer = make(parameters)
    for step in range(1, STEPS + 1):
        gradients = {p: matrix[step].clone() for p, matrix in zip(parameters, matrices, strict=True)}
        for turn in [{p} for p in parameters] if one_by_one else [set(parameters)]:
            for parameter in parameters:
                parameter.grad = gradients[parameter] if parameter in turn else None
            optimizer.step()
    changes = [p.detach() - start for p, (start, *_) in zip(parameters, matrices, strict=True)]
    return changes, optimizer.state[parameters[0]]


def _cut(matrix: Sequence[Tensor], dim: int) -> list[list[Tensor]]:
    pairs = [tensor.chunk(2, dim) for tensor in matrix]
    return [[pair[half].contiguous() for pair in pairs] for half in range(2)]


def _kinds(state: Mapping[str, Any]) -> tuple[frozenset[str], dict[str, tuple[int, ...]], bool]:
    """Moments, strange tensors, and whether any moment has 8 bits: scales of its blocks are not strange then."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.numel() != 1}
    shape = (_ROWS, _COLUMNS)
    eight_bits = {n for n, t in tensors.items() if t.numel() == _ROWS * _COLUMNS and t.dtype.itemsize == 1}
    moments = {n for n, t in tensors.items() if t.shape == shape and t.is_floating_point()} - eight_bits
    strange = {} if eight_bits else {n: tuple(t.shape) for n, t in tensors.items() if t.shape != shape}
    return frozenset(moments), strange, bool(eight_bits)


def _distance(found: Tensor, expected: Tensor) -> float:
    """Relative to ``expected``, which may be zero."""
    size = float(torch.linalg.vector_norm(expected))
    return float(torch.linalg.vector_norm(found - expected)) / (size or 1.0)
