"""Models whose sequences are split: every way of attention, in both orders, equals one device."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import ShardingError
from tests.models import VOCABULARY, Case, Float64, llama, prepared, tokens
from tests.pinned import compile_pinned
from tests.ranks.test_parity import verified

WAYS = [
    ("all_gather", "contiguous", {"cp": 4}),
    ("all_gather", "paired", {"cp": 2, "tp": 2}),
    ("ring", "contiguous", {"cp": 2, "dp": 2}),
    ("ring", "paired", {"cp": 4}),
    ("heads", "contiguous", {"cp": 4}),
    ("heads", "paired", {"cp": 2, "dp": 2}),
]
FORMS = {"all_gather": "[attention_with_offset]", "ring": "[ring_attention]", "heads": "S(1), S(1), S(1) -> S(1)"}


def small_llama() -> Case:
    return prepared(lambda: llama(4, layers=2))


@pytest.mark.slow
@pytest.mark.parametrize(("way", "order", "mesh"), WAYS, ids=lambda v: "-".join(v) if isinstance(v, dict) else v)
def test_every_way_equals_one_device(way: Any, order: Any, mesh: dict[str, int]) -> None:
    with Float64():
        found = verified(small_llama(), mesh, attention=way, cp_order=order)
    assert found.ok, str(found)


@pytest.mark.slow
def test_a_ring_in_a_pipeline_recomputed() -> None:
    """The backward of a recomputed layer goes round the ring three times, and pipeline ranks never wait in a circle."""
    with Float64():
        found = verified(small_llama(), {"pp": 2, "cp": 2}, microbatches=2, attention="ring", recompute="full", zero=1)
    assert found.ok, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("way", FORMS)
def test_a_pinned_way_is_that_of_every_layer(way: Any) -> None:
    case = prepared(lambda: llama(4, layers=1))
    job = compile_pinned(case.model, 2, sample=case.batch, mesh={"cp": 2}, attention=way)
    (choice,) = {node.choices["cp"] for block in job.plan.blocks for node in block.nodes if "attention" in node.op}
    assert FORMS[way] in choice
    assert job.plan.attention == [f"{way} (LlamaDecoderLayer)"]
    order = "neighbouring parts" if way == "heads" else "pairs of parts"
    assert f"attention over cp, in {order}: {way} (LlamaDecoderLayer)" in str(job.plan)
    again = compile_pinned(case.model, 2, sample=case.batch, plan=job.plan)
    assert again.source(0) == job.source(0)


def test_heads_that_do_not_divide() -> None:
    case = prepared(lambda: llama(4, layers=1))
    with pytest.raises(ShardingError, match=r"attention='heads' can't be split over cp 8; .* heads 8 of queries and 4"):
        compile_pinned(case.model, 8, sample=case.batch, mesh={"cp": 8}, attention="heads")


# --- attention that a model writes out -----------------------------------------------------------------

WIDTH, HEADS = 16, 4
KINDS = ("softcap", "relative bias", "alibi", "sinks", "outer mask")


class Written(nn.Module):
    """Products, a mask and a softmax; one head of keys for all of queries, as what is gathered should be that alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH // HEADS, bias=False)
        self.bias = nn.Embedding(8, HEADS) if kind == "relative bias" else None
        self.sinks = nn.Parameter(torch.randn(HEADS)) if kind == "sinks" else None

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, length, _ = x.shape
        h = self.norm(x)
        q = self.q(h).view(rows, length, HEADS, -1).transpose(1, 2)
        k, v = self.kv(h).view(rows, length, 1, -1).transpose(1, 2).chunk(2, -1)
        scores = self.changed(q @ k.mT / math.sqrt(WIDTH // HEADS), mask)
        if self.sinks is None:
            shares = scores.softmax(-1)
        else:
            sinks = self.sinks.view(1, -1, 1, 1).expand(rows, -1, length, 1)
            shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return x + self.o((shares @ v).transpose(1, 2).reshape(rows, length, WIDTH))

    def changed(self, scores: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(scores.shape[-1], device=scores.device)
        behind = places[:, None] - places[None, :]
        if self.kind == "outer mask":
            return scores + mask
        if self.kind == "softcap":
            scores = torch.tanh(scores / 5.0) * 5.0
        if self.bias is not None:
            scores = scores + self.bias(behind.clamp(0, 7)).permute(2, 0, 1)
        if self.kind == "alibi":
            scores = scores - behind * (0.5 ** (places[:HEADS] + 1))[:, None, None]
        return scores.masked_fill(behind < 0, -math.inf)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Written(kind) for kind in KINDS)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(ids)
        mask = torch.full((ids.shape[1],) * 2, -1e9, dtype=x.dtype, device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).view(-1, VOCABULARY), targets.view(-1))


@pytest.mark.slow
def test_written_out_attention_gathers_keys_and_values_alone() -> None:
    with Float64():
        case = prepared(lambda: Case(Model(), (tokens(2), tokens(2).roll(-1, 1))))
        found = verified(case, {"cp": 4}, cp_order="paired")
        job = compile_pinned(case.model, 4, sample=case.batch, mesh={"cp": 4}, cp_order="contiguous")
    assert found.ok, str(found)
    exchanged = re.findall(r"(\w+) = (?:all_gather|all_to_all|all_reduce|reduce_scatter)\(", job.source(0))
    assert exchanged == ["kv"] * len(KINDS)
