"""Where numbers alone leave nothing that can run: the errors that say so, and what would do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from autopar.errors import ArgumentError, AutoparError
from autopar.plan import bytes_text
from autopar.search.pins import SEARCHED_OPTIONS, Pins
from autopar.search.space import Region, Sizes, regions

if TYPE_CHECKING:
    from autopar.search.search import Search

_NAMED: Final = 4  # ways

_NEEDING = ("powersgd", "placements")
"""Options that need several ranks of an axis, and aren't searched."""


def no_degrees(search: Search) -> AutoparError:
    """The error where no degrees multiply to the GPUs and divide the batch, the heads, the sequence and the layers; or
    none leave the microbatches that were pinned."""
    pins, sizes = search.pins, search.sizes
    on = f"gpus={pins.gpus}" + (f" with mesh={dict(pins.mesh)}" if pins.mesh else "")
    if pins.gpus % pins.least_gpus:
        nearest = search.possible(pins).nearest_gpus()
        return ArgumentError(
            f"mesh={dict(pins.mesh)} is a multiple of {pins.least_gpus} ranks, which doesn't divide gpus={pins.gpus}; "
            f"use {f'gpus={nearest}, or ' if nearest else ''}other degrees"
        )
    freed = replace(pins, microbatch=None, microbatches=None)
    if free := search.possible(freed).regions() or regions(sizes, freed):
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
    possible = search.possible()
    found = regions(search.sizes, search.pins)
    needs = dict.fromkeys(need for region in found for need in possible.needs(possible.as_pinned(region)))
    return ArgumentError(
        f"no degrees of gpus={search.pins.gpus}{pinned_text(search.pins)} can run, which takes "
        f"{' and '.join(needs)}; {', or '.join(_ways(search)[:_NAMED])}"
    )


def _ways(search: Search) -> list[str]:
    """To something that can run: another number of GPUs, or less that is pinned; both where neither is enough. There
    always is one: one rank has no degrees."""
    pins, possible = search.pins, search.possible()
    freed = list(changes(search))
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
    return f"{words}: {_fitting(pins, search.possible(replace(freed, gpus=gpus)).regions())}"


def pinned_text(pins: Pins) -> str:
    """`` with ...``: all that was asked for, but for the number of GPUs."""
    names = [f"mesh={dict(pins.mesh)}"] if pins.mesh else []
    for name in ("microbatches", "microbatch", "schedule", "chunks", "vocabulary"):
        if getattr(pins, name) is not None:
            names.append(f"{name}={getattr(pins, name)!r}")
    names += [f"{name}={getattr(pins.options, name)!r}" for name in sorted(pins.given)]
    return f" with {', '.join(names)}" if names else ""


def changes(search: Search) -> Iterator[tuple[str, Pins]]:
    """What else could be asked for, with one thing freed: in words, and as pins."""
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
