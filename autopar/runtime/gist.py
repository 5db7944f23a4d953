"""Less memory for what a backward needs: bits in place of tensors, masks drawn again, and 8 bits a number.

(Jain et al., "Gist: Efficient Data Encoding for Deep Neural Network Training", ISCA 2018, section 4.) Lossless:
the gradient of an op like ReLU needs one comparison per element (4.1.1), dropout's mask comes again from the seed
that the op has of its place (:mod:`autopar.runtime.random`), max-pooling needs the place in its window. Lossy:
what else a layer saves in 16 bits or more, as 8-bit numbers under one factor per block (4.2, with the blocks of
Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, section 2.1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autopar.compression import BLOCK, LEAST_SHARE
from autopar.runtime.axes import Axes
from autopar.runtime.random import seed_of_op, seeded
from autopar.runtime.saved_memory import Once, Piece, as_it_is, held_storages, storages

aten = torch.ops.aten


def pack_bits(mask: Tensor) -> Tensor:
    """Eight truth values ``[...]`` a byte: ``uint8 [ceil(n / 8)]``."""
    bytes_ = mask.flatten().view(torch.uint8)
    bytes_ = torch.nn.functional.pad(bytes_, (0, -bytes_.numel() % 8)).view(-1, 8)
    packed = bytes_[:, 0].clone()
    for bit in range(1, 8):
        packed |= bytes_[:, bit] << bit
    return packed


def unpack_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of :func:`pack_bits`, ``bool [*shape]``."""
    bits = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=packed.device)
    mask = (packed.unsqueeze(1) & bits).ne(0).flatten()
    return mask[: shape.numel()].view(shape)


def relu_kept_as_bits(x: Tensor) -> Tensor:
    """``aten.relu``, which keeps one bit per element."""
    return _kept_as_bits(x, "relu")


def relu6_kept_as_bits(x: Tensor) -> Tensor:
    """``aten.relu6``, which keeps one bit per element."""
    return _kept_as_bits(x, "relu6")


def leaky_relu_kept_as_bits(x: Tensor, negative_slope: float = 0.01) -> Tensor:
    """``aten.leaky_relu``, which keeps one bit per element."""
    return _kept_as_bits(x, "leaky_relu", negative_slope)


def hardtanh_kept_as_bits(x: Tensor, min_val: float = -1, max_val: float = 1) -> Tensor:
    """``aten.hardtanh``, which keeps one bit per element."""
    return _kept_as_bits(x, "hardtanh", min_val, max_val)


def threshold_kept_as_bits(x: Tensor, threshold: float, value: float) -> Tensor:
    """``aten.threshold``, which keeps one bit per element."""
    return _kept_as_bits(x, "threshold", threshold, value)


def _kept_as_bits(x: Tensor, name: str, *numbers: float) -> Tensor:
    return cast(Tensor, _KeptAsBits.apply(x, name, numbers))  # type: ignore[no-untyped-call]


_PASSES: Final[dict[str, Callable[..., Tensor]]] = {
    "relu": lambda x: ~(x <= 0),
    "relu6": lambda x: (x > 0) & (x < 6),
    "leaky_relu": lambda x, slope: x > 0,
    "hardtanh": lambda x, low, high: (x > low) & (x < high),
    "threshold": lambda x, threshold, value: ~(x <= threshold),
}
"""Where the gradient passes as it is: torch's own comparisons."""


class _KeptAsBits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, numbers: tuple[float, ...]) -> Tensor:
        ctx.save_for_backward(pack_bits(_PASSES[name](x, *numbers)))
        ctx.shape, ctx.slope = x.shape, numbers[0] if name == "leaky_relu" else 0.0
        result: Tensor = getattr(aten, name)(x, *numbers)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        (grad,) = grads
        elsewhere = grad * ctx.slope if ctx.slope else grad.new_zeros(())
        return torch.where(unpack_bits(packed, ctx.shape), grad, elsewhere), None, None


def dropout_replayed(x: Tensor, p: float, train: bool, axes: Axes) -> Tensor:
    """``aten.dropout`` directly within :func:`autopar.runtime.rng`: the same values, and nothing is kept.

    The backward draws the mask again, from the op's seed.
    """
    return cast(Tensor, _Dropout.apply(x, p, axes.device)) if train else x  # type: ignore[no-untyped-call]


class _Dropout(torch.autograd.Function):
    """Which numbers an element gets follows from the tensor's layout: the gradient is given that of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, device: torch.device) -> Tensor:
        ctx.seed, ctx.p, ctx.device = seed_of_op(), p, device
        made: Tensor = aten.dropout(_aligned(x), p, True)
        ctx.shape, ctx.stride = made.shape, made.stride()
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        grad = torch.empty_strided(ctx.shape, ctx.stride, dtype=grads[0].dtype, device=grads[0].device)
        grad.copy_(grads[0])
        with seeded(ctx.seed, ctx.device):
            return aten.dropout(grad, ctx.p, True), None, None


def _aligned(x: Tensor) -> Tensor:
    """``x`` at the beginning of 16 bytes: a GPU draws in vectors of elements where it can."""
    return x if x.storage_offset() * x.itemsize % 16 == 0 else x.clone()


def max_pool2d_kept_as_places(
    x: Tensor,
    kernel_size: list[int],
    stride: list[int] | tuple[()] = (),
    padding: int | list[int] = 0,
    dilation: int | list[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """``aten.max_pool2d`` of ``x [..., c, h, w]``, which keeps in 8 bits where in its window a maximum was.

    Windows of more than 256 elements take 16 bits.
    """
    kernel, pad, holes = _pair(kernel_size), _pair(padding), _pair(dilation)
    steps = _pair(stride) if stride else kernel
    return cast(Tensor, _MaxPool.apply(x, kernel, steps, pad, holes, ceil_mode))  # type: ignore[no-untyped-call]


_Pair = tuple[int, int]


def _pair(value: int | list[int] | tuple[int, ...]) -> _Pair:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values[0], values[-1]


class _MaxPool(torch.autograd.Function):
    """Row ``i`` of the output, row ``k`` of its window: row ``i * stride - padding + k * dilation`` of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: _Pair, step: _Pair, pad: _Pair, holes: _Pair, ceil: bool) -> Tensor:
        result, index = aten.max_pool2d_with_indices(x, kernel, step, pad, holes, ceil)
        rows, columns = _corners(result, step, pad)
        row = (index // x.shape[-1] - rows) // holes[0]
        column = (index % x.shape[-1] - columns) // holes[1]
        place = (row * kernel[1] + column).to(torch.uint8 if kernel[0] * kernel[1] <= 256 else torch.int16)
        ctx.save_for_backward(place)
        ctx.shape, ctx.kernel, ctx.step, ctx.pad, ctx.holes = x.shape, kernel, step, pad, holes
        return cast(Tensor, result)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (place,) = ctx.saved_tensors
        (grad,) = grads
        rows, columns = _corners(place, ctx.step, ctx.pad)
        row = rows + place.long() // ctx.kernel[1] * ctx.holes[0]
        column = columns + place.long() % ctx.kernel[1] * ctx.holes[1]
        into = grad.new_zeros((*ctx.shape[:-2], ctx.shape[-2] * ctx.shape[-1]))
        into.scatter_add_(-1, (row * ctx.shape[-1] + column).flatten(-2), grad.flatten(-2))
        return into.view(ctx.shape), None, None, None, None, None


def _corners(result: Tensor, step: _Pair, pad: _Pair) -> tuple[Tensor, Tensor]:
    """The first row ``[oh, 1]`` and column ``[ow]`` of each window."""
    rows = torch.arange(result.shape[-2], device=result.device) * step[0] - pad[0]
    return rows.unsqueeze(1), torch.arange(result.shape[-1], device=result.device) * step[1] - pad[1]


@dataclass(frozen=True)
class EightBits:
    """Numbers ``[n]`` as ``codes int8 [blocks, 256]`` times ``scale [blocks, 1]``, each within half a unit of it."""

    codes: Tensor
    scale: Tensor
    count: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> EightBits:
        """``x [n]`` rounded. A block with a number that isn't finite has none that is."""
        wide = torch.promote_types(x.dtype, torch.float32)
        blocks = torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK).to(wide)
        scale = blocks.abs().amax(1, keepdim=True) / 127
        codes = (blocks / scale.masked_fill(scale == 0, 1)).round_().to(torch.int8)
        return cls(codes, scale.to(torch.float32), x.numel(), x.dtype)

    def numbers(self) -> Tensor:
        """``[n]``, in their own dtype."""
        return (self.codes * self.scale).flatten()[: self.count].to(self.dtype)


F = TypeVar("F", bound=Callable[..., Any])


def kept_in_8_bits(forward: F) -> F:
    """A layer's ``forward`` that keeps in 8 bits, not exactly, what its backward needs of 16-bit numbers or wider.

    Parameters, what was passed in from outside of the graph (masks, tables), and statistics (far fewer elements
    than the layer's input, such as a norm's) stay as they are.
    """

    @functools.wraps(forward)
    def compressed(self: nn.Module, *args: Any) -> Any:
        given = [a for a in args if isinstance(a, Tensor)]
        held = held_storages(self) | storages([a for a in given if a.is_leaf or not a.requires_grad])
        least = max((a.numel() for a in given if a.is_floating_point()), default=0) // LEAST_SHARE
        with Once[EightBits]() as once, saved_tensors_hooks(functools.partial(_keep, once, held, least), _restore):
            return forward(self, *args)

    return cast(F, compressed)


def _keep(once: Once[EightBits], held: Collection[int], least: int, x: Tensor) -> Tensor | Piece[EightBits]:
    wide = x.is_floating_point() and x.itemsize > 1
    if not wide or x.numel() <= least or id(x.untyped_storage()) in held:
        return as_it_is(x)
    return once.piece(x, EightBits.of)


def _restore(kept: Tensor | Piece[EightBits]) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept.of(kept.whole.numbers())
