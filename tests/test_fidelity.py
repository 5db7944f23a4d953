"""Predictions against published measurements: a few rows of the benchmark's, and the formulas that it is made of."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autopar.api import prepare
from autopar.graph import info, op_name

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "tests/data/vocab_parallel_artifact_rows.csv"
MEASUREMENTS = ROOT / "benchmarks/measurements"
METHODS = ("baseline", "vocab-2", "vocab-1", "interlaced")
IN_FLIGHT = {"baseline": 8, "vocab-2": 9, "vocab-1": 10, "interlaced": 12}


@pytest.fixture(scope="module")
def fidelity() -> ModuleType:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("fidelity")
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("method", METHODS)
def test_the_timeline_of_measured_pass_times_is_the_measured_iteration(fidelity: ModuleType, method: str) -> None:
    rows = fidelity.read(ROWS)
    (run,) = fidelity.profiled([row for row in rows if row["method"] == method], fidelity.transfers(rows))
    assert abs(run.error) <= 0.015
    assert run.timeline.peak_in_flight[0] == IN_FLIGHT[method]


def test_the_rows_are_those_of_the_artifact(fidelity: ModuleType) -> None:
    every = fidelity.read(MEASUREMENTS / "vocab_parallel_artifact_onehost_profile.csv")
    assert len(every) == 40
    assert all(row in every for row in fidelity.read(ROWS))


def test_layers_move_off_the_last_stage_as_in_the_artifact(fidelity: ModuleType) -> None:
    """Its sheet says how many layers the last stage keeps, for all sizes."""
    for row in fidelity.read(MEASUREMENTS / "vocab_parallel_artifact_onehost_profile.csv"):
        if row["method"] == "redis":
            gpt = fidelity.Gpt(*(int(row[key]) for key in ("layers", "hidden", "heads", "seq", "vocab")))
            assert fidelity.redistributed(gpt, 8)[-1] == int(row["last_stage_layers"])


def test_products_hold_one_share_of_the_peak_rate_in_all_profiled_models(fidelity: ModuleType) -> None:
    """One number stands for four models of another paper: it isn't fitted to each."""
    cluster = fidelity.Cluster.load(fidelity.CLUSTER)
    rows = fidelity.read(MEASUREMENTS / "zero_bubble_profiled_times.csv")
    shares = [fidelity.sustained_fraction([row], cluster) for row in rows]
    assert max(shares) / min(shares) < 1.05
    assert max(shares) < cluster.device.achievable_fraction


@pytest.mark.parametrize("method", ["baseline", "vocab-2"])
def test_memory_from_formulas_is_the_published_peak(fidelity: ModuleType, method: str) -> None:
    cells = fidelity.cells_of(fidelity.read(MEASUREMENTS / "vocab_parallel_paper_tables5_6.csv"))
    predicted = fidelity.predict(cells[0], method, fidelity.machine_of(MEASUREMENTS))
    assert str(cells[0]) == "1F1B 8 GPUs s=2048 V=32k"
    assert abs(predicted.errors[1]) < 0.08


def test_methods_come_in_the_published_order_where_the_vocabulary_is_large(fidelity: ModuleType) -> None:
    cells = fidelity.cells_of(fidelity.read(MEASUREMENTS / "vocab_parallel_paper_tables5_6.csv"))
    machine = fidelity.machine_of(MEASUREMENTS)
    cell = next(cell for cell in cells if str(cell) == "1F1B 8 GPUs s=2048 V=256k")
    baseline, redis, split = (fidelity.predict(cell, method, machine) for method in ("baseline", "redis", "vocab-2"))
    assert baseline.seconds > redis.seconds > split.seconds
    assert fidelity.differ(baseline, redis)
    assert fidelity.same_order(baseline, redis)


# --- published runs, planned as they ran ---------------------------------------------------------------------


def test_every_row_is_a_run_or_left_out_for_a_reason(fidelity: ModuleType) -> None:
    for table in fidelity.tables(MEASUREMENTS):
        rows = fidelity.read(MEASUREMENTS / table.file)
        for key in ("scheme", "schedule") if table.file.startswith(("vocab", "ptdp")) else ():
            rows = [row for row in rows if row.get(key, "") in table.title]
        assert len(table.runs) + sum(table.left_out.values()) == len(rows), table.title
        assert len({run.name for run in table.runs}) == len(table.runs), table.title
        for run in table.runs:
            assert run.request.microbatches * run.microbatch * run.mesh.replicas == run.batch, run.name


def test_flops_are_counted_as_published(fidelity: ModuleType) -> None:
    """The vocabulary tables say how many TFLOP an iteration has; Megatron's formula for GPTs gives the same."""
    tables = importlib.import_module("published_tables")
    for row in fidelity.read(MEASUREMENTS / "vocab_parallel_paper_tables5_6.csv"):
        counted = tables.megatron_flops(tables.gpt_sizes(row), int(row["global_batch"]), 3)
        assert counted == pytest.approx(1e12 * float(row["model_tflop_per_iter"]), rel=1e-3)


@pytest.mark.slow
def test_a_layer_called_again_is_a_layer_captured(fidelity: ModuleType) -> None:
    """The plan of six layers is that of four of them, one of which is called twice more."""
    runs = importlib.import_module("published_runs")
    sizes = runs.GptSizes(6, 256, 4, 512, 128, tied=False)
    run = runs.Run("tiny", "a100", sizes, {"pp": 2, "dp": 2, "tp": 2}, 1, 16, 1.0, options={"zero": 1})
    whole = runs.prepare(
        runs.published_gpt(sizes), runs.gpt_tokens(16, sizes.sequence), device="cuda", precision="bf16"
    )[0]
    plans = [runs.build(model, run.request).plan for model in (whole, runs.captured(sizes, run.batch))]
    assert plans[0].cost == plans[1].cost
    assert plans[0].peak_bytes == plans[1].peak_bytes


@pytest.mark.slow
def test_runs_are_planned_as_their_systems_ran(fidelity: ModuleType) -> None:
    """Whole tokens between products, gradients summed at the end, and layers recomputed that no mode of ours names."""
    runs, tables = importlib.import_module("published_runs"), importlib.import_module("published_tables")
    sizes = runs.GptSizes(6, 4096, 32, 8192, 2048, fused=False, tied=False)
    run = runs.Run("small", "a100", sizes, {"dp": 2, "tp": 2}, 1, 16, 1.0)
    other = tables._other_layers
    tried = {
        "run": run,
        "full": replace(run, options={"recompute": "full"}),
        "whole": replace(run, whole_tokens=True),
        "late": replace(run, late_sums=True),
        "every": replace(run, recomputed=lambda block, _: other(block, 1)),
        "half": replace(run, recomputed=other),
    }
    found = dict(zip(tried, runs.predictions(tried.values()), strict=True))
    sent = {name: {part.kind for part in one.plan.cost.parts if part.axis == "tp"} for name, one in found.items()}
    assert "reduce_scatter" in sent["run"]
    assert sent["whole"] == {"all_reduce"}
    seconds = {name: one.seconds for name, one in found.items()}
    assert seconds["late"] > seconds["run"]
    assert seconds["every"] == pytest.approx(seconds["full"])
    assert seconds["half"] - seconds["run"] == pytest.approx((seconds["full"] - seconds["run"]) / 2)


def _without_hosts(runs: ModuleType) -> Any:
    """A100s whose hosts are never what a step as small as these waits for."""
    cluster = runs.Cluster.load("a100")
    return replace(cluster, device=replace(cluster.device, host_call_seconds=0.0))


@pytest.mark.slow
def test_copies_of_gathered_weights_take_their_time(fidelity: ModuleType) -> None:
    """Each weight read and written once more, for a forward and a backward of each microbatch; of our programs, those
    of layers, which are small, and the part of them that a rank sends."""
    runs = importlib.import_module("published_runs")
    sizes = runs.LlamaSizes(5, 1024, 8, 2, 2048, 8192, 512, plain=True)
    run = runs.Run("small", _without_hosts(runs), sizes, {"dp": 16}, 1, 32, 1.0, options={"zero": 3})
    all_, none = replace(run, copies_gathered=True), replace(run, copies_gathered=False)
    plain, copied, flat = runs.predictions([run, all_, none])
    layer = 1024 * (2 * 1024 + 2 * 256 + 3 * 2048 + 2)
    elements = 5 * layer + 1024 * (2 * 8192 + 1)
    rate = runs.Cluster.load("a100").device.achievable_memory_bytes_per_second
    assert copied.seconds - flat.seconds == pytest.approx(2 * 2 * elements * 2 * 2 / rate, rel=1e-6)
    assert plain.seconds - flat.seconds == pytest.approx(2 * 2 * 5 * layer * (1 + 1 / 16) * 2 * 2 / rate, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("recompute", "gathers"), [("none", 2), ("full", 3)])
def test_passes_that_wait_for_gathers_have_none_beside_them(fidelity: ModuleType, recompute: str, gathers: int) -> None:
    """A step is its passes, which nothing slows, its gathers and scatters, and the update, one after the other."""
    runs = importlib.import_module("published_runs")
    sizes = runs.LlamaSizes(4, 1024, 8, 2, 2048, 8192, 512)
    options = {"zero": 3, "recompute": recompute}
    cluster = _without_hosts(runs)
    run = runs.Run("small", cluster, sizes, {"dp": 16}, 1, 32, 1.0, options=options, waits_for_gathers=True)
    found = runs._best(runs.captured(sizes, run.batch), run)
    pipeline, machine = found.pipeline, runs.Machine.of(run.request.cluster, run.mesh)
    costs, (slowed,) = pipeline.timeline.costs, pipeline.slowed
    moves = runs.MoveCosts(found.built.model, run.request.options, machine, pipeline.stages, (0,))
    copied = moves.unpack_seconds(pipeline.stages[0])
    moves = replace(moves, sizes=runs.one_by_one(16))
    assert copied > 0
    assert slowed.forward > 0
    passes = costs.forward_seconds[0] + costs.backward_seconds[0] - slowed.forward - slowed.backward - 2 * copied
    moved = gathers * moves.gather_seconds(pipeline.stages[0]) + moves.scatter_seconds(pipeline.stages[0])
    once = costs.begin_seconds[0] + costs.reduce_seconds[0] + costs.step_seconds[0] + costs.end_seconds[0]
    assert found.seconds == pytest.approx(2 * (passes + moved) + once, rel=1e-6)


def test_plain_ops_of_llama_compute_the_same(fidelity: ModuleType) -> None:
    """Norms of one kernel or of several; positions as complex numbers or as halves, whose order differs."""
    llama = importlib.import_module("published_llama")
    x, angles = torch.randn(2, 4, 8, 16), torch.randn(8, 8)
    neighbours = llama.turned(x, torch.stack((angles.cos(), angles.sin()), -1))
    by_halves = x.unflatten(-1, (8, 2)).transpose(-1, -2).flatten(-2)
    halves = llama.rotated(by_halves, torch.stack((angles.cos().tile(2), angles.sin().tile(2))))
    torch.testing.assert_close(neighbours.unflatten(-1, (8, 2)).transpose(-1, -2).flatten(-2), halves)
    norms = [llama.RmsNorm(16, fused=fused) for fused in (True, False)]
    for norm in norms:
        torch.nn.init.ones_(norm.weight)
    one, several = (norm(x.bfloat16()) for norm in norms)
    torch.testing.assert_close(one, several)


@pytest.mark.slow
def test_times_of_layers_are_as_profiled(fidelity: ModuleType) -> None:
    """Those of the 22B model under recomputation, and whole stages of four others; one set of constants."""
    found = [one for one in fidelity.layers(MEASUREMENTS) if "(ms)" in one.table]
    assert len(found) == 15
    assert all(abs(one.error) < 0.1 for one in found)
    assert sum(abs(one.error) for one in found) / len(found) < 0.04


# --- mixtures of experts, as Megatron ran them ---------------------------------------------------------------


def zoo_rows(fidelity: ModuleType) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = fidelity.read(MEASUREMENTS / "megatron_moe_modelzoo.csv")
    return rows


def test_seconds_and_tflops_of_the_zoo_say_the_same(fidelity: ModuleType) -> None:
    """Where a row has both, the FLOPs that are counted make one the other: so they are counted as there."""
    rows = zoo_rows(fidelity)
    published = {int(row["line"]): float(row["Step time (sec)"]) for row in rows if row["Step time (sec)"]}
    checked = [run for run in fidelity.moe_zoo.runs(rows) if run.line in published]
    assert len(checked) == 5
    for run in checked:
        assert abs(run.seconds / published[run.line] - 1) < 0.01, run


def test_every_row_of_the_zoo_is_a_run_or_left_out_for_a_reason(fidelity: ModuleType) -> None:
    rows = zoo_rows(fidelity)
    runs, left_out = list(fidelity.moe_zoo.runs(rows)), fidelity.moe_zoo.left_out(rows)
    headings = {int(row["line"]) for row in rows if not (row["SEQ LEN"] or row["SEQ_LEN"])}
    assert {run.line for run in runs} | set(left_out) | headings == {int(row["line"]) for row in rows}
    assert all(run.mesh.world == run.gpus and run.mesh.experts == run.degrees["ep"] for run in runs)
    assert all(run.batch % (run.degrees["dp"] * run.microbatch) == 0 for run in runs)


def test_the_scripts_of_the_zoo_are_runs_too(fidelity: ModuleType) -> None:
    rows = fidelity.read(MEASUREMENTS / "megatron_moe_modelzoo_scripts.csv")
    (run,) = fidelity.moe_zoo.runs(zoo_rows(fidelity)[:0] + rows)
    assert (run.model, run.gpus, run.mesh.experts, run.microbatches) == ("Mixtral-8x22B", 128, 8, 32)
    active, attention = 39e9, 56 * 6144 * 4096  # as published; half of the square
    assert run.flops / run.tokens == pytest.approx(6 * (active + attention), rel=0.01)


def test_the_zoos_experts_lie_on_the_innermost_axes(fidelity: ModuleType) -> None:
    axes = {run.line: run.mesh.expert_axes for run in fidelity.moe_zoo.runs(zoo_rows(fidelity))}
    assert axes[14] == ("ep", "tp")
    assert axes[36] == ("cp", "tp")
    assert axes[62] == ("ep",)


@pytest.mark.slow
def test_a_run_of_the_zoo_is_planned(fidelity: ModuleType) -> None:
    """Two layers of it, all the way: the plan has the row's degrees, and time for its tokens."""
    zoo = fidelity.moe_zoo
    (run,) = (run for run in zoo.runs(zoo_rows(fidelity)) if run.line == 17)
    (found,) = zoo.predictions([run], layers=2)
    assert found.plan.microbatches == 4
    assert found.plan.mesh.replicas == 128
    assert found.seconds > 0


def test_runs_of_the_zoo_that_moved_tokens_otherwise_say_so(fidelity: ModuleType) -> None:
    """Of those by DeepEP, where experts are on several nodes, a token goes once to each; on neighbours that no axes of
    ours are, ours go otherwise."""
    rows = fidelity.read(MEASUREMENTS / "megatron_moe_modelzoo_scripts.csv")
    runs = {run.line: run for run in fidelity.moe_zoo.runs(zoo_rows(fidelity) + rows)}
    assert [line for line, run in runs.items() if run.dispatch == "node"] == [14, 15, 37, 38]
    assert [line for line, run in runs.items() if "neighbours" in run.differs] == [37, 38]
    assert not any(run.differs for line, run in runs.items() if line not in {37, 38})


@pytest.fixture(scope="module")
def published_moe(fidelity: ModuleType) -> ModuleType:
    return importlib.import_module("published_moe")


TINY = {"layers": 2, "width": 64, "heads": 4, "groups": 2, "head": 16, "inner": 32, "experts": 4, "vocabulary": 128}
NAMES = {
    "model.embed_tokens.": "token.",
    "model.": "",
    "lm_head.": "head.",
    "self_attn.": "attention.",
    "_proj.": ".",
    "attention.o.": "attention.out.",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "mlp.gate.weight": "experts.router",
    "mlp.experts.gate_up_proj": "experts.gate_up",
    "mlp.experts.down_proj": "experts.down",
}
"""Parts of names in ``transformers``, in the order in which they are replaced -> those of the plain model."""


def renamed(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize("name", ["mixtral_8x22b", "qwen3_235b"])
def test_plain_mixtures_have_the_parameters_of_transformers(published_moe: ModuleType, name: str) -> None:
    """All of them, at full depth."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        theirs = getattr(importlib.import_module("models"), name)()
    finally:
        sys.path.pop(0)
    ours = published_moe.published_moe(getattr(published_moe, name.upper()), 4096)
    shapes = {renamed(path): parameter.shape for path, parameter in theirs.named_parameters()}
    assert {path: parameter.shape for path, parameter in ours.named_parameters()} == shapes


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_plain_mixtures_compute_what_transformers_does(published_moe: ModuleType, name: str) -> None:
    """Losses and gradients of equal weights, in float32."""
    torch.manual_seed(0)
    published = published_moe.QWEN3_235B if name == "qwen3_moe" else published_moe.MIXTRAL_8X22B
    sizes = replace(published, chosen=2, **TINY)
    common = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    widths = {"intermediate_size": 32, "moe_intermediate_size": 32, "head_dim": 16, "vocab_size": 128}
    values = {"rms_norm_eps": sizes.epsilon, "rope_parameters": {"rope_type": "default", "rope_theta": sizes.base}}
    given = {**common, **experts, **widths, **values, "use_cache": False}
    known = AutoConfig.for_model(name)
    config = AutoConfig.for_model(name, **{key: value for key, value in given.items() if hasattr(known, key)})
    theirs = AutoModelForCausalLM.from_config(config, experts_implementation="eager").train()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.1)
    ours = published_moe.PublishedMoe(sizes, 8, torch.float32).train()
    ours.load_state_dict({renamed(path): value for path, value in theirs.state_dict().items()})
    ids = torch.randint(128, (2, 8))
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = -100
    losses = ours(ids, labels), theirs(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for loss in losses:
        loss.backward()
    found = dict(ours.named_parameters())
    for path, parameter in theirs.named_parameters():
        torch.testing.assert_close(found[renamed(path)].grad, parameter.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("size", ["MIXTRAL_8X22B", "QWEN3_235B"])
def test_experts_of_plain_mixtures_are_recognised(published_moe: ModuleType, size: str) -> None:
    """Once per layer. Norms are one op each, and values bf16 but those of the router."""
    sizes = replace(getattr(published_moe, size), chosen=2, **TINY)
    ids = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    model = published_moe.published_moe(sizes, 8)
    made = prepare(model, {"ids": ids, "labels": ids}, device="cuda", precision="bf16")[0]
    layers = [call for call in made.calls if call.path.startswith("layers.")]
    assert len(layers) == 2
    assert len({call.block for call in layers}) == 1
    block = made.blocks[layers[0].block]
    ops = Counter(op_name(node) for node in block.ops)
    moves = ("route", "dispatch", "grouped_linear", "combine")
    assert [ops[name] for name in moves] == [1, 1, 2, 1]
    assert ops["aten.rms_norm.default"] == (4 if sizes.head_norms else 2)
    assert (ops["aten.silu.default"], ops["aten.scaled_dot_product_attention.default"]) == (1, 1)
    names = {"aten.linear.default", "aten.rms_norm.default", "aten.mul.Tensor", "combine"}
    wide = [node for node in block.ops if op_name(node) in names and info(node).meta.dtype != torch.bfloat16]
    assert [(op_name(node), info(node).meta.dtype) for node in wide] == [("aten.linear.default", torch.float32)]
    assert info(wide[0]).meta.shape == (16, 4)


def test_rank_correlation(fidelity: ModuleType) -> None:
    assert fidelity.moe_zoo.correlation([1.0, 2.0, 3.0], [10.0, 20.0, 15.0]) == pytest.approx(0.5)
    assert fidelity.moe_zoo.correlation([1.0, 2.0, 2.0], [1.0, 3.0, 3.0]) == pytest.approx(1.0)


def test_held_out_rows_are_as_published(fidelity: ModuleType) -> None:
    """Sizes have the published numbers of parameters, and all rows that are left out are said."""
    heldout = importlib.import_module("heldout_tables")
    found = heldout.tables()
    runs = [run for table in found for run in table.runs]
    assert len(runs) + sum(sum(table.left_out.values()) for table in found) == 183
    assert {run.machine.name for run in runs} == {"h100", "a100", "gb200"}
    for run in runs:
        assert run.batch % (run.mesh.replicas * run.microbatch) == 0, run.name
    for row in fidelity.read(heldout.HELDOUT / "llm_foundry_mpt.csv"):
        layers, width, _ = heldout._MPT[row["model"]]
        of_layer = 12 * width**2 + 13 * width  # products and their biases, two norms
        counted = layers * of_layer + (50368 + int(row["seq"]) + 2) * width
        assert counted == int(row["parameters"]), row["model"]


@pytest.mark.slow
def test_kernels_that_torch_has_no_op_for_move_what_theirs_do(fidelity: ModuleType) -> None:
    """Fused rotary positions and SwiGLU read and write each of their operands and results once."""
    runs = importlib.import_module("published_runs")
    sizes = runs.LlamaSizes(5, 1024, 8, 2, 2048, 8192, 512)
    several = runs.Run("small", "h100", sizes, {"dp": 2}, 4, 8, 1.0)
    one = replace(several, sizes=replace(sizes, fused=True))
    relu = replace(several, sizes=replace(sizes, fused=True, gated=False))
    slow, fast, fewest = (found.seconds for found in runs.predictions([several, one, relu]))
    assert slow > fast > fewest


@pytest.mark.slow
def test_blocks_of_keys_travel_around_cp_as_pinned(fidelity: ModuleType) -> None:
    runs = importlib.import_module("published_runs")
    sizes = runs.LlamaSizes(5, 1024, 8, 2, 2048, 8192, 512, fused=True)
    options = {"attention": "ring", "cp_order": "paired", "zero": 1}
    run = runs.Run("small", "h100", sizes, {"dp": 2, "cp": 2}, 1, 8, 1.0, options=options)
    (found,) = runs.predictions([run])
    assert found.plan.mesh.paired
    assert "send" in {part.kind for part in found.plan.cost.parts if part.axis == "cp"}
