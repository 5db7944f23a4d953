"""The plan that is found with nothing pinned beside the one that experts ran, both under one cost model.

    python benchmarks/choice.py [--case TEXT]... [--json]

Cases are the models of ``ptdp_sc21_table1.csv`` (arXiv 2104.04473, on A100s) and of
``megatron_core_h100_weak_scaling.csv`` (on H100s), as GPTs in plain PyTorch of the published sizes, and Llama-3.1-405B
on 16,384 H100 (arXiv 2407.21783, table 4). For the experts' plan the published degrees are pinned with what is known of
it (interleaved 1F1B where there is a pipeline, whole layers recomputed or not, ZeRO); what isn't published, the
microbatch and the chunks of a rank, is the best for these. Each case is planned in a fresh process and takes up to a
minute.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from fidelity import MEASUREMENTS, read
from models import GPT, TRAININGS, Sizes
from planning import described
from processes import in_fresh_process
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from autopar.plan import Plan, bytes_text, percent_text, seconds_text

LLAMA: Final = "llama3.1-405b"
LLAMA_FLOPS_PER_SECOND: Final = 400e12
"""Of each GPU, as published."""

BY_HAND: Final[Mapping[str, Any]] = {"vocabulary": "stage", "offload": (), "head_chunks": 1, "zero_ranks": 0}
"""What Megatron's users didn't have, or is as it was written: the embedding on the first rank, the head on the last."""

UNBOUNDED_BYTES: Final = 10**13
"""Of a rank, where the experts' plan wouldn't fit by our account."""

REMARKABLE: Final = 0.005
"""Parts whose difference is below this share of the step aren't named."""

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Case:
    """A model of ``sizes`` (None: the one of :data:`models.TRAININGS` with this name) on some GPUs, the ``pins`` that
    make it the experts' plan, and the seconds of a step that they measured."""

    name: str
    cluster: str
    gpus: int
    batch: int
    sizes: Sizes | None
    pins: Mapping[str, Any] = field(hash=False)
    measured_seconds: float

    def model(self) -> nn.Module:
        """Without weights."""
        if self.sizes is None:
            return TRAININGS[self.name].model()
        with torch.device("meta"):
            return GPT(self.sizes).train()

    def sample(self) -> dict[str, Tensor]:
        if self.sizes is None:
            return TRAININGS[self.name].sample()
        tokens = torch.zeros(self.batch, self.sizes.sequence, dtype=torch.int64, device="meta")
        return {"tokens": tokens, "targets": tokens}


def cases(measurements: Path = MEASUREMENTS) -> Iterator[Case]:
    for row in read(measurements / "ptdp_sc21_table1.csv"):  # which counts what is recomputed
        pins = {"recompute": "full", "zero": 0, **BY_HAND}
        yield _case(row, f"{row['params_B']}B on a100", "a100", int(row["dp_derived"]), pins, passes=4)
    for row in read(measurements / "megatron_core_h100_weak_scaling.csv"):
        pins = {"zero": 1, **BY_HAND}
        yield _case(row, f"{row['model']} on h100", "h100", int(row["dp"]), pins, passes=3)
    training = TRAININGS[LLAMA]
    mesh = {"pp": 16, "dp": 128, "tp": 8}
    # ZeRO 1: to scatter gradients after each microbatch would take as long as the step that was measured.
    pins = {"mesh": mesh, "schedule": "interleaved", "zero": 1, **BY_HAND, "vocabulary": "redistributed"}
    flops = training.tokens * (6 * 405e9 + 6 * 126 * 16384 * training.sequence)  # causal attention, half of the square
    seconds = flops / (LLAMA_FLOPS_PER_SECOND * training.gpus)
    yield Case(LLAMA, training.cluster, training.gpus, training.batch, None, pins, seconds)


def _case(row: Mapping[str, str], name: str, cluster: str, dp: int, pins: Mapping[str, Any], *, passes: int) -> Case:
    """``passes`` over a layer are counted in the row's TFLOP/s, the head's three beside them (arXiv 2104.04473,
    equation 3)."""
    layers, width, heads, sequence, vocabulary = (int(row[k]) for k in ("layers", "hidden", "heads", "seq", "vocab"))
    pp, tp, gpus, batch = (int(row[key]) for key in ("pp", "tp", "gpus", "global_batch"))
    of_layers = passes * layers * (24 * width**2 + 4 * sequence * width)
    flops = batch * sequence * (of_layers + 3 * 2 * width * vocabulary)
    schedule = {"schedule": "interleaved" if pp > 1 else "1f1b"}
    return Case(
        name=name,
        cluster=cluster,
        gpus=gpus,
        batch=batch,
        sizes=Sizes(layers, width, heads, vocabulary, sequence, batch),
        pins={"mesh": {"pp": pp, "dp": dp, "tp": tp}, **schedule, **pins},
        measured_seconds=flops / (float(row["tflops_per_gpu"]) * 1e12 * gpus),
    )


@dataclass(frozen=True)
class Choice:
    """Both plans of a case; ``fits``: whether the experts' fits into the memory by our account."""

    case: Case
    experts: Plan
    chosen: Plan
    fits: bool
    differences: tuple[float, ...] = ()
    """Of the chosen and of the experts' costs from those of their programs, the largest of each, where that was asked
    for."""

    @property
    def gain(self) -> float:
        """By how much more tokens a second the chosen plan gets through."""
        return self.experts.step_seconds / self.chosen.step_seconds - 1

    @property
    def is_slower(self) -> bool:
        return self.chosen.step_seconds > self.experts.step_seconds

    def to_json(self) -> dict[str, Any]:
        plans = {"experts": self.experts, "chosen": self.chosen}
        return {
            "case": self.case.name,
            "measured_seconds": self.case.measured_seconds,
            "gain": self.gain,
            "experts_fit": self.fits,
            "why": why(self.chosen, self.experts),
            "audit": self.differences,
            **{
                name: {
                    "step_seconds": plan.step_seconds,
                    "mfu": plan.mfu,
                    "peak_bytes": max(plan.peak_bytes),
                    "mesh": plan.mesh.to_json(),
                    "plan": described(plan),
                }
                for name, plan in plans.items()
            },
        }


def choose(case: Case, audit: bool = False) -> Choice:
    import autopar

    captured = autopar.capture(case.model(), sample=case.sample(), precision="bf16")
    plan = partial(autopar.plan, captured, case.gpus, cluster=case.cluster)
    chosen = plan()
    try:
        found = Choice(case, plan(**case.pins), chosen, fits=True)
    except autopar.AutoparError:
        found = Choice(case, plan(**case.pins, budget_bytes=UNBOUNDED_BYTES), chosen, fits=False)
    if not audit:
        return found
    compiled = (autopar.compile(captured, case.gpus, plan=each) for each in (found.chosen, found.experts))
    return replace(found, differences=tuple(each.audit().largest_difference for each in compiled))


def why(chosen: Plan, experts: Plan) -> str:
    """What of a step takes less time, and what more, on the busiest rank of each; the largest differences first."""
    saved: dict[str, float] = defaultdict(float)
    for sign, plan in ((1, experts), (-1, chosen)):
        for part in plan.cost.parts:
            saved[f"{part.name} over {part.axis}" if part.axis else part.name] += sign * part.exposed_seconds
    least = REMARKABLE * experts.step_seconds
    named = sorted((item for item in saved.items() if abs(item[1]) > least), key=lambda item: -abs(item[1]))
    texts = [f"{name} {seconds_text(abs(s))} {'less' if s > 0 else 'more'}" for name, s in named[:4]]
    return ", ".join(texts) or "the same but for details"


def table(found: Sequence[Choice]) -> Table:
    columns = ("case", "GPUs", "measured", "experts' plan", "MFU", "memory", "chosen", "MFU", "memory", "gain", "gap")
    shown = Table(*columns, title="Chosen with nothing pinned, and as experts ran it: both predicted")
    for one in found:
        shown.add_row(
            one.case.name,
            f"{one.case.gpus:,}",
            seconds_text(one.case.measured_seconds),
            *_figures(one.experts, "" if one.fits else "!"),
            *_figures(one.chosen),
            f"{one.gain:+.1%}",
            percent_text(_gap(one.chosen)),
        )
    return shown


def _figures(plan: Plan, mark: str = "") -> tuple[str, str, str]:
    return seconds_text(plan.step_seconds), percent_text(plan.mfu), bytes_text(max(plan.peak_bytes)) + mark


def _gap(plan: Plan) -> float:
    return max(0.0, 1 - plan.search.bound_seconds / plan.step_seconds) if plan.search else 0.0


@app.command()
def main(
    case: Annotated[list[str] | None, typer.Option(help="Cases whose name has this; all if not given.")] = None,
    measurements: Annotated[Path, typer.Option(help="Folder of the published tables.")] = MEASUREMENTS,
    audit: Annotated[bool, typer.Option("--audit", help="Compare costs with those of the programs, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures instead of a table.")] = False,
) -> None:
    """Compare what is chosen with what experts chose."""
    wanted = [one for one in cases(measurements) if not case or any(text in one.name for text in case)]
    found = [in_fresh_process(choose, one, audit) for one in wanted]
    if as_json:
        print(json.dumps([one.to_json() for one in found], indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(found))
    for one in found:
        console.print(f"{one.case.name}: {why(one.chosen, one.experts)}", highlight=False)
        console.print(f"  experts: {described(one.experts)}\n  chosen:  {described(one.chosen)}", highlight=False)
        if audit:
            console.print(f"  costs differ from those of their programs by {max(one.differences):.1e} at most")
    slower = [one.case.name for one in found if one.is_slower]
    console.print(f"{len(found)} cases; slower than the experts' plan: {', '.join(slower) or 'none'}")
    if any(not one.fits for one in found):
        console.print("!: more than the device has, by our account")


if __name__ == "__main__":
    app()
