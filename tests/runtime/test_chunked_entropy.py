"""The chunked cross entropy is the plain one of whole logits, value and gradients; no logits of all tokens exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from autopar import simulate
from autopar.errors import ArgumentError, ShardingError
from autopar.mesh import Mesh
from autopar.runtime import Axes, chunked_cross_entropy
from tests.runtime.ranks import on_ranks
from tests.storages import Largest

WIDTH, CLASSES = 5, 12
IGNORED = 7


def capped(z: Tensor) -> Tensor:
    return 3 * torch.tanh(z / 3)


def operands(dtype: torch.dtype = torch.float64, *, weight_dim: int = 0) -> list[Tensor]:
    """``x [2, 7, h]``, weight, bias."""
    random = torch.Generator().manual_seed(0)
    table = (WIDTH, CLASSES) if weight_dim else (CLASSES, WIDTH)
    made = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((2, 7, WIDTH), table, (CLASSES,))]
    return [(3 * t).to(dtype).requires_grad_() for t in made]


def targets() -> Tensor:
    found = torch.randint(CLASSES, (2, 7), generator=torch.Generator().manual_seed(1))
    found[0, 2] = found[1, 4] = IGNORED
    return found


def whole(x: Tensor, weight: Tensor, bias: Tensor, logits: Callable[[Tensor], Tensor] | None, **named: Any) -> Tensor:
    """The same in ops of torch on all logits."""
    y = x @ (weight if named.pop("weight_dim", 0) else weight.t()) + bias
    y = y if logits is None else logits(y)
    loss: Tensor = F.cross_entropy(y.flatten(0, 1), targets().flatten(), ignore_index=IGNORED, **named)
    return loss.view(2, 7) if named.get("reduction") == "none" else loss


def close(found: list[Tensor], wanted: list[Tensor]) -> None:
    for have, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("logits", [None, capped], ids=["plain", "capped"])
@pytest.mark.parametrize(
    "named",
    [
        {"reduction": "sum"},
        {"reduction": "sum", "label_smoothing": 0.3},
        {"reduction": "none", "label_smoothing": 0.3, "weight_dim": 1},
    ],
    ids=str,
)
def test_it_is_the_plain_one(ranks: int, logits: Any, named: dict[str, Any]) -> None:
    """In any number of chunks, more than tokens too; a slope for each token, as an unknown loss behind it has."""
    weight_dim = named.get("weight_dim", 0)
    given = operands(weight_dim=weight_dim)
    expected = whole(*given, logits, **named)
    slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    gradients = torch.autograd.grad(expected, given, slope)
    options: dict[str, Any] = {"logits": logits, "ignore_index": IGNORED, **named}

    def program(axes: Axes) -> list[list[Tensor]]:
        axis = axes["tp"] if ranks > 1 else None
        parts = [given[0], given[1].chunk(ranks, weight_dim)[axes.rank], given[2].chunk(ranks)[axes.rank]]
        found = []
        for chunks in (1, 3, 4, 100):
            x, weight, bias = own = [t.detach().clone().requires_grad_() for t in parts]
            loss = chunked_cross_entropy(x, weight, targets(), bias, chunks=chunks, axis=axis, **options)
            found.append([loss.detach(), *torch.autograd.grad(loss, own, slope)])
        return found

    for by_rank in zip(*on_ranks(Mesh(tp=ranks), program), strict=True):
        losses, *found = zip(*by_rank, strict=True)
        close(list(losses), [expected.detach()] * ranks)
        close([sum(found[0]), torch.cat(found[1], weight_dim), torch.cat(found[2])], list(gradients))


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    x, weight, bias = (t.detach() for t in operands())
    for position in range(3):
        given = [t.clone().requires_grad_(k == position) for k, t in enumerate((x, weight, bias))]
        loss = chunked_cross_entropy(given[0], given[1], targets(), given[2], chunks=3, ignore_index=IGNORED)
        loss.backward()
        assert [t.grad is not None for t in given] == [k == position for k in range(3)]
    assert not chunked_cross_entropy(x, weight, targets(), chunks=3, ignore_index=IGNORED).requires_grad


def test_narrow_products_are_summed_wide() -> None:
    """bf16 factors, float32 logits: as precise as all at once, measured against float64."""
    exact = operands()
    narrow = operands(torch.bfloat16)
    for wide, own in zip(exact, narrow, strict=True):
        wide.data.copy_(own.detach())
    to_float = torch.Tensor.float
    wanted = torch.autograd.grad(whole(*exact, None), exact)
    plain = torch.autograd.grad(whole(*narrow, to_float), narrow)
    x, weight, bias = narrow
    loss = chunked_cross_entropy(x, weight, targets(), bias, chunks=5, logits=to_float, ignore_index=IGNORED)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, whole(*narrow, to_float, reduction="sum"), rtol=1e-6, atol=0)
    found = torch.autograd.grad(loss / (14 - int((targets() == IGNORED).sum())), narrow)
    for have, other, want in zip(found, plain, wanted, strict=True):
        assert have.dtype == torch.bfloat16
        assert (have - want).norm() <= 1.1 * (other - want).norm()


def test_no_tokens() -> None:
    weight = torch.ones(CLASSES, WIDTH, requires_grad=True)
    loss = chunked_cross_entropy(torch.ones(0, WIDTH), weight, torch.ones(0, dtype=torch.long), chunks=2)
    loss.backward()
    assert loss == 0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_what_does_not_fit_is_refused() -> None:
    x, weight, _ = operands()
    with pytest.raises(ArgumentError, match="chunks=0"):
        chunked_cross_entropy(x, weight, targets(), chunks=0)
    with pytest.raises(ShardingError, match=r"needs a target of shape \(2, 7\), not \(2, 7, 12\)"):
        chunked_cross_entropy(x, weight, torch.ones(2, 7, CLASSES), chunks=2)


@pytest.mark.parametrize("wrong", [-1, CLASSES, 2 * CLASSES])
def test_a_target_that_is_no_class_is_refused_on_every_rank(wrong: int) -> None:
    def program(axes: Axes) -> None:
        x, weight, _ = operands()
        bad = targets()
        bad[1, 1] = wrong
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            chunked_cross_entropy(x, weight[:6], bad, chunks=3, axis=axes["tp"])

    on_ranks(Mesh(tp=2), program)


@pytest.mark.parametrize("chunks", [1, 8])
@pytest.mark.parametrize(("logits", "copies"), [(None, 1), (capped, 6)], ids=["plain", "capped"])
def test_the_largest_tensor_is_a_chunk_of_logits(chunks: int, logits: Any, copies: int) -> None:
    """Tokens x classes is far more than anything else here; a cap's own backward needs further tensors of a chunk."""
    tokens, classes, width = 512, 4096, 8
    logits_bytes = 4 * tokens * classes
    table_bytes = 4 * classes * width

    def program(rank: int) -> int:
        x, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(classes, width, requires_grad=True)
        with Largest() as largest:
            chunked_cross_entropy(x, weight, torch.arange(tokens), chunks=chunks, logits=logits).backward()
        return largest.bytes

    run = simulate.run(program, 1)
    assert run.results[0] == logits_bytes // chunks
    assert run.peak_bytes[0] < copies * logits_bytes / chunks + 4 * table_bytes


@pytest.mark.filterwarnings("ignore")  # the tracer's own, which it would trip over as errors
@pytest.mark.parametrize("logits", [None, capped], ids=["plain", "capped"])
def test_compiled_in_one_graph(logits: Any) -> None:
    target = targets()

    def run(x: Tensor, weight: Tensor, bias: Tensor, axis: Any) -> Tensor:
        return chunked_cross_entropy(x, weight, target, bias, chunks=3, axis=axis, logits=logits, ignore_index=IGNORED)

    def program(rank: int) -> None:
        axes = Axes.build(Mesh(tp=2), rank, "cpu")
        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        x, weight, bias = operands()
        own = [x, weight.chunk(2)[rank], bias.chunk(2)[rank]]
        found = []
        for function in (run, compiled):
            loss = function(*own, axes["tp"])
            found.append([loss.detach(), *torch.autograd.grad(loss, own)])
        close(found[1], found[0])

    simulate.run(program, 2, track_memory=False)
