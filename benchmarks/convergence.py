"""What saving memory does to training: loss curves of the demo's GPT-2 beside one device in float32.

    python benchmarks/convergence.py [--steps 300] [--picture convergence.png]

On 4 gloo processes of this machine, on the same batches: bf16 with float32 masters, ZeRO-2 and every layer recomputed
on pp 2 x dp 2; and float32 on dp 4 with gradients summed by PowerSGD. The first should follow one device, the second
may learn a little slower. The figure is the mean loss over the last tenth of the steps.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

import autopar
from autopar.options import Given

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from demo import CLIP_NORM, batches, build_model, train_one_device, train_ranks

RUNS: dict[str, tuple[dict[str, int], int, Given]] = {
    "bf16, ZeRO-2, recompute": ({"pp": 2, "dp": 2}, 4, {"precision": "bf16", "zero": 2, "recompute": "full"}),
    "PowerSGD rank 4": ({"dp": 4}, 1, {"powersgd": 4}),
}
"""Mesh, microbatches and options."""
ONE_DEVICE = "one device, float32"


def main(
    steps: Annotated[int, typer.Option(min=10)] = 300,
    picture: Annotated[Path | None, typer.Option(help="write the curves as a picture (.png, .svg)")] = None,
) -> None:
    """Train the demo's model in each way and compare the curves."""
    torch.set_num_threads(1)  # as each rank has
    data = batches(steps)
    curves = {ONE_DEVICE: list(track(train_one_device(build_model(), data), ONE_DEVICE, total=steps))}
    for name, run in RUNS.items():
        curves[name] = list(track(trained(*run, data), name, total=steps))
    Console(width=None if sys.stdout.isatty() else 120).print(table(curves))
    if picture is not None:
        draw(curves, picture)


def trained(mesh: dict[str, int], microbatches: int, options: Given, data: list[dict[str, Tensor]]) -> Iterator[float]:
    """The losses of the ranks, as they come."""
    pinned: dict[str, Any] = {"mesh": mesh, "microbatches": microbatches, "clip_norm": CLIP_NORM}
    job = autopar.compile(build_model(), gpus=4, sample=data[0], **pinned, **options)
    with tempfile.TemporaryDirectory() as folder:
        directory = job.write(Path(folder) / "job")
        save_file({f"{i}.{k}": v for i, b in enumerate(data) for k, v in b.items()}, directory / "batches.safetensors")
        yield from train_ranks(directory, len(data))


def last_tenth(losses: list[float]) -> float:
    return statistics.mean(losses[-max(1, len(losses) // 10) :])


def table(curves: dict[str, list[float]]) -> Table:
    found = Table(title="mean loss of the last tenth of the steps", title_justify="left")
    for column in ("run", "loss", "beside one device", "largest difference of a step"):
        found.add_column(column, justify="left" if column == "run" else "right")
    one = curves[ONE_DEVICE]
    for name, losses in curves.items():
        gap = last_tenth(losses) - last_tenth(one)
        worst = max(abs(a - b) for a, b in zip(losses, one, strict=True))
        found.add_row(name, f"{last_tenth(losses):.4f}", f"{gap:+.4f}", f"{worst:.4f}")
    return found


def draw(curves: dict[str, list[float]], picture: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, losses in curves.items():
        axes.plot(smooth(losses), label=name, linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss (mean of 10 steps)", title="GPT-2 of 3.2 M parameters over bytes of text")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=150)


def smooth(losses: list[float], width: int = 10) -> list[float]:
    return [statistics.mean(losses[max(0, i - width + 1) : i + 1]) for i in range(len(losses))]


if __name__ == "__main__":
    typer.run(main)
