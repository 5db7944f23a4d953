"""What a rank must know beside the code of its stage: the interface of one emitted program, as values.

An emitted module ends with ``PROGRAM = Program(...)``, written with these classes, so that a written
directory runs without the compiler, and so that the text and its interface can't drift apart.
All shapes are local to one rank and one microbatch unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tensor:
    """A value that crosses a stage boundary: its name in the emitted text, local shape, dtype name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    needs_grad: bool = True


@dataclass(frozen=True)
class Input:
    """A tensor of the batch that the stage reads.

    ``path`` is where it lies in the call (``"input_ids"``, ``"0"``, ``"1.labels"``); ``shape`` is that of the
    whole global batch; ``batch_dim`` is the dim that microbatches and ``dp`` split, None: every rank takes it whole.
    """

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    batch_dim: int | None


@dataclass(frozen=True)
class Total:
    """A scalar computed from the batch alone, summed over microbatches and ``axes`` before the step.

    Example: the number of tokens that count in the loss, the denominator of its mean.
    """

    name: str
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Parameter:
    """How one parameter or buffer is stored.

    ``shape`` is the local one, ``full_shape`` the model's; ``types`` its spmd type per axis (text; absent: I);
    ``reduce`` the axes over which its gradient is a pending sum after the last microbatch;
    ``shared_stages`` all pipeline stages that hold a copy of it (tied weights), else empty;
    ``aliases`` further names the model knows it by.
    """

    name: str
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    dtype: str
    types: dict[str, str] = field(default_factory=dict)
    reduce: tuple[str, ...] = ()
    trainable: bool = True
    is_buffer: bool = False
    shared_stages: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """The interface of one stage.

    ``Stage.totals(*inputs)`` gives the local, per-microbatch value of each of ``totals`` (absent where empty);
    ``Stage.forward(*receives, *inputs, *totals)`` gives a tuple of the values ``sends``, or on the last stage the
    loss, whose sum over microbatches and over ``loss_axes`` is the model's loss. ``mesh`` is sizes per axis.
    """

    stage: int
    stages: int
    mesh: dict[str, int]
    microbatches: int
    receives: tuple[Tensor, ...]
    inputs: tuple[Input, ...]
    totals: tuple[Total, ...]
    sends: tuple[Tensor, ...]
    parameters: tuple[Parameter, ...]
    loss_axes: tuple[str, ...] = ()
    plan_digest: str = ""

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1
