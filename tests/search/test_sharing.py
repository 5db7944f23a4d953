"""A proof in another process: the same plan, whatever becomes of that."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar import Plan
from autopar.errors import BudgetError
from autopar.mesh import Mesh
from autopar.report.search_progress import SearchProgress
from autopar.search import search as module
from autopar.search import sharing
from autopar.search.dive import dive
from autopar.search.profiles import Key
from autopar.search.proof import Tried
from autopar.search.sharing import both, processes, running
from tests.fast_cluster import FAST
from tests.models import make
from tests.search.spaces import search_of

Asks = Callable[[], int]


def twice(asks: Asks) -> tuple[int, int]:
    return 2 * asks(), os.getpid()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_runs_is_told_one_thing_and_gives_one_back(elsewhere: bool) -> None:
    with running(twice, elsewhere=elsewhere) as run:
        run.tell(21)
        result, pid = run.result()
    assert result == 42
    assert (pid != os.getpid()) == elsewhere


def test_it_goes_on_meanwhile_and_changes_nothing_here() -> None:
    changed: list[int] = []

    def changes(asks: Asks) -> list[int]:
        changed.append(1)
        changed.append(asks())
        return changed

    with running(changes, elsewhere=True) as run:
        run.tell(2)
        assert run.result() == [1, 2]
    assert not changed


def test_larger_than_a_pipe() -> None:
    with running(lambda asks: asks() * b"x", elsewhere=True) as run:
        run.tell(1 << 22)
        assert len(run.result()) == 1 << 22


def test_what_a_copy_could_not_do_is_done_here() -> None:
    here = os.getpid()

    def dies(asks: Asks) -> int:
        if os.getpid() != here:
            os._exit(1)
        return asks()

    with running(dies, elsewhere=True) as run:
        run.tell(5)
        assert run.result() == 5


def test_what_cannot_be_told_is_used_here() -> None:
    with running(lambda asks: asks()(), elsewhere=True) as run:
        run.tell(lambda: 3)
        assert run.result() == 3


def test_one_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.getpid()

    def hangs(asks: Asks) -> int:
        while os.getpid() != here:
            time.sleep(1)
        return asks()

    monkeypatch.setattr(sharing, "_PATIENCE", 0.1)
    with running(hangs, elsewhere=True) as run:
        run.tell(5)
        assert run.result() == 5


def test_one_that_is_busy_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_long(asks: Asks) -> int:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass
        return os.getpid()

    monkeypatch.setattr(sharing, "_PATIENCE", 0.1)
    with running(takes_long, elsewhere=True) as run:
        assert run.result() != os.getpid()


def test_a_copy_that_waits_for_its_own_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(asks: Asks) -> tuple[int, int]:
        patience, sharing._PATIENCE = sharing._PATIENCE, 10.0
        try:
            return both(os.getpid, lambda: busy(1.0), elsewhere=True)
        finally:
            sharing._PATIENCE = patience

    def busy(seconds: float) -> int:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return os.getpid()

    monkeypatch.setattr(sharing, "_PATIENCE", 0.1)
    with running(waits, elsewhere=True) as run:
        assert len({*run.result(), os.getpid()}) == 3


def test_nothing_is_left_of_a_copys_own_copy(tmp_path: Path) -> None:
    written = tmp_path / "pid"

    def sleeps() -> None:
        written.write_text(str(os.getpid()))
        time.sleep(60)

    def waits(asks: Asks) -> None:
        both(lambda: None, sleeps, elsewhere=True)

    with running(waits, elsewhere=True):
        assert soon(lambda: written.exists() and bool(written.read_text()))
    pid = int(written.read_text())
    assert soon(lambda: not Path(f"/proc/{pid}").exists() or ") Z " in Path(f"/proc/{pid}/stat").read_text())


def soon(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + 5
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)
    return is_so()


def test_a_copy_has_no_other_threads_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def sums(asks: Asks) -> tuple[float, int]:
        return torch.ones(1 << 21).exp().sum().item(), os.getpid()

    monkeypatch.setattr(sharing, "_PATIENCE", 0.5)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        sums(lambda: 0)
        with running(sums, elsewhere=True) as run:
            assert run.result()[1] != os.getpid()
    finally:
        torch.set_num_threads(before)


def test_what_it_raises_is_raised_here() -> None:
    def raises(asks: Asks) -> int:
        raise ValueError(str(asks()))

    with running(raises, elsewhere=True) as run:
        run.tell(7)
        with pytest.raises(ValueError, match="7"):
            run.result()


def test_nothing_is_left_of_one_that_is_not_wanted_any_more() -> None:
    def takes_long(asks: Asks) -> None:
        time.sleep(5)

    def fails() -> None:
        with running(takes_long, elsewhere=True) as run:
            pids.append(run._pid)
            raise ValueError("here")

    pids, begun = list[int](), time.monotonic()
    with pytest.raises(ValueError, match="here"):
        fails()
    assert time.monotonic() - begun < 4
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_without_another_process_it_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> int:
        raise OSError("no memory")

    monkeypatch.setattr(os, "fork", refused)
    with running(twice, elsewhere=True) as run:
        run.tell(1)
        assert run.result() == (2, os.getpid())


@pytest.mark.parametrize("elsewhere", [False, True])
def test_one_beside_the_other(elsewhere: bool) -> None:
    done: list[int] = []
    one, other = both(lambda: done.append(os.getpid()), lambda: (len(done), os.getpid()), elsewhere=elsewhere)
    assert one is None
    assert done == [os.getpid()]
    assert other[0] == (0 if elsewhere else 1)
    assert (other[1] != os.getpid()) == elsewhere


def test_as_many_as_torch_has_threads() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert processes() == 1
        torch.set_num_threads(64)
        assert processes() == len(os.sched_getaffinity(0))
    finally:
        torch.set_num_threads(before)


def planned(monkeypatch: pytest.MonkeyPatch, count: int, model: str, gpus: int, **given: Any) -> tuple[Plan, list[str]]:
    """With so many processes, and what was told of that."""
    case, told, here = make(model, 8), list[str](), os.getpid()

    def tell(progress: SearchProgress) -> None:
        assert os.getpid() == here, "else what a copy does is done here again"
        told.append(progress.phase)

    with monkeypatch.context() as patch:
        # the package has a function of that name
        patch.setattr(import_module("autopar.search.choose"), "processes", lambda: count)
        patch.setattr(module, "_WORTH", 0)
        return autopar.plan(case.model, gpus, sample=case.batch, progress=tell, **given), told


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("mlp", {"cluster": "h100", "chunks": 2}),
        ("mlp", {"cluster": FAST, "microbatch": 1}),
        ("mlp", {"cluster": FAST, "fronts": True}),
        pytest.param("gpt2", {"cluster": FAST, "budget_bytes": 1 << 20, "effort": 0.1}, marks=pytest.mark.slow),
        pytest.param("llama", {"cluster": FAST, "fronts": True}, marks=pytest.mark.slow),
    ],
)
def test_plans_are_the_same_with_one_process_and_two(
    model: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, whichever process found what."""
    (one, told), (two, told_here) = (planned(monkeypatch, count, model, 4, **given) for count in (1, 2))
    assert one.to_json() == two.to_json()
    assert len(told_here) < len(told), "a copy tells nobody"
    assert any(phase.startswith("search on") for phase in told) == ("fronts" in given)
    assert not any(phase.startswith("search on") for phase in told_here)


TOO_LARGE: dict[str, Any] = {
    "cluster": "cpu",
    "mesh": {"dp": 2},
    "zero": 3,
    "offload": (),
    "budget_bytes": 100_000,
}


def test_what_needs_not_wait_has_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof, what is compared with the best, other numbers of GPUs; or those on which it would fit."""
    copies, forked = list[int](), sharing._forked

    def fork() -> int:
        copies.append(1)
        return forked()

    monkeypatch.setattr(sharing, "_forked", fork)
    planned(monkeypatch, 2, "mlp", 4, cluster=FAST)
    assert len(copies) == 2
    planned(monkeypatch, 2, "mlp", 4, cluster=FAST, fronts=True)
    assert len(copies) == 5
    with pytest.raises(BudgetError):
        planned(monkeypatch, 2, "mlp", 2, **TOO_LARGE)
    assert len(copies) == 7


def test_errors_are_the_same_with_one_process_and_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """That say what would fit, with less pinned and on more GPUs."""
    said = []
    for count in (1, 2):
        with pytest.raises(BudgetError) as refused:
            planned(monkeypatch, count, "mlp", 2, **TOO_LARGE)
        said.append(str(refused.value))
    assert said[0] == said[1]
    assert "without mesh={'dp': 2} (" in said[0]
    assert re.search(r"or on \d+ GPUs \(", said[0])


def test_a_proof_does_the_same_whatever_the_search_beside_it_did() -> None:
    known = search_of("gpt2", 8, 8, FAST, budget_bytes=1 << 20).glance()

    def proven(*, dives: bool) -> tuple[float, float, int]:
        """And the work that it took."""
        search = search_of("gpt2", 8, 8, FAST, budget_bytes=1 << 20)
        search.most_work = 2e4
        regions, profiler = search._begin(), search.profiler.aside()
        if dives:
            dive(search, regions)
            assert search.costing.keeping.read
        proof = search._proof(profiler)
        assert not proof.costing.keeping.read
        found = proof.run(lambda: Tried(known, {}))
        return found.bound_seconds, found.work, found.placed

    assert proven(dives=True) == proven(dives=False)


def test_what_was_placed_for_one_is_placed_for_the_other_but_not_known() -> None:
    profiler = search_of("gpt2", 8, 8, FAST).profiler
    other, (key, mesh) = profiler.aside(), (Key(2, 1, 1, 2), Mesh(dp=4, tp=2))
    placed = profiler.of(key, mesh, 1)
    assert placed is not None
    assert not other.was_tried(key, mesh)
    assert other.of(key, mesh, 1) is placed
    assert profiler.aside().was_tried(key, mesh)
    third = search_of("gpt2", 8, 8, FAST).profiler
    assert third.aside().of(key, Mesh(dp=2, tp=2), 2) is not third.of(key, mesh, 1), "of another job"


def test_what_a_search_puts_aside_reads_is_work_of_its_own() -> None:
    search = search_of("gpt2", 8, 8, FAST)
    search.glance()
    assert search.costing.keeping.read > search.aside().costing.keeping.read == 0
