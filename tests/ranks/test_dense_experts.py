"""Experts behind masks and capacities, on ranks: the same values as on one device, exchanged by expert."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import autopar
from autopar.codegen import emit
from autopar.errors import CaptureError, ShardingError
from autopar.graph import info, op_name
from autopar.mesh import Mesh
from autopar.runtime.random import op_seed, seeded
from tests.codegen.programs import assert_equal, cut, expected, folded, place_at_random, simulated
from tests.dense_moe_models import EXPERTS, LAYERS, ExpertChoice, GShard, Switch, decoder
from tests.fast_cluster import FAST
from tests.models import Case, Float64, prepared
from tests.pinned import compile_pinned
from tests.ranks.test_parity import name_of, optimizer, verified


def case_of(layer: Callable[[], nn.Module], batch: int = 8) -> Case:
    return prepared(lambda: decoder(layer, batch, sequence=8))


def compiled(case: Case, gpus: int, **options: Any) -> autopar.ParallelModel:
    return compile_pinned(case.model, gpus, sample=case.batch, cluster=FAST, optimizer=optimizer, **options)


def collectives(job: autopar.ParallelModel, rank: int = 0) -> set[str]:
    """Of the layers' forward: ``all_to_all S(0) S(1)``."""
    found = re.findall(r"= (\w+)\(\w+, \w+, src=(\S+), dst=(\S+)\)", job.source(rank).split("class Stage")[0])
    return {" ".join(words) for words in found}


# --- parity ---------------------------------------------------------------------------------------


def test_gshard_sends_slots_to_their_experts_and_back() -> None:
    """The layout of the paper: an all-to-all before and after the experts, and nothing else."""
    with Float64():
        case = case_of(LAYERS["gshard"])
        job = compiled(case, 2, mesh={"dp": 2, "ep": 2})
        result = job.verify(case.batch)
    assert result.ok, str(result)
    assert collectives(job) == {"all_to_all S(1) S(0)", "all_to_all S(0) S(1)"}
    held = {p.name: p for p in job.job.programs[0].program.parameters}
    for name in ("layers.0.experts.wi", "layers.1.experts.wo"):
        assert held[name].shape[0] == EXPERTS // 2


MESHES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("gshard", {"dp": 8, "ep": 8}, {}),
    ("gshard", {"pp": 2, "dp": 2, "tp": 2, "ep": 4}, {"microbatches": 2}),
    ("gshard", {"dp": 2, "cp": 2, "ep": 4}, {}),
    ("switch", {"dp": 4, "ep": 2}, {"zero": 3}),
    ("switch", {"dp": 2, "cp": 2, "ep": 2}, {}),
    ("expert_choice", {"dp": 2, "cp": 2, "ep": 2}, {"recompute": "full"}),
    ("expert_choice_of_batch", {"dp": 2, "tp": 2, "ep": 4}, {}),
    ("expert_choice_of_batch", {"dp": 1, "cp": 2, "ep": 2}, {}),
    ("dense", {"dp": 2, "tp": 2, "ep": 4}, {}),
    ("soft", {"pp": 2, "dp": 2, "ep": 2}, {"microbatches": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "options"), MESHES, ids=name_of)
def test_float64(name: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    sizes = {axis: size for axis, size in mesh.items() if axis != "ep"}
    with Float64():
        case = case_of(LAYERS[name])
        gpus = torch.Size(sizes.values()).numel()
        result = compiled(case, gpus, mesh=mesh, clip_norm=0.5, **options).verify(case.batch)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


@pytest.mark.slow
def test_tokens_are_dropped_as_on_one_device() -> None:
    """Places are counted over the tokens of all ranks: with few slots, other tokens would be dropped else."""
    with Float64():
        case = case_of(lambda: Switch(0.5))
        result = verified(case, {"dp": 2, "cp": 2})
    assert result.ok, str(result)


RANDOM = [
    ("gshard", Mesh(dp=2, cp=2), 0),
    ("switch", Mesh(ep=2, tp=2), 1),
    ("expert_choice_of_batch", Mesh(dp=2, ep=2), 2),
    ("dense", Mesh(cp=2, tp=2), 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "seed"), RANDOM, ids=str)
def test_random_placements(name: str, mesh: Mesh, seed: int) -> None:
    """Any legal placement: planned under random prices."""
    with Float64():
        case = case_of(LAYERS[name], batch=4)
        model = folded(case)
        place_at_random(model, mesh, 1, seed)
        programs = emit(model, cut(model, 1), mesh, microbatches=1, digest="")
        assert_equal(simulated(case, programs, mesh, 1), expected(case), 1e-9)


# --- random choices -------------------------------------------------------------------------------


class _Drawn(TorchFunctionMode):
    """``rand_like`` draws what ranks of dp do, each for its rows, layer by layer."""

    def __init__(self, job: autopar.ParallelModel, ranks: int) -> None:
        super().__init__()
        self.job, self.ranks, self.layer = job, ranks, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.rand_like:
            return func(*args, **(kwargs or {}))
        scope = f"layers.{self.layer}"
        self.layer += 1
        parts = []
        for index, rows in enumerate(args[0].chunk(self.ranks)):
            with seeded(op_seed(_Place(index, scope), 0, ("dp",)), torch.device("cpu")):  # type: ignore[arg-type]
                parts.append(torch.rand_like(rows))
        return torch.cat(parts)


class _Place:
    """What a seed is made of, of one rank in the first step."""

    seed = 0

    class stream:  # noqa: N801
        step, microbatch = 0, 0

    def __init__(self, index: int, scope: str) -> None:
        self.index, self.scope = index, scope

    def __getitem__(self, name: str) -> _Place:
        return self


@pytest.mark.slow
def test_a_random_second_expert_is_that_of_one_device_with_the_same_draws() -> None:
    with Float64():
        case = case_of(GShard, batch=4)
        job = compiled(case, 2, mesh={"dp": 2})
        found = job.simulate(case.batch, 1)
        with _Drawn(job, 2):
            loss: Tensor = case.model(*case.batch)
        loss.backward()
    assert abs(found.losses[0] - loss.item()) < 1e-12
    for name, parameter in case.model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_jitter_is_drawn_again_alike_when_it_is_recomputed() -> None:
    with Float64():
        case = case_of(lambda: Switch(jitter=0.1), batch=4)
        mesh = {"dp": 2, "ep": 2}
        jobs = [compiled(case, 2, mesh=mesh, recompute=how) for how in ("none", "full")]
        kept, again = (job.simulate(case.batch, 2) for job in jobs)
    assert kept.losses == again.losses
    assert all(torch.equal(kept.gradients[name], again.gradients[name]) for name in kept.gradients)


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["bf16", "model"])
def test_a_router_in_float32_stays_there(precision: str) -> None:
    case = prepared(lambda: decoder(Switch, 4, sequence=8), torch.float32 if precision == "bf16" else torch.bfloat16)
    job = compiled(case, 2, mesh={"dp": 2, "ep": 2}, precision=precision)
    nodes = [node for block in job.lowered.blocks for node in block.ops]
    dtypes = {name: {info(node).meta.dtype for node in nodes if op_name(node) == name} for name in _ROUTER | _EXPERTS}
    assert {dtype for name in _ROUTER for dtype in dtypes[name]} == {torch.float32}
    assert {dtype for name in _EXPERTS for dtype in dtypes[name]} == {torch.bfloat16}


_ROUTER = {"aten.softmax.int", "aten.logsumexp.default"}
_EXPERTS = {"aten.bmm.default", "aten.baddbmm.default"}


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [lambda: GShard(0.1), lambda: ExpertChoice(0.1)], ids=["mask", "choice"])
def test_a_capacity_of_no_slots_names_the_line(layer: Callable[[], nn.Module]) -> None:
    with pytest.raises(CaptureError, match=r"einsum.*dense_moe_models.py:\d+.*0 slots.*raise the capacity factor"):
        compiled(case_of(layer), 1)


def test_experts_that_do_not_divide() -> None:
    with pytest.raises(ShardingError, match=r"holds 8 experts, which don't divide over ep 3"):
        compiled(case_of(LAYERS["soft"], batch=3), 3, mesh={"dp": 3, "ep": 3})


def test_no_microbatch_knows_the_places_of_others_tokens() -> None:
    with pytest.raises(ShardingError, match=r"cumsum.*dense_moe_models.py:\d+.*needs the whole batch.*microbatches=1"):
        compiled(case_of(LAYERS["switch"]), 1, microbatches=2)


def test_pairs_of_parts_do_not_fit_masked_experts_over_cp() -> None:
    with pytest.raises(ShardingError, match=r"einsum.*dense_moe_models.py:\d+.*cp_order='contiguous'"):
        compiled(case_of(LAYERS["gshard"]), 2, mesh={"cp": 2, "ep": 2}, cp_order="paired")
