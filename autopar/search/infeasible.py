"""What would work where nothing fits: the same search with one thing freed at a time, cheapest first.

Each relaxation is solved and built, not guessed: it is offered with the step of what a search found for it, and what
costs the fewest GPU seconds a step comes first. Of more GPUs, the fewest are looked for. What fits on n of them need
not fit on more, since degrees have to divide the batch, the heads and the experts; so numbers can't be bisected. They
are tried in order, from the fewest whose memory holds the state; those without degrees, or on which layers don't fit
though all is recomputed, are left out unsolved. Where that takes too long, numbers double from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from autopar.errors import ArgumentError, AutoparError, BudgetError
from autopar.mesh import EXPERTS
from autopar.options import parameters_on_host
from autopar.plan import bytes_text, seconds_text
from autopar.search.costing import Found, Outcome
from autopar.search.fronts import differs
from autopar.search.pins import SEARCHED_OPTIONS, Pins
from autopar.search.possible import Possible
from autopar.search.space import Point, Region, Sizes, regions, savers

if TYPE_CHECKING:
    from autopar.search.search import Search

_OFFERED = 4
_LEAN_REGIONS = 3
_MOST_TIMES = 64
"""Times the GPUs that are tried at most."""

_WORK = 1e5
"""Units of work (:data:`autopar.search.search.WORK`) of one such search that finds nothing."""

_FEWEST_WORK = 6e5
"""The same of all that are tried in order for the fewest GPUs."""

_NUMBERS = 512
"""Of GPUs that are looked at for that."""

_NEEDING = ("powersgd", "placements")
"""Options that need several ranks of an axis, and aren't searched."""


class Solved(NamedTuple):
    """The ``best`` that a search found, as it was built (None: nothing fits), and how much ``work`` that was."""

    best: Outcome | None
    work: float


Solve = Callable[["Search"], Solved]


@dataclass(frozen=True)
class Relaxation:
    """What to change, and the best that is known of what this makes possible."""

    change: str
    outcome: Outcome

    @property
    def gpu_seconds(self) -> float:
        """Of a step."""
        return self.outcome.step_seconds * self.outcome.point.region.mesh.world

    def __str__(self) -> str:
        return f"{self.change} ({differs(self.outcome.point)}: {seconds_text(self.outcome.step_seconds)} a step)"


def refusal(search: Search, found: Found, solve: Solve, built: BudgetError | None = None) -> AutoparError:
    """The error of a search that found nothing, or only what was too large once it was ``built``: what is too large,
    and what would do."""
    laid_out, placed = list(found.refusals.values()), list(search.profiler.refused.values())
    too_large = [error for error in (*laid_out, *placed, built) if isinstance(error, BudgetError)]
    if search.pins.mesh_is_whole and (laid_out or placed) and not too_large:
        return (laid_out + placed)[0]
    spared, whole = search.costing.spared_bytes, search.costing.whole_budget_bytes
    counted = [error.needed_bytes + spared for error in laid_out if isinstance(error, BudgetError)]
    needed = min([*counted, *([built.needed_bytes] if built is not None else [])], default=0)
    needed = needed or _leanest_bytes(search)
    refusals = laid_out + placed or list(search.refusals.values())
    if not (needed or too_large) and refusals and search.pins.gpus >= search.least_gpus:
        return refusals[0]  # not even the leanest way is refused for its memory
    offers = relaxations(search, solve)
    pinned = _pinned_text(search.pins)
    has = bytes_text(whole)
    least = f"the leanest way found needs {bytes_text(needed)} on a rank, which" if needed else "a rank"
    text = (
        f"nothing fits on {_gpus_text(search.pins.gpus)}{pinned}: {least} has {has} "
        f"({found.points:,} ways were looked at{_state_text(search)})"
    )
    ways = "; or ".join(map(str, offers))
    return BudgetError(f"{text}. It fits {ways}" if ways else f"{text}. No single change makes it fit", needed)


def no_degrees(search: Search) -> AutoparError:
    """The error where no degrees multiply to the GPUs and divide the batch, the heads, the sequence and the layers; or
    none leave the microbatches that were pinned."""
    pins, sizes = search.pins, search.sizes
    on = f"gpus={pins.gpus}" + (f" with mesh={dict(pins.mesh)}" if pins.mesh else "")
    if pins.gpus % pins.least_gpus:
        nearest = _possible(search, pins).nearest_gpus()
        return ArgumentError(
            f"mesh={dict(pins.mesh)} is a multiple of {pins.least_gpus} ranks, which doesn't divide gpus={pins.gpus}; "
            f"use {f'gpus={nearest}, or ' if nearest else ''}other degrees"
        )
    freed = replace(pins, microbatch=None, microbatches=None)
    if free := _possible(search, freed).regions() or regions(sizes, freed):
        return _no_cut(pins, sizes, on, free)
    heads = f", heads {' and '.join(map(str, sizes.heads))} (tp)" if sizes.heads else ", a width of weights (tp)"
    lengths = f", sequences of {' and '.join(map(str, sizes.lengths))} (cp)" if sizes.lengths else ""
    rows = (pins.microbatch or 1) * (pins.microbatches or 1)
    cut = _cut_text(pins)
    nor = f", nor {'do' if ' and ' in cut else 'does'} {cut} divide the batch" if sizes.batch % rows else ""
    return ArgumentError(
        f"{on} can't all be used: no degrees with that product divide a batch of {sizes.batch} (dp x microbatches), "
        f"{sizes.units} layers and more (pp){heads}{lengths}{nor}; {_ways(search)[0]}, or another batch"
    )


def _no_cut(pins: Pins, sizes: Sizes, on: str, free: Sequence[Region]) -> ArgumentError:
    """Of microbatches that were pinned, which no degrees leave; those ``free`` are without."""
    if pins.microbatch is not None and pins.microbatches is not None:
        return ArgumentError(
            f"{_cut_text(pins)} are {pins.microbatch * pins.microbatches} rows on each rank, which no degrees of {on} "
            f"leave of a batch of {sizes.batch}; leave one of the two out"
        )
    return ArgumentError(
        f"{_cut_text(pins)} doesn't divide what any degrees of {on} leave a rank of a batch of {sizes.batch}; "
        f"{_fitting(pins, free)}"
    )


def _cut_text(pins: Pins) -> str:
    given = {"microbatch": pins.microbatch, "microbatches": pins.microbatches}
    return " and ".join(f"{name}={value}" for name, value in given.items() if value is not None)


def _fitting(pins: Pins, free: Iterable[Region]) -> str:
    """What the one of both that was pinned may be."""
    name = "microbatch" if pins.microbatch is not None else "microbatches"
    fits = sorted({region.rows if name == "microbatch" else region.microbatches for region in free})
    return f"{name} may be one of {fits}"


def nothing_runs(search: Search) -> AutoparError:
    """The error where there are degrees, but what was pinned beside them can run on none."""
    possible = _possible(search, search.pins)
    found = regions(search.sizes, search.pins)
    needs = dict.fromkeys(need for region in found for need in possible.needs(possible.as_pinned(region)))
    return ArgumentError(
        f"no degrees of gpus={search.pins.gpus}{_pinned_text(search.pins)} can run, which takes "
        f"{' and '.join(needs)}; {', or '.join(_ways(search)[:_OFFERED])}"
    )


def _ways(search: Search) -> list[str]:
    """To something that can run: another number of GPUs, or less that is pinned; both where neither is enough. There
    always is one: one rank has no degrees."""
    pins, possible = search.pins, _possible(search, search.pins)
    freed = list(_changes(search))
    for name in _NEEDING:
        if asked := getattr(pins.options, name):
            options = pins.options.model_copy(update={name: type(pins.options).model_fields[name].get_default()})
            freed.append((f"without {name}={asked!r}", replace(pins, options=options)))
    ways = [f"use gpus={nearest}"] if (nearest := possible.nearest_gpus()) else []
    ways += [f"go {change}" for change, other in freed if possible.under(other).regions()]
    if ways:
        return ways
    freed.append(("without what is pinned", Pins(pins.gpus)))
    both = ((change, other, possible.under(other).nearest_gpus()) for change, other in freed)
    found = [_use(search, gpus, change, other) for change, other, gpus in both if gpus]
    return ["go without what is pinned"] if possible.under(freed[-1][1]).regions() else found


def _use(search: Search, gpus: int, change: str, freed: Pins) -> str:
    """Say what the microbatches may be, if it is their pin that has to go."""
    pins, words = search.pins, f"use gpus={gpus} {change}"
    if (pins.microbatch is None) == (pins.microbatches is None) or freed.microbatch or freed.microbatches:
        return words
    return f"{words}: {_fitting(pins, _possible(search, replace(freed, gpus=gpus)).regions())}"


def _possible(search: Search, pins: Pins) -> Possible:
    return Possible(search.sizes, pins, search.heads)


def _state_text(search: Search) -> str:
    """Of parameters, gradients and moments, if these alone take more GPUs than there are; of which memory, where the
    host's would have to hold some and the devices have room for the others."""
    if search.pins.gpus >= search.least_gpus:
        return ""
    gradients = sum(weights.masters for weights in search.root.weights.values())
    if search.pins.masters_on_host and gradients <= search.pins.gpus * search.costing.budget_bytes:
        has = bytes_text(search.costing.cluster.device.host_memory_bytes)
        fill = f"parameters, gradients and moments alone fill that of {_gpus_text(search.least_gpus)}"
        return f"; it is memory of the host that lacks, {has} for each GPU: {fill}"
    room = 0 if search.pins.masters_on_host is False else search.costing.cluster.device.host_memory_bytes
    both = f"{bytes_text(search.costing.budget_bytes)} each" + (f" and {bytes_text(room)} of its host" if room else "")
    return f"; parameters, gradients and moments alone fill {_gpus_text(search.least_gpus)} with {both}"


def _gpus_text(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus > 1 else ''}"


def _leanest_bytes(search: Search) -> int:
    """What a rank needs with the smallest microbatches on the most stages, everything split and away that can be; 0
    where that can't run at all. Bounds alone refused it, which don't say by how much."""
    found = regions(search.sizes, search.pins)
    for region in sorted(found, key=lambda r: (r.rows / r.key.inner, -r.mesh.pp))[:_LEAN_REGIONS]:
        points = list(search.points_of(region))  # none without a pipeline, if several chunks are pinned
        if not points or search.place(region) is None:
            continue
        point = max(points, key=lambda p: (p.schedule == "1f1b", p.zero, not p.head))
        ways = list(savers(point.family, search.costing.cluster, search.pins))
        most = max((offload for offload, _ in ways), key=lambda kinds: (len(kinds), parameters_on_host(kinds)))
        leanest = (point._replace(offload=most, head_chunks=chunks) for chunks in {chunks for _, chunks in ways})
        if needed := min(filter(None, (_needed_bytes(search, each) for each in leanest)), default=0):
            return needed
    return 0


def _needed_bytes(search: Search, point: Point) -> int:
    """On a rank that has no room for them; 0 where they fit, or ``point`` can't run at all."""
    try:
        search.lay_out(point)
    except BudgetError as error:
        return error.needed_bytes
    except AutoparError:
        return 0
    return 0


def _pinned_text(pins: Pins) -> str:
    names = [f"mesh={dict(pins.mesh)}"] if pins.mesh else []
    for name in ("microbatches", "microbatch", "schedule", "chunks", "vocabulary"):
        if getattr(pins, name) is not None:
            names.append(f"{name}={getattr(pins, name)!r}")
    names += [f"{name}={getattr(pins.options, name)!r}" for name in sorted(pins.given)]
    return f" with {', '.join(names)}" if names else ""


def relaxations(search: Search, solve: Solve) -> list[Relaxation]:
    """At most four single changes that make it fit, the cheapest first; two at once where none does."""
    offers = []
    for change, pins in _changes(search):
        solved = solve(_under(search, pins))
        if solved.best is not None:
            offers.append(Relaxation(change, solved.best))
    offers += _fewest(search, solve, _with_copies(search.pins), "")
    if not offers and search.pins.mesh_is_whole:
        offers += _fewest(search, solve, {}, f" without mesh={dict(search.pins.mesh)}")
    return sorted(offers, key=lambda offer: offer.gpu_seconds)[:_OFFERED]


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


def _with_copies(pins: Pins) -> Mapping[str, int]:
    """The pinned degrees; where they were all, of more GPUs ``dp`` takes what there is more."""
    if not pins.mesh_is_whole:
        return pins.mesh
    return {axis: pins.mesh.get(axis, 1) for axis in ("pp", "cp", "tp")} | {
        axis: pins.mesh[axis] for axis in EXPERTS if axis in pins.mesh
    }


def _fewest(search: Search, solve: Solve, mesh: Mapping[str, int], without: str) -> list[Relaxation]:
    """On a mesh with these degrees; nothing where no number that was tried will do."""
    least, most = max(search.pins.gpus + 1, search.least_gpus), _MOST_TIMES * search.pins.gpus
    best, tried, left = None, least, _FEWEST_WORK
    for again in _under_more(search, mesh, range(least, most + 1)[:_NUMBERS]):
        best, work = solve(again)
        tried, left = again.pins.gpus, left - work
        if best is not None or left <= 0:
            break
    gpus = 2 * tried
    while best is None and gpus <= most:
        for again in islice(_under_more(search, mesh, range(gpus, 2 * gpus)), 1):
            best, _ = solve(again)
        gpus *= 2
    return [Relaxation(f"on {_gpus_text(best.point.region.mesh.world)}{without}", best)] if best is not None else []


def _under_more(search: Search, mesh: Mapping[str, int], numbers: Iterable[int]) -> Iterator[Search]:
    """On so many GPUs, where there are such degrees and layers may fit."""
    for gpus in numbers:
        pins = replace(search.pins, gpus=gpus, mesh=mesh)
        found = _possible(search, pins).regions()
        if not all(math.isinf(search.region_bound(region)) for region in found):
            yield _under(search, pins)


def _under(search: Search, pins: Pins) -> Search:
    """The same search under ``pins``, without a proof if its dives find anything."""
    return replace(search.under(pins), quick=True, most_work=_WORK)
