"""Predicted peak memory beside what ranks really hold: 20 plans of four models, and Llama-3 at full size.

    python benchmarks/memory.py [--plan NAME …] [--full 8b] [--full 70b] [--json]

Every plan is compiled, its memory predicted, and a step trained on simulated ranks, whose live tensors are counted. The
table has the rank of each plan whose prediction is the farthest off. With ``--full``, instead: Llama-3-8B or 70B (bf16,
sequence 8192) on 64 GPUs, on fake tensors: a rank of each pipeline index runs its whole step, without arithmetic.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import torch
import typer
from models import Sizes, gpt, gpt_batch
from plain import PLAIN
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autopar
from autopar.plan import bytes_text
from autopar.report import MemoryReport

_SIZES: Final = Sizes(layers=4, width=64, heads=8, vocabulary=512, sequence=64, batch=8)


@dataclass(frozen=True)
class Case:
    """One plan: of which model, on which mesh, with which keywords of :func:`autopar.compile`."""

    model: str
    mesh: dict[str, int]
    microbatches: int = 4
    layers: int = 4
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        mesh = " ".join(f"{axis}{size}" for axis, size in self.mesh.items())
        given = ", ".join(f"{key} {value}" for key, value in self.options.items())
        return f"{self.model} {mesh}" + (f", {given}" if given else "")


CASES: Final = (
    Case("gpt", {"dp": 2}, 2),
    Case("gpt", {"dp": 4}, 2, options={"zero": 1}),
    Case("gpt", {"dp": 2, "tp": 2}, options={"zero": 2}),
    Case("gpt", {"dp": 4}, 2, options={"zero": 3}),
    Case("gpt", {"pp": 2, "dp": 2}, options={"zero": 3}),
    Case("gpt", {"pp": 4}, 8, options={"schedule": "zb-h1"}),
    Case("llama", {"tp": 4}, 2),
    Case("llama", {"pp": 2, "tp": 2}),
    Case("llama", {"pp": 2}, 8, options={"schedule": "v-half", "vocabulary": "vocab-2"}),
    Case("llama", {"pp": 4}, 8, layers=8, options={"schedule": "interleaved", "chunks": 2}),
    Case("llama", {"pp": 2, "dp": 2}, options={"recompute": "full"}),
    Case("llama", {"pp": 2}, options={"recompute": "selective"}),
    Case("llama", {"dp": 2}, 2, options={"precision": "bf16", "zero": 2}),
    Case("llama_tied", {"pp": 2, "dp": 2}, options={"vocabulary": "vocab-1"}),
    Case("llama_tied", {"dp": 2, "tp": 2}, 2, options={"head_chunks": 4}),
    Case("llama_tied", {"pp": 2}, options={"schedule": "gpipe", "recompute": "full"}),
    Case("gpt2", {"pp": 2, "dp": 2}, options={"schedule": "zb-v"}),
    Case("gpt2", {"dp": 2}, 2, options={"zero": 2, "offload": ("optimizer",)}),
    Case("gpt2", {"pp": 2}, options={"precision": "bf16"}),
    Case("gpt2", {"pp": 2, "tp": 2}, options={"offload": ("activations",)}),
)


def model_of(case: Case) -> tuple[nn.Module, Any]:
    """The model and its batch."""
    sizes = Sizes(case.layers, _SIZES.width, _SIZES.heads, _SIZES.vocabulary, _SIZES.sequence, _SIZES.batch)
    if case.model == "gpt":
        return gpt(sizes), gpt_batch(sizes)
    tokens = gpt_batch(sizes)
    torch.manual_seed(0)
    return _MODELS[case.model](sizes), {"input_ids": tokens["tokens"], "labels": tokens["targets"]}


def _llama(sizes: Sizes, *, tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=2 * sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads // 2,
        max_position_embeddings=sizes.sequence,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def _gpt2(sizes: Sizes) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=sizes.vocabulary,
        n_positions=sizes.sequence,
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        use_cache=False,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config).train()


_MODELS: Final[dict[str, Callable[[Sizes], nn.Module]]] = {
    "llama": _llama,
    "llama_tied": lambda sizes: _llama(sizes, tied=True),
    "gpt2": _gpt2,
}


def report_of(case: Case) -> MemoryReport:
    """Predicted, and measured on simulated ranks."""
    model, batch = model_of(case)
    job = autopar.compile(
        model,
        math.prod(case.mesh.values()),
        sample=batch,
        mesh=case.mesh,
        microbatches=case.microbatches,
        cluster="cpu",
        **{**PLAIN, **case.options},
    )
    return job.memory(batch, measure="simulate")


def worst(report: MemoryReport) -> int:
    """The rank whose prediction is the farthest off."""
    return max(range(len(report.errors)), key=lambda rank: abs(report.errors[rank]))


FULL: Final = {
    "8b": ({"pp": 2, "dp": 8, "tp": 4}, {"zero": 1, "microbatch": 1}),
    "70b": ({"pp": 4, "dp": 2, "tp": 8}, {"zero": 1, "microbatch": 1, "recompute": "full"}),
}
_LLAMA_3: Final = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


def full_size(name: str, batch: int) -> MemoryReport:
    """Llama-3 on 64 GPUs: no rank's step is computed, each is run on fake tensors."""
    from transformers import LlamaConfig, LlamaForCausalLM

    mesh, options = FULL[name]
    shared = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "use_cache": False}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**_LLAMA_3[name], **shared)).to(torch.bfloat16).train()
    ids: Tensor = torch.zeros(batch, 8192, dtype=torch.int64)
    sample = {"input_ids": ids, "labels": ids}
    job = autopar.compile(model, 64, sample=sample, mesh=mesh, cluster="h100", **{**PLAIN, **options})
    return job.memory(measure="fake")


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    plan: Annotated[list[str] | None, typer.Option(help="Plans whose name has this; all if not given.")] = None,
    full: Annotated[list[str] | None, typer.Option(help="8b, 70b: Llama-3 at full size instead.")] = None,
    batch: Annotated[int, typer.Option(help="Global batch at full size.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures instead of a table.")] = False,
) -> None:
    """Compare predicted and measured peak memory per rank."""
    torch.set_num_threads(1)
    runs: list[tuple[str, Callable[[], MemoryReport]]]
    if full:
        runs = [(f"llama-3-{name} {FULL[name][0]}", lambda name=name: full_size(name, batch)) for name in full]
    else:
        chosen = [case for case in CASES if not plan or any(part in case.name for part in plan)]
        runs = [(case.name, lambda case=case: report_of(case)) for case in chosen]
    found = []
    for name, run in runs:
        start = time.process_time()
        report = run()
        found.append((name, report, time.process_time() - start))
    if as_json:
        print(json.dumps([{"plan": name, "seconds": s, **report.to_json()} for name, report, s in found], indent=1))
        return
    Console(width=140).print(_table(found))


def _table(found: list[tuple[str, MemoryReport, float]]) -> Table:
    table = Table("plan", "rank", "at", "predicted", "measured", "error", "CPU s")
    for name, report, seconds in found:
        rank = worst(report)
        measured = report.measured[rank]
        table.add_row(
            name,
            f"{rank} of {len(report.measured)}",
            measured.peak.label,
            bytes_text(report.predicted[rank].peak_bytes),
            bytes_text(measured.peak_bytes),
            f"{100 * report.errors[rank]:+.2f} %",
            f"{seconds:.0f}",
        )
    return table


if __name__ == "__main__":
    app()
