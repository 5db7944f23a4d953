"""What is the cheapest way to train Llama-3-8B at 8k context in under 2 seconds a step?

    python examples/cheapest_llama.py
    python examples/cheapest_llama.py --cluster h100 --cluster a100 --price h100=2.5 --price a100=1.4

Plans the model, which has no weights here, for several numbers of GPUs, and ranks the plans that are fast enough by
what a step costs: in GPU seconds, or in dollars where prices are given. Numbers of GPUs that couldn't be fast enough at
the device's full rate aren't planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from published import batch_of, how, llama_3_8b, without_weights
from rich.console import Console
from rich.table import Table
from torch import nn

import autopar
from autopar.plan import Plan, bytes_text, percent_text, seconds_text
from autopar.report import live_progress


@dataclass(frozen=True)
class Offer:
    """A plan, and what an hour of one of its GPUs costs (0: not known)."""

    plan: Plan
    dollars_per_hour: float = 0.0

    @property
    def gpu_seconds(self) -> float:
        """Of a step."""
        return self.plan.mesh.world * self.plan.step_seconds

    @property
    def cost(self) -> float:
        """What offers are ranked by."""
        return self.gpu_seconds * (self.dollars_per_hour or 1.0)

    def gpu_hours(self, tokens: float, batch_tokens: int) -> float:
        """Of training with ``tokens``."""
        return self.gpu_seconds * tokens / batch_tokens / 3600


@dataclass(frozen=True)
class Refused:
    """What the model can't be trained on, and why."""

    gpus: int
    cluster: str
    why: str


def offers(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    clusters: Sequence[str],
    gpus: Sequence[int],
    limit_seconds: float,
    prices: Mapping[str, float],
    **pins: Any,
) -> Iterator[Offer | Refused]:
    """The best plan for each cluster and number of GPUs, the largest number first, down to those that wouldn't be fast
    enough at the full rate of all their devices."""
    captured = autopar.capture(model, sample=batch, precision="bf16")
    for name in clusters:
        peak = autopar.Cluster.load(name).device.rate("bfloat16")
        flops = 0
        for count in sorted(gpus, reverse=True):
            if flops > limit_seconds * count * peak:
                break
            try:
                plan = autopar.plan(captured, count, cluster=name, **pins)
            except autopar.AutoparError as error:
                yield Refused(count, name, str(error))
                continue
            flops = plan.cost.model_flops
            yield Offer(plan, prices.get(name, 0.0))


def cheapest(found: Sequence[Offer], limit_seconds: float) -> Offer | None:
    return min((one for one in found if one.plan.step_seconds <= limit_seconds), key=lambda one: one.cost, default=None)


def answer(found: Sequence[Offer], limit_seconds: float, batch_tokens: int) -> str:
    """In words."""
    best = cheapest(found, limit_seconds)
    if best is None:
        if not found:
            return "None of these clusters can hold the model."
        fastest = min(found, key=lambda one: one.plan.step_seconds).plan
        where = f"{fastest.mesh.world} x {fastest.cluster}"
        return f"None of these is that fast: the fastest is {where}, {seconds_text(fastest.step_seconds)} a step."
    plan, hours = best.plan, best.gpu_hours(1e9, batch_tokens)
    money = f", ${hours * best.dollars_per_hour:,.0f}" if best.dollars_per_hour else ""
    return (
        f"{plan.mesh.world} x {plan.cluster}: {seconds_text(plan.step_seconds)} a step, {best.gpu_seconds:.0f} GPU "
        f"seconds, or {hours:.1f} GPU hours{money} for a billion tokens.\nHow: {how(plan)}; "
        f"{bytes_text(max(plan.peak_bytes))} a GPU, MFU {percent_text(plan.mfu)}."
    )


def table(found: Sequence[Offer], limit_seconds: float, batch_tokens: int) -> Table:
    money = ["$ / 10⁹ tokens"] if any(one.dollars_per_hour for one in found) else []
    shown = Table("GPUs", "step", "MFU", "GPU s a step", "GPU h / 10⁹ tokens", *money, "memory")
    for one in sorted(found, key=lambda one: one.cost):
        plan, hours = one.plan, one.gpu_hours(1e9, batch_tokens)
        shown.add_row(
            f"{plan.mesh.world} x {plan.cluster}",
            seconds_text(plan.step_seconds),
            percent_text(plan.mfu),
            f"{one.gpu_seconds:.0f}",
            f"{hours:.1f}",
            *[f"{hours * one.dollars_per_hour:,.0f}" if one.dollars_per_hour else "-" for _ in money],
            bytes_text(max(plan.peak_bytes)),
            style="" if plan.step_seconds <= limit_seconds else "dim",
        )
    return shown


def prices_of(texts: Sequence[str]) -> dict[str, float]:
    """``["h100=2.5"]`` as a mapping."""
    found = {}
    for text in texts:
        name, _, dollars = text.partition("=")
        try:
            found[name] = float(dollars)
        except ValueError:
            raise typer.BadParameter(f"--price {text}: say CLUSTER=DOLLARS, such as h100=2.5") from None
    return found


def main(
    seconds: Annotated[float, typer.Option(help="A step may take so long.")] = 2.0,
    cluster: Annotated[list[str] | None, typer.Option(help="A preset or a TOML file; h100 if not given.")] = None,
    gpus: Annotated[list[int] | None, typer.Option(help="Numbers to try; 32 to 128 if not given.")] = None,
    price: Annotated[list[str] | None, typer.Option(help="Dollars an hour of one GPU, such as h100=2.5.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences of 8,192 tokens in a step.")] = 128,
) -> None:
    """The cheapest way to train Llama-3-8B that is fast enough."""
    console = Console()
    sample, counts, clusters = batch_of(batch, 8192), gpus or [32, 48, 64, 96, 128], cluster or ["h100"]
    tokens = sample["input_ids"].numel()
    prices = prices_of(price or [])
    with live_progress(Console(stderr=True)) as progress:
        model = without_weights(llama_3_8b())
        every = list(offers(model, sample, clusters, counts, seconds, prices, progress=progress))
    found = [one for one in every if isinstance(one, Offer)]
    console.print(f"Llama-3-8B, {tokens:,} tokens a step, at most {seconds:g} s:")
    console.print(table(found, seconds, tokens))
    for offer in found:
        console.print(f"{offer.plan.mesh.world} x {offer.plan.cluster}: {how(offer.plan)}", highlight=False)
    for one in every:
        if isinstance(one, Refused):
            console.print(f"Not on {one.gpus} x {one.cluster}: {one.why}", highlight=False, markup=False)
    console.print(answer(found, seconds, tokens), highlight=False)


if __name__ == "__main__":
    typer.run(main)
