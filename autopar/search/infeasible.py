"""What would work where nothing fits: the same search with one thing freed at a time, cheapest first.

Each relaxation is solved, not guessed: it is offered with the step that its search found. They cost in this order: what
the user pinned of how to save memory, how work is cut, the degrees; then more memory, and more GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autopar.errors import ArgumentError, AutoparError, BudgetError
from autopar.plan import bytes_text, seconds_text
from autopar.search.costing import Outcome
from autopar.search.fronts import differs
from autopar.search.pins import SEARCHED_OPTIONS, Pins
from autopar.search.profiles import Profiler
from autopar.search.space import regions, savers

if TYPE_CHECKING:
    from autopar.search.loop import Found, Search

_OFFERED = 4
_LEAN_REGIONS = 3
_MORE = (1.25, 1.5, 2, 3, 4, 6, 8)
"""Times the GPUs that are tried, where that is a whole number of them."""


@dataclass(frozen=True)
class Relaxation:
    """What to change, and the best that this makes possible."""

    change: str
    outcome: Outcome

    def __str__(self) -> str:
        return f"{self.change} ({differs(self.outcome.point)}: {seconds_text(self.outcome.step_seconds)} a step)"


def refusal(search: Search, found: Found) -> AutoparError:
    """The error of a search that found nothing: what is too large, and what would do."""
    refusals = list(found.refusals.values()) + list(search.profiler.refused.values())
    if search.pins.mesh_is_whole and refusals and not any(isinstance(error, BudgetError) for error in refusals):
        return refusals[0]
    too_large = (error for error in refusals if isinstance(error, BudgetError))
    needed = min((error.needed_bytes for error in too_large if error.needed_bytes), default=0)
    needed = needed or _leanest_bytes(search)
    offers = relaxations(search)
    pinned = _pinned_text(search.pins)
    has = bytes_text(search.costing.budget_bytes)
    least = f"the leanest way found needs {bytes_text(needed)} on a rank, which" if needed else "a rank"
    text = (
        f"nothing fits on {_gpus_text(search.pins.gpus)}{pinned}: {least} has {has} "
        f"({found.points:,} ways were looked at)"
    )
    ways = "; or ".join(map(str, offers))
    return BudgetError(f"{text}. It fits {ways}" if ways else f"{text}. No single change makes it fit", needed)


def _gpus_text(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus > 1 else ''}"


def _leanest_bytes(search: Search) -> int:
    """What a rank needs with the smallest microbatches on the most stages, everything split and away that can be; 0
    where that can't run at all. Bounds alone refused it, which don't say by how much."""
    found = regions(search.sizes, search.pins)
    for region in sorted(found, key=lambda r: (r.rows / r.key.inner, -r.mesh.pp))[:_LEAN_REGIONS]:
        if search.place(region) is None:
            continue
        point = max(search.points_of(region), key=lambda p: (p.schedule == "1f1b", p.zero, not p.head))
        ways = savers(search.costing.cluster, search.pins)
        offload, chunks = max(ways, key=lambda way: (len(way[0]), -way[1]))
        try:
            search.lay_out(point._replace(offload=offload, head_chunks=chunks))
        except BudgetError as error:
            return error.needed_bytes
        except AutoparError:
            continue
    return 0


def _pinned_text(pins: Pins) -> str:
    names = [f"mesh={dict(pins.mesh)}"] if pins.mesh else []
    for name in ("microbatches", "microbatch", "schedule", "chunks", "vocabulary"):
        if getattr(pins, name) is not None:
            names.append(f"{name}={getattr(pins, name)!r}")
    names += [f"{name}={getattr(pins.options, name)!r}" for name in sorted(pins.given)]
    return f" with {', '.join(names)}" if names else ""


def relaxations(search: Search) -> list[Relaxation]:
    """At most four single changes that make it fit, in the order of what they cost a user."""
    offers = []
    for change, pins in _changes(search):
        found = _searched(search, pins)
        if found is not None:
            offers.append(Relaxation(change, found))
        if len(offers) == _OFFERED:
            break
    return offers


def _changes(search: Search) -> Iterator[tuple[str, Pins]]:
    pins = search.pins
    for name in ("recompute", *SEARCHED_OPTIONS):
        if name in pins.given:
            default = type(pins.options).model_fields[name].default
            options = pins.options.model_copy(update={name: default})
            freed = replace(pins, options=options, given=pins.given - {name})
            yield f"without {name}={getattr(pins.options, name)!r}", freed
    for name in ("microbatch", "microbatches", "vocabulary", "chunks", "schedule"):
        if getattr(pins, name) is not None:
            freed = replace(pins, **{name: None})  # type: ignore[arg-type]
            yield f"without {name}={getattr(pins, name)!r}", freed
    if pins.mesh:
        yield f"without mesh={dict(pins.mesh)}", replace(pins, mesh={})
    if "budget_bytes" in pins.given and pins.options.budget_bytes:
        options = pins.options.model_copy(update={"budget_bytes": None})
        whole = bytes_text(search.costing.cluster.device.memory_bytes)
        freed = replace(pins, options=options, given=pins.given - {"budget_bytes"})
        yield f"with the device's {whole}", freed
    yield from _with_more_gpus(search)


def _with_more_gpus(search: Search) -> Iterator[tuple[str, Pins]]:
    pins = search.pins
    for times in _MORE:
        gpus = times * pins.gpus
        if gpus == int(gpus):
            mesh = {} if pins.mesh_is_whole else pins.mesh
            try:
                yield f"on {_gpus_text(int(gpus))}", replace(pins, gpus=int(gpus), mesh=mesh)
            except ArgumentError:  # pinned degrees don't divide so many
                continue


def _searched(search: Search, pins: Pins) -> Outcome | None:
    """The best under ``pins``; None where still nothing fits."""
    profiler = search.profiler
    if pins.options != profiler.options:
        profiler = Profiler(profiler.models, profiler.cluster, pins.options, profiler.expert_load)
    again = replace(
        search,
        pins=pins,
        profiler=profiler,
        costing=search.costing.under(pins.options),
        outcomes=[],
        refusals={},
        quick=True,
    )
    try:
        return next(iter(again.run().outcomes), None)
    except AutoparError:
        return None
