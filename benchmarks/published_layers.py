"""Single layers against published profiles: pass times, and the bytes that a layer keeps for its backward.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198: table 4 (times of
a layer of its 22B model) and table 2 (formulas of activation bytes). Rows without sequence parallelism are left out:
the planner prefers to split sequences, which costs the same messages. Qi et al., "Zero Bubble Pipeline Parallelism",
arXiv 2401.10241, table 9: a stage's F, B and W together, of which the first and last stage's embedding and head are no
part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from published_gpt import GptSizes
from published_runs import UNBOUNDED_BYTES, captured
from published_tables import read

from autopar.cluster import Cluster
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.planner.block_costs import Machine, block_cost
from autopar.planner.build import Request, build
from autopar.planner.wanted import Wanted

CLUSTER = "a100"
LARGE = GptSizes(4, 6144, 64, 51200, 2048, fused=False, dropout=0.1)
LARGE_ROWS, LARGE_TP = 4, 8
MIB = 2**20


@dataclass(frozen=True)
class LayerResult:
    """Milliseconds, or MiB."""

    table: str
    name: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Layer:
    """Of a middle layer: seconds of its passes, what recomputation adds, and the bytes that it keeps."""

    forward_seconds: float
    backward_seconds: float
    again_seconds: float
    kept_bytes: int


def layer_of(sizes: GptSizes, rows: int, tp: int = 1, recompute: str = "none") -> Layer:
    cluster, mesh = Cluster.load(CLUSTER), Mesh.of({"tp": tp}, tp)
    options = Options.of(precision="bf16", recompute=recompute, budget_bytes=UNBOUNDED_BYTES)
    model = captured(replace(sizes, layers=4), rows)
    built = build(model, Request(mesh, 1, cluster, Wanted("1f1b", "stage"), options))
    calls = [i for i, call in enumerate(built.model.calls) if built.model.block_of(call).kind == "layer"]
    middle = calls[1]
    cost = block_cost(built.model.block_of(built.model.calls[middle]), Machine.of(cluster, mesh))
    chosen = built.pipeline.chosen[middle]
    return Layer(cost.forward_seconds, cost.backward_seconds, chosen.seconds, chosen.saved_bytes)


def layers(folder: Path) -> Iterator[LayerResult]:
    yield from _times(folder)
    yield from _kept()
    yield from _stages(folder)


_MODES = {"sequence parallelism": "none", "baseline full recompute": "full", "selective + sequence": "selective"}


def _times(folder: Path) -> Iterator[LayerResult]:
    for row in read(folder / "korthikanti_table4_layer_times.csv"):
        if row["experiment"] in _MODES:
            found = layer_of(LARGE, LARGE_ROWS, LARGE_TP, _MODES[row["experiment"]])
            seconds = found.forward_seconds + found.backward_seconds + found.again_seconds
            yield LayerResult("Layer times, 22B (ms)", row["experiment"], float(row["combined_ms"]), 1e3 * seconds)


def _kept() -> Iterator[LayerResult]:
    """The formulas with tensor and sequence parallelism."""
    s, b, h, a, t = LARGE.sequence, LARGE_ROWS, LARGE.width, LARGE.heads, LARGE_TP
    formulas = {
        "none": s * b * h * (34 / t + 5 * a * s / (h * t)),
        "selective": s * b * h * 34 / t,
        "full": 2 * s * b * h / t,
    }
    for mode, bytes_ in formulas.items():
        found = layer_of(LARGE, LARGE_ROWS, LARGE_TP, mode)
        yield LayerResult("Kept bytes, 22B (MiB)", f"recompute {mode}", bytes_ / MIB, found.kept_bytes / MIB)


def _stages(folder: Path) -> Iterator[LayerResult]:
    known: dict[str, Layer] = {}
    for row in read(folder / "zero_bubble_profiled_times.csv"):
        sizes = GptSizes(4, int(row["hidden"]), int(row["heads"]), 50304, int(row["seq"]), fused=False, dropout=0.1)
        if row["model"] not in known:
            known[row["model"]] = layer_of(sizes, int(row["microbatch"]))
        one, count = known[row["model"]], (int(row["layers"]) + 2) / int(row["pp"])
        measured = sum(float(row[key]) for key in ("T_F_ms", "T_B_ms", "T_W_ms"))
        predicted = 1e3 * count * (one.forward_seconds + one.backward_seconds)
        yield LayerResult("Passes of a stage (ms)", f"{row['model']} m{row['num_microbatches']}", measured, predicted)
