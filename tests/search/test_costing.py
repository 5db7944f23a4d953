"""What is known of a point that was laid out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from autopar.errors import StageError
from autopar.graph import Model
from autopar.mesh import Mesh
from autopar.planner.block_costs import BlockCost
from autopar.planner.pipeline import Pipeline
from autopar.search import costing
from autopar.search.costing import Costing
from autopar.search.outcomes import Outcome
from autopar.search.space import Point, Region
from tests.fast_cluster import BUSY, FAST
from tests.search.spaces import every_point, experts_on, search_of


def best(name: str, **given: Any) -> Outcome:
    """On a pipeline whose weights' gradients may come early."""
    given = {"mesh": {"pp": 2}, "schedule": "v-half", "microbatch": 1, "vocabulary": "redistributed", **given}
    return search_of(name, 8, 2, FAST, zero=0, head_chunks=1, **given).run().outcomes[0]


def test_what_memory_made_slower_is_tight() -> None:
    roomy = best("llama", recompute="none", offload=())
    assert not roomy.is_tight
    early = best("llama", recompute="none", offload=(), budget_bytes=roomy.peak_bytes - 1)
    assert early.step_seconds > roomy.step_seconds
    assert early.is_tight
    again = best("llama", offload=(), budget_bytes=roomy.peak_bytes * 92 // 100)
    assert again.recomputes
    assert again.is_tight


def test_what_saves_memory_is_tried_where_memory_made_it_slower() -> None:
    """And not where there is enough."""
    roomy = best("llama", recompute="none")
    assert roomy.point.offload == ()
    search = search_of("llama", 8, 2, FAST, mesh={"pp": 2}, schedule="v-half", microbatch=1, recompute="none")
    search.run()
    laid_out = {outcome.point for outcome in search.outcomes}
    assert not any(point.offload for point in laid_out if point._replace(offload=(), head_chunks=1) in laid_out)


def test_more_stages_than_layers_have_a_bound_and_are_refused() -> None:
    """Pinned chunks suit some pipelines of a search and not others."""
    search = search_of("llama", 8, 4, FAST, mesh={"pp": 4})
    search.glance()
    point = Point(Region(Mesh(pp=4), 1, 8), "interleaved", 3, "redistributed", 0, 0, (), 1)
    profile = search.place(point.region)
    assert profile is not None
    assert len(profile.units) < 4 * 3
    assert search.costing.bound(point, profile) >= 8 * profile.seconds / 4 * (1 - 1e-9)
    with pytest.raises(StageError):
        search.lay_out(point)


@pytest.mark.slow
def test_scatters_go_one_after_the_other_after_the_first_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last one, which a backward may hide in part; with gathers, where there are such. Passes are likely to
    wait for what each leaves, less where other stages have passes."""
    search = search_of("llama", 8, 8, FAST, mesh={"pp": 2})
    search.glance()
    point = Point(Region(Mesh(pp=2, dp=4), 1, 2), "1f1b", None, "redistributed", 2, 0, (), 1)
    profile, costs = search.place(point.region), search.costing
    assert profile is not None
    monkeypatch.setattr(Costing, "_moves", lambda *_, **_likely: (0.5, 1.0, 0.0, 0.0))  # a scatter takes a second
    after, first = costs._update_seconds(point, profile), sum(unit.forward for unit in profile.units[1:-1])
    left = 1.0 - sum(unit.backward for unit in profile.units) / 2
    assert 0 < first < 0.1 < left
    assert costs.bound(point, profile) == pytest.approx(first + 1.0 + after)
    assert costs.bound(point._replace(zero=3), profile) == pytest.approx(2 * 2 * 0.5 + 1.0 + after)
    after = costs._ends_seconds(point, profile)
    assert costs.likely(9.0, point, profile) == pytest.approx(9.0 + 2 * left + after, rel=1e-3)
    several = point._replace(schedule="interleaved", chunks=2)
    after = costs._ends_seconds(several, profile)
    assert costs.likely(9.0, several, profile) == pytest.approx(9.0 + 2 * costing.BESIDE * left + after, rel=1e-3)
    assert costs.likely(0.1, several, profile) == pytest.approx(first + 1.0 + after), "the stream takes longer"
    once = point._replace(zero=1)
    assert costs.likely(0.5, once, profile) == 0.5 + costs._ends_seconds(once, profile)


@pytest.mark.parametrize(
    ("name", "mesh"), [("llama", Mesh(pp=4)), ("llama", Mesh(pp=2, tp=2)), ("encoder", Mesh(pp=4))]
)
def test_stages_send_each_other_no_less_than_is_known_before(
    name: str, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any cut. Equal layers send each other as much as that; bounds by passes and by memory count it."""
    search = search_of(name, 8, 4, BUSY, mesh=mesh.to_json(), recompute="none")
    search._begin()
    sent: list[tuple[float, float]] = []
    parts_of = costing.parts_of

    def seen(pipeline: Pipeline, costs: list[BlockCost], model: Model) -> dict[str, float]:
        taken, placement = pipeline.timeline.costs, pipeline.schedule.placement
        for stage, (home, following) in enumerate(pairwise(placement)):
            if home != following:
                sent.append((taken.send_forward_seconds[stage], taken.send_backward_seconds[stage + 1]))
        return parts_of(pipeline, costs, model)

    monkeypatch.setattr(costing, "parts_of", seen)
    region = Region(mesh, 1, 8)
    profile = search.place(region)
    assert profile is not None
    least = search.costing.sent_seconds(profile, mesh)
    point = Point(region, "1f1b", None, "redistributed", 0, 0, (), 1)
    search.lay_out(point)
    assert len(sent) == mesh.pp - 1
    assert all(there >= least[0] and back >= least[1] for there, back in sent)
    assert least in sent or name == "encoder"
    assert min(least) > 0
    unplaced = search.costing.sent_seconds(search.root, mesh, search.share(region))
    assert all(0 < share <= whole for share, whole in zip(unplaced, least, strict=True))
    with_them = search.costing.bound(point, profile), search.costing.memory_bound(point, profile)
    silent = Costing(search.costing.cluster, search.costing.options, root=search.root)
    monkeypatch.setattr(silent, "sent_seconds", lambda *_: (0.0, 0.0))
    without = silent.bound(point, profile), silent.memory_bound(point, profile)
    assert all(one > other for one, other in zip(with_them, without, strict=True))


def test_what_only_some_ranks_have_terms_of_is_likely_summed() -> None:
    """Experts that get whole sequences on every rank of cp: their gradients are sums over dp alone. No bound counts
    them, since others may compute the same on all."""
    search = experts_on(FAST, 8, mesh={"dp": 4, "cp": 2}, microbatch=1, offload=())
    search.glance()
    point = next(point for point in every_point(search) if point.zero == 0 and point.region.mesh.ep == 1)
    profile = search.place(point.region)
    assert profile is not None
    every, partly, summed = (
        sum(weights.elements for weights in kinds.values())
        for kinds in (profile.weights, profile.summed_partly, profile.summed)
    )
    assert every >= partly > summed
    (*_, least, _), (*_, likely, _) = (search.costing._moves(point, profile, likely=each) for each in (False, True))
    assert least < likely


@pytest.mark.parametrize("vocabulary", ["redistributed", "vocab-1"])
def test_more_stages_than_there_are_units_are_no_error_of_a_bound(vocabulary: str) -> None:
    """Of 6 units, on 6 ranks with two stages each: laying that out says that it can't be cut."""
    search = search_of("gpt2", 1, 6, FAST, mesh={"pp": 6}, schedule="interleaved", vocabulary=vocabulary, offload=())
    (region,) = search._begin()
    profile = search.place(region)
    assert profile is not None
    for point in search.points_of(region):
        assert search.costing.memory_bound(point, profile) == 0
        with pytest.raises(StageError, match="fewer than pp=6 x 2 chunks"):
            search.lay_out(point)
