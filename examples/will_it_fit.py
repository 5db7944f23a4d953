"""Will Mixtral-8x22B fit on 16 H100s, and how?

    python examples/will_it_fit.py
    python examples/will_it_fit.py --gpus 32 --cluster a100 --budget-gb 72

Plans the model, which has no weights here, and shows what the fullest GPU holds at its peak, and what that costs in
time. Where it doesn't fit, says what would do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import typer
from published import batch_of, mixtral_8x22b, without_weights
from rich.console import Console
from rich.table import Table
from torch import nn

import autopar
from autopar.plan import Plan, bytes_text, percent_text, seconds_text
from autopar.report import live_progress


def fitting_plan(
    model: nn.Module, gpus: int, batch: Mapping[str, torch.Tensor], cluster: str, **pins: Any
) -> Plan | autopar.AutoparError:
    """The fastest plan that fits, or why there is none."""
    try:
        return autopar.plan(model, gpus, sample=batch, cluster=cluster, precision="bf16", **pins)
    except autopar.AutoparError as error:
        return error


def means(plan: Plan) -> list[str]:
    """What makes it fit: how the model is split, and what is kept elsewhere or computed again."""
    mesh, options = plan.mesh, plan.options
    split = {
        "pipeline stages": mesh.pp,
        "ranks of tensor parallelism": mesh.tp,
        "parts of each sequence": mesh.cp,
        "ranks that share the experts": mesh.experts,
    }
    found = [f"{size} {what}" for what, size in split.items() if size > 1]
    if options.zero and (shards := mesh.zero_shards(options.zero_ranks)) > 1:
        what = ("optimizer state", "optimizer state and gradients", "parameters, gradients and optimizer state")
        found.append(f"{what[options.zero - 1]} split over {shards} ranks")
    recomputed = sum(number > 0 for stage in plan.stage_plans for number in stage.recompute)
    if recomputed:
        units = sum(len(stage.units) for stage in plan.stage_plans)
        found.append(f"{recomputed} of {units} parts of the model recomputed, wholly or in part")
    if options.offload:
        found.append(f"{' and '.join(options.offload)} in the host's memory")
    if options.head_chunks > 1:
        found.append(f"the loss computed in {options.head_chunks} chunks")
    return found


def answer(plan: Plan | autopar.AutoparError, gpus: int, cluster: str) -> str:
    """In words."""
    if not isinstance(plan, Plan):
        return f"No, not on {gpus} x {cluster}: {plan}"
    fullest = max(plan.rank_plans, key=lambda rank: rank.peak_bytes)
    memory = autopar.Cluster.parse(plan.cluster_toml).device.memory_bytes
    host = f", and {bytes_text(fullest.host_bytes)} of the host's" if fullest.host_bytes else ""
    count, rows = plan.microbatches, plan.batch_size // plan.microbatches // plan.mesh.replicas
    parts = f"{count} microbatch{'' if count == 1 else 'es'} of {rows} sequence{'' if rows == 1 else 's'}"
    return (
        f"Yes, on {gpus} x {cluster}: {bytes_text(fullest.peak_bytes)} of {bytes_text(memory)} a GPU{host}.\n"
        f"How: {'; '.join(means(plan)) or 'whole on each GPU'}; {parts}.\n"
        f"A step of {plan.batch_size} sequences takes {seconds_text(plan.step_seconds)} (MFU {percent_text(plan.mfu)})."
    )


def table(plan: Plan) -> Table:
    """What the fullest pipeline rank holds when it holds the most."""
    fullest = max(range(len(plan.rank_plans)), key=lambda rank: plan.rank_plans[rank].peak_bytes)
    rank = plan.rank_plans[fullest]
    shown = Table("what", "bytes", "share", title=f"the fullest GPU, of pipeline rank {fullest}")
    for kind, bytes_ in sorted(rank.kinds.items(), key=lambda item: -item[1]):
        shown.add_row(kind, bytes_text(bytes_), percent_text(bytes_ / rank.peak_bytes))
    return shown


def main(
    gpus: Annotated[int, typer.Option(min=1, help="How many there are.")] = 16,
    cluster: Annotated[str, typer.Option(help="A preset or a TOML file.")] = "h100",
    batch: Annotated[int, typer.Option(help="Sequences of 4,096 tokens in a step.")] = 64,
    budget_gb: Annotated[float | None, typer.Option(help="Bytes of a GPU that may be used, in 10⁹.")] = None,
) -> None:
    """Whether Mixtral-8x22B can be trained there."""
    console = Console()
    pins = {} if budget_gb is None else {"budget_bytes": round(budget_gb * 1e9)}
    with live_progress(Console(stderr=True)) as progress:
        model, sample = without_weights(mixtral_8x22b()), batch_of(batch, 4096)
        plan = fitting_plan(model, gpus, sample, cluster, progress=progress, **pins)
    console.print(answer(plan, gpus, cluster), highlight=False)
    if isinstance(plan, Plan):
        console.print(table(plan))


if __name__ == "__main__":
    typer.run(main)
