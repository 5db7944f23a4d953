"""Which placements are made because they bound many others."""

from __future__ import annotations

import math
from collections import Counter

from autopar.mesh import Mesh
from autopar.search.profiles import Key
from autopar.search.references import References
from autopar.search.search import Search
from autopar.search.space import Region, regions
from tests.fast_cluster import NODES
from tests.search.spaces import experts_on


def begun() -> tuple[Search, References, list[Region]]:
    """Of a batch of 8 rows, with experts."""
    search = experts_on(NODES, 8)
    search._begin()
    found = list(regions(search.sizes, search.pins))
    return search, References.of(search.profiler, 8, Counter(region.key for region in found)), found


def made(search: Search, references: References, region: Region) -> list[Key]:
    """One after the other, until none is wanted any more."""
    keys = []
    while (reference := references.wanted(region)) is not None:
        search.profiler.of(*reference)
        keys.append(reference[0])
    return keys


def test_the_shortest_part_of_an_axis_comes_first() -> None:
    """Of the whole batch: it bounds the most others."""
    search, references, _ = begun()
    keys = made(search, references, Region(Mesh(dp=1, ep=2, tp=4), 4, 1))
    assert [(key.ep, key.tp) for key in keys] == [(2, 1), (1, 2), (1, 4)]
    assert all(key.rows * key.ep == 8 and not (key.several or key.copies or key.borrowed) for key in keys)
    assert all(math.isinf(key.counted) == (key.tp > 1) for key in keys)
    assert set(keys) <= {profile.key for profile in references.known()}
    assert made(search, references, Region(Mesh(dp=2, ep=2, tp=2), 2, 1)) == [], "they serve all with these axes"


def test_experts_over_an_axis_are_split_there() -> None:
    search, references, _ = begun()
    keys = made(search, references, Region(Mesh(dp=2, tp=4, borrowed=("tp",)), 4, 1))
    assert [(key.tp, key.borrowed) for key in keys] == [(2, ("tp",)), (4, ("tp",))]


def test_what_serves_few_regions_is_not_made() -> None:
    """Not even as a part of an axis."""
    search, _, found = begun()
    region = next(r for r in found if r.key.axes() == ["tp"] and r.key.tp == 4 and not r.key.borrowed)
    for count, wanted in ((3, False), (4, True)):
        references = References.of(search.profiler, 8, {region.key: count})
        assert (references.wanted(region) is not None) == wanted


def test_closer_ones_are_of_its_rows_and_of_all_its_axes() -> None:
    search, _, _ = begun()
    region, keys = Region(Mesh(dp=1, ep=2, cp=2, tp=2, borrowed=("tp",)), 1, 4), list[Key]()
    references = References.of(search.profiler, 8, {region.key: 4})
    while (reference := references.closer(region)) is not None:
        assert search.profiler.of(*reference) is not None
        keys.append(reference[0])
    plain, every = keys
    assert (plain.rows, plain.axes(), plain.several) == (2, [], True)
    assert every == Key(4, 2, 2, 2, ("tp",), counted=math.inf)
    assert every in {profile.key for profile in references.known()}
