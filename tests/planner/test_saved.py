"""What the planner says autograd keeps is what autograd keeps: distinct storages, to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar import ParallelModel, simulate
from autopar.batch import flatten
from autopar.graph import Model, info, op_name
from autopar.planner.saved import Kept, kept_storages, saved_tensors
from autopar.runtime import Axes, batches
from autopar.runtime.job import build_modules
from tests.codegen.programs import emit_alone, folded, load
from tests.fast_cluster import FAST
from tests.models import CASES, Case, Float64, gpt2, make, prepared
from tests.pinned import compile_pinned


def predicted(model: Model) -> int:
    """All calls together, nothing recomputed."""
    found = [saved_tensors(block) for block in model.blocks]
    calls = [i for i, call in enumerate(model.calls) if model.block_of(call).kind != "tables"]
    kept = {i: everything(model, found, i) for i in calls}
    return sum(kept_storages(model, found, calls, kept).values()) + sum(k.extra_bytes for k in kept.values())


def everything(model: Model, found: Sequence[Any], index: int) -> Kept:
    ops, analysis = model.block_of(model.calls[index]).ops, found[model.calls[index].block]
    return Kept(frozenset(analysis.kept(ops)), analysis.bytes_of((), ops))


def measured(stage: nn.Module, given: Sequence[Tensor]) -> int:
    """Of the storages that autograd's nodes hold on to after a forward, beside weights and the batch."""
    known = {id(t.untyped_storage()): t.untyped_storage() for t in [*stage.parameters(), *stage.buffers(), *given]}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in known:
            found[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        stage(*given)
    return sum(storage.nbytes() for storage in found.values())


def with_dropout(batch: int) -> Case:
    return gpt2(batch, dropout=0.1)


@pytest.mark.parametrize("name", [*CASES, "dropout"])
def test_of_a_whole_model(name: str) -> None:
    with Float64():
        case = make(name, 4) if name in CASES else prepared(lambda: with_dropout(4))
        model = folded(case)
    (one,) = emit_alone(model)
    batch, _ = flatten(case.batch)
    assert predicted(model) == measured(load(one, case.model), [batch[i.path] for i in one.program.inputs])


ONE_RANK = [(name, mesh, 1) for name in ("gpt2", "llama", "encoder") for mesh in ({"tp": 2}, {"dp": 2, "tp": 2})]


@pytest.mark.parametrize(("name", "mesh", "head_chunks"), [*ONE_RANK, ("llama", {"tp": 4}, 1), ("llama", {"tp": 2}, 3)])
def test_of_one_rank(name: str, mesh: dict[str, int], head_chunks: int) -> None:
    """Collectives, strided shards, lookups and losses that are split."""
    with Float64():
        case = make(name, 4)
        ranks = mesh["tp"] * mesh.get("dp", 1)
        options: Any = {"mesh": mesh, "cluster": FAST, "head_chunks": head_chunks}
        job = compile_pinned(case.model, ranks, sample=case.batch, loss=case.loss, **options)
    check_ranks(job, case.batch)


def test_what_moves_averages_keeps_nothing() -> None:
    x = torch.randn(8, 8, dtype=torch.float64)
    model = Normalized().double()
    check_ranks(compile_pinned(model, 2, sample=x, mesh={"dp": 2}, microbatches=1, cluster=FAST), x)


class Normalized(nn.Module):
    """A batch norm that ranks take by their samples: what follows can't be split by channels."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.enter(x)).softmax(-1).square().mean()


def check_ranks(job: ParallelModel, given: Any) -> None:
    ranks = job.plan.mesh.world
    batch, _ = flatten(given)

    def program(rank: int) -> int:
        axes = Axes.build(job.plan.mesh, rank, "cpu")
        (module,), (one,) = build_modules(job.job, axes).all, job.programs.stages
        given = list(batches.parts(batch, one.program, 0, axes))
        given += [torch.ones((), dtype=torch.int64) for _ in one.program.totals]
        return measured(module, given)

    found = simulate.run(program, ranks, track_memory=False).results
    assert found == [predicted(job.lowered)] * ranks


class Attending(nn.Module):
    """Dropout on its own and inside of attention, which CUDA runs otherwise than a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4, 8, 16, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        q = functional.dropout(x * self.weight, 0.1)
        return functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum()


def test_cuda_keeps_masks_as_bools_and_seeds_of_attention() -> None:
    x = torch.ones(2, 4, 8, 16, dtype=torch.bfloat16)
    (block,) = folded(Case(Attending(), x)).blocks
    kept = {device: saved_tensors(block, device) for device in ("cpu", "cuda")}
    dropout, attention = (n for n in block.ops if info(n).random)
    assert kept["cpu"].ops[dropout].extra_bytes == 2 * x.numel()
    assert kept["cuda"].ops[dropout].extra_bytes == x.numel()
    assert set(kept["cuda"].ops[attention].values) == {dropout, attention}
    seed_and_offset, log_sums = 2 * 8 + 8, 4 * 2 * 4 * 8
    assert kept["cuda"].ops[attention].extra_bytes == seed_and_offset + log_sums


class Narrow(nn.Module):
    """Values are not as wide as keys, which fused attention of CUDA takes, and that of a CPU doesn't."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4, 256, 24, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        q = x * self.weight
        return functional.scaled_dot_product_attention(q, q, q[..., :16], is_causal=True).sum()


def test_cuda_keeps_no_scores_of_attention_with_narrow_values() -> None:
    x = torch.ones(2, 4, 256, 24, dtype=torch.bfloat16)
    (block,) = folded(Case(Narrow(), x)).blocks
    (attention,) = (n for n in block.ops if "scaled_dot_product" in op_name(n))
    scores = 2 * 4 * 256 * 256
    assert saved_tensors(block, "cpu").ops[attention].extra_bytes > scores
    assert saved_tensors(block, "cuda").ops[attention].extra_bytes < scores
