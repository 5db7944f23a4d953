"""Plain PyTorch mixtures of experts on ranks: equal to one device, experts split, and under the model's own names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon

import autopar
from autopar import simulate
from autopar.batch import flatten
from autopar.errors import ShardingError
from autopar.runtime.job import run_rank
from autopar.runtime.launch import read_job
from tests.expert_loop_models import EXPERTS, MIXTURES, ByCounts, ByWhere, Model, looped
from tests.fast_cluster import FAST
from tests.models import Case, prepared
from tests.pinned import compile_pinned
from tests.ranks.test_parity import name_of, optimizer


def compiled(case: Case, mesh: dict[str, int], **options: Any) -> autopar.ParallelModel:
    gpus = math.prod(size for axis, size in mesh.items() if axis != "ep")
    given: dict[str, Any] = {"optimizer": optimizer, "clip_norm": 0.5, **options}
    return compile_pinned(case.model, gpus, sample=case.batch, mesh=mesh, cluster=FAST, **given)


def check(name: str, mesh: dict[str, int], *, layers: int = 2, **options: Any) -> None:
    case = prepared(lambda: looped(MIXTURES[name], 8, layers=layers))
    result = compiled(case, mesh, **options).verify(case.batch, steps=3)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


def test_experts_split_over_two_ranks() -> None:
    check("where", {"dp": 2, "ep": 2}, layers=1)


PARITY: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("mixtral", {"dp": 4, "ep": 4}, {}),
    ("mask", {"dp": 2, "ep": 2, "tp": 2}, {}),
    ("shazeer", {"dp": 2, "ep": 4, "tp": 2}, {}),
    ("switch", {"pp": 2, "dp": 2, "ep": 2}, {"microbatches": 2}),
    ("where_biases", {"dp": 4, "ep": 2}, {"zero": 1}),
    ("where_normed", {"dp": 2, "ep": 2}, {"zero": 3}),
    ("thresholded", {"dp": 2, "ep": 2}, {"layers": 1}),
    ("one_tensor", {"pp": 2, "dp": 2, "ep": 2, "tp": 2}, {"microbatches": 2}),
    ("shared", {"tp": 2}, {"layers": 1}),
    ("unequal", {"dp": 2, "ep": 2}, {"layers": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "options"), PARITY, ids=[name for name, _, _ in PARITY])
def test_parity(name: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    check(name, mesh, **options)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 2, "ep": 2}, {"pp": 2, "dp": 2, "ep": 2}], ids=name_of)
@pytest.mark.parametrize("mixture", [ByWhere, ByCounts])
def test_experts_without_tokens(mixture: Callable[[], nn.Module], mesh: dict[str, int]) -> None:
    """All tokens choose the first two experts. The others' gradients are zero, and decay, or there are none, if the
    loop passes over them; in the second layer they have tokens."""
    case = prepared(lambda: looped(mixture, 8))
    with torch.no_grad():
        case.model.layers[0].moe.gate.weight.zero_()  # type: ignore[union-attr,operator]
    result = compiled(case, mesh).verify(case.batch, steps=3)
    assert result.ok, str(result)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [({"dp": 2, "ep": 2}, {}), pytest.param({"pp": 2, "dp": 2, "ep": 2}, {"zero": 2}, marks=pytest.mark.slow)],
    ids=["dp2", "pp2 dp2"],
)
def test_layers_that_are_applied_twice(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """Their experts are split as others are. What both times give an expert counts, for the layer that has it: two
    experts of the first one never have tokens, and aren't trained."""
    case = prepared(lambda: looped(ByCounts, 8, times=2))
    with torch.no_grad():
        case.model.layers[0].moe.gate.weight.zero_()  # type: ignore[union-attr,operator]
    job = compiled(case, mesh, **options)
    result = job.verify(case.batch, steps=2)
    assert result.ok, str(result)
    load = job.simulate(case.batch, 1).expert_load[0]
    assert sorted(load["layers.0.moe"]) == [0, 0, 128, 128]
    assert sum(load["layers.1.moe"]) == 256
    assert min(load["layers.1.moe"]) > 0


def muon(model: nn.Module) -> Any:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embedding" not in n]
    rest = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return Muon(matrices, lr=2e-2), AdamW(rest, lr=1e-3)


def groups(model: nn.Module) -> Any:
    """Another learning rate for one of the experts."""
    own = [p for n, p in model.named_parameters() if ".experts.1." in n]
    rest = [p for p in model.parameters() if not any(p is one for one in own)]
    return AdamW([{"params": own, "lr": 1e-2}, {"params": rest, "weight_decay": 0.3}], lr=1e-3)


def by_name(model: nn.Module) -> Any:
    def made(parameters: Any) -> SGD:
        third = [p for n, p in parameters.named() if ".experts.2." in n]
        rest = [p for n, p in parameters.named() if ".experts.2." not in n]
        return SGD([{"params": third, "lr": 0.5}, {"params": rest}], lr=0.1, momentum=0.9)

    return made


OPTIMIZERS: dict[str, tuple[Callable[[nn.Module], Any], dict[str, int], dict[str, Any]]] = {
    "muon": (muon, {"dp": 4, "ep": 2, "tp": 2}, {"zero": 1}),
    "adafactor": (lambda model: Adafactor(model.parameters(), lr=1e-2), {"dp": 4, "ep": 2}, {"zero": 1}),
    "groups": (groups, {"dp": 2, "ep": 2}, {}),
    "by_name": (by_name, {"pp": 2, "tp": 2}, {}),
}


@pytest.fixture
def float64_scalars() -> Iterator[None]:
    """Optimizers keep scalars in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_see_each_expert(name: str, float64_scalars: None) -> None:
    make, mesh, options = OPTIMIZERS[name]
    case = prepared(lambda: looped(MIXTURES["where_biases"], 8, layers=mesh.get("pp", 1)))
    result = compiled(case, mesh, optimizer=make(case.model), **options).verify(case.batch, steps=3)
    assert result.ok, str(result)


def test_names_and_weights_are_the_models(tmp_path: Path) -> None:
    """No rank has all experts; what comes back, and what is written, has the names of the model."""
    case = prepared(lambda: looped(ByWhere, 4, layers=1))
    job = compiled(case, {"dp": 2, "ep": 2})
    for rank in range(2):
        for name, parameter in job.modules(rank)[0].named_parameters():
            assert "*" not in name or parameter.shape[0] == EXPERTS // 2
    result = job.simulate(case.batch)
    own = dict(case.model.named_parameters())
    assert set(result.parameters) == set(result.gradients) == set(own)
    assert all(result.parameters[name].shape == tensor.shape for name, tensor in own.items())
    directory = job.write(tmp_path / "job")
    assert set(load_file(directory / "weights.safetensors")) == set(own)
    again = replace(read_job(directory), optimizer=optimizer, clip_norm=0.5)
    tensors = flatten(case.batch)[0]
    ranks = simulate.run(lambda rank: run_rank(again, rank, tensors, 1), 2).results
    _, parameters = again.gather(ranks)
    assert all(torch.equal(parameters[name], tensor) for name, tensor in result.parameters.items())


@pytest.mark.slow
def test_a_model_without_memory_starts_from_recipes() -> None:
    case = prepared(lambda: looped(ByWhere, 4, layers=1))
    with torch.device("meta"):
        model = Model(ByWhere, 1).double()
    result = compiled(Case(model, case.batch), {"dp": 2, "ep": 2}).verify(case.batch, steps=1)
    assert result.ok, str(result)


def test_experts_that_dont_divide() -> None:
    case = prepared(lambda: looped(ByWhere, 3, layers=1))
    with pytest.raises(ShardingError, match=r"moe.experts.\*.* 4 experts.* ep 3; they do over \[1, 2, 4\]"):
        compiled(case, {"dp": 3, "ep": 3})
