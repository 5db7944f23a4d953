"""What each operation gives, and how many bytes it counts, against plain arithmetic on all ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autopar import simulate
from autopar.simulate.operations import fits

SIZES = [2, 4]
ROWS = 3


def value(rank: int, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's own tensor ``[rows, 2]``; no two ranks share an element."""
    return (torch.arange(rows * 2).view(rows, 2) + 100 * rank).to(dtype)


def check(program: Callable[[int], object], expected: Callable[[int], object], world_size: int) -> None:
    results = simulate.run(program, world_size).results
    for rank, result in enumerate(results):
        torch.testing.assert_close(result, expected(rank), rtol=0, atol=0)


@pytest.mark.parametrize("world_size", SIZES)
class TestCollectives:
    def test_all_reduce(self, world_size: int) -> None:
        def program(rank: int) -> Tensor:
            x = value(rank)
            dist.all_reduce(x)
            return x

        total = sum(value(rank) for rank in range(world_size))
        check(program, lambda _: total, world_size)

    def test_all_gather(self, world_size: int) -> None:
        def program(rank: int) -> list[Tensor]:
            parts = [torch.empty(ROWS, 2) for _ in range(world_size)]
            dist.all_gather(parts, value(rank))
            return parts

        check(program, lambda _: [value(rank) for rank in range(world_size)], world_size)

    def test_all_gather_of_unequal_shapes(self, world_size: int) -> None:
        def program(rank: int) -> list[Tensor]:
            parts = [torch.empty(source + 1, 2) for source in range(world_size)]
            dist.all_gather(parts, value(rank, rank + 1))
            return parts

        check(program, lambda _: [value(rank, rank + 1) for rank in range(world_size)], world_size)

    @pytest.mark.parametrize("shape", ["concatenated", "stacked"])
    @pytest.mark.filterwarnings("ignore:.*_single. instead:FutureWarning")
    def test_all_gather_into_tensor(self, world_size: int, shape: str) -> None:
        whole = torch.stack([value(rank) for rank in range(world_size)])
        whole = whole.flatten(0, 1) if shape == "concatenated" else whole

        def program(rank: int) -> Tensor:
            output = torch.empty_like(whole)
            dist.all_gather_into_tensor(output, value(rank))
            return output

        check(program, lambda _: whole, world_size)

    @pytest.mark.filterwarnings("ignore:.*_single. instead:FutureWarning")
    def test_all_gather_in_place(self, world_size: int) -> None:
        def program(rank: int) -> Tensor:
            output = torch.zeros(world_size, 2)
            output[rank] = rank + 1
            dist.all_gather_into_tensor(output, output[rank])
            return output

        check(program, lambda _: (torch.arange(world_size) + 1.0)[:, None].expand(-1, 2), world_size)

    def test_reduce_scatter(self, world_size: int) -> None:
        def program(rank: int) -> Tensor:
            output = torch.empty(ROWS, 2)
            dist.reduce_scatter(output, [value(rank) * target for target in range(world_size)])
            return output

        total = sum(value(rank) for rank in range(world_size))
        check(program, lambda rank: total * rank, world_size)

    @pytest.mark.filterwarnings("ignore:.*_single. instead:FutureWarning")
    def test_reduce_scatter_tensor(self, world_size: int) -> None:
        def program(rank: int) -> Tensor:
            output = torch.empty(1, 2)
            dist.reduce_scatter_tensor(output, value(rank, world_size))
            return output

        total = sum(value(rank, world_size) for rank in range(world_size))
        check(program, lambda rank: total[rank : rank + 1], world_size)

    def test_all_to_all(self, world_size: int) -> None:
        def program(rank: int) -> list[Tensor]:
            outputs = [torch.empty(source + rank + 1) for source in range(world_size)]
            inputs = [torch.full((rank + target + 1,), 10.0 * rank + target) for target in range(world_size)]
            dist.all_to_all(outputs, inputs)
            return outputs

        def expected(rank: int) -> list[Tensor]:
            return [torch.full((source + rank + 1,), 10.0 * source + rank) for source in range(world_size)]

        check(program, expected, world_size)

    def test_all_to_all_single(self, world_size: int) -> None:
        def program(rank: int) -> Tensor:
            output = torch.empty(world_size, 2)
            dist.all_to_all_single(output, value(rank, world_size))
            return output

        def expected(rank: int) -> Tensor:
            return torch.stack([value(source, world_size)[rank] for source in range(world_size)])

        check(program, expected, world_size)

    def test_all_to_all_single_with_uneven_splits(self, world_size: int) -> None:
        def sizes(rank: int) -> list[int]:
            return [(rank + peer) % 3 for peer in range(world_size)]  # 0 rows among them

        def program(rank: int) -> Tensor:
            sent = torch.cat([torch.full((n,), 10.0 * rank + to) for to, n in enumerate(sizes(rank))])
            output = torch.empty(sum(sizes(rank)))
            dist.all_to_all_single(output, sent, sizes(rank), sizes(rank))
            return output

        def expected(rank: int) -> Tensor:
            return torch.cat([torch.full((n,), 10.0 * of + rank) for of, n in enumerate(sizes(rank))])

        check(program, expected, world_size)

    def test_broadcast(self, world_size: int) -> None:
        def program(rank: int) -> Tensor:
            x = value(rank)
            dist.broadcast(x, src=1)
            return x

        check(program, lambda _: value(1), world_size)

    def test_reduce(self, world_size: int) -> None:
        def program(rank: int) -> Tensor:
            x = value(rank)
            dist.reduce(x, dst=1)
            return x

        total = sum(value(rank) for rank in range(world_size))
        check(program, lambda rank: total if rank == 1 else value(rank), world_size)

    def test_gather(self, world_size: int) -> None:
        def program(rank: int) -> list[Tensor]:
            parts = [torch.empty(ROWS, 2) for _ in range(world_size)] if rank == 1 else []
            dist.gather(value(rank), parts or None, dst=1)
            return parts

        whole = [value(rank) for rank in range(world_size)]
        check(program, lambda rank: whole if rank == 1 else [], world_size)

    def test_scatter(self, world_size: int) -> None:
        def program(rank: int) -> Tensor:
            output = torch.empty(ROWS, 2)
            dist.scatter(output, [value(to) for to in range(world_size)] if rank == 1 else None, src=1)
            return output

        check(program, value, world_size)

    def test_object_collectives(self, world_size: int) -> None:
        def program(rank: int) -> tuple[list[object], list[object], list[object]]:
            gathered: list[object] = [None] * world_size
            dist.all_gather_object(gathered, {"rank": rank, "pad": "x" * rank})
            shared: list[object] = [("from", 1)] if rank == 1 else [None]
            dist.broadcast_object_list(shared, src=1)
            mine: list[object] = [None]
            dist.scatter_object_list(mine, list(range(world_size)) if rank == 0 else None, src=0)
            return gathered, shared, mine

        for rank, result in enumerate(simulate.run(program, world_size).results):
            gathered = [{"rank": other, "pad": "x" * other} for other in range(world_size)]
            assert result == (gathered, [("from", 1)], [rank])

    def test_asynchronous(self, world_size: int) -> None:
        def program(rank: int) -> tuple[Tensor, bool]:
            tensors = [value(rank) * k for k in (1, 2, 3)]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for work in reversed(works):
                work.wait()
            return torch.stack(tensors), all(work.is_completed() for work in works)

        total = sum(value(rank) for rank in range(world_size))
        check(program, lambda _: (torch.stack([total, 2 * total, 3 * total]), True), world_size)


def test_sixty_four_ranks() -> None:
    def program(rank: int) -> tuple[Tensor, Tensor]:
        total, row = torch.tensor([float(rank)]), torch.empty(64)
        dist.all_reduce(total)
        dist.all_to_all_single(row, torch.arange(64.0) + 100 * rank)
        return total, row

    check(program, lambda rank: (torch.tensor([2016.0]), torch.arange(64.0) * 100 + rank), 64)


def test_one_rank() -> None:
    def program(rank: int) -> Tensor:
        x = value(0)
        dist.all_reduce(x)
        dist.barrier()
        return x

    check(program, lambda _: value(0), 1)


def test_sub_groups() -> None:
    def program(rank: int) -> Tensor:
        group, _ = dist.new_subgroups(2)
        x = value(rank)
        dist.all_reduce(x, group=group)
        odd = dist.new_group([1, 3])
        if rank in (1, 3):
            dist.broadcast(x, src=3, group=odd)
        return x

    low, high = value(0) + value(1), value(2) + value(3)
    check(program, lambda rank: (low, high, high, high)[rank], 4)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8],
)
@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
def test_reductions_keep_the_dtype(dtype: torch.dtype, op: str) -> None:
    tensors = [torch.tensor([3, 1, 2]), torch.tensor([2, 5, 2]), torch.tensor([4, 1, 2])]
    expected = {
        "SUM": [9, 7, 6],
        "AVG": [3, 7 / 3, 2] if dtype.is_floating_point else [3, 2, 2],
        "PRODUCT": [24, 5, 8],
        "MIN": [2, 1, 2],
        "MAX": [4, 5, 2],
    }[op]

    def program(rank: int) -> Tensor:
        x = tensors[rank].to(dtype)
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        return x

    check(program, lambda _: torch.tensor(expected, dtype=torch.float64).to(dtype), 3)


@pytest.mark.parametrize(
    ("op", "expected"),
    [("MAX", [True, True, False]), ("MIN", [True, False, False]), ("SUM", [True, True, False])],
)
def test_reductions_of_bool(op: str, expected: list[bool]) -> None:
    def program(rank: int) -> Tensor:
        x = torch.tensor([[True, True, False], [True, False, False]][rank])
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        return x

    check(program, lambda _: torch.tensor(expected), 2)


@pytest.mark.parametrize(("op", "expected"), [("BAND", 0b1000), ("BOR", 0b1110), ("BXOR", 0b0110)])
def test_bitwise_reductions(op: str, expected: int) -> None:
    def program(rank: int) -> Tensor:
        x = torch.tensor([0b1100, 0b1010][rank])
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op))
        return x

    check(program, lambda _: torch.tensor(expected), 2)


def test_sums_are_in_rank_order() -> None:
    terms = [1.0, 1e8, -1e8, 1.0]  # float32 sums of these depend on the order

    def program(rank: int) -> Tensor:
        x = torch.tensor(terms[rank])
        dist.all_reduce(x)
        return x

    total = torch.tensor(0.0)
    for term in terms:
        total = total + term
    assert total.item() != sum(terms)
    check(program, lambda _: total, 4)


def test_complex_tensors() -> None:
    def program(rank: int) -> Tensor:
        x = torch.tensor([1 + 1j * rank])
        dist.all_reduce(x)
        return x

    check(program, lambda _: torch.tensor([2 + 1j]), 2)


def test_autograd_does_not_see_the_sum() -> None:
    seen: list[str] = []

    def program(rank: int) -> bool:
        x = torch.ones(2, requires_grad=True) * 2
        x.register_hook(lambda grad: seen.append("hook"))
        y = torch.ones(2)
        dist.all_gather([y.clone(), y], x)
        dist.all_reduce(x)
        dist.all_reduce(x, op=dist.ReduceOp.MIN)  # is made with out=, which autograd refuses
        x.sum().backward()
        return y.requires_grad

    assert simulate.run(program, 2).results == [False, False]
    assert seen == ["hook"] * 2


def test_autograd_does_not_see_the_write() -> None:
    def program(rank: int) -> int:
        x = torch.ones(2)
        dist.all_reduce(x)
        return x._version

    assert simulate.run(program, 2).results == [0, 0]


@pytest.mark.parametrize("ranks_in_it", [{0, 1}, {0}])
def test_inference_mode(ranks_in_it: set[int]) -> None:
    def program(rank: int) -> Tensor:
        with torch.inference_mode(rank in ranks_in_it):
            x = value(rank)
            dist.all_reduce(x, async_op=True).wait()
        return x.clone()

    check(program, lambda _: value(0) + value(1), 2)


def test_meta_tensors_match_but_move_nothing() -> None:
    def program(rank: int) -> torch.device:
        x = torch.empty(4, device="meta")
        dist.all_reduce(x)
        return x.device

    run = simulate.run(program, 2)
    assert run.results == [torch.device("meta")] * 2
    assert run.sent_bytes == [{"world": 16}] * 2


@pytest.mark.filterwarnings("ignore:.*_single. instead:FutureWarning")
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        # 3 ranks, tensors of 12 floats: 48 bytes.
        (lambda rank, x: dist.all_reduce(x), [64, 64, 64]),  # 2 * 2/3 * 48
        (lambda rank, x: dist.all_gather_into_tensor(torch.empty(36), x), [96, 96, 96]),  # 2/3 * 144
        (lambda rank, x: dist.reduce_scatter_tensor(torch.empty(4), x), [32, 32, 32]),  # 2/3 * 48
        (lambda rank, x: dist.broadcast(x, 1), [0, 48, 48]),  # 1 -> 2 -> 0
        (lambda rank, x: dist.reduce(x, 1), [48, 0, 48]),
        (lambda rank, x: dist.gather(x, [x.clone()] * 3 if rank == 1 else None, 1), [48, 0, 48]),
        (lambda rank, x: dist.scatter(x, [x.clone()] * 3 if rank == 1 else None, 1), [0, 96, 0]),
        (lambda rank, x: dist.all_to_all_single(torch.empty(12), x), [32, 32, 32]),  # 8 of 12 leave
        (lambda rank, x: dist.send(x, 2) if rank == 0 else rank == 2 and dist.recv(x, 0), [48, 0, 0]),
        (lambda rank, x: dist.barrier(), [0, 0, 0]),
    ],
    ids=[
        *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter"),
        *("all_to_all", "send", "barrier"),
    ],
)
def test_sent_bytes(program: Callable[[int, Tensor], object], expected: list[int]) -> None:
    run = simulate.run(lambda rank: bool(program(rank, torch.ones(12))), 3)
    assert [sent.get("world", 0) for sent in run.sent_bytes] == expected


@pytest.mark.parametrize(
    ("sent", "expected", "fit"),
    [
        ((2, 3), (2, 3), True),
        ((2, 3), (3, 2), False),
        ((2, 3), (6,), True),
        ((6,), (2, 3), True),
        ((2, 1, 3), (2, 3), True),
        ((), (1,), True),
        ((2, 3), (2, 2), False),
        ((0, 3), (0,), True),
    ],
)
def test_fit(sent: tuple[int, ...], expected: tuple[int, ...], fit: bool) -> None:
    assert fits(torch.empty(sent), torch.empty(expected)) is fit
    assert not fits(torch.empty(sent), torch.empty(expected, dtype=torch.float64))
