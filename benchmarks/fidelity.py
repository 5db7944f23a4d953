"""How far predictions lie from published measurements.

    python benchmarks/fidelity.py [--measurements DIR] [--part tables|heldout|layers|profile|better|moe] [--case TEXT]
                                  [--rows] [--table TEXT] [--audit]

tables   every published run whose configuration is known (:mod:`published_tables`), each captured from its sizes and
         planned as it ran: one line per table with the mean absolute errors of step time and peak memory, and the rank
         correlation of step times; rows that are left out, and why. --rows shows each run, --table those whose title
         has this text. Takes minutes. --audit reads costs off the programs, too (:mod:`autopar.audit`), and says by
         how much those of the plans differ at most; also in part moe. Takes as long again, and longer.
heldout  the same for tables that were taken up after the cost models had been made (:mod:`heldout_tables`), H100, GB200
         and A100: 178 runs of GPTs, Llamas and Nemotrons by NeMo, llm-foundry and torchtitan. Takes the longest.
layers   forward and backward of single layers against profiles (:mod:`published_layers`), and what a layer keeps
         against formulas of activation memory.

Yeung et al., "Balancing Pipeline Parallelism with Vocabulary Parallelism", arXiv 2411.05288, on A100s:

profile  the 40 runs of its artifact on 8 GPUs, from their own measured pass times: the timeline against the measured
         iteration. The slot T(j-1) S(j), measured as one, is cut by its products' FLOPs: 2 to 1 (Vocab-2), 1 to 2
         (Vocab-1, interlaced). Runs without a measured transfer take that of the Vocab-2 run of the same sizes.
         Exchanges, which were not measured, are those of the cost models; interlaced's measured passes contain theirs
         but for the broadcast of X, because they block. The optimizer's step is the cost models'.
better   the best schedule, placement, vocabulary mode and partition of the synthesis against the best published
         method as the same formulas (:mod:`gpt_costs`) predict both, at no more predicted peak memory; and how the gain
         holds when every pass time is off by up to 5 %, with the lists as they are. Four cells of 8 GPUs, unless --case
         asks for others, such as --case "32 GPUs s=2048 V=256k".

Megatron's MoE model zoo (github.com/yanring/Megatron-MoE-ModelZoo), on H100s and GB200s:

moe      every run of Qwen3-235B-A22B and Mixtral-8x22B whose configuration is known (:mod:`moe_zoo`), planned as it
         ran: step time, the mean absolute error of all runs and of those that moved tokens as programs of ours do, and
         the rank correlation of TFLOP/s. Takes minutes.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import heldout_tables
import moe_zoo
import typer
from gpt_costs import Gpt, Machine, Placed, exchange_seconds, sustained_fraction
from published_layers import layers
from published_runs import Predicted as Planned
from published_runs import predictions
from published_tables import Table as Published
from published_tables import read, tables
from rich.console import Console
from rich.table import Table

from autopar.cluster import Cluster
from autopar.errors import ScheduleError
from autopar.planner.stages import Unit, partition
from autopar.planner.synthesis import Synthesis, synthesize
from autopar.schedules import Costs, Timeline, generate, lower, simulate_timeline
from autopar.schedules.pass_times import PassTimes

MEASUREMENTS = Path(__file__).parent / "measurements"
PARTS = ("tables", "heldout", "layers", "profile", "better", "moe")
CLUSTER = "a100"
CLEAR = 0.03
"""Published differences up to this share say nothing about the order of two methods."""

CASES = (
    "1F1B 8 GPUs s=2048 V=32k",
    "1F1B 8 GPUs s=2048 V=256k",
    "1F1B 8 GPUs s=4096 V=32k",
    "1F1B 8 GPUs s=4096 V=256k",
)
"""Cells of part better unless others are asked for: those of 32 GPUs take minutes each."""

SHAKES, SHAKE = 8, 0.05
GIB = 2**30
HEADS = {"baseline": "", "redis": "", "vocab-1": "vocab-1", "vocab-2": "vocab-2", "interlaced": "vocab-1"}
S_SHARE = {"vocab-1": 1 / 3, "vocab-2": 2 / 3, "interlaced": 1 / 3}
UNITS = ("embedding", "layer", "head")
NAMES = {"1F1B": "1f1b", "V-Half": "v-half"}
Row = Mapping[str, str]

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    measurements: Annotated[Path, typer.Option(help="Folder of the published tables.")] = MEASUREMENTS,
    part: Annotated[list[str] | None, typer.Option(help=f"Any of {', '.join(PARTS)}; all if not given.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Cells of part better whose name has this; '' is all.")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="Show each run of part tables.")] = False,
    table: Annotated[list[str] | None, typer.Option(help="Tables of part tables whose title has this.")] = None,
    audit: Annotated[bool, typer.Option("--audit", help="Compare costs with those of the programs, too.")] = False,
) -> None:
    """Compare predictions with published measurements."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    wanted = part or list(PARTS)
    if unknown := set(wanted) - set(PARTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: parts are {', '.join(PARTS)}")
    if "tables" in wanted:
        found = [one for one in tables(measurements) if not table or any(text in one.title for text in table)]
        show_tables(console, found, rows=rows, audit=audit)
    if "heldout" in wanted:
        found = [one for one in heldout_tables.tables() if not table or any(text in one.title for text in table)]
        show_tables(console, found, rows=rows, audit=audit)
    if "layers" in wanted:
        show_layers(console, measurements)
    if "profile" in wanted:
        show_profile(console, read(measurements / "vocab_parallel_artifact_onehost_profile.csv"))
    machine = machine_of(measurements)
    cells = cells_of(read(measurements / "vocab_parallel_paper_tables5_6.csv"))
    if "better" in wanted:
        shown = [cell for cell in cells if any(text in str(cell) for text in case or CASES)]
        show_better(console, shown, machine)
    if "moe" in wanted:
        show_moe(console, [row for file in moe_zoo.FILES for row in read(measurements / file)], audit=audit)


def machine_of(measurements: Path) -> Machine:
    cluster = Cluster.load(CLUSTER)
    return Machine(cluster, sustained_fraction(read(measurements / "zero_bubble_profiled_times.csv"), cluster))


def timeline_of(name: str, placed_costs: Costs, ranks: int, microbatches: int, head: str) -> Timeline:
    schedule = generate(name, ranks, microbatches, costs=PassTimes.of(placed_costs), head=head, embedding=bool(head))
    return simulate_timeline(lower(schedule, placed_costs.seconds), placed_costs)


# The artifact's runs, from their pass times.


@dataclass(frozen=True)
class Profiled:
    """One run of the artifact: what was measured, and the timeline of its pass times."""

    name: str
    method: str
    measured_seconds: float
    timeline: Timeline

    @property
    def error(self) -> float:
        return self.timeline.makespan_seconds / self.measured_seconds - 1


def transfers(rows: Iterable[Row]) -> dict[tuple[str, str], tuple[float, ...]]:
    """Seconds of a transfer from each stage, by sequence and vocabulary, as the Vocab-2 runs measured them."""
    return {(row["seq"], row["vocab"]): us(row, "p2p") for row in rows if row["method"] == "vocab-2"}


def profiled(rows: Iterable[Row], sends: Mapping[tuple[str, str], tuple[float, ...]]) -> Iterator[Profiled]:
    for row in rows:
        costs = profile_costs(row, sends[row["seq"], row["vocab"]])
        name = "interlaced" if row["method"] == "interlaced" else "1f1b"
        timeline = timeline_of(name, costs, int(row["pp"]), microbatches(row), HEADS[row["method"]])
        yield Profiled(row["name"], row["method"], float(row["iter_time_ms"]) * 1e-3, timeline)


def microbatches(row: Row) -> int:
    return int(row["global_batch"]) // int(row["microbatch"])


def us(row: Row, key: str) -> tuple[float, ...]:
    """Seconds per stage from a column of microseconds."""
    return tuple(float(value) * 1e-6 for value in row[f"{key}_us_per_stage"].split())


def profile_costs(row: Row, send: tuple[float, ...]) -> Costs:
    """A run's measured pass times; bytes count microbatches here, one each."""
    ranks, method, cluster = int(row["pp"]), row["method"], Cluster.load(CLUSTER)
    gpt = Gpt(*(int(row[key]) for key in ("layers", "hidden", "heads", "seq", "vocab")))
    placed = Placed(gpt, Machine(cluster, 1.0), tuple(range(ranks)), even(gpt.layers, ranks), HEADS[method])
    own = us(row, "p2p")
    sends = own if any(own) else send
    return Costs(
        forward_seconds=us(row, "F"),
        backward_seconds=us(row, "B"),
        send_forward_seconds=sends,
        send_backward_seconds=sends,
        reduce_seconds=(0.0,) * ranks,
        activation_bytes=(1,) * ranks,
        step_seconds=placed.costs().step_seconds,
        vocabulary_seconds=profile_vocabulary(row, gpt, cluster) if HEADS[method] else {},
    )


def profile_vocabulary(row: Row, gpt: Gpt, cluster: Cluster) -> dict[str, tuple[float, ...]]:
    slot, share, ranks = us(row, "S_plus_T"), S_SHARE[row["method"]], int(row["pp"])
    exchanges = exchange_seconds(gpt.tokens, gpt.hidden, ranks, cluster)
    if row["method"] == "interlaced":
        exchanges = {"CAST_X": exchanges["CAST_X"]}
    return {
        "S": tuple(share * seconds for seconds in slot),
        "T": tuple((1 - share) * seconds for seconds in slot),
        "E": us(row, "input_F"),
        "G": us(row, "input_B"),
        **{kind: (seconds,) * ranks for kind, seconds in exchanges.items()},
    }


def even(layers: int, ranks: int) -> tuple[int, ...]:
    return tuple(layers // ranks + (rank >= ranks - layers % ranks) for rank in range(ranks))


def show_profile(console: Console, rows: Sequence[Row]) -> None:
    table = Table("run", "measured ms", "timeline ms", "error", "in flight", title="Measured pass times, 8 x A100")
    runs = list(profiled(rows, transfers(rows)))
    for run in runs:
        predicted = f"{1e3 * run.timeline.makespan_seconds:.1f}"
        flight = " ".join(map(str, run.timeline.peak_in_flight))
        table.add_row(run.name, f"{1e3 * run.measured_seconds:.1f}", predicted, f"{run.error:+.2%}", flight)
    console.print(table)
    errors = [run.error for run in runs]
    within = sum(abs(error) <= 0.015 for error in errors)
    console.print(f"{within} of {len(runs)} within 1.5 %; from {min(errors):+.2%} to {max(errors):+.2%}\n")


# The cells of its tables 5 and 6, from formulas: what the synthesis is compared with.


@dataclass(frozen=True)
class Cell:
    """One column of a published table: a model and cluster, with the row of each method."""

    schedule: str
    gpt: Gpt
    ranks: int
    microbatches: int
    rows: Mapping[str, Row]

    def __str__(self) -> str:
        return f"{self.schedule} {self.ranks} GPUs s={self.gpt.seq} V={self.gpt.vocab // 1000}k"

    def placed(self, method: str, machine: Machine) -> Placed:
        if self.schedule == "V-Half":
            placement = (*range(self.ranks), *reversed(range(self.ranks)))
            return Placed(self.gpt, machine, placement, even(self.gpt.layers, 2 * self.ranks), HEADS[method])
        layers = even(self.gpt.layers, self.ranks)
        if method == "redis":
            layers = redistributed(self.gpt, self.ranks)
        return Placed(self.gpt, machine, tuple(range(self.ranks)), layers, HEADS[method])


def cells_of(rows: Iterable[Row]) -> list[Cell]:
    groups: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row["schedule"], row["gpus"], row["seq"], row["vocab"], row["hidden"]), {})[
            row["method"]
        ] = row
    return [cell_of(list(methods.values()), methods) for methods in groups.values()]


def cell_of(rows: Sequence[Row], methods: Mapping[str, Row]) -> Cell:
    sizes = [int(rows[0][key]) for key in ("layers", "hidden", "heads", "seq", "vocab", "microbatch")]
    return Cell(rows[0]["schedule"], Gpt(*sizes), int(rows[0]["pp"]), int(rows[0]["num_microbatches"]), methods)


def redistributed(gpt: Gpt, ranks: int) -> tuple[int, ...]:
    """Whole layers moved off the last stage, as long as it stays no shorter than the average by FLOPs ("redis").

    The artifact's choice in all of its runs, also where one layer less would make the longest stage shorter.
    """
    head = gpt.vocab / (12 * gpt.hidden + 2 * gpt.seq)
    last = max(0, math.ceil((gpt.layers + head) / ranks - head))
    return (*even(gpt.layers - last, ranks - 1), last)


@dataclass(frozen=True)
class Predicted:
    """A method in a cell: what was published, what the formulas say."""

    cell: Cell
    method: str
    placed: Placed
    timeline: Timeline

    @property
    def seconds(self) -> float:
        return self.timeline.makespan_seconds

    @property
    def peak_bytes(self) -> int:
        return self.placed.peak_bytes(self.timeline.peak_activation_bytes)

    @cached_property
    def published(self) -> tuple[float, float] | None:
        """Seconds and bytes; None where it ran out of memory. 1F1B's MFU is of 320 TFLOP/s, V-Half's taken of 312."""
        row = self.cell.rows[self.method]
        key = "iter_time_ms_implied_peak320" if self.cell.schedule == "1F1B" else "iter_time_ms_implied_peak312"
        return (float(row[key]) * 1e-3, float(row["peak_mem_gb"]) * GIB) if row["status"] == "ok" else None

    @property
    def errors(self) -> tuple[float, float]:
        assert self.published is not None
        return self.seconds / self.published[0] - 1, self.peak_bytes / self.published[1] - 1


def predict(cell: Cell, method: str, machine: Machine) -> Predicted:
    placed = cell.placed(method, machine)
    name = "interlaced" if method == "interlaced" else NAMES[cell.schedule]
    return Predicted(
        cell, method, placed, timeline_of(name, placed.costs(), cell.ranks, cell.microbatches, HEADS[method])
    )


# Every published run, planned as it ran.


def show_tables(console: Console, published: Sequence[Published], *, rows: bool, audit: bool) -> None:
    columns = ("table", "rows", "left out", "step error", "memory error", "rank correlation", "audit")
    summary = Table(*columns, title="Published runs, planned as they ran")
    for table in published:
        found = list(predictions(table.runs, audit=audit))
        if rows:
            show_runs(console, table.title, found)
        counts = str(len(found)), str(sum(table.left_out.values()))
        summary.add_row(table.title, *counts, *summarized(found), audited(found))
    console.print(summary)
    for table in published:
        for reason, count in table.left_out.items():
            console.print(f"{table.title}: {count} left out: {reason}")
        if table.note:
            console.print(f"{table.title}: {table.note}")


def audited(found: Sequence[Planned | moe_zoo.Predicted]) -> str:
    """The largest difference of costs from those of the programs; "" where these weren't read."""
    differences = [one.difference for one in found if one.difference is not None]
    return f"{max(differences):.1e}" if differences else ""


def summarized(found: Sequence[Planned]) -> tuple[str, str, str]:
    """Mean absolute errors of step and memory, and the rank correlation of steps."""
    step = statistics.mean(abs(one.error) for one in found)
    memory = [abs(one.memory_error) for one in found if one.memory_error is not None]
    ranks = moe_zoo.correlation([one.run.seconds for one in found], [one.seconds for one in found]) if found[2:] else 0
    return f"{step:.1%}", f"{statistics.mean(memory):.1%}" if memory else "-", f"{ranks:.3f}" if ranks else "-"


def show_runs(console: Console, title: str, found: Sequence[Planned]) -> None:
    columns = ("run", "published s", "predicted s", "error", "published GiB", "predicted GiB", "error", "audit")
    table = Table(*columns, title=title)
    for one in found:
        published = f"{one.run.peak_bytes / GIB:.1f}" if one.run.peak_bytes else "-"
        off = f"{one.memory_error:+.1%}" if one.memory_error is not None else ""
        seconds = f"{one.run.seconds:.3f}", f"{one.seconds:.3f}", f"{one.error:+.1%}"
        table.add_row(one.run.name, *seconds, published, f"{one.peak_bytes / GIB:.1f}", off, audited([one]))
    console.print(table)


def show_layers(console: Console, measurements: Path) -> None:
    table = Table("layer", "published", "predicted", "error", title="Single layers")
    errors: dict[str, list[float]] = {}
    for one in layers(measurements):
        table.add_row(f"{one.table}: {one.name}", f"{one.published:.2f}", f"{one.predicted:.2f}", f"{one.error:+.1%}")
        errors.setdefault(one.table, []).append(abs(one.error))
    console.print(table)
    for name, off in errors.items():
        console.print(f"{name}: {len(off)} rows, mean absolute error {statistics.mean(off):.1%}")


def differ(first: Predicted, second: Predicted) -> bool:
    if first.published is None or second.published is None:
        return False
    return abs(first.published[0] / second.published[0] - 1) > CLEAR


def same_order(first: Predicted, second: Predicted) -> bool:
    assert first.published is not None
    assert second.published is not None
    return (first.published[0] < second.published[0]) == (first.seconds < second.seconds)


# Better than what was published.


@dataclass(frozen=True)
class Found:
    """The best of the synthesis over placements, vocabulary modes and partitions."""

    what: str
    placed: Placed
    synthesis: Synthesis

    @property
    def peak_bytes(self) -> int:
        return self.placed.peak_bytes(self.synthesis.timeline.peak_activation_bytes)


def choices(cell: Cell, machine: Machine) -> Iterator[tuple[str, Placed]]:
    """Placements, partitions and vocabulary modes to choose from."""
    ranks, gpt = cell.ranks, cell.gpt
    straight, there_and_back = tuple(range(ranks)), (*range(ranks), *reversed(range(ranks)))
    yield "on stages", Placed(gpt, machine, straight, balanced(gpt, machine, ranks))
    for head in ("vocab-1", "vocab-2"):
        yield f"straight, {head}", Placed(gpt, machine, straight, even(gpt.layers, ranks), head)
        if gpt.layers >= 2 * ranks:
            yield f"V, {head}", Placed(gpt, machine, there_and_back, even(gpt.layers, 2 * ranks), head)
    if gpt.layers >= 2 * ranks:
        yield "looped, vocab-2", Placed(gpt, machine, straight * 2, even(gpt.layers, 2 * ranks), "vocab-2")


def balanced(gpt: Gpt, machine: Machine, ranks: int) -> tuple[int, ...]:
    """Layers per stage that the stage partition's ILP chooses, with the embedding and the head on stages."""
    alone = Placed(gpt, machine, (0, 1, 2), (0, 1, 0)).costs()
    seconds = [f + b for f, b in zip(alone.forward_seconds, alone.backward_seconds, strict=True)]
    names = ("embedding", *("layer",) * gpt.layers, "head")
    units = [Unit(name, seconds[UNITS.index(name)], 0, 0, 0.0) for name in names]
    starts = (*partition(units, [1] * ranks, None).starts, len(units))
    return tuple(names[a:b].count("layer") for a, b in pairwise(starts))


def best_of(cell: Cell, machine: Machine, peak_bytes: int) -> Found:
    """The shortest step whose peak on every rank is at most ``peak_bytes``."""
    found = []
    for what, placed in choices(cell, machine):
        limits = [peak_bytes - placed.state_bytes(rank) for rank in range(cell.ranks)]
        try:
            synthesis = synthesize(
                placed.placement,
                cell.microbatches,
                placed.costs(),
                limit_bytes=limits,
                head=placed.head,
                embedding=bool(placed.head),
            )
        except ScheduleError:  # not even one microbatch fits beside the parameters
            continue
        found.append(Found(what, placed, synthesis))
    return min(found, key=lambda one: one.synthesis.timeline.makespan_seconds)


def shaken(costs: Costs, seed: int) -> Costs:
    """Every pass time off by up to :data:`SHAKE`, each stage and rank on its own."""
    draw = random.Random(seed)

    def off(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * draw.uniform(1 - SHAKE, 1 + SHAKE) for value in values)

    parts = [off(costs.forward_seconds), off(costs.weight_seconds)]
    inputs = off(tuple(b - w for b, w in zip(costs.backward_seconds, costs.weight_seconds, strict=True)))
    return replace(
        costs,
        forward_seconds=parts[0],
        weight_seconds=parts[1],
        backward_seconds=tuple(i + w for i, w in zip(inputs, parts[1], strict=True)),
        vocabulary_seconds={kind: off(values) for kind, values in costs.vocabulary_seconds.items()},
    )


def gains_shaken(found: Found, published: Predicted) -> list[float]:
    """The gain in throughput when pass times differ from what both lists were made for."""
    gains = []
    for seed in range(SHAKES):
        ours = simulate_timeline(found.synthesis.schedule, shaken(found.placed.costs(), seed))
        theirs = simulate_timeline(published.timeline.schedule, shaken(published.placed.costs(), seed))
        gains.append(theirs.makespan_seconds / ours.makespan_seconds - 1)
    return gains


def show_better(console: Console, cells: Sequence[Cell], machine: Machine) -> None:
    columns = (
        "cell",
        "best published",
        "s",
        "GiB",
        "found",
        "s",
        "GiB",
        "gain",
        "over bound",
        "gain, times off by 5 %",
    )
    table = Table(*columns, title="Synthesis against the best published method, both predicted")
    for cell in cells:
        methods = [predict(cell, method, machine) for method in cell.rows if cell.rows[method]["status"] == "ok"]
        published = min(methods, key=lambda one: one.seconds)
        found = best_of(cell, machine, published.peak_bytes)
        ours = found.synthesis.timeline.makespan_seconds
        shaken_ = gains_shaken(found, published)
        table.add_row(
            str(cell),
            published.method,
            f"{published.seconds:.3f}",
            f"{published.peak_bytes / GIB:.2f}",
            f"{found.what}: {found.synthesis.best}",
            f"{ours:.3f}",
            f"{found.peak_bytes / GIB:.2f}",
            f"{published.seconds / ours - 1:+.2%}",
            f"{found.synthesis.gap:.2%}",
            f"{min(shaken_):+.2%} to {max(shaken_):+.2%}",
        )
    console.print(table)


# Mixtures of experts, planned as they ran.


def show_moe(console: Console, rows: Sequence[Row], *, audit: bool) -> None:
    columns = ("line", "run", "recompute", "published s", "predicted s", "error", "TFLOP/s", "predicted", "peak GiB")
    table = Table(*columns, "audit", title="Mixtures of experts as Megatron ran them")
    found = []
    for one in moe_zoo.predictions(moe_zoo.runs(rows), audit=audit):
        run, peak = one.run, max(one.plan.peak_bytes) / GIB
        seconds = f"{run.seconds:.2f}", f"{one.seconds:.2f}", f"{one.error:+.1%}"
        rates = f"{run.tflops:.0f}", f"{one.tflops:.0f}", f"{peak:.0f}", audited([one])
        table.add_row(str(run.line), f"{run} {run.notes}".strip(), run.recompute, *seconds, *rates)
        found.append(one)
    console.print(table)
    alike = [one for one in found if not one.run.differs]
    for title, some in (("all", found), ("which move tokens as ours do", alike)):
        error, correlation = moe_zoo.mean_error(some), moe_zoo.rank_correlation(some)
        console.print(
            f"{len(some)} runs ({title}): mean absolute error {error:.1%}, rank correlation {correlation:+.2f}"
        )
    for one in found:
        if one.run.differs:
            console.print(f"  line {one.run.line}: {one.run.differs}")
    console.print("left out:")
    for line, why in moe_zoo.left_out(rows).items():
        console.print(f"  line {line}: {why}")


if __name__ == "__main__":
    app()
