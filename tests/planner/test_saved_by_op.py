"""What an op keeps, told in numbers of memories: found out once, and by how tensors lie, not by shapes alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.planner.saved_by_op import Laid, OpCall, Result, SavedByOp

aten = torch.ops.aten


def dense(memory: int, *shape: int, needs_grad: bool = True) -> Laid:
    return Laid.dense(shape, torch.float32, needs_grad, memory)


def result(function: Any, *args: Any, bytes_: tuple[int, ...], trains: bool = True) -> Result:
    return SavedByOp().of(OpCall(function, args, {}, bytes_, trains))


def test_a_product_keeps_its_factors() -> None:
    found = result(aten.mm.default, dense(0, 2, 3), dense(1, 3, 4), bytes_=(24, 48))
    assert sorted(found.kept) == [0, 1]
    assert found.made == (2 * 4 * 4,)
    assert found.value == Laid((2, 4), (4, 1), 0, torch.float32, True, 2)


def test_without_a_backward_nothing_is_kept() -> None:
    assert result(aten.mm.default, dense(0, 2, 3), dense(1, 3, 4), bytes_=(24, 48), trains=False).kept == ()


def test_what_is_made_inside_has_a_memory_of_its_own() -> None:
    found = result(aten.layer_norm.default, dense(0, 2, 8), [8], dense(1, 8), dense(2, 8), bytes_=(64, 32, 32))
    assert found.made[0] == 64
    assert found.made[1:] == (8, 8)  # the mean and the inverse deviation of each row
    assert set(found.kept) == {0, 1, 2, 4, 5}


def test_how_a_tensor_lies_decides_whether_a_view_copies() -> None:
    plain = dense(0, 2, 3)
    turned = Laid((2, 3), (1, 2), 0, torch.float32, True, 0)
    known = SavedByOp()
    made = [known.of(OpCall(aten.reshape.default, (x, [6]), {}, (24,), True)).value for x in (plain, turned)]
    assert [laid.memory for laid in made] == [0, 1]


def test_calls_that_are_alike_run_once() -> None:
    runs: list[tuple[int, ...]] = []

    def counted(x: Tensor, factor: float) -> Tensor:
        runs.append(tuple(x.shape))
        return x * factor

    known = SavedByOp()
    for shape, factor in [((2, 3), 2.0), ((2, 3), 2.0), ((2, 3), 3.0), ((3, 2), 2.0)]:
        known.of(OpCall(counted, (dense(0, *shape), factor), {}, (24,), True))
    assert runs == [(2, 3), (2, 3), (3, 2)]


def test_tensors_in_one_memory_are_another_call_than_tensors_in_two() -> None:
    known = SavedByOp()
    one = known.of(OpCall(aten.mul.Tensor, (dense(0, 4), dense(0, 4)), {}, (16,), True))
    two = known.of(OpCall(aten.mul.Tensor, (dense(0, 4), dense(1, 4)), {}, (16, 16), True))
    assert set(one.kept) == {0}
    assert set(two.kept) == {0, 1}


def test_part_of_a_memory_in_another_dtype() -> None:
    """A view of two of its eight elements, each as two numbers."""
    part = Laid((2, 2), (2, 1), 4, torch.bfloat16, True, 0)
    found = result(aten.view_as_complex.default, Laid((2, 2), (2, 1), 4, torch.float32, True, 0), bytes_=(35,))
    assert found.value == Laid((2,), (1,), 2, torch.complex64, True, 0)
    assert result(aten.neg.default, part, bytes_=(32,)).made == (8,)
