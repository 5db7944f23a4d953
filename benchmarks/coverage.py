"""Which architectures of transformers does autopar take? Each is compiled in a tiny configuration, and compared.

    python benchmarks/coverage.py [--task causal]... [--only NAME]... [--shuffled] [--limit SECONDS] [--out FILE]

Every class that transformers lists for a task (:data:`coverage_models.TASKS`) is made with random weights in float64.
It has to run forward and backward on one device: what doesn't is left out. Then it is captured; trained for a step on
four simulated ranks with each of :data:`MESHES` pinned, and compared with one device (``job.verify``: loss, gradients,
parameters; within :data:`TOLERANCE`); and planned for four GPUs with nothing pinned. Each class, and each of these
within it, runs in a process of its own, which is killed when its time is over: none can end or hold up the others.
Classes whose graph is that of one before count without being run again. Seconds are of CPU time.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from coverage_models import TASKS, Task, tiny
from float64 import Float64
from plain import PLAIN
from processes import DiedError, in_fork
from rich.console import Console
from rich.table import Table
from torch import nn

import autopar
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.graph import info, op_name
from autopar.preparation import Captured

MESHES: Final = ({"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"cp": 2, "dp": 2}, {"dp": 2, "ep": 2})
"""The third where there are sequences, the last where there are experts."""

EQUAL, DIFFERS, REFUSED, CRASHED, LATE = "equal", "differs", "refused", "crashed", "late"
AGAIN, LEFT_OUT = "again", "left out"
VERDICTS: Final = (CRASHED, DIFFERS, LATE, REFUSED, EQUAL)
"""Of a class: the first that any of its runs has."""

TOLERANCE: Final = 1e-8
"""Of an error that is no mistake; norms over few samples amplify rounding."""

_CPU: Final = Cluster.load("cpu")
_LINK: Final = replace(_CPU.intra_node, latency_seconds=1e-9, bytes_per_second=1e10)
FAST: Final = replace(_CPU, intra_node=_LINK, inter_node=_LINK)
"""Communication is nearly free here, so that small models are really split."""

app = typer.Typer(pretty_exceptions_enable=False)


@dataclass
class Outcome:
    """Of one class: by what was tried, the outcome and why; CPU seconds of it all."""

    task: str
    name: str
    runs: dict[str, tuple[str, str]] = field(default_factory=dict)
    seconds: float = 0.0
    digest: str = ""
    """Of the graph; "" where there is none."""

    @property
    def verdict(self) -> str:
        found = {outcome for outcome, _ in self.runs.values()}
        return next((verdict for verdict in VERDICTS if verdict in found), LEFT_OUT)


@app.command()
def main(
    task: Annotated[list[str] | None, typer.Option(help=f"Any of {', '.join(TASKS)}; all if not given.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Model types, as transformers calls them.")] = None,
    limit: Annotated[int, typer.Option(help="Seconds for each run of a class.")] = 120,
    shuffled: Annotated[bool, typer.Option("--shuffled", help="In an order that is the same each time.")] = False,
    out: Annotated[Path | None, typer.Option(help="A file of outcomes, one a line, which is gone on with.")] = None,
) -> None:
    """Try every architecture."""
    if unknown := set(task or ()) - set(TASKS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: tasks are {', '.join(TASKS)}")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    names = [(t, name) for t in task or TASKS for name in TASKS[t].classes if not only or name in only]
    if shuffled:
        random.Random(0).shuffle(names)
    done = _read(out)
    for t, name in names:
        if (t, name) not in done:
            done[t, name] = _tried(t, name, limit, done.values())
            _keep(out, done[t, name])
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table(done.values()), summary(done.values()))


def _read(out: Path | None) -> dict[tuple[str, str], Outcome]:
    lines = out.read_text().splitlines() if out is not None and out.exists() else []
    return {(o.task, o.name): o for o in (Outcome(**json.loads(line)) for line in lines)}


def _keep(out: Path | None, outcome: Outcome) -> None:
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")


def _tried(task: str, name: str, limit: int, before: Iterable[Outcome]) -> Outcome:
    graphs = {o.digest: o.name for o in before if o.digest and o.verdict != LEFT_OUT}
    try:  # what comes after capture has limits of its own
        return in_fork(partial(attempt, task, name, limit, graphs), limit * (len(MESHES) + 2))
    except (DiedError, TimeoutError) as error:
        return Outcome(task, name, {"capture": (LATE if isinstance(error, TimeoutError) else CRASHED, str(error))})


def attempt(task: str, name: str, limit: int, graphs: Mapping[str, str]) -> Outcome:
    """Everything with one class, in this process and copies of it. ``graphs``: digests of those before, and whose they
    are."""
    _quiet()
    outcome, started = Outcome(task, name), _cpu_seconds()
    with Float64():
        try:
            model, batch = tiny(TASKS[task], name)
            runs_on_one_device(model, batch)
        except Exception as error:
            outcome.runs["one device"] = (LEFT_OUT, _text(error))
            return outcome
        captured: list[Captured] = []
        outcome.runs["capture"] = _run(lambda: captured.append(autopar.capture(model, sample=batch)))
        if captured:
            outcome.digest = digest(captured[0])
            if outcome.digest in graphs:
                outcome.runs = {"capture": (EQUAL, f"{AGAIN}: {graphs[outcome.digest]}")}
            else:
                outcome.runs |= _meshes(TASKS[task], captured[0], batch, limit)
    outcome.seconds = round(_cpu_seconds() - started, 1)
    return outcome


def _cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _quiet() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def runs_on_one_device(model: nn.Module, batch: Mapping[str, Any]) -> None:
    loss = model(**batch).loss
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not all(bool(value.isfinite().all()) for value in (loss, *gradients)):
        raise ValueError("loss or gradients aren't finite")
    model.zero_grad()
    with torch.no_grad():
        if not torch.allclose(model(**batch).loss, loss, rtol=1e-9):
            raise ValueError("the loss is another each time, so that ranks can't be compared with one device")


def _limited(limit: int, function: Callable[[], Any]) -> tuple[str, str]:
    """The same in a process of its own, for so many seconds."""
    try:
        return in_fork(partial(_run, function), limit)
    except TimeoutError as error:
        return LATE, str(error)
    except DiedError as error:
        return CRASHED, str(error)


def _run(function: Callable[[], Any]) -> tuple[str, str]:
    """Outcome and why."""
    try:
        found = function()
    except AutoparError as error:
        return REFUSED, _text(error)
    except Exception as error:
        return CRASHED, _text(error)
    return found if isinstance(found, tuple) else (EQUAL, "")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def digest(captured: Captured) -> str:
    """Of ops, constants, shapes and who reads what: the same for models that differ in names only."""
    numbers: dict[Any, int] = {}
    lines = []
    for number, node in enumerate(captured.flat.nodes):
        numbers[node] = number
        read = [numbers.get(operand, info(operand).meta.shape) for operand in node.all_input_nodes]
        constants = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, int | float | bool | str)]
        lines.append(f"{op_name(node)} {read} {constants} {[meta.shape for meta in info(node).outputs]}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _meshes(task: Task, captured: Captured, batch: Any, limit: int) -> dict[str, tuple[str, str]]:
    has_experts = any(op_name(node) == "autopar.dispatch.default" for node in captured.flat.nodes)
    found = {}
    for mesh in MESHES:
        if ("cp" in mesh and not task.has_positions) or ("ep" in mesh and not has_experts):
            continue
        text = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
        found[text] = _limited(limit, partial(_verified, captured, mesh, batch, task))
    found["nothing pinned"] = _limited(limit, lambda: autopar.compile(captured, 4, cluster=FAST) and None)
    return found


def _verified(captured: Captured, mesh: Mapping[str, int], batch: Any, task: Task) -> tuple[str, str]:
    gpus = mesh.get("pp", 1) * mesh.get("dp", 1) * mesh.get("cp", 1) * mesh.get("tp", 1)
    more = {"microbatches": 2 if "pp" in mesh else 1}
    if not task.has_positions:  # there, batches are also what norms have statistics of
        more["statistics"] = "microbatch"
    job = autopar.compile(captured, gpus, mesh=mesh, cluster=FAST, optimizer=_optimizer, **PLAIN, **more)
    result = job.verify(batch, steps=1)
    worst = max([result.loss_error, *result.gradient_errors.values(), *result.parameter_errors.values()])
    whole = sorted({op.partition(" ")[0] for op in job.plan.replicated_ops})
    told = f"computed whole: {', '.join(whole)}" if whole else ""
    return (EQUAL, told) if worst <= TOLERANCE else (DIFFERS, f"{worst:.1e} {result.divergence[:200]}")


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    """One that doesn't amplify rounding."""
    return torch.optim.SGD(parameters, lr=0.05)


def table(outcomes: Iterable[Outcome]) -> Table:
    shown = Table("class", "what was tried", "outcome", "CPU seconds", title="Architectures of transformers")
    for outcome in sorted(outcomes, key=lambda o: (o.task, o.name)):
        name, seconds = TASKS[outcome.task].classes.get(outcome.name, outcome.name), f"{outcome.seconds:.1f}"
        for tried, (found, why) in outcome.runs.items():
            shown.add_row(name, tried, f"{found} {why}".strip(), seconds)
            name = seconds = ""
    return shown


def summary(outcomes: Iterable[Outcome]) -> Table:
    """Classes by task and outcome."""
    counts = Counter((outcome.task, outcome.verdict) for outcome in outcomes)
    shown = Table("task", *VERDICTS, LEFT_OUT, title="Classes, each by the worst of its runs")
    for task in dict.fromkeys(task for task, _ in counts):
        shown.add_row(task, *(str(counts[task, verdict]) for verdict in (*VERDICTS, LEFT_OUT)))
    return shown


if __name__ == "__main__":
    app()
