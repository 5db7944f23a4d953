"""The key-value store that torch.distributed hands out inside a simulation."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from autopar import simulate
from autopar.errors import DeadlockError
from autopar.simulate.baton import Baton
from autopar.simulate.store import SharedStore


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def test_a_value_that_comes_later() -> None:
    order = []

    def program(rank: int) -> bytes:
        if rank == 1:
            order.append("set")
            store().set("key", b"value")
        found = store().get("key")
        order.append(f"got {rank}")
        return found

    assert simulate.run(program, 2).results == [b"value"] * 2
    assert order[0] == "set"


def test_counting_and_waiting() -> None:
    def program(rank: int) -> int:
        if store().add("arrived", 1) == 3:
            store().set("all", "1")
        store().wait(["all", "arrived"])
        return store().add("arrived", 0)

    assert simulate.run(program, 3).results == [3] * 3


def test_a_key_that_nobody_sets() -> None:
    with pytest.raises(DeadlockError, match=r"rank 0: waits in store\.wait\('.*nothing'\), at .* in <lambda>"):
        simulate.run(lambda rank: rank == 0 and store().get("nothing"), 2)


def test_the_rest() -> None:
    shared = SharedStore(Baton(1, 0, lambda waiting: DeadlockError()))
    assert shared.compare_set("a", b"", b"1") == b"1"
    assert shared.compare_set("a", b"2", b"3") == b"1"
    assert shared.compare_set("a", b"1", b"3") == b"3"
    assert shared.compare_set("b", b"x", b"y") == b"x"
    assert shared.getNumKeys() == 1
    assert shared.deleteKey("a")
    assert not shared.deleteKey("a")


def test_barrier_after_initialisation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")

    def program(rank: int) -> int:
        group = dist.new_group([0, 1])
        return dist.get_world_size() + (dist.get_world_size(group) if rank < 2 else 0)

    assert simulate.run(program, 3).results == [5, 5, 3]
