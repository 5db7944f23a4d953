"""Do plans that nobody chose compute the same on architectures that nobody chose, and cost what programs do?

    python benchmarks/random_plans.py [--seconds N] [--seed N] [--only NAME]... [--plans N] [--out FILE]

Classes of transformers (:mod:`coverage_models`, tiny, float64) in an order by chance, each with some plans: degrees on
2 to 8 simulated ranks, schedule, vocabulary, ZeRO, recomputation, offload, chunks of the head, clipping; all of them
pinned, some, or none. Each job trains two steps beside one device (``job.verify``, within :data:`coverage.TOLERANCE`),
and its costs are read off its programs (``job.audit``). A plan that doesn't fit a model is refused, and counts as such.
A seed names classes and plans; each runs in a process of its own, for :data:`LIMIT` seconds at most.
"""

from __future__ import annotations

import json
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from coverage import CRASHED, DIFFERS, EQUAL, FAST, LATE, REFUSED, TOLERANCE, digest, runs_on_one_device
from coverage_models import TASKS, Task, tiny
from float64 import Float64
from processes import DiedError, in_fork
from rich.console import Console
from rich.table import Table

import autopar
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.graph import op_name
from autopar.preparation import Captured
from autopar.schedules import SCHEDULES

LIMIT: Final = 120
"""Seconds for a plan; five times that for a class."""

COSTS: Final = "other costs"
"""It computes the same, but an audit finds other costs than the plan has."""

SLOW: Final = replace(
    FAST,
    devices_per_node=2,
    intra_node=replace(FAST.intra_node, bytes_per_second=1e8),
    inter_node=replace(FAST.inter_node, latency_seconds=1e-6, bytes_per_second=5e7),
)
CLUSTERS: Final[dict[str, Cluster]] = {"fast": FAST, "slow": SLOW}

_ASYNCHRONOUS: Final = ("pipedream",)


@dataclass
class Outcome:
    task: str
    name: str
    ranks: int
    pins: dict[str, Any]
    verdict: str
    why: str = ""
    seconds: float = 0.0
    digest: str = field(default="", repr=False)


def drawn(chance: random.Random, task: Task, *, has_experts: bool) -> tuple[int, dict[str, Any]]:
    """Ranks, and arguments of :func:`autopar.compile`; the name of a cluster among them."""
    ranks, kind = chance.choice((2, 4, 4, 6, 8)), chance.choice(("all", "all", "all", "some", "none"))
    axes = ["pp", "dp", "tp", *(["cp"] if task.has_positions else [])]
    pins: dict[str, Any] = {}
    if kind == "all":
        pins = _all_pinned(chance, axes, ranks, has_experts=has_experts)
    elif kind == "some":
        pins = {"mesh": {chance.choice(axes): 2}}
    optional = {
        "recompute": ("none", "selective", "full"),
        "offload": (("optimizer",), ("parameters",), ("activations",)),
        "head_chunks": (2, 3),
        "clip_norm": (0.01, 1.0),
        "activations": ("lossless",),
    }
    pins |= {name: chance.choice(values) for name, values in optional.items() if chance.random() < 0.2}
    if not task.has_positions:  # there, batches are also what norms have statistics of
        pins["statistics"] = "microbatch"
    return ranks, pins | {"cluster": chance.choice(list(CLUSTERS))}


def _all_pinned(chance: random.Random, axes: Sequence[str], ranks: int, *, has_experts: bool) -> dict[str, Any]:
    mesh, left = dict[str, int](), ranks
    while left > 1:
        factor = 2 if left % 2 == 0 else left
        axis = chance.choice([each for each in axes if each != "pp" or "pp" not in mesh])
        mesh[axis], left = mesh.get(axis, 1) * factor, left // factor
    lent = mesh.get("dp", 1) * mesh.get("cp", 1)
    lent = lent if lent > 1 else mesh.get("tp", 1)
    if has_experts and lent > 1 and chance.random() < 0.7:
        mesh["ep"] = lent
    pins: dict[str, Any] = {
        "mesh": mesh,
        "microbatches": chance.choice((1, 2, 4)),
        "zero": chance.choice((0, 0, 1, 2, 3)),
    }
    if mesh.get("cp", 1) > 1 and chance.random() < 0.3:
        pins["attention"] = chance.choice(("all_gather", "ring", "heads"))
    if mesh.get("pp", 1) > 1:
        schedules = [name for name in SCHEDULES if name not in _ASYNCHRONOUS]
        vocabularies = ("stage", "redistributed", "redistributed", "naive", "vocab-1", "vocab-2")
        pins |= {"schedule": chance.choice(schedules), "vocabulary": chance.choice(vocabularies)}
        pins |= {"microbatches": chance.choice((2, 4))}
        pins |= {"chunks": 2} if pins["schedule"] == "interleaved" else {}
        pins |= {"vocabulary": "interlaced"} if pins["schedule"] == "interlaced" else {}
    return pins


def tried(captured: Captured, ranks: int, pins: dict[str, Any], batch: Any) -> tuple[str, str]:
    """Verdict and why."""
    try:
        job = autopar.compile(captured, ranks, optimizer=_optimizer, **pins | {"cluster": CLUSTERS[pins["cluster"]]})
    except AutoparError as error:
        return REFUSED, _first(error)
    except Exception as error:
        return CRASHED, _first(error)
    try:
        result = job.verify(batch, steps=2)
        worst = max([result.loss_error, *result.gradient_errors.values(), *result.parameter_errors.values()])
        if worst > TOLERANCE:
            return DIFFERS, f"{worst:.1e} {result.divergence[:200]}"
        found = job.audit()
    except Exception as error:  # what was compiled has to run
        return CRASHED, _first(error)
    rows = ", ".join(f"{row.what} {100 * row.difference:+.2g} %" for row in found.different[:3])
    return (EQUAL, "") if found.ok else (COSTS, rows)


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    """One that doesn't amplify rounding, and has a state."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def of_class(task: str, name: str, seed: int, plans: int, known: frozenset[str]) -> list[Outcome]:
    """Of a class that runs on one device and is captured; none of one whose graph is that of one before."""
    chance = random.Random(f"{seed} {task} {name}")
    with Float64():
        try:
            model, batch = tiny(TASKS[task], name)
            runs_on_one_device(model, batch)
            captured = autopar.capture(model, sample=batch)
        except Exception:  # benchmarks/coverage.py says why
            return []
        mark = digest(captured)
        if mark in known:
            return []
        has_experts = any(op_name(node) == "autopar.dispatch.default" for node in captured.flat.nodes)
        drawings = [drawn(chance, TASKS[task], has_experts=has_experts) for _ in range(plans)]
        return [_outcome(task, name, captured, ranks, pins, batch, mark) for ranks, pins in drawings]


def _outcome(
    task: str, name: str, captured: Captured, ranks: int, pins: dict[str, Any], batch: Any, mark: str
) -> Outcome:
    start = time.perf_counter()
    try:
        verdict, why = in_fork(partial(tried, captured, ranks, pins, batch), LIMIT)
    except TimeoutError as error:
        verdict, why = LATE, str(error)
    except DiedError as error:
        verdict, why = CRASHED, str(error)
    return Outcome(task, name, ranks, pins, verdict, why, round(time.perf_counter() - start, 1), mark)


def outcomes(names: Sequence[tuple[str, str]], seed: int, plans: int, seconds: float) -> Iterator[Outcome]:
    """Until so many ``seconds`` are over."""
    known, end = set[str](), time.perf_counter() + seconds
    for task, name in names:
        if time.perf_counter() > end:
            return
        try:
            found = in_fork(partial(of_class, task, name, seed, plans, frozenset(known)), 5 * LIMIT)
        except (TimeoutError, DiedError) as error:
            found = [Outcome(task, name, 0, {}, LATE if isinstance(error, TimeoutError) else CRASHED, str(error))]
        known |= {outcome.digest for outcome in found}
        yield from found


app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def main(
    seconds: Annotated[float, typer.Option(help="No class is begun after so many.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of the order of classes, and of plans.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Model types, as transformers calls them.")] = None,
    plans: Annotated[int, typer.Option(min=1, help="For each class.")] = 4,
    out: Annotated[Path | None, typer.Option(help="A file of outcomes, one a line, which is added to.")] = None,
) -> None:
    """Try plans by chance on classes by chance."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    names = [(task, name) for task in TASKS for name in TASKS[task].classes if not only or name in only]
    random.Random(seed).shuffle(names)
    found = []
    for outcome in outcomes(names, seed, plans, seconds):
        found.append(outcome)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table(found), summary(found))


def table(found: Sequence[Outcome]) -> Table:
    """What isn't equal, and wasn't refused."""
    shown = Table("class", "ranks", "pins", "outcome", title="Plans by chance that aren't equal")
    for each in found:
        if each.verdict not in (EQUAL, REFUSED):
            name = TASKS[each.task].classes.get(each.name, each.name)
            pins = ", ".join(f"{key} {value}" for key, value in each.pins.items())
            shown.add_row(name, str(each.ranks), pins, f"{each.verdict}: {each.why}")
    return shown


def summary(found: Sequence[Outcome]) -> Table:
    counts = Counter(outcome.verdict for outcome in found)
    shown = Table("classes", *counts, title="Plans by chance")
    shown.add_row(str(len({(each.task, each.name) for each in found})), *map(str, counts.values()))
    return shown


if __name__ == "__main__":
    app()
