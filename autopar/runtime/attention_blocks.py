"""Attention by blocks of queries and keys: fused kernels that give the log-sum-exp of a row, and how blocks add up.

For queries ``q [b, h, s, d]`` and blocks of keys and values ``k [b, g, t, d]``, ``v [b, g, t, e]`` (``g`` divides
``h``: grouped heads), with ``l`` the logarithm of the sum of a row's exponentials over a block, rows of all blocks are

    l = log sum_i exp(l_i)          out = sum_i exp(l_i - l) out_i

and the gradients of a block follow from ``out`` and ``l`` of all of them (T. Dao et al., "FlashAttention", NeurIPS
2022, section 3.1; H. Liu et al., "Ring Attention with Blockwise Transformers", ICLR 2024). No communication here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime.stand_in import device_type

aten = torch.ops.aten

SUMS_MULTIPLE: Final = 32
"""The kernel of :class:`Efficient` wants a row's logarithms in memory for a multiple of so many rows."""

BIAS_MULTIPLE: Final = 16
"""And rows of its bias at a multiple of so many elements."""


class Rows(NamedTuple):
    """What a block gives for its rows: ``out [b, h, s, e]``, ``sums [b, h, s]`` (their logarithm, in float32 at least;
    -inf where a row sees nothing), and what the kernel wants again in the backward."""

    out: Tensor
    sums: Tensor
    state: tuple[Any, ...] = ()


class Gradients(NamedTuple):
    """By operand; ``mask`` None where it has none."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None


@dataclass(frozen=True)
class Block:
    """Queries and keys that see each other, by position in a rank's tensors; ``causal``: the i-th query sees keys up to
    the i-th of the block."""

    queries: slice
    keys: slice
    causal: bool = False


@dataclass(frozen=True)
class Call:
    """What is alike for all blocks of one attention. ``mask_trains``: the mask is a bias that wants a gradient."""

    scale: float
    mask_trains: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Rows:
        """One block; ``mask`` is broadcast to ``[b, h, s, t]``: what may be seen (bool), or what scores get added."""
        rows = kernel(q, v, mask, self).forward(q, k, v, _bias(mask, q.dtype), causal, self)
        blind = _blind(mask, rows.sums)
        if blind is None:
            return rows
        return Rows(rows.out.masked_fill(blind.unsqueeze(-1), 0), rows.sums.masked_fill(blind, -math.inf), rows.state)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, whole: Rows
    ) -> Gradients:
        """Of one block, where ``whole`` are the rows of all blocks together."""
        sums = whole.sums.masked_fill(whole.sums.isneginf(), 0)  # rows that see nothing: exp(-inf - 0) = 0
        rows = Rows(whole.out, sums, whole.state)
        return kernel(q, v, mask, self).backward(grad, q, k, v, _bias(mask, q.dtype), causal, rows, self)


class Kernel(Protocol):
    """A fused attention, forward and backward of one block."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, call: Call) -> Rows: ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, rows: Rows, call: Call
    ) -> Gradients: ...


def kernel(q: Tensor, v: Tensor, mask: Tensor | None, call: Call) -> Kernel:
    """The fastest that can do it on these tensors' device; in products and sums where none can."""
    width, same = q.shape[-1], q.shape[-1] == v.shape[-1]
    device = device_type(q)
    if device == "cpu":
        return Cpu() if same and not call.mask_trains else Products()
    if device != "cuda" or q.dtype == torch.float64:
        return Products()
    if mask is None and same and q.dtype.itemsize == 2 and width % 8 == 0 and width <= 256:
        return Flash()
    aligned = width * q.itemsize % 16 == 0 and v.shape[-1] * v.itemsize % 16 == 0
    return Efficient() if aligned else Products()


class Cpu:
    """Flash attention on the CPU; heads may be grouped."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, call: Call) -> Rows:
        return Rows(
            *aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=_four_dims(bias), scale=call.scale
            )
        )

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, rows: Rows, call: Call
    ) -> Gradients:
        return Gradients(
            *aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, rows.out, rows.sums, 0.0, causal, attn_mask=_four_dims(bias), scale=call.scale
            )
        )


class Flash:
    """Flash attention on CUDA in 16 bits, without a mask; heads may be grouped."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, call: Call) -> Rows:
        out, sums, *state = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=call.scale)
        return Rows(out, _finite_or_none(sums), tuple(state[4:6]))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, rows: Rows, call: Call
    ) -> Gradients:
        lengths = (None, None, q.shape[2], k.shape[2])  # the first two: of sequences packed in one
        return Gradients(
            *aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, rows.out, rows.sums, *lengths, 0.0, causal, *rows.state, scale=call.scale
            )
        )


class Efficient:
    """Memory-efficient attention on CUDA: any floating type, a bias and its gradient; heads of keys are repeated."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, call: Call) -> Rows:
        k, v = _repeated(q, k), _repeated(q, v)
        out, sums, *state = aten._scaled_dot_product_efficient_attention(
            q, k, v, self._aligned(bias, q, k), True, 0.0, causal, scale=call.scale
        )
        return Rows(out, _finite_or_none(sums[..., : q.shape[2]]), tuple(state))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, rows: Rows, call: Call
    ) -> Gradients:
        whole_k, whole_v = _repeated(q, k), _repeated(q, v)
        # As the forward lays it out: in 16 bits the kernel takes it to be so, whatever its strides are, and gives wrong
        # gradients for anything else.
        out = rows.out.transpose(1, 2).contiguous().transpose(1, 2)
        sums = F.pad(rows.sums, (0, -q.shape[2] % SUMS_MULTIPLE)).contiguous()
        wanted = [True, True, True, call.mask_trains]
        dq, dk, dv, dbias = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, whole_k, whole_v, self._aligned(bias, q, k), out, sums, *rows.state, 0.0, wanted, causal,
            scale=call.scale,
        )  # fmt: skip
        return Gradients(dq, _joined(dk, k), _joined(dv, v), dbias if call.mask_trains else None)

    def _aligned(self, bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        if bias is None:
            return None
        whole = bias.expand(*q.shape[:3], k.shape[2])
        return F.pad(whole, (0, -k.shape[2] % BIAS_MULTIPLE))[..., : k.shape[2]]


class Products:
    """All scores of a block at once, in float32 at least."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, call: Call) -> Rows:
        scores = _scores(q, k, bias, causal, call)
        sums = scores.logsumexp(-1)
        shares = (scores - sums.masked_fill(sums.isneginf(), 0).unsqueeze(-1)).exp_()
        return Rows((shares @ _repeated(q, v).to(shares.dtype)).to(q.dtype), sums)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, rows: Rows, call: Call
    ) -> Gradients:
        shares = (_scores(q, k, bias, causal, call) - rows.sums.unsqueeze(-1)).exp_()
        wide = shares.dtype
        grad, out = grad.to(wide), rows.out.to(wide)
        dv = shares.transpose(-1, -2) @ grad
        slopes = grad @ _repeated(q, v).to(wide).transpose(-1, -2)
        slopes = shares * (slopes - (grad * out).sum(-1, keepdim=True))
        dq = slopes @ _repeated(q, k).to(wide) * call.scale
        dk = slopes.transpose(-1, -2) @ q.to(wide) * call.scale
        dmask = slopes if call.mask_trains else None
        return Gradients(dq.to(q.dtype), _joined(dk, k).to(k.dtype), _joined(dv, v).to(v.dtype), dmask)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, call: Call) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ _repeated(q, k).to(wide).transpose(-1, -2) * call.scale
    if bias is not None:
        scores += bias
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(later, -math.inf)
    return scores


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask of truth values as what is added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else dense(mask)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _blind(mask: Tensor | None, sums: Tensor) -> Tensor | None:
    """Rows that see no key of the block, for which kernels give what they like; None where a mask can't say."""
    if mask is None:
        return None
    hidden = ~mask if mask.dtype == torch.bool else mask.isneginf()
    return hidden.all(-1).expand(sums.shape)


def _four_dims(bias: Tensor | None) -> Tensor | None:
    return bias if bias is None or bias.dim() in (2, 4) else bias[(None,) * (4 - bias.dim())]


def _finite_or_none(sums: Tensor) -> Tensor:
    """CUDA kernels say inf of a row that sees nothing."""
    return sums.masked_fill(sums.isinf(), -math.inf)


def _repeated(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values for each head of the queries."""
    times = q.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _joined(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of what :func:`_repeated` repeated."""
    return grad if grad.shape[1] == x.shape[1] else grad.reshape(grad.shape[0], x.shape[1], -1, *grad.shape[2:]).sum(2)


class Sum:
    """Rows of blocks, added up; in float32 at least."""

    def __init__(self, q: Tensor, width: int) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self.dtype = q.dtype
        self.out = q.new_zeros((*q.shape[:-1], width), dtype=wide)
        self.sums = q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        self.state: tuple[Any, ...] = ()

    def add(self, rows: Rows, queries: slice) -> None:
        out, sums = self.out[:, :, queries], self.sums[:, :, queries]
        top = torch.maximum(sums, rows.sums)
        top = top.masked_fill(top.isneginf(), 0)
        here, there = (sums - top).exp(), (rows.sums - top).exp()
        total = here + there
        share = there / total.masked_fill(total == 0, 1)
        out.lerp_(rows.out.to(out.dtype), share.unsqueeze(-1))
        sums.copy_(top + total.log())
        self.state = rows.state

    def rows(self) -> Rows:
        return Rows(self.out.to(self.dtype), self.sums, self.state)


def visible(queries: Sequence[int], keys: Sequence[int], length: int) -> list[Block]:
    """What queries see of keys causally, both being parts of ``length`` positions, by number, in rising order.

    Parts are the same on both sides, or none is. What sees nothing is left out; neighbours that see as much are one.
    """
    if list(queries) == list(keys):
        return [Block(slice(None), slice(None), causal=True)]
    seen = [sum(key < query for key in keys) for query in queries]
    blocks = []
    for count in sorted(set(seen) - {0}):
        first, times = seen.index(count), seen.count(count)
        blocks.append(Block(slice(first * length, (first + times) * length), slice(0, count * length)))
    return blocks


def dense(x: Tensor) -> Tensor:
    """``x`` as kernels need it: neighbours of the last dim are neighbours in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


def heads_apart(x: Tensor) -> Tensor:
    """``[b, h, s, d]`` also of ``[b, s, d]``, for kernels."""
    return dense(x if x.dim() == 4 else x.unsqueeze(1))


def default_scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale
