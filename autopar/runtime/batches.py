"""From the global batch to the part that one rank needs of one microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from autopar.errors import BatchError
from autopar.runtime.axes import Axes
from autopar.runtime.modules import dtype_of
from autopar.runtime.program import Input, Program, VocabularyProgram


def check(batch: Mapping[str, Tensor], inputs: Iterable[Input]) -> None:
    """Raise BatchError where an input is missing, or has another shape or dtype than the program expects."""
    for wanted in inputs:
        given = batch.get(wanted.path)
        if given is None:
            there = ", ".join(map(repr, batch)) or "nothing"
            raise BatchError(f"the batch has no {wanted.path!r}; it has {there}")
        expected = f"shape {tuple(wanted.shape)} and dtype {wanted.dtype}"
        if tuple(given.shape) != tuple(wanted.shape) or given.dtype != dtype_of(wanted.dtype):
            raise BatchError(
                f"batch input {wanted.path!r} has shape {tuple(given.shape)} and dtype "
                f"{str(given.dtype).removeprefix('torch.')}, but the program was compiled for {expected}; "
                "give it batches like that, or compile for this one"
            )


def part(whole: Tensor, given: Input, program: Program | VocabularyProgram, microbatch: int, axes: Axes) -> Tensor:
    """This rank's rows of one microbatch, on its device. Microbatches are contiguous, dp's slices within.

    Raises BatchError where the rows don't divide.
    """
    if given.batch_dim is None:
        return whole.to(axes.device)
    replicas = axes.mesh.replicas
    rows, rest = divmod(given.shape[given.batch_dim], program.microbatches * replicas)
    if rest:
        raise BatchError(
            f"batch input {given.path!r} has {given.shape[given.batch_dim]} rows, which don't divide over "
            f"{program.microbatches} microbatches x dp {replicas}"
        )
    start = (microbatch * replicas + axes["dp"].index * axes["ep"].size + axes["ep"].index) * rows
    return whole.narrow(given.batch_dim, start, rows).to(axes.device, non_blocking=True).contiguous()


def parts(
    batch: Mapping[str, Tensor], program: Program | VocabularyProgram, microbatch: int, axes: Axes
) -> tuple[Tensor, ...]:
    """All inputs of a stage for one microbatch."""
    return tuple(part(batch[item.path], item, program, microbatch, axes) for item in program.inputs)
