"""What a rank must know beside the code of its stage: the interface of one emitted program, as values.

An emitted module ends with ``PROGRAM = Program(...)``, written with these classes, so that a written
directory runs without the compiler, and so that the text and its interface can't drift apart.
All shapes are local to one rank and one microbatch unless a name says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar.spmd import S, parse, row_dims


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
    ``aliases`` further names the model knows it by. ``padding`` is ``(dim, rows)``: what is split over ranks has so
    many rows of zeros behind those of ``full_shape``; they exist on ranks only, never in a checkpoint.

    ``dtype`` is what the module computes with, ``master`` what the optimizer updates ("": the same). ``zero`` is over
    how many ranks of those that split tokens the rows (dim 0 of ``shape``) are stored: equal parts, zeros behind the
    last. ``order``: dim 0 has as many rows for each expert, and those of expert ``order[p]`` come ``p``-th before
    anything is split ((): as the model has them). ``stacked``: dim 0 is no dim of the model's but its parameters of
    this name with 0, 1 … for the ``*`` in it (the experts of a loop).
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
    padding: tuple[int, int] | None = None
    master: str = ""
    zero: int = 1
    order: tuple[int, ...] = ()
    stacked: bool = False

    @property
    def parts(self) -> tuple[Parameter, ...]:
        """The parameters of the model that :attr:`stacked` ones are made of, as a rank stores those it has: whole, but
        for what is split of the other dims."""
        if not self.stacked:
            return ()
        kinds = {axis: parse(text) for axis, text in self.types.items()}
        types = {axis: str(S(kind.dim - 1, kind.outer)) for axis, kind in kinds.items() if kind.dim > 0}
        one = replace(
            self,
            shape=self.shape[1:],
            full_shape=self.full_shape[1:],
            types=types,
            zero=1,
            order=(),
            stacked=False,
        )
        return tuple(replace(one, name=self.name.replace("*", str(i))) for i in range(self.full_shape[0]))

    @property
    def row_dims(self) -> int:
        """How many leading dims of ``shape`` are rows to ZeRO. Stacked parameters are split between them only."""
        return 1 if self.stacked else row_dims(self.shape, self.zero)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape that ``types`` split: the full one and its padding."""
        dim, rows = self.padding or (0, 0)
        return tuple(extent + rows * (d == dim) for d, extent in enumerate(self.full_shape))


@dataclass(frozen=True)
class Router:
    """A layer that gives tokens to experts; ``layer`` is its module path.

    ``split``: the axes on which ranks have different tokens of it. ``bias`` is the buffer ``[experts]`` that is added
    to scores for the choice of experts alone, where there is one. ``order[p]`` is the expert that is stored at place
    ``p`` ((): p itself). ``imbalance``: how many times its share the fullest rank is reckoned to get, where there are
    no values to say so. ``skips``: the stacked parameters of which parts whose expert got no token in a step have no
    gradient, so that no optimizer touches them.
    """

    layer: str
    experts: int
    split: tuple[str, ...] = ()
    bias: str = ""
    order: tuple[int, ...] = ()
    imbalance: float = 1.0
    skips: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """The interface of one stage.

    ``Stage.totals(*inputs)`` gives the local, per-microbatch value of each of ``totals`` (absent where empty);
    ``Stage.forward(*receives, *inputs, *totals)`` gives a tuple of the values ``sends``, or on the last stage the
    loss, whose sum over microbatches and over ``loss_axes`` is the model's loss. ``mesh`` is sizes per axis.
    ``returns_loss`` is False on the last stage of a model whose vocabulary is split over the pipeline: it too gives
    a tuple of what it ``sends``, to every rank's :class:`VocabularyProgram`. ``parameters`` are in the order of their
    use; ``spanning`` names those that more than one of the stage's calls use, or are given views of; ``readers`` those
    that another layer than the one they are named after reads first, with its path, or "" for the stage's own code.
    ``routers`` are of the stage's layers; ``averages`` names the buffers that forwards move, equal on all ranks.
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
    returns_loss: bool = True
    spanning: tuple[str, ...] = ()
    routers: tuple[Router, ...] = ()
    readers: dict[str, str] = field(default_factory=dict)
    averages: tuple[str, ...] = ()

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1


@dataclass(frozen=True)
class VocabularyProgram:
    """The interface of the vocabulary layers, of which every pipeline rank runs its rows.

    (Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", MLSys 2025, sections 3 and 4 and
    appendix C.) Class ``Vocabulary`` has these methods; those that read the batch take all of ``inputs``, in order:

    * ``totals(*inputs)``: as in a stage; absent where there are none.
    * ``embed_ids(*inputs)``: this rank's part of ``embedding``, what the first stage receives, a pending sum over pp.
      Absent where ``embedding`` is None.
    * ``enter(x)``: ``hidden``, what the last stage sends, as ``[t, h]``, a row per token.
    * ``product(x)``: ``[t, h]`` to ``[t, rows]``, this rank's part of the matrix product with ``weight``, and ``bias``.
    * ``shape(z)``: what else makes ``[t, rows]`` logits of it, element by element. Absent where nothing does.
    * ``targets(*inputs)``: ``[t]``, for each token its class in the whole vocabulary, or ``ignore_index``.
    * ``tail(entropy, *inputs, *totals)``: the loss, as a stage gives it, from the cross entropy of all ranks' logits:
      the sum over tokens, or ``[t]`` where ``reduction`` is "none".

    ``weight_dim`` is the dim of ``weight`` that the classes are split on (``bias`` has no other); rank ``(pp, tp)``
    holds the classes from ``(pp * tp_size + tp) * rows`` on. ``classes`` is the model's number of them: logits of
    classes from there on are padding, and count nowhere. Logits are made in ``chunks`` parts of the tokens, one after
    another. Shapes are local to one rank and one microbatch.
    """

    mesh: dict[str, int]
    stages: int
    microbatches: int
    inputs: tuple[Input, ...]
    totals: tuple[Total, ...]
    parameters: tuple[Parameter, ...]
    hidden: Tensor
    embedding: Tensor | None
    weight: str
    bias: str | None
    weight_dim: int
    classes: int
    rows: int
    reduction: str = "sum"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    loss_axes: tuple[str, ...] = ()
    plan_digest: str = ""
    chunks: int = 1
