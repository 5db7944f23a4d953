"""Deadlocks, dead ranks and interrupts: one error, all ranks ended, at once."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from autopar import simulate
from autopar.errors import DeadlockError, DeadRankError, RankError
from autopar.simulate import baton

SOON_SECONDS = 10.0


@pytest.fixture(autouse=True)
def all_ranks_end_soon() -> Iterator[None]:
    threads, start = threading.active_count(), time.perf_counter()
    yield
    assert threading.active_count() == threads
    assert time.perf_counter() - start < SOON_SECONDS


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """The first run in a process imports a part of torch."""
    simulate.run(lambda rank: torch.ones(1), 1)


class TestDeadlock:
    def test_both_receive_first(self) -> None:
        def program(rank: int) -> None:
            x = torch.ones(3)
            dist.recv(x, 1 - rank)
            dist.send(x, 1 - rank)

        with pytest.raises(DeadlockError) as caught:
            simulate.run(program, 2)
        assert str(caught.value).splitlines() == [
            "no rank can run:",
            *(
                f"  rank {rank}: waits in recv(float32[3], src={1 - rank}) on world for rank {1 - rank}, "
                f"at {__file__}:{program.__code__.co_firstlineno + 2} in program"
                for rank in range(2)
            ),
        ]

    def test_both_send_first(self) -> None:
        def program(rank: int) -> None:
            x = torch.ones(3)
            dist.send(x, 1 - rank)
            dist.recv(x, 1 - rank)

        with pytest.raises(DeadlockError, match=r"rank 1: waits in send\(float32\[3\], dst=0\) on world for rank 0"):
            simulate.run(program, 2)

    def test_a_rank_returned(self) -> None:
        def program(rank: int) -> None:
            if rank != 1:
                dist.all_reduce(torch.ones(2))

        with pytest.raises(DeadlockError) as caught:
            simulate.run(program, 4)
        assert "ranks 0, 2-3: waits in all_reduce(float32[2], op=SUM) on world for rank 1" in str(caught.value)
        assert "rank 1: returned" in str(caught.value)

    def test_a_cycle_of_three_groups(self) -> None:
        def program(rank: int) -> None:
            groups = [dist.new_group([a, (a + 1) % 3]) for a in range(3)]
            dist.barrier(groups[rank])
            dist.barrier(groups[rank - 1])

        with pytest.raises(DeadlockError) as caught:
            simulate.run(program, 3)
        for rank, group in enumerate(["0,1", "1,2", "0,2"]):
            waits = f"rank {rank}: waits in barrier() on ranks {group} for rank {(rank + 1) % 3}, "
            assert waits in str(caught.value)

    def test_a_wait_for_an_earlier_operation(self) -> None:
        def program(rank: int) -> None:
            if rank == 0:
                works = [dist.irecv(torch.ones(1), 1, tag=tag) for tag in (1, 2)]
                works[1].wait()
            else:
                dist.send(torch.ones(1), 0, tag=1)

        with pytest.raises(DeadlockError, match=r"rank 0: waits in recv.* tag=2"):
            simulate.run(program, 2)

    def test_of_sixty_four_ranks(self) -> None:
        with pytest.raises(DeadlockError, match=r"ranks 0-62: waits .* for rank 63"):
            simulate.run(lambda rank: rank < 63 and dist.barrier(), 64)

    def test_with_a_name_that_cannot_be_printed(self) -> None:
        class Broken:
            def __str__(self) -> str:
                raise ValueError("no name")

        def program(rank: int) -> None:
            action = Broken()
            dist.recv(torch.ones(1), 1 - rank)
            del action

        with pytest.raises(ValueError, match="no name"):
            simulate.run(program, 2)


class TestDeadRank:
    def test_the_others_end(self) -> None:
        cleaned = []

        def program(rank: int) -> None:
            try:
                dist.barrier()
                if rank == 2:
                    raise ValueError("no more")
                dist.barrier()
            finally:
                cleaned.append(rank)

        with pytest.raises(DeadRankError) as caught:
            simulate.run(program, 4)
        line = program.__code__.co_firstlineno + 4
        assert str(caught.value) == f"rank 2 ended with ValueError at {__file__}:{line} in program: no more"
        assert isinstance(caught.value.__cause__, ValueError)
        assert sorted(cleaned) == [0, 1, 2, 3]

    def test_the_first_error_counts(self) -> None:
        def program(rank: int) -> None:
            try:
                if rank == 0:
                    raise KeyError("first")
                dist.barrier()
            except baton.Ended:
                raise RuntimeError("a consequence") from None

        with pytest.raises(DeadRankError, match="rank 0 ended with KeyError"):
            simulate.run(program, 3)

    def test_misuse_on_the_way_out_is_a_consequence(self) -> None:
        def program(rank: int) -> None:
            if rank == 1:
                raise KeyError("first")
            try:
                dist.barrier()
            finally:
                dist.all_gather([], torch.ones(1))

        with pytest.raises(DeadRankError, match="rank 1 ended with KeyError"):
            simulate.run(program, 2)

    def test_a_rank_that_catches_everything_ends_at_its_next_operation(self) -> None:
        def program(rank: int) -> None:
            if rank == 0:
                raise ValueError("over")
            for _ in range(3):
                try:
                    dist.barrier()
                except BaseException:
                    continue

        with pytest.raises(DeadRankError, match="rank 0"):
            simulate.run(program, 2)

    def test_in_backward(self) -> None:
        def fail(_: torch.Tensor) -> None:
            raise ValueError("in a hook")

        def program(rank: int) -> None:
            x = torch.ones(2, requires_grad=True)
            if rank == 1:
                x.register_hook(fail)
            (x * 2).sum().backward()
            dist.barrier()

        with pytest.raises(DeadRankError, match="rank 1 ended with ValueError"):
            simulate.run(program, 2)

    def test_blocked_in_backward_while_another_dies(self) -> None:
        def program(rank: int) -> None:
            if rank == 1:
                raise ValueError("gone")
            x = torch.ones(2, requires_grad=True)
            x.register_hook(dist.all_reduce)
            (x * 2).sum().backward()

        with pytest.raises(DeadRankError, match="rank 1"):
            simulate.run(program, 2)

    def test_exit(self) -> None:
        with pytest.raises(DeadRankError, match="rank 0 ended with SystemExit"):
            simulate.run(lambda rank: exit(1), 2)


def test_an_interrupt_ends_all_ranks() -> None:
    rounds = []

    def program(rank: int) -> None:
        if rank == 0:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        for _ in range(1000):
            time.sleep(0.001)
            rounds.append(rank)
            dist.barrier()

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            simulate.run(program, 2)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(rounds) < 1000


def test_threads_leave_one_after_another() -> None:
    events: list[str] = []

    class Local(threading.local):
        def __init__(self) -> None:
            self.leaves = Leaves()

    class Leaves:
        def __init__(self) -> None:
            self.thread = threading.current_thread()
            weakref.finalize(self, events.append, f"{self.thread.name} left")

    local = Local()

    def program(rank: int) -> None:
        assert local.leaves
        dist.barrier()
        events.append(f"rank {rank} ended")

    simulate.run(program, 3)
    assert sorted(events[:3]) == [f"rank {rank} ended" for rank in range(3)]
    assert events[3:] == [f"rank {rank} left" for rank in range(3)]


def test_a_system_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "rank 2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        simulate.run(lambda rank: dist.barrier(), 4)


def test_only_one_rank_runs_at_a_time() -> None:
    running: list[int] = []

    def program(rank: int) -> None:
        for _ in range(5):
            running.append(rank)
            time.sleep(0.001)
            assert running == [rank]
            running.remove(rank)
            dist.barrier()

    simulate.run(program, 4)


def test_another_thread_may_not_communicate() -> None:
    caught: list[BaseException] = []

    def program(rank: int) -> None:
        group = dist.group.WORLD

        def other() -> None:
            try:
                dist.barrier(group)
            except RankError as error:
                caught.append(error)

        thread = threading.Thread(target=other, name="helper")
        thread.start()
        thread.join()

    simulate.run(program, 1)
    assert str(caught[0]).startswith("torch.distributed was used from thread 'helper' while rank 0 ran")


def test_a_group_that_outlives_its_simulation() -> None:
    group = simulate.run(lambda rank: dist.group.WORLD, 2).results[0]
    with pytest.raises(RankError, match="used after its simulation"):
        dist.barrier(group)
