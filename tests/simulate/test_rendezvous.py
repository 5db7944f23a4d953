"""Sends and receives, and every way in which ranks can disagree about what they call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar import simulate
from autopar.errors import DeadRankError, MismatchError

Program = Callable[[int], object]


class TestSendAndReceive:
    def test_ring(self) -> None:
        def program(rank: int) -> Tensor:
            received = torch.empty(2)
            sends = dist.isend(torch.full((2,), float(rank)), (rank + 1) % 4)
            source = dist.recv(received, (rank - 1) % 4)
            sends.wait()
            assert source == (rank - 1) % 4
            return received

        for rank, received in enumerate(simulate.run(program, 4).results):
            assert received.tolist() == [(rank - 1) % 4] * 2

    def test_batch(self) -> None:
        def program(rank: int) -> list[float]:
            outputs = [torch.empty(1) for _ in range(2)]
            peer = 1 - rank
            operations = [
                dist.P2POp(dist.irecv, outputs[0], peer),
                dist.P2POp(dist.isend, torch.tensor([10.0 + rank]), peer),
                dist.P2POp(dist.irecv, outputs[1], peer),
                dist.P2POp(dist.isend, torch.tensor([20.0 + rank]), peer),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            return [output.item() for output in outputs]

        assert simulate.run(program, 2).results == [[11, 21], [10, 20]]

    def test_tags(self) -> None:
        def program(rank: int) -> list[float]:
            if rank == 0:
                works = [dist.isend(torch.tensor([float(tag)]), 1, tag=tag) for tag in (1, 2)]
                return [work.wait() for work in works]
            outputs = [torch.empty(1), torch.empty(1)]
            for tag, output in zip((2, 1), outputs, strict=True):
                dist.recv(output, 0, tag=tag)
            return [output.item() for output in outputs]

        assert simulate.run(program, 2).results[1] == [2, 1]

    def test_receive_from_anyone(self) -> None:
        def program(rank: int) -> list[tuple[int, float]]:
            if rank:
                dist.send(torch.tensor([float(rank)]), 0)
                return []
            found, output = [], torch.empty(1)
            for _ in range(2):
                source = dist.recv(output)
                found.append((source, output.item()))
            return found

        assert sorted(simulate.run(program, 3).results[0]) == [(1, 1.0), (2, 2.0)]

    def test_within_a_group(self) -> None:
        def program(rank: int) -> float:
            group = dist.new_group([1, 3])
            x = torch.tensor([float(rank)])
            if rank == 3:
                dist.send(x, group=group, group_dst=0)
            if rank == 1:
                dist.recv(x, group=group, group_src=1)
            return x.item()

        assert simulate.run(program, 4).results == [0, 3, 2, 3]

    def test_a_send_ends_when_it_is_received(self) -> None:
        order: list[str] = []

        def program(rank: int) -> None:
            if rank == 0:
                dist.send(torch.ones(1), 1)
                order.append("sent")
            else:
                order.append("receives")
                dist.recv(torch.empty(1), 0)

        simulate.run(program, 2)
        assert order == ["receives", "sent"]


# Misuse. Each case: what rank 0 and rank 1 of a group of two do, and what the error must say.


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape or (4,), dtype=dtype)


def wrong_operation(rank: int) -> None:
    dist.all_reduce(x()) if rank == 0 else dist.broadcast(x(), 0)


def wrong_dtype(rank: int) -> None:
    dist.all_reduce(x(dtype=torch.float32 if rank == 0 else torch.float64))


def wrong_shape(rank: int) -> None:
    dist.all_reduce(x(4) if rank == 0 else x(5))


def same_size_but_another_shape(rank: int) -> None:
    dist.all_reduce(x(2, 3) if rank == 0 else x(3, 2))


def wrong_order(rank: int) -> None:
    a, b = x(4), x(2)
    for tensor in (a, b) if rank == 0 else (b, a):
        dist.all_reduce(tensor)


def wrong_reduction(rank: int) -> None:
    dist.all_reduce(x(), op=dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX)


def wrong_source(rank: int) -> None:
    dist.broadcast(x(), src=rank)


def wrong_destination(rank: int) -> None:
    dist.reduce(x(), dst=rank)


def wrong_group(rank: int) -> None:
    group = dist.new_group([0, 1], group_desc="pair")
    dist.all_reduce(x(), group=group if rank == 0 else None)


def order_across_groups(rank: int) -> None:
    groups = [dist.new_group([0, 1], group_desc=name) for name in ("first", "second")]
    for group in groups if rank == 0 else reversed(groups):
        dist.all_reduce(x(), group=group)


def groups_created_in_another_order(rank: int) -> None:
    members = [[0, 1], [1]]
    groups = {len(ranks): dist.new_group(ranks) for ranks in (members if rank == 0 else members[::-1])}
    dist.barrier(groups[2])


def receive_of_another_shape(rank: int) -> None:
    dist.send(x(2, 3), 1) if rank == 0 else dist.recv(x(3, 2), 0)


def receive_of_another_dtype(rank: int) -> None:
    dist.send(x(), 1) if rank == 0 else dist.recv(x(dtype=torch.bfloat16), 0)


def uneven_split(rank: int) -> None:
    if rank == 0:
        dist.all_to_all_single(x(3), x(3), [1, 2], [1, 2])
    else:
        dist.all_to_all_single(x(2), x(3), [1, 1], [2, 1])


def gathered_list_of_another_shape(rank: int) -> None:
    dist.all_gather([x(4), x(4)], x(4) if rank == 0 else x(5))


def number_of_tensors(rank: int) -> None:
    opts = dist.AllreduceCoalescedOptions()
    dist.group.WORLD.allreduce_coalesced([x()] * (rank + 1), opts).wait()


def write_in_flight(rank: int) -> None:
    tensor = x()
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 1:
        tensor.add_(1)
    work.wait()


def write_before_the_peers_come(rank: int) -> None:
    tensor = x()
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        tensor.add_(1)
        dist.barrier()
        work.wait()
    else:
        dist.all_reduce(tensor)
        dist.barrier()


def write_to_a_tensor_that_is_sent(rank: int) -> None:
    tensor = x()
    if rank == 0:
        work = dist.isend(tensor, 1)
        tensor.zero_()
        work.wait()
    else:
        dist.recv(tensor, 0)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (wrong_operation, ["different operations", "all_reduce(float32[4]", "broadcast(float32[4], src=0"]),
        (wrong_dtype, ["different dtypes", "float32[4]", "float64[4]"]),
        (wrong_shape, ["different shapes", "float32[4]", "float32[5]"]),
        (same_size_but_another_shape, ["different shapes", "float32[2, 3]", "float32[3, 2]"]),
        (wrong_order, ["different shapes in collective 1", "in the same order"]),
        (wrong_reduction, ["different reduce operations", "op=SUM", "op=MAX"]),
        (wrong_source, ["different source or destination ranks", "src=0", "src=1"]),
        (wrong_destination, ["different source or destination ranks", "dst=0", "dst=1"]),
        (wrong_group, ["wait for each other in different collectives", "on pair", "on world"]),
        (order_across_groups, ["wait for each other in different collectives", "on first", "on second"]),
        (groups_created_in_another_order, ["different collectives", "must create groups in the same order"]),
        (receive_of_another_shape, ["rank 0 gives float32[2, 3] where rank 1 takes float32[3, 2]"]),
        (receive_of_another_dtype, ["rank 0 gives float32[4] where rank 1 takes bfloat16[4]"]),
        (uneven_split, ["rank 0 gives float32[2] where rank 1 takes float32[1]"]),
        (gathered_list_of_another_shape, ["rank 1 gives float32[5] where rank 0 takes float32[4]"]),
        (number_of_tensors, ["different numbers of tensors", "2 x float32[4]"]),
    ],
)  # fmt: skip
def test_disagreement(program: Program, says: list[str]) -> None:
    with pytest.raises(MismatchError) as caught:
        simulate.run(program, 2)
    message = str(caught.value)
    for words in (*says, "rank 0: ", "rank 1: "):
        assert words in message
    _, first_line = inspect.getsourcelines(program)
    sites = [line for line in message.splitlines() if f"{__file__}:" in line]
    assert len(sites) == 2
    for site in sites:
        line = int(site.partition(f"{__file__}:")[2].split()[0])
        assert first_line < line < first_line + 10
        assert f" in {program.__name__}" in site


@pytest.mark.parametrize(
    ("program", "rank"),
    [(write_in_flight, 1), (write_before_the_peers_come, 0), (write_to_a_tensor_that_is_sent, 0)],
)
def test_write_in_flight(program: Program, rank: int) -> None:
    with pytest.raises(MismatchError, match=f"rank {rank} wrote to an input of an operation in flight") as caught:
        simulate.run(program, 2)
    assert f" in {program.__name__}" in str(caught.value)


def test_a_write_beside_a_tensor_in_flight_is_no_misuse() -> None:
    def program(rank: int) -> list[float]:
        buffer = torch.ones(4)
        work = dist.all_reduce(buffer[:2], async_op=True)
        buffer[2:] = 5
        work.wait()
        buffer[:2] += 1
        return buffer.tolist()

    assert simulate.run(program, 2).results == [[3, 3, 5, 5]] * 2


def test_a_write_after_polling_is_no_misuse() -> None:
    def program(rank: int) -> float:
        tensor = torch.ones(1)
        work = dist.all_reduce(tensor, async_op=True)
        while not work.is_completed():
            pass
        tensor.add_(1)
        work.wait()
        return tensor.item()

    assert simulate.run(program, 2).results == [3, 3]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (lambda rank: rank == 0 and dist.all_reduce(x(), async_op=True), "rank 0: all_reduce(float32[4], "),
        (lambda rank: rank == 0 and dist.isend(x(), 1), "rank 0: send(float32[4], dst=1)"),
        (lambda rank: rank == 1 and dist.irecv(x(), 0), "rank 1: recv(float32[4], src=0)"),
    ],
)  # fmt: skip
def test_operations_left_over_at_the_end(program: Program, says: str) -> None:
    with pytest.raises(MismatchError, match="never met their counterparts") as caught:
        simulate.run(lambda rank: bool(program(rank)), 2)
    assert says in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*_single. instead:FutureWarning")
@pytest.mark.parametrize(
    ("program", "says"),
    [
        (lambda: dist.all_gather([x()], x()), "a list of 1 tensors in a group of 2 ranks"),
        (lambda: dist.all_gather_into_tensor(x(3), x(2)), "a tensor of shape [3] can't be 2 equal parts"),
        (lambda: dist.all_gather_into_tensor(x(2, 4).t(), x(4)), "a non-contiguous tensor of shape [4, 2]"),
        (lambda: dist.all_to_all_single(x(3), x(3)), "3 rows can't be split as [1, 1] over 2 ranks"),
    ],
)
def test_a_call_that_fits_no_peer(program: Callable[[], object], says: str) -> None:
    with pytest.raises(MismatchError) as caught:
        simulate.run(lambda rank: program(), 2)
    assert str(caught.value).startswith("rank 0: ")
    assert says in str(caught.value)
    assert __file__ in str(caught.value)


def test_a_reduction_that_is_not_simulated() -> None:
    def program(rank: int) -> None:
        op = SimpleNamespace(op=SimpleNamespace(name="PREMUL_SUM"))  # only NCCL can make a real one
        dist.group.WORLD.allreduce([x()], SimpleNamespace(reduceOp=op, asyncOp=False))

    with pytest.raises(DeadRankError, match="PREMUL_SUM is not simulated; use one of SUM, AVG"):
        simulate.run(program, 2)


def test_ranks_of_which_the_same_is_said_share_a_line() -> None:
    def program(rank: int) -> None:
        if rank != 5:
            dist.barrier()

    with pytest.raises(Exception, match="ranks 0-4, 6-7: waits in barrier\\(\\) on world for rank 5, at "):
        simulate.run(program, 8)
