"""What a head costs in chunks: one product more in its backward, no logits kept. tests/audit has what passes cost."""

from __future__ import annotations

import pytest
import torch

from autopar.cost_models import compute
from autopar.graph import Choice, op_name, operands
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.planner.build import Built, Request, build
from autopar.planner.op_costs import pass_seconds, work_of
from autopar.planner.vocabulary_costs import VocabularyCost
from autopar.planner.wanted import Wanted
from autopar.rules import RULES
from autopar.rules.base import Op
from autopar.rules.chunked import CHUNKED
from autopar.spmd import R
from tests.codegen.programs import folded
from tests.fast_cluster import FAST
from tests.models import llama

CLASSES, WIDTH, TOKENS = 4096, 32, 4 * 16


def built(mesh: Mesh, vocabulary: str, chunks: int) -> Built:
    with torch.device("meta"):
        case = llama(8, layers=2, vocabulary=CLASSES)
    wanted = Wanted("1f1b", vocabulary)
    return build(folded(case), Request(mesh, 2, FAST, wanted, Options(head_chunks=chunks)))


def cost(vocabulary: str, chunks: int) -> VocabularyCost:
    found = built(Mesh(pp=2), vocabulary, chunks).pipeline.vocabulary
    assert found is not None
    return found


@pytest.mark.parametrize("vocabulary", ["vocab-1", "vocab-2", "naive"])
def test_a_head_over_the_pipeline(vocabulary: str) -> None:
    whole, chunked = cost(vocabulary, 1), cost(vocabulary, 4)
    again = chunked.pass_seconds - whole.pass_seconds
    tokens, classes = TOKENS // 4, CLASSES // 2
    bytes_ = 4 * (tokens * WIDTH + WIDTH * classes + tokens * classes)
    product = compute.seconds(2 * tokens * WIDTH * classes, bytes_, "float32", FAST.device, tokens * classes)
    assert 4 * product < again < whole.pass_seconds
    assert whole.logits_bytes == 4 * TOKENS * CLASSES // 2
    assert whole.chunk_bytes == 0
    terms = 2 * 4 * TOKENS * WIDTH if vocabulary == "vocab-2" else 0
    assert chunked.logits_bytes == 8 * 4 * TOKENS + terms
    assert chunked.chunk_bytes == 2 * whole.logits_bytes // 4
    assert chunked.logits_bytes + chunked.chunk_bytes < whole.logits_bytes


def test_a_head_on_a_stage() -> None:
    """Its backward has three products, that of a whole one two; both sweep over the logits, beside."""
    (node,) = (n for b in built(Mesh(), "stage", 4).model.blocks for n in b.ops if op_name(n) == CHUNKED)
    whole, op, device = Choice((R,) * len(operands(node)), R), Op.of(node), FAST.device
    forward, backward = pass_seconds(node, op, RULES[CHUNKED], whole, 1, device)
    work = work_of(op, RULES[CHUNKED], whole, 1)
    there, back = (b / device.achievable_memory_bytes_per_second for b in (work.swept_bytes, work.back_swept_bytes))
    assert 0 < there < forward
    assert backward - there - back == pytest.approx(3 * (forward - there))
