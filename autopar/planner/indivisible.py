"""Why a model can't be computed microbatch by microbatch: the first ops that need more than one microbatch has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.graph import AVERAGED, INPUT_CALL, Choice, Meta, Model, info, op_name, operands, where
from autopar.planner.prices import FORBIDDEN_SECONDS, Prices
from autopar.rules import has_rule, lookup
from autopar.rules.base import Op
from autopar.spmd import P, R, Type

Key = tuple[int, fx.Node | int]
"""(block, node), or (INPUT_CALL, position) for a tensor of the batch."""

_SHOWN = 3


@dataclass
class _Search:
    """``types`` that each value can have without any exchange; None: behind an op that has no choice left."""

    model: Model
    choices: Mapping[Key, Sequence[Choice]]
    prices: Prices
    types: dict[Key, set[Type] | None]


def refusal(model: Model, choices: Mapping[Key, Sequence[Choice]], prices: Prices, microbatches: int) -> str:
    """The text of an error that names the ops where microbatches would have to be exchanged, and what would work."""
    found = _blocked(_Search(model, choices, prices, {}))
    names = [where(node) + ("" if has_rule(op_name(node)) else " (an op autopar has no rule for)") for node, _ in found]
    what = "; ".join(dict.fromkeys(names[:_SHOWN])) or "the loss"
    more = f" (and {len(names) - _SHOWN} more)" if len(names) > _SHOWN else ""
    advice = "Use microbatches=1, or add a rule for the op (CONTRIBUTING: a new op rule)."
    if found and all(has_rule(op_name(node)) for node, _ in found):
        advice = (
            "It computes with several rows of the batch at once, or with what needs all of them. Use microbatches=1."
        )
    if found and all(is_statistic for _, is_statistic in found):
        advice = (
            "It computes with a sum over the batch, of which a microbatch has a part, or moves a buffer. Use "
            "microbatches=1, or statistics='microbatch', under which each computes with its own as accumulating "
            "gradients does."
        )
    start = f"the batch can't be split into {microbatches} microbatches"
    return f"{start}: {what}{more} needs the whole batch at once. {advice}"


def _blocked(search: _Search) -> list[tuple[fx.Node, bool]]:
    """Ops of which no choice fits what their operands can be, and whether one of those is a sum over the batch."""
    model, found = search.model, []
    for key, choices in search.choices.items():
        if key[0] == INPUT_CALL or info(key[1]).role in ("parameter", "buffer"):  # type: ignore[arg-type]
            search.types[key] = {choice.result for choice in choices}
    for number in dict.fromkeys(call.block for call in model.calls):
        for node in model.blocks[number].inputs:
            search.types[number, node] = _incoming(search, number, node)
        for node in model.blocks[number].ops:
            given = [_reachable(search, number, operand) for operand in operands(node)]
            search.types[number, node] = made = _made(search, number, node, given)
            if made == set():
                # As the operands were made: what any microbatch has whole counts as a sum, too, where that is free.
                is_sum = any(search.types[number, operand] == {P} for operand in operands(node))
                found.append((node, is_sum or node.target == AVERAGED))
                search.types[number, node] = None
    return found


def _incoming(search: _Search, number: int, node: fx.Node) -> set[Type] | None:
    """What can come from calls before; nothing changes between calls but totals."""
    model = search.model
    position, types = model.blocks[number].inputs.index(node), set[Type]()
    for source_block, output, target, at in model.edges():
        if (target, at) != (number, position):
            continue
        is_batch = source_block == INPUT_CALL
        source: Key = (INPUT_CALL, output) if is_batch else (source_block, model.blocks[source_block].outputs[output])
        given = search.types.get(source) or set()
        is_table = not is_batch and model.blocks[source_block].kind == "tables"
        types |= _changed(search, info(node).meta, given, from_tables=True) if is_table else given
    return types or None


def _reachable(search: _Search, number: int, node: fx.Node) -> set[Type] | None:
    types = search.types[number, node]
    return None if types is None else _changed(search, info(node).meta, types, from_tables=False)


def _changed(search: _Search, meta: Meta, types: set[Type], from_tables: bool) -> set[Type]:
    """``types``, and what they become without an exchange."""

    def is_free(src: Type, dst: Type) -> bool:
        price = search.prices.change(meta, src, dst, per_step=False, from_tables=from_tables)
        return price is not None and price < FORBIDDEN_SECONDS

    return types | {dst for dst in (R, P) for src in types if is_free(src, dst)}


def _made(search: _Search, number: int, node: fx.Node, given: Sequence[set[Type] | None]) -> set[Type] | None:
    if any(types is None for types in given):
        return None
    op = Op.of(node)
    rule = lookup(op.name)
    return {
        choice.result
        for choice in search.choices[number, node]
        if all(kind in (types or ()) for kind, types in zip(choice.operands, given, strict=True))
        and search.prices.op(node, op, rule, choice) < FORBIDDEN_SECONDS
    }
