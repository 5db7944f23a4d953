"""What training says of experts on ranks is what one device does: loads, selection biases, hot experts apart."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, MixtralConfig, MixtralForCausalLM

import autopar
from autopar.errors import ArgumentError
from autopar.runtime.loads import save_load
from tests.expert_loop_models import MIXTURES, looped
from tests.fast_cluster import FAST
from tests.models import Case, Float64, prepared, tokens
from tests.moe_models import family
from tests.pinned import compile_pinned
from tests.ranks.test_parity import verified

BIAS_RATE = 0.05
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "experts_implementation": "eager",
}


def batch() -> dict[str, Tensor]:
    ids = tokens(8, vocabulary=SIZES["vocab_size"], sequence=8)
    return {"input_ids": ids, "labels": ids}


def mixtral() -> Case:
    config = MixtralConfig(intermediate_size=16, num_hidden_layers=2, num_local_experts=4, **SIZES)
    return Case(MixtralForCausalLM(config), batch())


def wide() -> Case:
    """Rows of experts are most of its memory."""
    sizes = SIZES | {"hidden_size": 64, "max_position_embeddings": 64}
    config = MixtralConfig(intermediate_size=128, num_hidden_layers=2, num_local_experts=4, **sizes)
    ids = tokens(8, vocabulary=32, sequence=64)
    return Case(MixtralForCausalLM(config), {"input_ids": ids, "labels": ids})


def glm() -> Case:
    """Sigmoid scores with a selection bias, experts in two groups, a dense layer and a shared expert."""
    routing = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1}
    config = Glm4MoeConfig(
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        head_dim=8,
        **routing,
        **SIZES,
    )
    return Case(Glm4MoeForCausalLM(config), batch())


def compiled(case: Case, mesh: dict[str, int], **options: Any) -> autopar.ParallelModel:
    gpus = math.prod(size for axis, size in mesh.items() if axis != "ep")
    given = {"optimizer": sgd, "cluster": FAST, "microbatches": 1, **options}
    return compile_pinned(case.model, gpus, sample=case.batch, mesh=mesh, **given)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def train_by_hand(case: Case, steps: int, rate: float = 0.0) -> tuple[list[dict[str, list[int]]], dict[str, Tensor]]:
    """One device: the slots of each expert per step, seen where experts are called, and the biases in the end."""
    counts: dict[str, Tensor] = {}

    def look(name: str, module: Any) -> None:
        def count(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            counts[name] = torch.bincount(given[1].flatten(), minlength=module.num_experts)

        module.register_forward_pre_hook(count)

    for name, module in case.model.named_modules():
        if name.endswith(".experts"):
            look(name, module)
    optimizer = sgd(case.model.parameters())
    loads = []
    for _ in range(steps):
        optimizer.zero_grad()
        case.model(**case.batch).loss.backward()
        optimizer.step()
        loads.append({name: count.tolist() for name, count in counts.items()})
        for name, count in counts.items() if rate else ():
            bias = case.model.get_buffer(f"{name.removesuffix('.experts')}.gate.e_score_correction_bias")
            bias += rate * torch.sign(count.double().mean() - count)
    return loads, dict(case.model.named_buffers())


MESHES = [
    pytest.param({"dp": 2, "ep": 2}, {}, id="ep2"),
    pytest.param({"dp": 2, "ep": 2}, {"cluster": "cpu"}, id="ep2, tokens whole", marks=pytest.mark.slow),
    pytest.param(
        {"pp": 2, "dp": 2, "ep": 2},
        {"microbatches": 2, "recompute": "full"},
        id="pp2 ep2, recomputed",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("mesh", "options"), MESHES)
def test_loads_are_those_of_one_device(mesh: dict[str, int], options: dict[str, Any]) -> None:
    """In every step; what is recomputed counts once."""
    with Float64():
        found = compiled(prepared(mixtral), mesh, **options).simulate(batch(), 2)
        expected, _ = train_by_hand(prepared(mixtral), 2)
    assert found.expert_load == expected
    assert expected[0] != expected[1]
    assert {sum(load) for load in expected[0].values()} == {8 * 8 * 2}


@pytest.mark.slow
def test_accumulated_steps_count_together() -> None:
    with Float64():
        job = compiled(prepared(mixtral), {"dp": 1})
        job.step(batch(), accumulate=True)
        assert job.expert_load == {}
        job.step(batch())
        expected, _ = train_by_hand(prepared(mixtral), 1)
    assert job.expert_load == {layer: [2 * count for count in counts] for layer, counts in expected[0].items()}


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "options"), [MESHES[0], MESHES[2]])
def test_selection_biases_are_those_of_a_loop_by_hand(mesh: dict[str, int], options: dict[str, Any]) -> None:
    with Float64():
        found = compiled(prepared(glm), mesh, expert_bias_rate=BIAS_RATE, **options).simulate(batch(), 3)
        loads, expected = train_by_hand(prepared(glm), 3, BIAS_RATE)
    assert found.expert_load == loads
    assert len(found.buffers) == 1
    for name, bias in found.buffers.items():
        assert bias.abs().max() >= BIAS_RATE
        assert torch.equal(bias, expected[name])


@pytest.mark.slow
def test_a_job_with_selection_biases_verifies() -> None:
    with Float64():
        result = verified(prepared(glm), {"dp": 2}, expert_bias_rate=BIAS_RATE, zero=3)
    assert result.ok, str(result)
    assert [error for name, error in result.parameter_errors.items() if name.endswith("_bias")] == [0.0]


def hot(case: Case) -> dict[str, list[float]]:
    """Loads of which two neighbours have the most: one of them has to move."""
    names = [name for name, module in case.model.named_modules() if name.endswith(".experts")]
    return {name: [50.0, 40.0 + number, 3.0, 4.0] for number, name in enumerate(names)}


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"dp": 2, "ep": 2}, {"zero": 1}),
        pytest.param({"pp": 2, "dp": 2, "ep": 2}, {"zero": 3, "microbatches": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 4, "ep": 2}, {"zero": 2}, marks=pytest.mark.slow),
    ],
)
def test_hot_experts_apart_compute_the_same(mesh: dict[str, int], options: dict[str, Any]) -> None:
    with Float64():
        case = prepared(mixtral)
        job = compiled(case, mesh, expert_load=hot(case), **options)
        assert [row.order for row in job.plan.experts] == [[0, 2, 1, 3], [0, 2, 1, 3]]
        result = job.verify(batch())
        loads, _ = train_by_hand(prepared(mixtral), 1)
        assert job.simulate(batch()).expert_load == loads
    assert result.ok, str(result)
    assert result.tolerance == 1e-9


@pytest.mark.slow
def test_memory_is_predicted_for_the_fullest_rank() -> None:
    """With the loads that it really has; without them, too little is."""
    with Float64():
        case = prepared(wide)
        load = compiled(case, {"dp": 2, "ep": 2}).simulate(case.batch).expert_load[0]
        unknown, known = (
            compiled(case, {"dp": 2, "ep": 2}, expert_load=given).memory(case.batch, measure="simulate")
            for given in ({}, load)
        )
    assert min(unknown.errors) < -0.03
    predicted, measured = known.predicted[0].peak_bytes, max(rank.peak_bytes for rank in known.measured)
    assert abs(predicted / measured - 1) < 0.03


@pytest.mark.slow
def test_an_order_holds_for_experts_of_a_loop() -> None:
    """Which are parameters of their own, that ranks hold in one."""
    with Float64():
        case = prepared(lambda: looped(MIXTURES["where"], 8))
        load = {f"layers.{layer}.moe": [50.0, 40.0, 3.0, 4.0] for layer in range(2)}
        job = compiled(case, {"dp": 2, "ep": 2}, loss=case.loss, expert_load=load)
        assert {tuple(row.order) for row in job.plan.experts} == {(0, 2, 1, 3)}
        result = job.verify(case.batch, steps=1)
    assert result.ok, str(result)


@pytest.mark.slow
def test_an_order_holds_for_rows_of_all_experts_in_one_matrix() -> None:
    """Of which ``tp`` splits those of each expert, as ``ep`` does experts: a plan counts the ranks of ``ep`` alone."""
    with Float64():
        case = prepared(lambda: family("dbrx", 8, experts=4))
        job = compiled(case, {"dp": 2, "ep": 2, "tp": 2}, expert_load=hot(case))
        assert [row.order for row in job.plan.experts] == [[0, 2, 1, 3], [0, 2, 1, 3]]
        result = job.verify(case.batch, steps=2)
        whole = compiled(case, {"dp": 4, "ep": 4, "tp": 2})
    assert result.ok, str(result)
    assert [(row.axes, row.ranks) for row in whole.plan.experts] == [(["ep"], 4), (["ep"], 4)]


@pytest.mark.slow
def test_an_order_is_stored_and_read_back(tmp_path: Path) -> None:
    """Ranks hold experts in the plan's order; a plan from a file gives the same program."""
    case = prepared(mixtral)
    save_load(tmp_path / "loads.json", hot(case))
    job = compiled(case, {"dp": 2, "ep": 2}, expert_load=tmp_path / "loads.json")
    again = compiled(case, {"dp": 2, "ep": 2}, plan=autopar.Plan.from_json(job.plan.to_json()))
    assert again.source(0) == job.source(0)
    assert "hot ones are stored apart" in str(job.plan)
    name = "model.layers.0.mlp.experts.down_proj"
    stored = [job.modules(rank)[0].get_parameter(name) for rank in range(2)]
    assert torch.equal(torch.cat(stored), case.model.get_parameter(name)[[0, 2, 1, 3]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_bias_rate": 0.1}, "none of its 2 routers has one"),
        ({"expert_load": {"model.layers.7.mlp": [1, 2, 3, 4]}}, "layers with experts are: model.layers.0.mlp.experts"),
        ({"expert_load": {"model.layers.0.mlp.experts": [1, 2]}}, "2 loads of .*, which has 4 experts"),
    ],
)
def test_what_is_not_of_the_model_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        compiled(prepared(mixtral), {"dp": 2, "ep": 2}, **options)
