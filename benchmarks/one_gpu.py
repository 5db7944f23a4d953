"""Predicted step times and peak memory beside those of a real GPU: one rank of the emitted program, and eager PyTorch.

    python benchmarks/one_gpu.py [--case NAME …] [--cluster h100 --cluster mine.toml] [--kinds] [--json FILE]

Each model is compiled for one rank with everything pinned, and trained for some steps. A step is the median of those
after a few that warm up, between CUDA events; memory is the most that torch's allocator had given out within a step,
which is what is predicted too. Beside it the same model is trained by hand: eager PyTorch under ``torch.autocast``,
with the same optimizer. ``--kinds`` profiles a step more: seconds of kernels by pass and by what they are (products,
attention, all else), and with ``--json`` by op.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import torch
import typer
from plain import PLAIN
from published_llama import LlamaSizes, PublishedLlama
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autopar
from autopar.api import ParallelModel
from autopar.graph import Choice
from autopar.plan import bytes_text
from autopar.planner.gradient_sums import block_sums
from autopar.planner.op_costs import pass_seconds
from autopar.report.measured import compare, read_steps, record
from autopar.rules import lookup
from autopar.rules.base import Op
from autopar.runtime.optimizers import adamw
from autopar.spmd import R

WARM_UP: Final = 3
GB: Final = 10**9


@dataclass(frozen=True)
class Case:
    """A model, its batch ``[rows, sequence]``, and keywords of :func:`autopar.compile`."""

    name: str
    model: Callable[[], nn.Module]
    vocabulary: int
    rows: int
    sequence: int
    options: dict[str, Any] = field(default_factory=dict)
    ids: str = "input_ids"

    def batch(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocabulary, (self.rows, self.sequence), generator=generator)
        return {self.ids: ids, "labels": ids}


def gpt2(layers: int, width: int, sequence: int = 1024) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"n_layer": layers, "n_embd": width, "n_head": width // 64, "n_positions": sequence}
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, use_cache=False, loss_type="ForCausalLM"))

    return made


def llama(layers: int, width: int, inner: int, sequence: int, vocabulary: int = 128256) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        heads = {"num_attention_heads": width // 128, "num_key_value_heads": max(1, width // 512)}
        sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, **heads}
        return LlamaForCausalLM(
            LlamaConfig(vocab_size=vocabulary, max_position_embeddings=sequence, use_cache=False, **sizes)
        )

    return made


def mixtral(layers: int, width: int, inner: int, sequence: int) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        heads = {"num_attention_heads": width // 128, "num_key_value_heads": max(1, width // 512)}
        sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, **heads}
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False}
        return MixtralForCausalLM(
            MixtralConfig(vocab_size=32000, max_position_embeddings=sequence, use_cache=False, **sizes, **experts)
        )

    return made


def qwen3_moe(layers: int, width: int, inner: int, sequence: int, vocabulary: int = 151936) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        heads = {"num_attention_heads": width // 64, "num_key_value_heads": 4, "head_dim": 128}
        sizes = {"hidden_size": width, "moe_intermediate_size": inner, "num_hidden_layers": layers, **heads}
        experts = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(vocab_size=vocabulary, max_position_embeddings=sequence, use_cache=False, **sizes, **experts)
        )

    return made


def plain_llama(layers: int, sequence: int) -> Callable[[], nn.Module]:
    """That of the published runs of torchtitan, of Llama-3-8B's sizes."""

    def made() -> nn.Module:
        return PublishedLlama(LlamaSizes(layers, 4096, 32, 8, 14336, 128256, sequence))

    return made


_SMALL, _LARGE = gpt2(12, 768), gpt2(24, 1024)
_ONE, _EIGHT = llama(16, 2048, 8192, 4096), llama(4, 4096, 14336, 8192)
_MOE, _MANY = mixtral(4, 2048, 7168, 4096), qwen3_moe(3, 2048, 768, 4096)
_HOST: Final = {"microbatches": 8, "schedule": "gpipe", "offload": ("activations",)}
CASES: Final = (
    Case("gpt2-124m, 1 x 128", _SMALL, 50257, 1, 128),
    Case("gpt2-124m", _SMALL, 50257, 16, 1024),
    Case("gpt2-124m, recompute", _SMALL, 50257, 16, 1024, {"recompute": "full"}),
    Case("gpt2-124m, 4 microbatches", _SMALL, 50257, 32, 1024, {"microbatches": 4}),
    Case("gpt2-355m", _LARGE, 50257, 8, 1024),
    Case("llama-1b", _ONE, 128256, 2, 4096),
    Case("llama-1b, recompute", _ONE, 128256, 2, 4096, {"recompute": "full"}),
    Case("llama-1b, selective", _ONE, 128256, 2, 4096, {"recompute": "selective"}),
    Case("llama-1b, head in 8", _ONE, 128256, 2, 4096, {"head_chunks": 8}),
    Case("llama-1b, host optimizer", _ONE, 128256, 2, 4096, {"offload": ("optimizer",)}),
    Case("llama-8b of 4 layers", _EIGHT, 128256, 1, 8192),
    Case("llama-8b of 4 layers, 4 x 2048", _EIGHT, 128256, 4, 2048),
    Case("plain llama-8b of 4 layers", plain_llama(4, 8192), 128256, 1, 8192, ids="ids"),
    Case("gpt2-124m, activations on the host", _SMALL, 50257, 32, 1024, _HOST | {"budget_bytes": 29 * GB}),
    Case("llama-8b of 4 layers, activations on the host", _EIGHT, 128256, 8, 2048, _HOST | {"budget_bytes": 46 * GB}),
    Case("mixtral of 4 layers", _MOE, 32000, 2, 4096),
    Case("mixtral of 4 layers, recompute", _MOE, 32000, 2, 4096, {"recompute": "full"}),
    Case("mixtral of 4 layers, 1 x 512", _MOE, 32000, 1, 512),
    Case("qwen3-30b of 3 layers", _MANY, 151936, 2, 4096),
    Case("qwen3-30b of 3 layers, 1 x 512", _MANY, 151936, 1, 512),
)


@dataclass(frozen=True)
class Result:
    """Seconds and bytes; ``predicted_seconds`` by cluster. ``kinds``: pass and kind of kernel -> predicted, measured;
    ``ops``: pass, op and kernel -> measured."""

    case: str
    predicted_seconds: dict[str, float]
    seconds: float
    predicted_bytes: int
    bytes: int
    eager_seconds: float
    eager_bytes: int
    losses: tuple[float, float]
    actions: str = ""
    kinds: dict[str, tuple[float, float]] = field(default_factory=dict)
    ops: dict[str, float] = field(default_factory=dict)


def run(case: Case, clusters: list[str], steps: int, device: torch.device, *, kinds: bool) -> Result:
    """Compile, train, train by hand, and profile. Random weights, those of the model's own initialization."""
    batch = case.batch()
    torch.manual_seed(0)
    with device:
        model = case.model()
    model = _filled(model).cpu().train()
    captured = autopar.capture(model, sample=batch, precision="bf16")
    options = {**PLAIN, "recompute": "none", "mesh": {"dp": 1}, "microbatches": 1, **case.options}
    job = autopar.compile(captured, 1, cluster=clusters[0], **options)
    plans = {name: autopar.plan(captured, 1, cluster=name, **options) for name in clusters[1:]}
    predicted = {Path(name).stem: plan.cost.step_seconds for name, plan in {clusters[0]: job.plan, **plans}.items()}
    planned = job.memory().predicted[0].peak_bytes
    seconds, peak, loss = _measured(partial(job.step, batch), steps, device)
    found = _profiled(job, batch) if kinds else {}
    del job
    gc.collect()  # executors are in cycles
    by_hand = _by_hand(model.to(device), {name: x.to(device) for name, x in batch.items()}, case.options)
    eager_seconds, eager_peak, eager_loss = _measured(by_hand, steps, device)
    losses = loss, eager_loss
    return Result(case.name, predicted, seconds, planned, peak, eager_seconds, eager_peak, losses, **found)


def _filled(model: nn.Module) -> nn.Module:
    """Parameters that the model's code leaves as they were allocated."""
    if isinstance(model, PublishedLlama):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02)
            for buffer in model.buffers():
                buffer.fill_(0.5)
    return model


def _measured(step: Callable[[], Tensor], steps: int, device: torch.device) -> tuple[float, int, float]:
    """Median seconds of a step, the peak of the last ones, and the loss of the first."""
    loss = float(step())
    for _ in range(WARM_UP - 1):
        step()
    if device.type != "cuda":
        return float("nan"), 0, loss
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    times = [1e-3 * start.elapsed_time(end) for start, end in pairwise(marks)]
    return median(times), torch.cuda.max_memory_allocated(), loss


def _by_hand(model: nn.Module, batch: dict[str, Tensor], options: dict[str, Any]) -> Callable[[], Tensor]:
    """As it is written for one device; microbatches add up."""
    optimizer = adamw(model.parameters())
    parts = [
        {name: x.chunk(options.get("microbatches", 1))[i] for name, x in batch.items()}
        for i in range(options.get("microbatches", 1))
    ]

    def step() -> Tensor:
        total = torch.zeros((), device=next(iter(batch.values())).device)
        for part in parts:
            with torch.autocast(total.device.type, torch.bfloat16):
                output = model(**part)
                loss = (output if isinstance(output, Tensor) else output.loss) / len(parts)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _profiled(job: ParallelModel, batch: dict[str, Tensor]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        with record(job.running.axes, folder):
            job.step(batch)
        ranks = read_steps(job.schedule, [Path(folder) / "rank0.json"])
    (rank,) = ranks
    names = {e["args"]["External id"]: e["name"] for e in rank.trace if e.get("cat") == "cpu_op"}
    measured: Counter[str] = Counter()
    ops: Counter[str] = Counter()
    for event in rank.trace:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        at = 1e-6 * event["ts"]
        passes = next((e.action.kind for e in rank.events if e.start_seconds <= at <= e.end_seconds), "between")
        measured[f"{passes} {_kind(event['name'])}"] += 1e-6 * event["dur"]
        ops[f"{passes} {names.get(event['args'].get('External id'), '?')}: {event['name'][:120]}"] += (
            1e-6 * event["dur"]
        )
    predicted = _predicted(job)
    both = {key: (predicted[key], measured[key]) for key in sorted(predicted.keys() | measured.keys())}
    return {"actions": str(compare(job.timeline, ranks)), "kinds": both, "ops": dict(ops.most_common(100))}


_NAMES: Final = {
    "attention": ("flash", "fmha", "attention"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk", "grouped_mm"),
}


def _kind(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in _NAMES.items() if any(part in name for part in parts)), "all else")


def _predicted(job: ParallelModel) -> Counter[str]:
    """Seconds of kernels of a step, of the plan's ops."""
    found: Counter[str] = Counter()
    cluster = autopar.Cluster.parse(job.plan.cluster_toml, origin="the plan")
    model, count = job.lowered, job.plan.microbatches
    for call in model.calls:
        for node in model.block_of(call).ops:
            op = Op.of(node)
            rule = lookup(op.name)
            whole = Choice((R,) * len(op.operands), R)
            ways = pass_seconds(node, op, rule, whole, 1, cluster.device)
            kind = "all else" if not rule.flops(op) else "attention" if rule.is_fused(op) else "products"
            for passes, seconds in zip("FB", ways, strict=True):
                found[f"{passes} {kind}"] += count * seconds
    found["B all else"] += count * sum(block_sums(model.block_of(call), cluster.device) for call in model.calls)
    found["B all else"] += job.plan.cost.exposed_seconds("accumulation")
    step = next(e for e in job.timeline.events if e.action.kind == "STEP")
    found["GATHER all else"] = job.plan.cost.exposed_seconds("casts")
    found["STEP all else"] = step.end_seconds - step.start_seconds
    return found


def table(results: list[Result]) -> Table:
    names = list(results[0].predicted_seconds)
    columns = [column for name in names for column in (f"by {name}", "error")]
    made = Table("model", "measured", *columns, "by hand", "peak memory", "predicted", "error", "by hand")
    for r in results:
        cells = []
        for name in names:
            seconds = r.predicted_seconds[name]
            cells += [f"{1e3 * seconds:.1f}", f"{100 * (seconds / r.seconds - 1):+.1f} %"]
        error = r.predicted_bytes / r.bytes - 1 if r.bytes else float("nan")
        memory = bytes_text(r.bytes), bytes_text(r.predicted_bytes), f"{100 * error:+.1f} %", bytes_text(r.eager_bytes)
        made.add_row(r.case, f"{1e3 * r.seconds:.1f} ms", *cells, f"{1e3 * r.eager_seconds:.1f}", *memory)
    return made


def _kinds_table(result: Result) -> Table:
    made = Table("pass and kernels", "measured ms", "predicted", title=f"{result.case} (without what is recomputed)")
    for key, (predicted, measured) in result.kinds.items():
        made.add_row(key, f"{1e3 * measured:.2f}", f"{1e3 * predicted:.2f}")
    return made


def main(
    case: Annotated[list[str] | None, typer.Option(help="Cases whose name begins so; all if not given.")] = None,
    cluster: Annotated[list[str] | None, typer.Option(help="Presets or files to predict by; the first runs.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of which the median counts.")] = 10,
    kinds: Annotated[bool, typer.Option("--kinds", help="Kernels by kind, too.")] = False,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
) -> None:
    """Compare predicted and measured steps."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [one for one in CASES if not case or any(one.name.startswith(name) for name in case)]
    console, results = Console(width=170), []
    for one in chosen:
        result = run(one, cluster or ["h100"], steps, device, kinds=kinds)
        results.append(result)
        console.print(table([result]))
        if kinds:
            console.print(_kinds_table(result))
        if as_json is not None:
            as_json.write_text(json.dumps([asdict(r) for r in results], indent=1))
        gc.collect()
        torch.cuda.empty_cache()
    console.print(table(results))


if __name__ == "__main__":
    typer.run(main)
