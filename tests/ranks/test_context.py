"""Sequences split over cp: whole models equal one device, in every form of attention, and beside the other axes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import BatchError, ShardingError
from tests.context_models import CONTEXT, packed, positions
from tests.fast_cluster import FAST
from tests.models import SEQUENCE, VOCABULARY, Case, Float64, NanoGPT, llama, prepared
from tests.pinned import compile_pinned
from tests.ranks.test_parity import name_of, verified


def compiled(case: Case, mesh: dict[str, int], **options: Any) -> autopar.ParallelModel:
    gpus = math.prod(mesh.values())
    return compile_pinned(case.model, gpus, sample=case.batch, loss=case.loss, mesh=mesh, cluster=FAST, **options)


def check(name: str, mesh: dict[str, int], batch: int = 2, **options: Any) -> None:
    with Float64():
        result = verified(prepared(lambda: CONTEXT[name](batch)), mesh, **options)
    assert result.tolerance == 1e-9
    assert result.ok, str(result)


@pytest.mark.parametrize("name", ["gpt2", "weighted"])
def test_sample(name: str) -> None:
    """A few of the cases below, for the fast tier."""
    check(name, {"cp": 2})


FORMS = [  # of Llama: test_attention.py
    *(("gemma2", "all_gather", 4), ("gemma3", "all_gather", 2), ("gemma3", "ring", 2), ("gemma3", "heads", 2)),
    *(("t5", "all_gather", 2), ("t5", "ring", 2), ("t5", "heads", 4)),
    *(("packed", "all_gather", 4), ("packed", "ring", 2), ("packed", "heads", 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "attention", "cp"), FORMS)
def test_forms_of_attention(name: str, attention: str, cp: int) -> None:
    check(name, {"cp": cp}, attention=attention)


COMBINED: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("llama", {"dp": 2, "cp": 2, "tp": 2}, {"microbatches": 2, "zero": 3}),
    ("llama", {"pp": 2, "cp": 2}, {"microbatches": 2, "zero": 2, "vocabulary": "vocab-2"}),
    ("t5", {"pp": 2, "cp": 2}, {"microbatches": 2, "zero": 2}),
    ("bert", {"pp": 2, "cp": 2}, {"microbatches": 2, "cp_order": "paired"}),
    ("packed", {"pp": 2, "dp": 2, "cp": 2}, {"cp_order": "contiguous", "recompute": "full"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "options"), COMBINED, ids=name_of)
def test_with_other_axes(name: str, mesh: dict[str, int], options: dict[str, Any]) -> None:
    check(name, mesh, batch=4, **options)


def test_no_token_sees_another_document() -> None:
    """Other tokens in the first document of a row: what later ones give to their own rows of the table is the same, to
    the last bit. Without positions it isn't.
    """
    with Float64():
        case = prepared(lambda: packed(4))
        first = torch.zeros(4, SEQUENCE, dtype=torch.bool)
        first[0] = (positions(4)[0] == 0).cumsum(0) == 1
        batch = case.batch | {"input_ids": torch.where(first, 40, case.batch["input_ids"] % 40)}
        changed = batch | {"input_ids": torch.where(first, 41, batch["input_ids"])}
        before, after = table_gradients(Case(case.model, batch), changed)
        assert torch.equal(before[:40], after[:40])
        assert not torch.equal(before[40:], after[40:])
        del batch["position_ids"], changed["position_ids"]
        before, after = table_gradients(Case(case.model, batch), changed)
        assert not torch.equal(before[:40], after[:40])


def table_gradients(case: Case, changed: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    job = compiled(case, {"cp": 2})
    before, after = (job.simulate(batch).gradients["model.embed_tokens.weight"] for batch in (case.batch, changed))
    return before, after


def test_logits_are_not_gathered() -> None:
    """Neither by a loss of the next token; what is gathered has a number for each token at most."""
    with Float64():
        text = compiled(prepared(lambda: CONTEXT["weighted"](2)), {"cp": 2}, attention="ring").source(0)
    gathered = [line for line in text.splitlines() if "= all_gather(" in line]
    assert gathered, text
    assert all(f"# {2 * SEQUENCE * 8} B" in line for line in gathered), gathered


class Convolved(nn.Module):
    """A causal convolution over positions, whose weight is the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.conv = nn.Conv1d(8, 8, 3)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_what_stays_whole_is_said() -> None:
    ids = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(0))
    case = prepared(lambda: Case(Convolved(), (ids,)))
    job = compiled(case, {"cp": 2})
    assert [op.split(":")[0] for op in job.plan.whole_sequences] == ["aten.conv1d.default at test_context.py"]
    assert "computed of whole sequences on every rank of cp: aten.conv1d.default at" in job.plan.explain()
    assert job.verify(case.batch).ok


@pytest.mark.slow
def test_a_scan_is_split_by_channels() -> None:
    """Mamba's convolution and recurrence need whole sequences, but of a part of the channels each."""
    with Float64():
        case = prepared(lambda: CONTEXT["mamba"](2))
        job = compiled(case, {"cp": 2})
        result = job.verify(case.batch)
    assert result.ok, str(result)
    assert job.plan.whole_sequences == []
    block = next(block for block in job.plan.blocks if block.kind == "layer")
    assert next(n for n in block.nodes if n.op == "aten.conv1d.default").choices["cp"] == "S(1), S(0) -> S(1)"


def test_sequences_that_do_not_divide() -> None:
    with pytest.raises(ShardingError, match=r"'input_ids' has sequences of 16 positions, which cp=3 doesn't divide"):
        compiled(llama(2, layers=1), {"cp": 3})
    with pytest.raises(ShardingError, match=r"in pairs \(cp_order='paired'\); cp may be one of \[1, 2, 4, 8\]"):
        compiled(llama(2, layers=1), {"cp": 16}, cp_order="paired")


class OneMore(nn.Module):
    """Takes a token more than it has positions, as loaders of text give it."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = NanoGPT(layers=1, width=16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.gpt(ids[:, :-1], ids[:, 1:].contiguous())[0]


def test_positions_are_those_of_activations() -> None:
    ids = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    case = prepared(lambda: Case(OneMore(), (ids,)))
    assert verified(case, {"cp": 2}).ok
    with pytest.raises(ShardingError, match=r"embedding.default in gpt.wte at .* has sequences of 15 positions, which"):
        compiled(Case(case.model, (ids[:, 1:],)), {"cp": 2})


def test_batches_with_other_positions() -> None:
    case = packed(4)
    job = compiled(case, {"dp": 1})
    jumping = positions(4)
    jumping[0, 9:] += 2
    with pytest.raises(BatchError, match="of row 0 go from 1 to 4 at token 9"):
        job.simulate({**case.batch, "position_ids": jumping})
