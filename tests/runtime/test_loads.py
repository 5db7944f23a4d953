"""Loads of experts: what counts, what it adds up to over ranks, and how a file of it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar import simulate
from autopar.errors import ArgumentError
from autopar.mesh import Mesh
from autopar.runtime import Axes, Router
from autopar.runtime.loads import added, read_load, save_load, total_load, update_bias_
from autopar.runtime.routers import Routers

LAYER = "layers.0.mlp"
INDEX = torch.tensor([[0, 2], [3, 2], [-1, 4], [2, 0]])  # of four experts: -1 and 4 are none


def test_slots_of_experts_count_in_forwards_only() -> None:
    routers = Routers()
    assert routers.seen(LAYER, INDEX, 4) is INDEX
    assert routers.take() == {}
    with routers.counting():
        routers.seen(LAYER, INDEX, 4)
        routers.seen(LAYER, INDEX[:1], 4)
    assert routers.take()[LAYER].tolist() == [3, 0, 4, 1]
    assert routers.take() == {}


def test_numbers_become_places_and_loads_keep_numbers() -> None:
    routers = Routers()
    routers.declare([Router(LAYER, 4, order=(2, 0, 3, 1), imbalance=1.5)], torch.device("cpu"))
    with routers.counting():
        placed = routers.seen(LAYER, INDEX, 4)
    assert placed.tolist() == [[1, 0], [2, 0], [4, 4], [0, 1]]
    assert routers.take()[LAYER].tolist() == [2, 0, 3, 1]
    assert (routers.imbalance(LAYER), routers.imbalance("other")) == (1.5, 1.0)


def test_ranks_with_the_same_tokens_count_once() -> None:
    mesh = Mesh(pp=2, dp=2, tp=2)
    routers = (Router("first", 2, split=("dp",)), Router("second", 3, split=("dp", "tp")), Router("unused", 2))

    def program(rank: int) -> dict[str, list[int]]:
        axes = Axes.build(mesh, rank, "cpu")
        own = {"first": torch.tensor([1, 10])} if axes["pp"].index == 0 else {"second": torch.tensor([rank, 0, 1])}
        return {layer: load.tolist() for layer, load in total_load(routers, own, axes).items()}

    result = simulate.run(program, mesh.world)
    assert result.results == [{"first": [2, 20], "second": [4 + 5 + 6 + 7, 0, 4], "unused": [0, 0]}] * 8
    assert [calls for rank in result.traffic for calls in [t.calls for t in rank if t.group == "world"]] == [1] * 8


def test_biases_move_towards_equal_loads() -> None:
    bias = torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64)
    update_bias_(bias, torch.tensor([1, 2, 3]), 0.25)
    assert bias.tolist() == [0.75, 0.0, -0.25]


def test_loads_add_up_and_a_file_reads_back(tmp_path: Path) -> None:
    load = added([{"a": [1, 2], "b": [3, 4]}, {"a": [1, 0], "b": [0, 0]}])
    save_load(tmp_path / "loads.json", load)
    assert read_load(tmp_path / "loads.json") == read_load(load) == {"a": (2.0, 2.0), "b": (3.0, 4.0)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": [1, -1]}, "not negative"),
        ({"a": [0, 0]}, "not all zero"),
        ({"a": [1, float("nan")]}, "finite"),
        ({"a": 3}, "is no table of loads"),
        ("missing.json", "is no table of loads"),
    ],
)
def test_what_is_no_load_is_refused(given: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_load(given)  # type: ignore[arg-type]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="can't write expert loads"):
        save_load(tmp_path / "missing" / "loads.json", {"a": [1]})
