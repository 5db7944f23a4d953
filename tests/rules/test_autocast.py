"""The autocast policies are torch's: the names it registers, and on the CPU what every op makes under it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.capture import Flat
from autopar.errors import CaptureError
from autopar.graph import Info, info, op_name, set_info
from autopar.passes.mixed_precision import LOWER, mixed_precision
from autopar.rules.autocast import POLICIES, Policy, policy
from tests.rules.harness import Example, meta_of, replace_tensors, tensors_in
from tests.rules.test_rules import FAMILIES, Family

COMPOSITE = {
    "cpu": {"einsum", "nll_loss_nd", "concat", "concatenate", "_convolution", "pad"},
    "cuda": {"square", "nll_loss_nd", "cross_entropy_loss"},
}
"""Names that torch doesn't register: they are made of ops that it does."""


@pytest.mark.parametrize(("device", "key"), [("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")])
def test_names(device: str, key: str) -> None:
    """What this torch registers for a device type is in the table, and hardly anything else is."""
    names = [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    registered = {n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{n}", key)}
    assert registered - set(POLICIES[device]) == set()
    ours = {"autopar.grouped_linear", "autopar.grouped_bias"}
    assert set(POLICIES[device]) - set(names) == ours, "each other is an op of torch"


def test_composite_ops_have_the_policy_of_what_they_are_made_of() -> None:
    for device, names in COMPOSITE.items():
        assert names <= set(POLICIES[device])
    assert policy("aten.square.default", "cuda", {}) is policy("aten.pow.Tensor_Scalar", "cuda", {}) is Policy.FLOAT32
    assert policy("aten.add.Tensor", "cpu", {}) is policy("transformers.mm.default", "cuda", {}) is Policy.AS_GIVEN
    products = {"ij,jk->ik": Policy.LOWER, "i,i": Policy.LOWER, "ij,j->ij": Policy.AS_GIVEN, "ii->i": Policy.AS_GIVEN}
    assert {e: policy("aten.einsum.default", "cpu", {"equation": e}) for e in products} == products


def flat_of(target: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Flat, fx.Node]:
    graph = fx.Graph()

    def placeholder(x: Tensor) -> fx.Node:
        return set_info(graph.placeholder("x"), Info((meta_of(x),), role="input", name="x"))

    given = replace_tensors((args, kwargs), placeholder)
    node = graph.call_function(target, *given)
    outputs = tensors_in(target(*args, **kwargs))
    set_info(node, Info(tuple(map(meta_of, outputs))))
    return Flat("Op", graph, [node], node, {}, [], {}, {}, 1, {}), node


def run(flat: Flat, values: list[Tensor]) -> list[Tensor]:
    placeholders = [n for n in flat.graph.nodes if n.op == "placeholder"]
    env: dict[fx.Node, Any] = dict(zip(placeholders, values, strict=True))
    for node in flat.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        env[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return tensors_in(env[flat.loss])


DTYPES = [(torch.float32,), (torch.bfloat16,), (torch.bfloat16, torch.float32), (torch.float64,)]
"""Of the operands in turn."""


LATER = ("padded_losses", "chunked_losses")
"""Of ops of the runtime that graphs get once they are cast."""


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.__name__ not in LATER], ids=lambda f: f.__name__)
def test_every_op_on_the_cpu(family: Family) -> None:
    """Value and dtype, bit for bit, for operands of float32, of bfloat16, of both, and of float64."""
    wrong = []
    for example in family():
        for dtypes in DTYPES:
            problem = compare(example, dtypes)
            if problem:
                wrong.append(f"{example} of {dtypes}: {problem}")
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


def compare(example: Example, dtypes: tuple[torch.dtype, ...]) -> str:
    count = iter(range(100))

    def cast(x: Tensor) -> Tensor:
        return x.detach().to(dtypes[next(count) % len(dtypes)]) if x.is_floating_point() else x

    args, kwargs = replace_tensors((example.args, example.kwargs), cast)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(0)
            wanted = tensors_in(example.target(*args, **kwargs))
            flat, node = flat_of(example.target, args, kwargs)
    except (RuntimeError, TypeError, IndexError):
        return ""  # torch itself can't
    wide = any(x.dtype == torch.float32 for x in tensors_in((args, kwargs)))
    short = op_name(node).removeprefix("aten.").removesuffix(".default")
    is_refused = wide and POLICIES["cpu"].get(short) is Policy.INSIDE
    with pytest.raises(CaptureError, match="is cast within") if is_refused else nullcontext():
        mixed_precision(flat, "cpu", "bf16")
    if is_refused:
        return ""
    torch.manual_seed(0)
    found = run(flat, tensors_in((args, kwargs)))
    if [t.dtype for t in found] != [t.dtype for t in wanted]:
        return f"{[t.dtype for t in found]}, under autocast {[t.dtype for t in wanted]}"
    if [m.dtype for m in info(node).outputs] != [t.dtype for t in wanted]:
        return f"noted as {info(node).outputs}"
    equal = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, wanted, strict=True))
    rounds_inside = op_name(node) == "aten.einsum.default"  # autocast casts within it, between its own steps
    return "" if equal or not example.compare or rounds_inside else f"{op_name(node)} makes other values"


def test_lower_precisions_are_those_of_autocast() -> None:
    assert {"bf16": torch.bfloat16, "fp16": torch.float16} == LOWER
