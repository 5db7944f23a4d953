"""Which rows of the global batch a rank takes for a microbatch. What it refuses: test_executor.py."""

from __future__ import annotations

import torch

from autopar.mesh import Mesh
from autopar.runtime import Axes, Input, Program
from autopar.runtime.batches import part, parts

MESH = Mesh(dp=2, tp=2)


def program(*inputs: Input) -> Program:
    return Program(0, 1, MESH.to_json(), 3, (), inputs, (), (), ())


def test_microbatches_are_contiguous_and_dp_splits_each() -> None:
    item = Input("x", "x", (12,), "int64", 0)
    rows = {
        (rank, m): part(torch.arange(12), item, program(item), m, Axes.alone(MESH, rank, "cpu")).tolist()
        for rank in range(4)
        for m in range(3)
    }
    for tp in (0, 1):
        assert [rows[tp, m] for m in range(3)] == [[0, 1], [4, 5], [8, 9]]
        assert [rows[2 + tp, m] for m in range(3)] == [[2, 3], [6, 7], [10, 11]]


def test_any_dim_can_be_the_batch() -> None:
    item = Input("x", "x", (2, 6), "int64", 1)
    found = part(torch.arange(12).view(2, 6), item, program(item), 2, Axes.alone(MESH, 3, "cpu"))
    assert found.tolist() == [[5], [11]]
    assert found.is_contiguous()


def test_inputs_without_a_batch_dim_are_taken_whole_in_the_order_of_the_program() -> None:
    whole, split = Input("t", "t", (3,), "float32", None), Input("x", "x", (6,), "int64", 0)
    batch = {"x": torch.arange(6), "t": torch.ones(3)}
    taken = parts(batch, program(whole, split), 1, Axes.alone(MESH, 2, "cpu"))
    assert [t.tolist() for t in taken] == [[1, 1, 1], [3]]
