"""On CUDA: one rank's program, and several simulated ranks that share the device, against the model on one device."""

from __future__ import annotations

import copy
import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.report.measured import read_steps, record
from autopar.runtime.attention_blocks import Block, Call, Sum, kernel
from autopar.verification import Trained, relative_errors, train_one_device
from tests.models import Case, Float64, gpt2, make, prepared, tokens
from tests.moe_models import family
from tests.pinned import compile_pinned
from tests.ranks.test_parity import tame_optimizer

pytestmark = pytest.mark.gpu

STEPS, CLIP_NORM = 3, 0.5


def on_cuda(batch: Any) -> Any:
    """A batch that is a tuple or a mapping."""
    if isinstance(batch, dict):
        return {name: tensor.cuda() for name, tensor in batch.items()}
    return tuple(tensor.cuda() for tensor in batch)


def one_device(case: Case, options: Any = None) -> Trained:
    model, batch = copy.deepcopy(case.model).cuda(), on_cuda(case.batch)
    return train_one_device(model, [batch], STEPS, case.loss, tame_optimizer, CLIP_NORM, options=options)


def one_rank(case: Case, **options: Any) -> tuple[autopar.ParallelModel, list[float]]:
    """As a user runs it: this process is the rank."""
    given = {"microbatches": 4, "optimizer": tame_optimizer, "clip_norm": CLIP_NORM} | options
    job = compile_pinned(case.model, 1, sample=case.batch, loss=case.loss, **given)
    losses = [float(job.step(case.batch)) for _ in range(STEPS)]
    assert job.running.axes.device.type == "cuda"
    return job, losses


def parameters_of(job: autopar.ParallelModel) -> dict[str, Tensor]:
    torch.cuda.synchronize()
    return {name: master.detach().cpu() for name, master in job.running.masters.items()}


ALONE: list[dict[str, Any]] = [
    {},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"head_chunks": 3},
    {"offload": ("optimizer",)},
    {"offload": ("parameters",)},
    {"activations": "lossless"},
    {"schedule": "interleaved", "chunks": 3},
    {"recompute": "full", "head_chunks": 2, "offload": ("optimizer", "parameters"), "activations": "lossless"},
]


@pytest.mark.parametrize("options", ALONE, ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_one_gpu_equals_one_device_in_float64(name: str, options: dict[str, Any]) -> None:
    with Float64():
        case = make(name, batch=8)
        expected = one_device(case)
        job, losses = one_rank(case, **options)
    assert losses == pytest.approx(expected.losses, rel=1e-9)
    assert max(relative_errors(parameters_of(job), expected.parameters).values()) < 1e-9


@pytest.mark.parametrize("name", ["gpt2", "llama", "nano_gpt", "mlp"])
def test_one_gpu_equals_one_device_in_float32(name: str) -> None:
    case = make(name, batch=8, dtype=torch.float32)
    expected = one_device(case)
    job, losses = one_rank(case)
    assert losses == pytest.approx(expected.losses, rel=2e-5)
    assert max(relative_errors(parameters_of(job), expected.parameters).values()) < 2e-5


def test_the_default_optimizer_is_torchs_adamw() -> None:
    """Fused, which is rounded otherwise: a gradient that is zero but for rounding becomes a whole step."""
    case = make("llama", batch=8, dtype=torch.float32)
    model, batch = copy.deepcopy(case.model).cuda(), on_cuda(case.batch)
    expected = train_one_device(model, [batch], STEPS, case.loss, lambda ps: torch.optim.AdamW(ps, lr=1e-3), CLIP_NORM)
    job, losses = one_rank(case, optimizer=None)
    assert job.running.optimizer is not None
    assert job.running.optimizer.defaults["fused"]
    assert losses == pytest.approx(expected.losses, rel=1e-4)


def vector_distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    difference = math.sqrt(sum(float((a[n] - b[n]).double().square().sum()) for n in b))
    return difference / math.sqrt(sum(float(b[n].double().square().sum()) for n in b))


@pytest.mark.parametrize("options", [{}, {"recompute": "full", "head_chunks": 2, "offload": ("optimizer",)}], ids=str)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_half_precision_is_as_near_as_autocast(name: str, precision: str, options: dict[str, Any]) -> None:
    """No farther from autocast on one device than two roundings of its size lie apart."""
    case = make(name, batch=8, dtype=torch.float32)
    exact = one_device(case)
    expected = one_device(case, autopar.Options.of(precision=precision))
    job, losses = one_rank(case, precision=precision, **options)
    rounding = vector_distance(expected.parameters, exact.parameters)
    assert vector_distance(parameters_of(job), expected.parameters) <= math.sqrt(2) * rounding
    assert losses == pytest.approx(expected.losses, rel=5e-3)


SHARED: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("gpt2", {"dp": 2, "tp": 2}, {"microbatches": 2}),
    ("llama", {"pp": 2, "tp": 2}, {"microbatches": 4, "schedule": "zb-v"}),
    ("llama", {"pp": 2}, {"microbatches": 4, "schedule": "v-half", "vocabulary": "vocab-2"}),
    ("gpt2", {"pp": 2, "dp": 2}, {"microbatches": 4, "offload": ("optimizer", "activations")}),
    ("llama", {"dp": 2}, {"microbatches": 2, "zero": 3, "recompute": "full", "offload": ("optimizer", "parameters")}),
    ("llama", {"dp": 2, "tp": 2}, {"zero": 2, "head_chunks": 2, "recompute": "selective", "activations": "lossless"}),
    ("llama", {"cp": 2}, {"attention": "ring"}),
    ("llama", {"cp": 2}, {"attention": "heads"}),
    ("gpt2", {"cp": 2, "dp": 2}, {"attention": "all_gather", "zero": 3}),
]


@pytest.mark.parametrize(("name", "mesh", "options"), SHARED, ids=str)
def test_ranks_that_share_a_gpu_equal_one_device(name: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    with Float64():
        case = make(name, batch=8)
        job = compile_pinned(
            case.model,
            math.prod(mesh.values()),
            sample=case.batch,
            mesh=mesh,
            optimizer=tame_optimizer,
            clip_norm=CLIP_NORM,
            **options,
        )
        result = job.verify(case.batch, device="cuda")
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


def mixtral(batch: int) -> Case:
    return family("mixtral", batch, experts=4, top_k=2, output_router_logits=False)


@pytest.mark.parametrize("mesh", [{"dp": 2, "ep": 2}, {"dp": 2, "tp": 2, "ep": 2}], ids=str)
def test_experts_on_ranks_that_share_a_gpu(mesh: dict[str, int]) -> None:
    gpus = mesh["dp"] * mesh.get("tp", 1)
    with Float64():
        case = prepared(lambda: mixtral(8))
        job = compile_pinned(case.model, gpus, sample=case.batch, mesh=mesh, optimizer=tame_optimizer)
        result = job.verify(case.batch, device="cuda")
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


@pytest.mark.parametrize("mesh", [{"dp": 1}, {"dp": 2, "ep": 2}], ids=str)
def test_experts_in_bf16_take_grouped_products(mesh: dict[str, int]) -> None:
    """As near to one device in float32 as one device in bf16 is; a token between two experts may choose the other."""
    case = prepared(lambda: mixtral(8), torch.float32)
    exact, expected = one_device(case), one_device(case, autopar.Options.of(precision="bf16"))
    job = compile_pinned(
        case.model,
        mesh["dp"],
        sample=case.batch,
        mesh=mesh,
        precision="bf16",
        optimizer=tame_optimizer,
        clip_norm=CLIP_NORM,
    )
    found = job.simulate(case.batch, STEPS, device="cuda")
    rounding = vector_distance(expected.parameters, exact.parameters)
    assert vector_distance(found.parameters, exact.parameters) <= 1.5 * rounding
    assert found.losses == pytest.approx(expected.losses, rel=1e-2)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_dropout_is_drawn_again_as_it_was(recompute: str) -> None:
    case = prepared(lambda: gpt2(8, dropout=0.2), torch.float32)
    found = [one_rank(case, recompute=way) for way in ("none", recompute)]
    (plain, plain_losses), (again, losses) = found
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    assert max(relative_errors(parameters_of(again), parameters_of(plain)).values()) < 2e-5


def test_dropout_replayed_is_the_same_training() -> None:
    case = prepared(lambda: gpt2(8, dropout=0.2), torch.float32)
    _, exact = one_rank(case, activations="exact")
    _, replayed = one_rank(case, activations="lossless")
    assert replayed == pytest.approx(exact, rel=1e-6)


ATTENTIONS = [  # dtype, heads of queries and of keys, width of keys and of values, has a mask
    (torch.bfloat16, 4, 4, 64, 64, False),
    (torch.bfloat16, 8, 2, 64, 64, False),
    (torch.bfloat16, 4, 2, 64, 64, True),
    (torch.float32, 4, 2, 32, 32, False),
    (torch.float32, 4, 4, 32, 16, True),
    (torch.float64, 4, 2, 16, 16, True),
    (torch.float32, 4, 4, 6, 6, False),
]


@pytest.mark.parametrize(("dtype", "heads", "groups", "width", "wide", "masked"), ATTENTIONS, ids=str)
def test_attention_by_blocks(dtype: torch.dtype, heads: int, groups: int, width: int, wide: int, masked: bool) -> None:
    """Queries of the second half see the first half's keys, and their own causally; the whole one in float64."""
    torch.manual_seed(0)
    length, half = 128, 64
    shapes = (heads, width), (groups, width), (groups, wide), (heads, wide)
    q, k, v, grad = (torch.randn(2, n, length, d, device="cuda", dtype=dtype) for n, d in shapes)
    mask = torch.rand(2, 1, length, length, device="cuda") > 0.3 if masked else None
    call = Call(width**-0.5)
    blocks = [Block(slice(half), slice(half), causal=True)] if not masked else []
    blocks += [Block(slice(half, length), slice(half)), Block(slice(half, length), slice(half, length), causal=True)]
    if masked:
        blocks = [Block(slice(None), slice(half)), Block(slice(None), slice(half, length))]
    total = Sum(q, wide)
    parts = [(b, None if mask is None else mask[:, :, b.queries, b.keys]) for b in blocks]
    for b, seen in parts:
        total.add(call.forward(q[:, :, b.queries], k[:, :, b.keys], v[:, :, b.keys], seen, b.causal), b.queries)
    whole = total.rows()
    found = [torch.zeros(x.shape, device="cuda", dtype=torch.float64) for x in (q, k, v)]
    for b, seen in parts:
        rows = whole._replace(out=whole.out[:, :, b.queries], sums=whole.sums[:, :, b.queries])
        sliced = q[:, :, b.queries], k[:, :, b.keys], v[:, :, b.keys]
        made = call.backward(grad[:, :, b.queries], *sliced, seen, b.causal, rows)
        for one, gradient, at in zip(found, made[:3], (b.queries, b.keys, b.keys), strict=True):
            one[:, :, at] += gradient
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*exact, attn_mask=mask, is_causal=not masked, enable_gqa=True)
    out.backward(grad.double())
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 2e-5, torch.float64: 1e-12}[dtype]
    wanted = [out.detach(), *(x.grad for x in exact)]
    for one, want in zip([whole.out, *found], wanted, strict=True):
        assert float((one.double() - want).norm() / want.norm()) < tolerance, kernel(q, v, mask, call)


def test_memory_of_the_device_is_as_predicted() -> None:
    """What torch's allocator gives out, in blocks of 512 bytes; products take a workspace beside."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8192, use_cache=False, max_position_embeddings=1024, **sizes))
    ids = tokens(8, vocabulary=8192, sequence=1024)
    batch = {"input_ids": ids, "labels": ids}
    job = compile_pinned(model.train(), 1, sample=batch, cluster="h100", precision="bf16")
    gc.collect()
    before = torch.cuda.memory_allocated()
    report = job.memory(batch, measure="device")
    measured = report.measured[0].peak_bytes - before
    assert report.predicted[0].peak_bytes == pytest.approx(measured, rel=0.03)


def test_kernels_of_a_backward_are_in_its_range(tmp_path: Path) -> None:
    case = make("gpt2", batch=8, dtype=torch.float32)
    job, _ = one_rank(case)
    with record(job.running.axes, tmp_path):
        job.step(case.batch)
    (rank,) = read_steps(job.schedule, [tmp_path / "rank0.json"])
    spans = [(event.start_seconds, event.end_seconds) for event in rank.events]
    kernels = [1e-6 * e["ts"] for e in rank.trace if e.get("cat") == "kernel"]
    inside = sum(any(start - 1e-9 <= at <= end + 1e-9 for start, end in spans) for at in kernels)
    assert inside > 0.9 * len(kernels)


def test_a_job_that_is_no_more_leaves_nothing() -> None:
    case = make("gpt2", batch=8, dtype=torch.float32)
    one_rank(case, precision="bf16")  # what libraries keep for good
    gc.collect()
    before = torch.cuda.memory_allocated()
    one_rank(case, precision="bf16")
    gc.collect()
    assert torch.cuda.memory_allocated() == before


class Wide(nn.Module):
    """Products whose sizes float8 kernels take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(3)])
        self.head = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return F.mse_loss(self.head(x).float(), y)


def test_float8_is_near() -> None:
    pytest.importorskip("torchao.float8", reason="float8 needs torchao")
    case = prepared(lambda: Case(Wide(), (torch.randn(64, 64), torch.randn(64, 32))), torch.float32)
    _, exact = one_rank(case, precision="bf16", microbatches=2)
    _, narrow = one_rank(case, precision="bf16", microbatches=2, float8=True)
    assert narrow == pytest.approx(exact, rel=0.05)
    assert narrow != exact
