"""Captured graphs run op by op, beside the model under ``torch.autocast``."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx

from autopar.batch import flatten
from autopar.capture import Flat, capture, loss_of
from autopar.graph import INPUT_CALL, Meta, Model, Value, info
from autopar.passes.fold import fold
from autopar.passes.functionalize import functionalize
from autopar.passes.mixed_precision import LOWER, mixed_precision
from tests.models import Case

Result = tuple[Tensor, dict[str, Tensor]]
"""Loss and gradients by name."""


def under_autocast(case: Case, precision: str) -> Result:
    """The model itself."""
    model = copy.deepcopy(case.model)
    tensors, structure = flatten(case.batch)
    args, kwargs = structure.call_arguments(tensors)
    with torch.autocast("cpu", LOWER.get(precision), enabled=precision in LOWER):
        loss = loss_of(model(*args, **kwargs), case.batch, case.loss)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def lowered(case: Case, precision: str, device: str = "cpu") -> Flat:
    """The flat graph with its casts; means stay means."""
    flat = functionalize(capture(case.model, case.batch, loss=case.loss, autocast=LOWER.get(precision)))
    return mixed_precision(flat, device, precision)


def folded(case: Case, precision: str) -> Model:
    return fold(lowered(case, precision))


def weights(case: Case) -> dict[str, Tensor]:
    """Leaves of its own, by every name."""
    copied = copy.deepcopy(case.model)
    named = [*copied.named_parameters(remove_duplicate=False), *copied.named_buffers(remove_duplicate=False)]
    return dict(named)


def run_flat(flat: Flat, case: Case) -> Result:
    """Loss and gradients of a flat graph; every result has the dtype that its metadata say."""
    full, batch = weights(case) | flat.constants, flatten(case.batch)[0]
    paths = {item.name: item.path for item in flat.inputs}
    env: dict[fx.Node, Any] = {}
    for node in flat.graph.nodes:
        if node.op == "placeholder":
            data = info(node)
            env[node] = batch[paths[data.name]] if data.role == "input" else full[data.name]
    for node in flat.nodes:
        env[node] = _run(node, env)
    return _differentiated(env[flat.loss], full)


def run_folded(model: Model, case: Case) -> Result:
    """The same of a folded graph; parameters with a master are cast from it."""
    full, batch = weights(case), flatten(case.batch)[0]
    values: dict[Value, Any] = {Value(INPUT_CALL, k): batch[item.path] for k, item in enumerate(model.inputs)}
    for index, call in enumerate(model.calls):
        block = model.block_of(call)
        stored = [full[n].to(info(p).meta.dtype) for n, p in zip(call.parameters, block.parameters, strict=True)]
        given = [*stored, *(values[v] for v in call.operands)]
        env: dict[fx.Node, Any] = dict(zip((*block.parameters, *block.inputs), given, strict=True))
        for node in block.ops:
            env[node] = _run(node, env)
        values |= {Value(index, k): env[node] for k, node in enumerate(block.outputs)}
    return _differentiated(values[model.loss], full)


def _run(node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    assert callable(node.target)
    made = node.target(*args, **kwargs)
    tensors = made if isinstance(made, list | tuple) else [made]
    metas = [Meta(tuple(t.shape), t.dtype) for t in tensors]
    assert [(m.shape, m.dtype) for m in metas] == [(m.shape, m.dtype) for m in info(node).outputs], node
    return made


def _differentiated(loss: Tensor, full: dict[str, Tensor]) -> Result:
    loss.backward()
    first = {id(t): name for name, t in reversed(full.items())}
    return loss.detach(), {n: t.grad for n, t in full.items() if t.grad is not None and first[id(t)] == n}
