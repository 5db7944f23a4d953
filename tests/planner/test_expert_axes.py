"""What the axes that split tokens leave whole, and what those that hold experts split."""

from __future__ import annotations

import contextlib

import pytest

import autopar
from autopar.errors import ShardingError
from autopar.graph import Model, info
from autopar.spmd import I, S, Type
from tests.fast_cluster import FAST
from tests.models import make
from tests.moe_models import family
from tests.pinned import compile_pinned


def stored(model: Model, axis: str) -> dict[str, Type]:
    """The type of every trained parameter on an axis, by name."""
    found = {}
    for call in model.calls:
        for name, node in zip(call.parameters, model.block_of(call).parameters, strict=True):
            if not model.parameters[name].is_buffer:
                found[name] = info(node).types()[axis]
    return found


def lowered(name: str, gpus: int, mesh: dict[str, int], experts: int = 8) -> Model:
    case = family(name, 8, experts=experts)
    return compile_pinned(case.model, gpus, sample=case.batch, mesh=mesh, microbatches=1, cluster=FAST).lowered


def test_only_experts_are_split() -> None:
    """GShard's layout (Lepikhin et al., ICLR 2021, section 3.3)."""
    for name, kind in stored(lowered("mixtral", 4, {"dp": 4, "ep": 4}), "ep").items():
        assert kind == (S(0) if ".experts." in name else I), name


def test_biases_go_with_their_experts() -> None:
    model = lowered("gpt_oss", 4, {"dp": 2, "cp": 2, "ep": 4})
    for axis in ("ep", "cp"):
        for name, kind in stored(model, axis).items():
            assert kind == (S(0) if ".experts." in name else I), (axis, name)


def test_between_layers_a_sequence_is_split() -> None:
    case = make("llama", 8)
    job = compile_pinned(case.model, 2, sample=case.batch, loss=case.loss, mesh={"cp": 2}, cluster=FAST)
    assert set(stored(job.lowered, "cp").values()) == {I}
    layers = [block for block in job.lowered.blocks if "Layer" in block.name]
    assert layers
    for block in layers:
        hidden = [node for node in block.inputs if info(node).meta.needs_grad]
        assert {info(node).types()["cp"] for node in (*hidden, *block.outputs)} == {S(1)}


def test_a_model_without_experts() -> None:
    case = make("mlp", 8)
    with pytest.raises(ShardingError, match="has no product with a weight per expert; leave ep out"):
        autopar.plan(case.model, 2, sample=case.batch, loss=case.loss, mesh={"dp": 2, "ep": 2}, cluster=FAST)


def test_experts_that_do_not_divide() -> None:
    with pytest.raises(ShardingError, match=r"6 experts, which don't divide over ep 4; they do over \[1, 2, 3, 6\]"):
        lowered("mixtral", 4, {"dp": 4, "ep": 4}, experts=6)


def test_a_sequence_that_does_not_divide() -> None:
    case = make("llama", 6)
    length = case.batch["input_ids"].shape[1]
    with pytest.raises(ShardingError, match=f"sequences of {length} positions, which cp=5 doesn't divide"):
        autopar.plan(case.model, 5, sample=case.batch, mesh={"cp": 5}, cluster=FAST)


@pytest.mark.parametrize(("attention", "fits"), [("auto", True), ("heads", False)])
def test_heads_are_left_for_tp(attention: str, fits: bool) -> None:
    """Of four heads of keys, a split over cp 2 leaves two, which tp 4 can't split."""
    with pytest.raises(ShardingError, match="attention may be") if not fits else contextlib.nullcontext():
        case = make("llama", 8)
        mesh = {"cp": 2, "tp": 4}
        plan = compile_pinned(case.model, 8, sample=case.batch, mesh=mesh, cluster=FAST, attention=attention).plan
        assert all(not text.startswith("heads") for text in plan.attention)
