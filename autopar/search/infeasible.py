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
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from autopar.errors import AutoparError, BudgetError
from autopar.mesh import EXPERTS
from autopar.options import parameters_on_host
from autopar.plan import bytes_text, seconds_text
from autopar.search.advice import changes, pinned_text
from autopar.search.fronts import differs
from autopar.search.outcomes import Found, Outcome
from autopar.search.pins import Pins
from autopar.search.search import WORK, Search
from autopar.search.sharing import both
from autopar.search.space import Region, regions, savers
from autopar.search.squeeze import needed_bytes

_OFFERED = 4
_LEAN_ORDERS: Final = ("rows", "stages"), ("rows", "copies", "experts"), ("copies", "rows", "experts")
"""Of regions: with the smallest microbatches and the most stages, or the most ranks to store weights; or most of those
first. None is always the leanest."""
_LEAN_REGIONS = 3  # of one order, of which the first that can be placed says what is needed
_MOST_TIMES = 64
"""Times the GPUs that are tried at most."""

_WORK = 1e5
"""Units of work (:data:`autopar.search.search.WORK`) of one such search that finds nothing."""

_FEWEST_WORK = 1e6
"""The same of all that are tried in order for the fewest GPUs."""

_NUMBERS = 512
"""Of GPUs that are looked at for that."""


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

    @classmethod
    def of(cls, change: str, best: Outcome) -> Relaxation:
        """Without its layout, which other processes can't be told: nothing is built of it."""
        return cls(change, replace(best, layout=None))

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
    counted += [_leanest_bytes(search), built.needed_bytes if built is not None else 0]
    needed = min(filter(None, counted), default=0)
    refusals = laid_out + placed or list(search.refusals.values())
    if not (needed or too_large) and refusals and search.pins.gpus >= search.least_gpus:
        return refusals[0]  # not even the leanest way is refused for its memory
    offers = relaxations(search, solve)
    pinned = pinned_text(search.pins)
    has = bytes_text(whole)
    least = f"the leanest way found needs {bytes_text(needed)} on a rank, which" if needed else "a rank"
    is_proven = search.pins.gpus < search.least_gpus or math.isinf(found.bound_seconds)
    looked = f"{found.points:,} ways were looked at" if is_proven else _looked_text(search, found)
    text = (
        f"nothing {'fits' if is_proven else 'was found to fit'} on {_gpus_text(search.pins.gpus)}{pinned}: {least} has "
        f"{has} ({looked}{_state_text(search)})"
    )
    ways = "; or ".join(map(str, offers))
    return BudgetError(f"{text}. It fits {ways}" if ways else f"{text}. No single change makes it fit", needed)


def _looked_text(search: Search, found: Found) -> str:
    """Where not all that is left was tried, or built."""
    twice = 2 * search.most_work / WORK
    return f"of {found.points:,} ways, {found.laid_out:,} were tried; effort={twice:g} may try more"


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
    """What a rank needs in the leanest ways there are, everything split and away that can be; 0 where these can't run
    at all. Bounds alone refused it, which don't say by how much."""
    found = regions(search.sizes, search.pins)
    firsts = (sorted(found, key=partial(_sizes, order))[:_LEAN_REGIONS] for order in _LEAN_ORDERS)
    needed = (next(filter(None, (_needed_on(search, region) for region in first)), 0) for first in firsts)
    return min(filter(None, needed), default=0)


def _sizes(order: Sequence[str], region: Region) -> list[float]:
    """Those that make ranks of ``region`` hold less, the less they are."""
    mesh, rows = region.mesh, region.rows / region.key.inner
    sizes = {"rows": rows, "stages": -mesh.pp, "copies": -mesh.zero_shards(0), "experts": -mesh.experts}
    return [sizes[name] for name in order]


def _needed_on(search: Search, region: Region) -> int:
    """The least of its ways to save memory, of one schedule; 0 where none is refused for that."""
    points = list(search.points_of(region))  # none without a pipeline, if several chunks are pinned
    if not points or search.place(region) is None:
        return 0
    point = max(points, key=lambda p: (p.schedule == "1f1b", p.zero, not p.head))
    ways = list(savers(point.family, search.costing.cluster, search.pins))
    most = max((offload for offload, _ in ways), key=lambda kinds: (len(kinds), parameters_on_host(kinds)))
    leanest = (point._replace(offload=most, head_chunks=chunks) for chunks in sorted({c for _, c in ways}))
    needed = (needed_bytes(search, each) for each in leanest)
    return min((int(each) for each in needed if 0 < each < math.inf), default=0)


def relaxations(search: Search, solve: Solve) -> list[Relaxation]:
    """At most four single changes that make it fit, the cheapest first; two at once where none does."""
    aside = search.aside()  # neither knows what the other places, in whichever process
    fewest = partial(_fewest, aside, solve, _with_copies(search.pins), "")
    freed, more = both(partial(_freed, search, solve), fewest, elsewhere=search.is_shared)
    offers = [*freed, *more]
    if not offers and search.pins.mesh_is_whole:
        offers += _fewest(search, solve, {}, f" without mesh={dict(search.pins.mesh)}")
    return sorted(offers, key=lambda offer: offer.gpu_seconds)[:_OFFERED]


def _freed(search: Search, solve: Solve) -> list[Relaxation]:
    """On as many GPUs, with one pin less."""
    solved = ((change, solve(_under(search, pins)).best) for change, pins in changes(search))
    return [Relaxation.of(change, best) for change, best in solved if best is not None]


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
    if best is None:
        return []
    return [Relaxation.of(f"on {_gpus_text(best.point.region.mesh.world)}{without}", best)]


def _under_more(search: Search, mesh: Mapping[str, int], numbers: Iterable[int]) -> Iterator[Search]:
    """On so many GPUs, where there are such degrees and layers may fit."""
    for gpus in numbers:
        pins = replace(search.pins, gpus=gpus, mesh=mesh)
        found = search.possible(pins).regions()
        if not all(math.isinf(search.region_bound(region)) for region in found):
            yield _under(search, pins)


def _under(search: Search, pins: Pins) -> Search:
    """The same search under ``pins``, without a proof if its dives find anything."""
    return replace(search.under(pins), quick=True, most_work=_WORK)
