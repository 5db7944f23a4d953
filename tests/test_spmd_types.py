"""Emitted programs pass the checker of ``spmd_types``, mistakes in their communication don't.

How, and what is inferred and what declared: tests/spmd_check.py.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from spmd_types import SpmdTypeError

import autopar
from tests import models
from tests.fast_cluster import FAST
from tests.moe_models import family
from tests.pinned import compile_pinned
from tests.spmd_check import check

pytestmark = [  # both are spmd_types' own
    pytest.mark.filterwarnings("ignore:`torch.distributed._functional_collectives:FutureWarning"),
    pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning"),
]

BY_HAND = """
import torch
from torch import nn

from autopar.runtime import I, P, R, S, Input, Parameter, Program, Total
from autopar.runtime import all_reduce, convert, cross_entropy_sharded, declare, embedding_sharded

aten = torch.ops.aten


class Stage(nn.Module):
    def __init__(self, axes):
        super().__init__()
        self.axes = axes
        declare(self, "embed.weight", (16, 8), torch.float32)
        declare(self, "norm.weight", (8,), torch.float32)
        declare(self, "gate_up.weight", (24, 8), torch.float32)
        declare(self, "down.weight", (8, 12), torch.float32)

    def totals(self, ids, labels):
        return (aten.sum(labels != -100),)

    def forward(self, ids, labels, count):
        tp = self.axes["tp"]
        h = embedding_sharded(self.embed.weight, ids, tp)
        h = all_reduce(h, tp, src=P, dst=I)
        x = aten.rms_norm(h, [8], self.norm.weight)
        x = convert(x, tp, src=I, dst=R)
        gate, up = aten.split(aten.linear(x, self.gate_up.weight), 12, dim=2)
        x = aten.silu(gate) * up
        x = aten.linear(x, self.down.weight)
        x = all_reduce(x, tp, src=P, dst=I)
        h = h + x
        h = convert(h, tp, src=I, dst=R)
        logits = aten.linear(h, self.embed.weight)
        logits = aten.reshape(logits, [24, 16])
        loss = cross_entropy_sharded(logits, aten.reshape(labels, [24]), tp)
        return loss / count


PROGRAM = Program(
    stage=0,
    stages=1,
    mesh={"pp": 1, "dp": 2, "tp": 2},
    microbatches=1,
    receives=(),
    inputs=(Input("ids", "ids", (8, 6), "int64", 0), Input("labels", "labels", (8, 6), "int64", 0)),
    totals=(Total("count", ("dp",)),),
    sends=(),
    parameters=(
        Parameter("embed.weight", (16, 8), (32, 8), "float32", types={"tp": "S(0)"}, reduce=("dp",)),
        Parameter("norm.weight", (8,), (8,), "float32", reduce=("dp",)),
        Parameter("gate_up.weight", (24, 8), (48, 8), "float32", types={"tp": "S(0,2)"}, reduce=("dp",)),
        Parameter("down.weight", (8, 12), (8, 24), "float32", types={"tp": "S(1)"}, reduce=("dp",)),
    ),
    loss_axes=("dp",),
)
"""

MISTAKES = {
    "a dropped all-reduce": ("        x = all_reduce(x, tp, src=P, dst=I)\n", ""),
    "a dropped all-reduce before a norm": ("        h = all_reduce(h, tp, src=P, dst=I)\n", ""),
    "an all-reduce to R where the residual is I": (
        "x = all_reduce(x, tp, src=P, dst=I)",
        "x = all_reduce(x, tp, src=P, dst=R)",
    ),
    "an all-reduce of what is whole": (
        "x = convert(x, tp, src=I, dst=R)",
        "x = all_reduce(x, tp, src=P, dst=R)",
    ),
    "an all-reduce of what is split": ("x = aten.silu(gate) * up", "x = all_reduce(up, tp, src=P, dst=R)"),
    "an all-reduce on the wrong axis": (
        "x = all_reduce(x, tp, src=P, dst=I)",
        'x = all_reduce(x, self.axes["dp"], src=P, dst=I)',
    ),
    "a forgotten convert": ("        x = convert(x, tp, src=I, dst=R)\n", ""),
    "a nonlinear op on a pending sum": (
        "x = aten.linear(x, self.down.weight)",
        "x = aten.relu(aten.linear(x, self.down.weight))",
    ),
    "a bias added on every rank": (
        "x = aten.linear(x, self.down.weight)",
        "x = aten.linear(x, self.down.weight) + self.norm.weight",
    ),
    "a weight split along the wrong dim": (
        '(8, 24), "float32", types={"tp": "S(1)"}',
        '(8, 24), "float32", types={"tp": "S(0)"}',
    ),
    "a fused weight split as one": ('"S(0,2)"', '"S(0)"'),
    "a fused weight in another order": ('"S(0,2)"', '"S(0,4)"'),
    "a tensor split twice over one axis": (
        "x = convert(x, tp, src=I, dst=R)",
        "x = convert(x, tp, src=I, dst=S(0))",
    ),
    "a gradient that nobody sums": (
        '"norm.weight", (8,), (8,), "float32", reduce=("dp",)',
        '"norm.weight", (8,), (8,), "float32"',
    ),
    "a gradient summed too often": (
        '"norm.weight", (8,), (8,), "float32", reduce=("dp",)',
        '"norm.weight", (8,), (8,), "float32", reduce=("dp", "tp")',
    ),
    "the count of one rank": ('Total("count", ("dp",))', 'Total("count", ())'),
    "a loss that is R": (
        "return loss / count",
        'return all_reduce(loss, self.axes["dp"], src=P, dst=R) / count',
    ),
    "a loss said to be whole": ('loss_axes=("dp",)', "loss_axes=()"),
}


def test_a_program_by_hand_is_well_typed() -> None:
    check(BY_HAND)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name: str) -> None:
    before, after = MISTAKES[name]
    assert BY_HAND.count(before) == 1
    with pytest.raises(SpmdTypeError):
        check(BY_HAND.replace(before, after))


TYPE = r"[IRP]|S\([\d, ]+\)"
COLLECTIVE = re.compile(rf"(\w+)\((\S+), (dp|tp), src=({TYPE}), dst=({TYPE})\)")
MODELS = {
    "llama": lambda: models.llama(8, layers=2),
    "gpt2": lambda: models.gpt2(8, layers=2, dropout=0.1),
    "nano_gpt": lambda: models.nano_gpt(8),
    "encoder": lambda: models.encoder(8),
    "nano_gpt in chunks": lambda: models.nano_gpt(8),
}
HEAD_CHUNKS = {"nano_gpt in chunks": 3}


@cache
def emitted(name: str) -> str:
    """The text for dp 2 x tp 2, with arithmetic so slow that even these models are worth splitting."""
    h100 = autopar.Cluster.load("h100")
    rates = dict.fromkeys(h100.device.flops_per_second, 7e12)
    device = replace(h100.device, launch_seconds=0.0, ramp_seconds=0.0, flops_per_second=rates)
    link = replace(h100.intra_node, latency_seconds=0.0, call_seconds=0.0)
    cluster = replace(h100, device=device, intra_node=link)
    case = MODELS[name]()
    job = compile_pinned(
        case.model,
        4,
        sample=case.batch,
        loss=case.loss,
        mesh={"dp": 2, "tp": 2},
        microbatches=2,
        cluster=cluster,
        head_chunks=HEAD_CHUNKS.get(name, 1),
    )
    return job.source(0)


@pytest.mark.parametrize("name", MODELS)
def test_emitted_programs_are_well_typed(name: str) -> None:
    text = emitted(name)
    assert "reduce_scatter(" in text or "all_reduce(" in text
    check(text)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["all_gather", "ring", "heads"])
def test_programs_over_a_split_sequence_are_well_typed(way: Any) -> None:
    case = models.llama(4, layers=1)
    job = compile_pinned(case.model, 4, sample=case.batch, mesh={"cp": 2, "tp": 2}, attention=way)
    check(job.source(0))


EXPERTS: list[tuple[str, dict[str, int], str]] = [
    ("mixtral", {"dp": 2, "tp": 2, "ep": 4}, "exchange=[ep, tp]"),
    ("qwen2_moe", {"dp": 4, "ep": 4}, "dispatch_start("),
    ("mixtral", {"dp": 2, "ep": 2}, "filter=[ep]"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh", "way"), EXPERTS, ids=str)
def test_programs_with_experts_are_well_typed(name: str, mesh: dict[str, int], way: str) -> None:
    config = {"layers": 1, "output_router_logits": False, "sliding_window": None}
    case = models.prepared(lambda: family(name, 16, **config), torch.float32)
    gpus = mesh["dp"] * mesh.get("tp", 1)
    cluster = autopar.Cluster.load("cpu") if "filter" in way else FAST
    text = compile_pinned(case.model, gpus, sample=case.batch, mesh=mesh, cluster=cluster).source(0)
    assert way in text
    check(text)
    if "filter" in way:  # each rank would add the terms of its own experts alone
        wrong = re.sub(r"reduce_scatter\((\w+), ep, src=P, dst=S\(0\)\)", r"convert(\1, ep, src=R, dst=S(0))", text)
        assert wrong != text
        with pytest.raises(SpmdTypeError):
            check(wrong.replace("import torch\n", "import torch\nfrom autopar.runtime import convert\n", 1))


def mistake(function: str, x: str, axis: str, src: str, dst: str) -> str:
    """The call without its communication forward or backward, in the same shapes; "" where there is none."""
    if function in ("all_reduce", "convert") and not dst.startswith("S"):
        return x
    if function == "reduce_scatter":
        return f"convert({x}, {axis}, src=R, dst={dst})"
    if function == "all_gather":
        return f"all_gather({x}, {axis}, src={src}, dst={'I' if dst == 'R' else 'R'})"
    return ""


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_forgotten_communication_is_caught(name: str) -> None:
    text = emitted(name).replace("import torch\n", "import torch\nfrom autopar.runtime import I, R, convert\n", 1)
    kinds, missed = set(), []
    for call in COLLECTIVE.finditer(text):
        wrong = mistake(*call.groups())
        if not wrong:
            continue
        kinds.add(call[1])
        try:
            check(text[: call.start()] + wrong + text[call.end() :])
            missed.append(call[0])
        except SpmdTypeError:
            pass
    assert not missed
    assert kinds & {"all_reduce", "reduce_scatter"}
