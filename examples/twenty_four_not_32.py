"""I have 24 GPUs, not 32: what do I lose?

    python examples/twenty_four_not_32.py
    python examples/twenty_four_not_32.py --have 48 --wanted 64 --batch 256

A quarter of the GPUs should cost a quarter of the throughput. It costs more where 24 divides badly: the batch, or the
model's heads and layers. So Llama-3-8B, which has no weights here, is planned for both numbers, and for a batch near
the given one that divides over all GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from published import batch_of, how, llama_3_8b, without_weights
from rich.console import Console
from rich.table import Table
from torch import nn

import autopar
from autopar.plan import Plan, bytes_text, percent_text, seconds_text
from autopar.report import live_progress


@dataclass(frozen=True)
class Case:
    """A number of GPUs, a batch of so many sequences, and the best plan for them."""

    gpus: int
    batch: int
    positions: int
    plan: Plan

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.positions / self.plan.step_seconds


def nearest_batch(batch: int, gpus: int) -> int:
    """The multiple of ``gpus`` next to ``batch``, the smaller of two."""
    below = batch // gpus * gpus
    return min((b for b in (below, below + gpus) if b), key=lambda b: abs(b - batch))


def compared(
    model: nn.Module, have: int, wanted: int, batch: int, positions: int, cluster: str, **pins: Any
) -> list[Case]:
    """As wanted; with the GPUs that there are; and with a batch that they divide, where that is another."""
    wishes = dict.fromkeys([(wanted, batch), (have, batch), (have, nearest_batch(batch, have))])
    captured = {
        size: autopar.capture(model, sample=batch_of(size, positions), precision="bf16")
        for size in dict.fromkeys(size for _, size in wishes)
    }
    return [
        Case(gpus, size, positions, autopar.plan(captured[size], gpus, cluster=cluster, **pins))
        for gpus, size in wishes
    ]


def loss(case: Case, wanted: Case) -> float:
    """The share of the tokens per second that is lost."""
    return 1 - case.tokens_per_second / wanted.tokens_per_second


def answer(cases: Sequence[Case]) -> str:
    """In words."""
    wanted, have, *other = cases
    fair = 1 - have.gpus / wanted.gpus
    lost = loss(have, wanted)
    text = (
        f"With {have.gpus} GPUs instead of {wanted.gpus} you lose {percent_text(lost)} of the throughput, where "
        f"{percent_text(fair)} of the GPUs are missing: a step takes {seconds_text(have.plan.step_seconds)}, not "
        f"{seconds_text(wanted.plan.step_seconds)}."
    )
    for case in other:
        text += (
            f"\nWith {case.batch} sequences a step instead of {have.batch} you lose {percent_text(loss(case, wanted))}."
        )
    return text


def table(cases: Sequence[Case]) -> Table:
    shown = Table("GPUs", "batch", "step", "tokens/s", "per GPU", "lost", "MFU", "memory")
    for case in cases:
        shown.add_row(
            str(case.gpus),
            str(case.batch),
            seconds_text(case.plan.step_seconds),
            f"{case.tokens_per_second:,.0f}",
            f"{case.tokens_per_second / case.gpus:,.0f}",
            "-" if case is cases[0] else percent_text(loss(case, cases[0])),
            percent_text(case.plan.mfu),
            bytes_text(max(case.plan.peak_bytes)),
        )
    return shown


def main(
    have: Annotated[int, typer.Option(min=1, help="GPUs that there are.")] = 24,
    wanted: Annotated[int, typer.Option(min=1, help="GPUs that there should be.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of 8,192 tokens in a step.")] = 128,
    cluster: Annotated[str, typer.Option(help="A preset or a TOML file.")] = "h100",
) -> None:
    """What fewer GPUs cost."""
    console = Console()
    try:
        with live_progress(Console(stderr=True)) as progress:
            cases = compared(without_weights(llama_3_8b()), have, wanted, batch, 8192, cluster, progress=progress)
    except autopar.AutoparError as error:
        console.print(str(error), highlight=False, markup=False)
        raise typer.Exit(1) from error
    console.print(table(cases))
    for case in cases:
        console.print(f"{case.gpus} GPUs, {case.batch} sequences: {how(case.plan)}", highlight=False)
    console.print(answer(cases), highlight=False)


if __name__ == "__main__":
    typer.run(main)
