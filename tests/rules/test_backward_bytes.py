"""What the backward of an elementwise op moves, counted in the kernels that autograd really runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.graph import Choice, Meta
from autopar.planner.op_costs import work_of
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.rules.chunked import CHUNKED
from autopar.rules.experts import routing_meta
from autopar.runtime.experts import combine
from autopar.runtime.routing import route
from autopar.spmd import I, R, S

aten: Any = torch.ops.aten


_CUTS = {
    aten.slice_backward.default: aten.slice.Tensor,
    aten.select_backward.default: aten.select.int,
    aten.diagonal_backward.default: aten.diagonal.default,
}
"""Several kernels (aten/src/ATen/native/TensorShape.cpp): zeros, and a copy into the part of them that was cut."""

_FILLS = (aten.zeros.default, aten.new_zeros.default, aten.zero_.default)
_NOTHING = (aten.detach.default, aten.new_empty.default)
_IN_PLACE = (aten.copy_.default,)  # it reads what is copied, and writes where it goes


class Moved(TorchDispatchMode):
    """Bytes of all that kernels read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CUTS:
            with self:
                whole = args[0].new_zeros(args[1])
                _CUTS[func](whole, *args[2:]).copy_(args[0])
                return whole
        result = func(*args, **(kwargs or {}))
        given = [] if func in _FILLS else tree_leaves(args)
        made = [] if func in _IN_PLACE else [result]
        if not func.is_view and func not in _NOTHING:
            self.bytes += sum(x.nbytes for x in (*given, *made) if isinstance(x, Tensor))
        return result


def leaf(*shape: int, dtype: torch.dtype = torch.float32, trained: bool = True) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(trained)


WIDE = (64, 128, 256)
CASES: list[tuple[str, Callable[[], tuple[Any, ...]]]] = [
    ("mul.Tensor", lambda: (leaf(*WIDE), leaf(*WIDE))),
    ("mul.Tensor", lambda: (leaf(*WIDE), leaf(*WIDE, trained=False))),
    ("mul.Tensor", lambda: (leaf(*WIDE), leaf(64, 128, 1))),
    ("mul.Tensor", lambda: (leaf(*WIDE), leaf(256))),
    ("mul.Tensor", lambda: (leaf(*WIDE, dtype=torch.bfloat16), leaf(1, 128, 256, trained=False))),
    ("mul.Tensor", lambda: (leaf(*WIDE, dtype=torch.bfloat16), leaf(*WIDE))),
    ("mul.Tensor", lambda: (leaf(*WIDE), 3.0)),
    ("div.Tensor", lambda: (leaf(*WIDE), leaf(*WIDE))),
    ("div.Tensor", lambda: (leaf(*WIDE), leaf(64, 128, 1))),
    ("div.Tensor", lambda: (leaf(*WIDE), leaf(64, 128, 1, trained=False))),
    ("div.Tensor", lambda: (leaf(*WIDE, trained=False), leaf(256))),
    ("div.Tensor", lambda: (leaf(256), leaf(*WIDE))),
    ("div.Tensor", lambda: (leaf(*WIDE, dtype=torch.bfloat16), leaf(64, 128, 1))),
    ("div.Tensor", lambda: (leaf(*WIDE), 3.0)),
    ("pow.Tensor_Scalar", lambda: (leaf(*WIDE), 3.0)),
    ("add.Tensor", lambda: (leaf(*WIDE), 3.0)),
    ("tanh.default", lambda: (leaf(*WIDE),)),
]


@pytest.mark.parametrize(("name", "arguments"), CASES, ids=[name for name, _ in CASES])
def test_as_many_bytes_as_autograd_moves(name: str, arguments: Callable[[], tuple[Any, ...]]) -> None:
    packet, overload = name.split(".")
    given = arguments()
    tensors = [x for x in given if isinstance(x, Tensor)]
    made = getattr(getattr(aten, packet), overload)(*given)
    trained, slope = [x for x in tensors if x.requires_grad], torch.ones_like(made)
    with Moved() as moved:
        torch.autograd.grad(made, trained, slope)
    metas = tuple(Meta(tuple(x.shape), x.dtype, x.requires_grad) for x in tensors)
    result = Meta(tuple(made.shape), made.dtype, True)
    counted = iter(metas)
    op = Op(f"aten.{name}", tuple(next(counted) if isinstance(x, Tensor) else x for x in given), {}, metas, (result,))
    work = work_of(op, lookup(op.name), Choice((R,) * len(metas), R), 1)
    assert work.back_bytes == pytest.approx(moved.bytes, rel=0.02, abs=1)


VIEWS: list[tuple[str, tuple[Any, ...]]] = [
    ("slice.Tensor", (2, 0, 32)),
    ("narrow.default", (1, 32, 64)),
    ("select.int", (1, 5)),
    ("diagonal.default", (0, 1, 2)),
    ("unbind.int", (1,)),
    ("chunk.default", (2, -1)),
    ("split.Tensor", (32, 1)),
    ("split_with_sizes.default", ([100, 156], 2)),
    ("expand.default", ((64, 4, 256),)),
    ("expand_as.default", (torch.empty(64, 4, 256),)),
    ("transpose.int", (0, 1)),
    ("view.default", ((-1,),)),
    ("unsqueeze.default", (1,)),
]


@pytest.mark.parametrize(("name", "further"), VIEWS, ids=[name for name, _ in VIEWS])
def test_backwards_of_views_move_what_is_cut_or_copied(name: str, further: tuple[Any, ...]) -> None:
    """With gradients of all parts."""
    packet, overload = name.split(".")
    given = leaf(64, 1, 256) if packet.startswith("expand") else leaf(*WIDE)
    made = getattr(getattr(aten, packet), overload)(given, *further)
    parts = [made] if isinstance(made, Tensor) else list(made)
    slopes = [torch.ones_like(part, memory_format=torch.contiguous_format) for part in parts]
    with Moved() as moved:
        torch.autograd.grad(parts, [given], slopes)
    assert lookup(f"aten.{name}").view_bytes(sum(part.nbytes for part in parts), given.nbytes) == moved.bytes


@pytest.mark.parametrize(
    ("shapes", "dtypes", "loose"),
    [
        ([WIDE, WIDE], ["float32", "float32"], (0, 0)),
        ([WIDE, (256,)], ["float32", "float32"], (1, 1)),
        ([WIDE, WIDE], ["bfloat16", "float32"], (1, 1)),
        ([WIDE, (1, 1, 256)], ["bfloat16", "float32"], (2, 2)),
        ([WIDE, (1, 128, 256)], ["float32", "float32"], (0, 0)),
    ],
)
def test_kernels_that_load_one_element_at_a_time(
    shapes: list[tuple[int, ...]], dtypes: list[str], loose: tuple[int, int]
) -> None:
    metas = tuple(Meta(s, getattr(torch, d), True) for s, d in zip(shapes, dtypes, strict=True))
    op = Op("aten.mul.Tensor", metas, {}, metas, (Meta(WIDE, torch.float32, True),))
    assert lookup(op.name).loose(op) == loose


@pytest.mark.parametrize(
    ("shapes", "trained", "loose"),
    [
        ([WIDE, WIDE], (True, True), (0, 0)),
        ([WIDE, (64, 128, 1)], (True, False), (1, 1)),
        ([WIDE, (64, 128, 1)], (False, True), (1, 2)),
        ([WIDE, (64, 128, 1)], (True, True), (1, 3)),
        ([(256,), WIDE], (True, True), (1, 1)),
    ],
)
def test_quotients_that_load_one_element_at_a_time(
    shapes: list[tuple[int, ...]], trained: tuple[bool, bool], loose: tuple[int, int]
) -> None:
    """What takes the operand that was broadcast: the dividend's gradient the divisor, the divisor's both."""
    metas = tuple(Meta(shape, torch.float32, grad) for shape, grad in zip(shapes, trained, strict=True))
    op = Op("aten.div.Tensor", metas, {}, metas, (Meta(WIDE, torch.float32, True),))
    assert lookup(op.name).loose(op) == loose


def test_casts_are_loose_where_they_widen() -> None:
    narrow, wide = (Meta(WIDE, dtype, True) for dtype in (torch.bfloat16, torch.float32))
    up = Op("aten.to.dtype", (narrow, torch.float32), {}, (narrow,), (wide,))
    down = Op("aten.to.dtype", (wide, torch.bfloat16), {}, (wide,), (narrow,))
    assert lookup(up.name).loose(up) == (1, 0)
    assert lookup(down.name).loose(down) == (0, 1)


def test_the_weight_of_a_norm_is_a_kernel_more() -> None:
    x = Meta((64, 256), torch.float32, True)
    bytes_ = []
    for trained in (False, True):
        weight = Meta((256,), torch.float32, trained)
        op = Op("aten.rms_norm.default", (x, [256], weight), {}, (x, weight), (x,))
        bytes_.append(work_of(op, lookup(op.name), Choice((R, R), R), 1).back_bytes)
    assert bytes_[1] - bytes_[0] == 2 * x.bytes + 256 * 4


@pytest.mark.parametrize(("classes", "dtype", "aligned"), [(50257, "bfloat16", False), (50264, "bfloat16", True)])
def test_rows_that_begin_anywhere_are_seen(classes: int, dtype: str, aligned: bool) -> None:
    kind = getattr(torch, dtype)
    x, weight, made = Meta((64, 768), kind, True), Meta((classes, 768), kind, True), Meta((64, classes), kind, True)
    op = Op("aten.linear.default", (x, weight), {}, (x, weight), (made,))
    assert work_of(op, lookup(op.name), Choice((R, R), R), 1).is_aligned == aligned


@pytest.mark.parametrize(("classes", "ranks", "aligned"), [(50257, 1, False), (50264, 1, True), (50264, 2, False)])
def test_rows_of_logits_that_come_in_chunks_count_too(classes: int, ranks: int, aligned: bool) -> None:
    """Of the classes that a rank has; they are no operand and no result of the op."""
    x, weight = Meta((64, 768), torch.bfloat16, True), Meta((classes, 768), torch.bfloat16, True)
    target, made = Meta((64,), torch.int64, False), Meta((), torch.float32, True)
    op = Op(CHUNKED, (x, weight, target), {"chunks": 8, "reduction": "mean"}, (x, weight, target), (made,))
    choice = Choice((R, R, R), R) if ranks == 1 else Choice((R, S(0), R), I, CHUNKED)
    assert work_of(op, lookup(op.name), choice, ranks).is_aligned == aligned


@pytest.mark.parametrize("choices", [2, 4])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)], ids=str)
def test_what_puts_rows_of_experts_together(choices: int, wide: torch.dtype, trained: tuple[bool, bool]) -> None:
    """Forward and backward, but for indices, weights and their gradients, which are small."""
    tokens, width = 64, 1024
    index = torch.stack([torch.randperm(8)[:choices] for _ in range(tokens)])
    routing = route(index, 8)
    rows = leaf(tokens * choices, width, dtype=torch.bfloat16, trained=trained[0])
    weights = leaf(tokens, choices, dtype=wide, trained=trained[1])
    combine(rows, weights, routing)  # finds the places of slots
    with Moved() as forward:
        made = combine(rows, weights, routing)
    slope = torch.ones_like(made)
    with Moved() as backward:
        torch.autograd.grad(made, [x for x in (rows, weights) if x.requires_grad], slope)
    given = (*(Meta(tuple(x.shape), x.dtype, x.requires_grad) for x in (rows, weights)), routing_meta(tokens))
    op = Op("combine", given, {}, given, (Meta(tuple(made.shape), made.dtype, True),))
    work = work_of(op, lookup(op.name), Choice((R,) * 3, R), 1)
    assert (work.moved_bytes, work.back_bytes) == pytest.approx((forward.bytes, backward.bytes), rel=0.03)
