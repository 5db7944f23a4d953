"""Parameters that ranks store stacked: read one by one, given back one by one, and so seen by optimizers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD

from autopar.runtime.optimizers.stacked import Apart, Idle, lend_gradients
from autopar.runtime.program import Parameter, Router
from autopar.runtime.routers import Routers
from autopar.runtime.shards import Place, rows_held, unshard
from autopar.runtime.weights import StateSource, unstacked

EXPERTS = 6
ORDER = (3, 0, 5, 1, 4, 2)


def stacked(*, zero: int = 1, order: tuple[int, ...] = ()) -> Parameter:
    """Over ep 2 by experts, over tp 2 by columns, and over what is left of dp by ``zero``."""
    types = {"ep": "S(0)", "tp": "S(2)"}
    return Parameter("moe.*.up", (3, 4, 1), (EXPERTS, 4, 2), "float32", types, zero=zero, order=order, stacked=True)


def state() -> dict[str, Tensor]:
    return {f"moe.{e}.up": torch.arange(8.0).view(4, 2) + 10 * e for e in range(EXPERTS)}


def places(dp: int, ep: int, tp: int) -> dict[str, Place]:
    return {"dp": Place(2, dp), "ep": Place(2, ep), "tp": Place(2, tp), "cp": Place(1, 0), "pp": Place(1, 0)}


def test_parts_are_the_models_parameters() -> None:
    parts = stacked(zero=2).parts
    assert [part.name for part in parts] == list(state())
    assert parts[4] == Parameter("moe.4.up", (4, 1), (4, 2), "float32", {"tp": "S(1)"})
    assert Parameter("up", (4, 2), (4, 2), "float32").parts == ()


def test_a_rank_reads_its_own_and_gives_all_back() -> None:
    for zero, order in ((1, ()), (2, ()), (1, ORDER), (2, ORDER)):
        parameter = stacked(zero=zero, order=order)
        shards = []
        for dp, ep, tp in ((dp, ep, tp) for dp in range(2) for ep in range(2) for tp in range(2)):
            at = places(dp, ep, tp)
            local = StateSource(state()).local(parameter, at)
            shards.append(({axis: place.index for axis, place in at.items()}, local))
            for expert, row in rows_held(parameter, at).items():
                assert torch.equal(local[row], state()[f"moe.{expert}.up"][:, tp : tp + 1])
        whole = unstacked(parameter, unshard(parameter, shards))
        assert all(torch.equal(whole[name], tensor) for name, tensor in state().items())


def test_rows_of_an_expert_stay_together() -> None:
    """Two rows for each of six experts, in their order over ep 2 and over what is left of dp."""
    whole = torch.arange(24.0).view(12, 2)
    parameter = Parameter("up", (6, 2), (12, 2), "float32", {"ep": "S(0)"}, zero=2, order=ORDER)
    shards = []
    for dp, ep in ((dp, ep) for dp in range(2) for ep in range(2)):
        at = places(dp, ep, 0) | {"tp": Place(1, 0)}
        local = StateSource({"up": whole}).local(parameter, at)
        shards.append(({axis: place.index for axis, place in at.items()}, local))
        assert all(torch.equal(local[row], whole[of]) for of, row in rows_held(parameter, at).items())
    rows = [2 * expert + row for expert in ORDER for row in range(2)]
    assert torch.equal(torch.cat([shards[place][1] for place in (0, 2, 1, 3)]), whole[rows])
    assert torch.equal(unshard(parameter, shards), whole)


def test_reading_asks_only_for_what_is_held() -> None:
    parameter, given = stacked(), state()
    for e in range(3, EXPERTS):
        del given[f"moe.{e}.up"]
    assert StateSource(given).local(parameter, places(0, 0, 0)).shape == (3, 4, 1)


def test_an_optimizer_steps_each_in_the_memory_of_all() -> None:
    parameter, at = stacked(order=ORDER), places(0, 1, 0)
    master = nn.Parameter(StateSource(state()).local(parameter, at))
    apart = Apart.of({parameter.name: parameter}, {parameter.name: master}, at)
    assert list(apart.specs) == list(state())
    assert sorted(apart.masters) == ["moe.1.up", "moe.2.up", "moe.4.up"]
    optimizer = SGD(
        [{"params": [apart.masters["moe.4.up"]], "lr": 1.0}, {"params": [apart.masters["moe.1.up"]]}], lr=2.0
    )
    counts = Routers()
    counts.total = {"moe": torch.tensor([1, 0, 1, 1, 1, 1])}
    lend_gradients(optimizer, apart.parts, Idle.of([Router("moe", EXPERTS, skips=(parameter.name,))], counts))
    before = master.detach().clone()
    master.grad = torch.ones_like(master)
    optimizer.step()
    change = {expert: float((master.detach() - before)[row].mean()) for expert, row in rows_held(parameter, at).items()}
    assert change == {1: 0.0, 4: -1.0, 2: 0.0}, "expert 1 had no tokens, expert 2 is in no group"
    assert all(part.parameter.grad is None for part in apart.parts)
