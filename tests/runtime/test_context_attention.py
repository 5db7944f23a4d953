"""Attention over a split sequence equals one device's: every form, in both orders, values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import simulate
from autopar.mesh import Mesh
from autopar.runtime import Axes, all_gather, all_to_all, attention_with_offset, ring_attention
from autopar.runtime.attention_blocks import Block, Call, Cpu, Efficient, Flash, Kernel, Products, Sum, visible
from autopar.runtime.context_attention import blocks
from autopar.runtime.recomputation import recompute
from autopar.spmd import R, S
from tests.runtime.ranks import on_ranks

LENGTH, WIDTH = 16, 8
ROWS = S(2)


@dataclass(frozen=True)
class Problem:
    """One attention on one device: ``[2, heads, LENGTH, WIDTH]``; ``options`` of scaled_dot_product_attention."""

    name: str
    heads: int = 4
    groups: int = 4
    causal: bool = False
    mask: Tensor | None = None
    width: int = WIDTH
    scale: float | None = None

    def tensors(self) -> list[Tensor]:
        """q, k, v and the gradient of the result."""
        generator = torch.Generator().manual_seed(0)
        shapes = [(self.heads, WIDTH), (self.groups, WIDTH), (self.groups, self.width), (self.heads, self.width)]
        return [
            torch.randn(2, heads, LENGTH, width, generator=generator, dtype=torch.float64) for heads, width in shapes
        ]

    def expected(self) -> list[Tensor]:
        """The result and the gradients of q, k, v (and of the mask)."""
        q, k, v, grad = self.tensors()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        mask = self.mask
        if mask is not None and mask.requires_grad:
            leaves.append(mask := mask.detach().clone().requires_grad_())
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.causal, scale=self.scale, enable_gqa=self.heads != self.groups
        )
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def masks() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    places = torch.arange(LENGTH)
    behind = places[:, None] - places[None, :]
    documents = torch.tensor([0] * 5 + [1] * 7 + [2] * 4)
    packed = (documents[:, None] == documents[None, :]) & (behind >= 0)
    left_padded = (places >= 3).expand(2, 1, LENGTH, LENGTH) & (behind >= 0)
    bias = torch.randn(4, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
    return {
        "window": (behind >= 0) & (behind < 4),
        "packed": packed.expand(2, 1, LENGTH, LENGTH),
        "rows_that_see_nothing": left_padded,
        "of_keys": (places < 11).reshape(1, 1, 1, LENGTH),
        "bias": bias,
        "trained_bias": bias[None].clone().requires_grad_(),
        "trained_bias_of_distance": bias[:1, :, :1].clone().requires_grad_(),
    }


def problems() -> Iterator[Problem]:
    yield Problem("plain")
    yield Problem("causal", causal=True, scale=0.3)
    yield Problem("grouped_causal", heads=4, groups=2, causal=True)
    yield Problem("grouped", heads=4, groups=1)
    yield Problem("values_of_other_width", causal=True, width=4)
    for name, mask in masks().items():
        yield Problem(name, mask=mask)
    yield Problem("grouped_packed", heads=4, groups=2, mask=masks()["packed"])


PROBLEMS = {problem.name: problem for problem in problems()}
CAUSAL = {name: problem for name, problem in PROBLEMS.items() if problem.causal}


def of_rank(x: Tensor, axes: Axes, dim: int = 2) -> Tensor:
    """This rank's part, by the definition of the order."""
    axis = axes["cp"]
    pieces = x.chunk(axis.parts, dim)
    return torch.cat([pieces[i] for i in axis.parts_of(axis.index)], dim).contiguous()


def of_all(parts: list[Tensor], paired: bool, dim: int = 2) -> Tensor:
    if not paired:
        return torch.cat(parts, dim)
    halves = [x.chunk(2, dim) for x in parts]
    return torch.cat([low for low, _ in halves] + [high for _, high in reversed(halves)], dim)


def ring(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, problem: Problem, axes: Axes) -> Tensor:
    options = {"mask": mask, "causal": problem.causal, "scale": problem.scale}
    return ring_attention(q, k, v, axes["cp"], **options)  # type: ignore[arg-type]


def gathered(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, problem: Problem, axes: Axes) -> Tensor:
    axis = axes["cp"]
    k, v = (all_gather(x, axis, src=ROWS, dst=R) for x in (k, v))
    if problem.causal:
        return attention_with_offset(q, k, v, axis, scale=problem.scale)
    return F.scaled_dot_product_attention(
        q, k, v, mask, scale=problem.scale, enable_gqa=problem.heads != problem.groups
    )


def by_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, problem: Problem, axes: Axes) -> Tensor:
    axis = axes["cp"]
    q, k, v = (all_to_all(x, axis, src=ROWS, dst=S(1)) for x in (q, k, v))
    grouped = problem.heads != problem.groups
    out = F.scaled_dot_product_attention(q, k, v, is_causal=problem.causal, scale=problem.scale, enable_gqa=grouped)
    return all_to_all(out, axis, src=S(1), dst=ROWS)


Way = Callable[[Tensor, Tensor, Tensor, "Tensor | None", Problem, Axes], Tensor]


def check(problem: Problem, way: Way, size: int, paired: bool, again: bool = False) -> None:
    wanted = problem.expected()

    def program(axes: Axes) -> list[Tensor]:
        q, k, v, grad = (of_rank(x, axes) for x in problem.tensors())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        mask = problem.mask
        if mask is not None:
            split = mask.shape[-2] > 1
            mask = of_rank(mask.detach(), axes, mask.dim() - 2) if split else mask.detach().clone()
            if problem.mask is not None and problem.mask.requires_grad:
                leaves.append(mask.requires_grad_())

        def run(*tensors: Tensor) -> Tensor:
            return way(*tensors[:3], mask, problem, axes)

        out = recompute(run, *leaves[:3]) if again else run(*leaves[:3])
        found = list(torch.autograd.grad(out, leaves, grad, retain_graph=again))
        if again:
            torch.testing.assert_close(list(torch.autograd.grad(out, leaves, grad)), found, rtol=0, atol=0)
        return [out.detach(), *found]

    results = on_ranks(Mesh(cp=size, paired=paired), program)
    for i, whole in enumerate(wanted):
        parts = [result[i] for result in results]
        if i == 4 and problem.mask is not None and problem.mask.shape[-2] == 1:
            got = torch.stack(parts).sum(0)
        else:
            got = of_all(parts, paired, whole.dim() - 2)
        torch.testing.assert_close(got, whole, rtol=0, atol=1e-10, msg=lambda m, i=i: f"{i}: {m}")


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("way", [ring, gathered])
def test_equals_one_device(way: Way, name: str) -> None:
    for size, paired in ((2, True), (4, False), (2, False), (4, True))[: 4 if PROBLEMS[name].causal else 2]:
        check(PROBLEMS[name], way, size, paired)


@pytest.mark.parametrize("way", [ring, gathered])
def test_operands_of_any_layout(way: Way) -> None:
    """The last dim of a transposed tensor isn't dense, nor is a gradient that was expanded."""

    def program(axes: Axes) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 2, 6, 8, generator=generator, dtype=torch.float64) for _ in range(3))
        found = []
        for change in (lambda x: x, lambda x: x.mT.contiguous().mT):
            leaves = [change(x).requires_grad_() for x in (q, k, v)]
            out = way(*leaves, None, PROBLEMS["plain"], axes)
            found += [torch.cat([out.detach(), *torch.autograd.grad(out.sum(), leaves)])]
        return found

    for dense, strided in on_ranks(Mesh(cp=2), program):
        torch.testing.assert_close(strided, dense, rtol=0, atol=1e-12)


@pytest.mark.parametrize("paired", [False, True], ids=["contiguous", "paired"])
def test_heads(paired: bool) -> None:
    check(PROBLEMS["causal"], by_heads, 2, paired)
    check(Problem("grouped", heads=8, groups=4, causal=True), by_heads, 2, paired)


@pytest.mark.parametrize("way", [ring, gathered])
def test_recomputed_and_differentiated_twice(way: Way) -> None:
    check(PROBLEMS["grouped_causal"], way, 2, True, again=True)


# --- what is sent, and what is never made -----------------------------------------------------------


def sent_bytes(way: Way, size: int, problem: Problem) -> list[int]:
    """Bytes that each rank sends forward and backward."""

    def program(rank: int) -> None:
        axes = Axes.build(Mesh(cp=size, paired=True), rank, "cpu")
        q, k, v, grad = (of_rank(x, axes) for x in problem.tensors())
        out = way(*(x.requires_grad_() for x in (q, k, v)), None, problem, axes)
        out.backward(grad)

    sent = simulate.run(program, size).sent_bytes
    return [sum(by_axis.values()) for by_axis in sent]


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_sent_equal_the_formula(size: int) -> None:
    problem = Problem("grouped", heads=4, groups=2, causal=True)
    local = 2 * (2 * 2 * LENGTH * WIDTH * 8) // size  # keys and values of one rank
    assert sent_bytes(ring, size, problem) == [(3 * size - 2) * local] * size
    assert sent_bytes(gathered, size, problem) == [2 * (size - 1) * local] * size


class Largest(TorchDispatchMode):
    """The most elements that any op's result has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        found = [x.numel() for x in (made if isinstance(made, tuple | list) else [made]) if isinstance(x, Tensor)]
        self.elements = max(self.elements, *found, 0)
        return made


@pytest.mark.parametrize("way", [ring, gathered])
def test_no_mask_is_made_for_causal_attention(way: Way) -> None:
    length = 256

    def program(axes: Axes) -> int:
        q, k, v = (torch.randn(1, 1, length // 2, 4, requires_grad=True) for _ in range(3))
        with Largest() as largest:
            way(q, k, v, None, PROBLEMS["causal"], axes).sum().backward()
        return largest.elements

    for found in on_ranks(Mesh(cp=2, paired=True), program):
        assert found <= 2 * length * 4  # keys and values; a mask of one part would be (length / 4)**2


# --- blocks and kernels -----------------------------------------------------------------------------


def test_what_is_visible() -> None:
    whole = slice(None)
    assert visible([1], [1], 4) == [Block(whole, whole, causal=True)]
    assert visible([2], [1], 4) == [Block(slice(0, 4), slice(0, 4))]
    assert visible([1], [2], 4) == []
    assert visible([1, 6], [0, 7], 4) == [Block(slice(0, 8), slice(0, 4))]
    assert visible([1, 6], [2, 5], 4) == [Block(slice(4, 8), slice(0, 8))]


def test_pairs_are_equal_work() -> None:
    def work(paired: bool) -> list[int]:
        axes = [Axes.alone(Mesh(cp=4, paired=paired), rank, "cpu")["cp"] for rank in range(4)]
        return [sum(_pairs(block) for block in blocks(axis, LENGTH // 4, LENGTH)) for axis in axes]

    assert len(set(work(True))) == 1
    assert work(False)[-1] > 1.7 * work(True)[0]


def _pairs(block: Block) -> int:
    queries, keys = (part.stop - part.start for part in (block.queries, block.keys))
    return queries * (queries + 1) // 2 if block.causal else queries * keys


@pytest.mark.parametrize("kernel", [Products(), Cpu()])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels(kernel: Kernel, causal: bool) -> None:
    """A block alone is attention; its sums are those of its scores."""
    problem = Problem("grouped", heads=4, groups=2, causal=causal)
    q, k, v, grad = problem.tensors()
    call = Call(WIDTH**-0.5)
    rows = kernel.forward(q, k, v, None, causal, call)
    found = kernel.backward(grad, q, k, v, None, causal, rows, call)
    for got, wanted in zip([rows.out, *found[:3]], problem.expected(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    scores = q @ k.repeat_interleave(2, 1).mT * WIDTH**-0.5
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) & causal
    torch.testing.assert_close(rows.sums, scores.masked_fill(hidden, -math.inf).logsumexp(-1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [Flash(), Efficient()])
def test_kernels_of_cuda_take_these_arguments(kernel: Kernel) -> None:
    """Shapes alone: what torch checks without a GPU."""
    q, k, v = (torch.empty(2, heads, LENGTH, WIDTH, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2))
    bias = None if isinstance(kernel, Flash) else torch.empty(4, LENGTH, LENGTH, dtype=q.dtype, device="meta")
    call = Call(0.5, mask_trains=bias is not None)
    rows = kernel.forward(q, k, v, bias, True, call)
    assert (rows.out.shape, rows.sums.shape) == (q.shape, q.shape[:-1])
    found = kernel.backward(torch.empty_like(q), q, k, v, bias, True, rows, call)
    assert [x.shape for x in found[:3]] == [x.shape for x in (q, k, v)]
    assert (found.mask is None) == (bias is None)


def test_rows_add_up_in_any_order() -> None:
    q, k, v, _ = PROBLEMS["plain"].tensors()
    call, total = Call(WIDTH**-0.5), Sum(q, WIDTH)
    for keys in (slice(9, 16), slice(0, 2), slice(2, 9)):
        total.add(call.forward(q, k[:, :, keys], v[:, :, keys], None, causal=False), slice(None))
    torch.testing.assert_close(total.rows().out, PROBLEMS["plain"].expected()[0], rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the tracer's own, which it would trip over as errors
@pytest.mark.parametrize("way", [ring, gathered])
def test_compiled_equals_eager(way: Way) -> None:
    """A ring's messages are no part of a graph; the other form is."""

    def program(axes: Axes) -> tuple[list[Tensor], list[Tensor]]:
        tensors = [of_rank(x, axes).requires_grad_() for x in PROBLEMS["causal"].tensors()]

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return way(q * 2, k, v, None, PROBLEMS["causal"], axes) + 1

        compiled = torch.compile(run, backend="aot_eager", fullgraph=way is gathered)
        outs = [f(*tensors[:3]) for f in (run, compiled)]
        eager, traced = ([out, *torch.autograd.grad(out, tensors[:3], tensors[3])] for out in outs)
        return eager, traced

    for eager, traced in on_ranks(Mesh(cp=2, paired=True), program):
        torch.testing.assert_close(traced, eager, rtol=1e-12, atol=1e-12)
