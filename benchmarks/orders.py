"""How far named schedules are from what any order of their passes takes: Llama-3-8B on 64 H100, pinned but for that.

    python benchmarks/orders.py [--schedule NAME]...

For some degrees, every way to compute the vocabulary and every schedule that keeps nothing on the host: the step of the
plan, and by how much that exceeds a bound for its stages. Takes three minutes.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer
from models import TRAININGS
from rich.console import Console
from rich.table import Table

import autopar
from autopar.errors import AutoparError
from autopar.plan import percent_text, seconds_text

MESHES: Final = ({"pp": 4, "dp": 8, "tp": 2}, {"pp": 8, "dp": 4, "tp": 2}, {"pp": 16, "dp": 4}, {"pp": 16, "tp": 2})
VOCABULARIES: Final = ("redistributed", "vocab-1", "vocab-2")
SCHEDULES: Final = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half")
PINS: Final[dict[str, Any]] = {"microbatch": 1, "zero": 1, "offload": (), "head_chunks": 1}


def main(
    schedule: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SCHEDULES)} if not given.")] = None,
) -> None:
    """A row for each degrees and vocabulary, a column for each schedule."""
    names, training = schedule or list(SCHEDULES), TRAININGS["llama3-8b"]
    captured = autopar.capture(training.model(), sample=training.sample(), precision="bf16")
    table = Table("degrees", "vocabulary", *names, title="Step, and what it has over any order of its passes")
    for mesh in MESHES:
        for vocabulary in VOCABULARIES:
            pins = PINS | {"mesh": mesh, "vocabulary": vocabulary}
            cells = [_cell(captured, training, pins | _schedule(name)) for name in names]
            table.add_row(" ".join(f"{axis} {size}" for axis, size in mesh.items()), vocabulary, *cells)
    Console().print(table)


def _schedule(name: str) -> dict[str, Any]:
    return {"schedule": name} | ({"chunks": 2} if name == "interleaved" else {})


def _cell(captured: Any, training: Any, pins: dict[str, Any]) -> str:
    try:
        plan = autopar.plan(captured, training.gpus, cluster=training.cluster, **pins)
    except AutoparError:
        return "doesn't fit"
    over = plan.step_seconds / plan.cost.order_seconds - 1
    return f"{seconds_text(plan.step_seconds)} +{percent_text(over)}"


if __name__ == "__main__":
    typer.run(main)
