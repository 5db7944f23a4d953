"""In which order the ranks of ``cp`` hold a sequence, and what they compute of all of it."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.errors import ShardingError
from autopar.graph import Model, info, op_name, operands, where
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.planner.spreading import Spread, sequence_lengths
from autopar.rules import lookup
from autopar.rules.attention import is_causal, way
from autopar.rules.base import Op
from autopar.rules.contraction import Product
from autopar.rules.experts import GROUPED_BIAS


def orders(spread: Spread, mesh: Mesh, options: Options) -> list[Mesh]:
    """``mesh`` in every order worth trying for the model that ``spread`` is of: with neighbouring parts, with pairs
    from both ends, or first the one and then the other.

    In causal attention a position's work grows with its place, so that the rank with the last of neighbouring parts
    has twice the average; pairs have equal work. Attention by heads is equal anyway. Raises ShardingError where a
    sequence doesn't divide.
    """
    model, lengths = spread.model, sequence_lengths(spread)
    _check_lengths(model, mesh, lengths, 2 if options.cp_order == "paired" else 1)
    pairs_fit = all(length % (2 * mesh.cp) == 0 for length in lengths)
    masked = _masked_experts(model) if "cp" in mesh.expert_axes else None
    numbered = _numbered_experts(model) if "cp" in mesh.expert_axes else None
    if numbered is not None:
        raise ShardingError(
            f"{where(numbered)}: weights of several choices of a token, by which rows are multiplied before experts "
            "compute, are told apart by numbers of experts, which can't be split with sequences. Use an ep without cp, "
            "or multiply what experts give"
        )
    if masked is not None and options.cp_order == "paired":
        raise ShardingError(
            f"{where(masked)}: a product with the weights of all experts at once, which lie on cp as neighbours; with "
            "cp_order='paired' what they are multiplied with would not. Use cp_order='contiguous', or an ep without cp"
        )
    causal = any(is_causal(Op.of(node)) for block in model.blocks for node in block.ops)
    both = options.cp_order == "auto" and causal and pairs_fit and options.attention != "heads" and masked is None
    paired = [True, False] if both else [options.cp_order == "paired"]
    return [replace(mesh, paired=order) for order in paired]


def _masked_experts(model: Model) -> fx.Node | None:
    """A product, of values with a dim of experts, with a weight per expert; None where rows are sent to experts."""
    for node in (node for block in model.blocks for node in block.ops):
        op, rule = Op.of(node), lookup(op_name(node))
        if isinstance(rule, Product) and any(_is_parameter(operands(node)[i]) for i in rule.expert_operands(op)):
            return node
    return None


def _numbered_experts(model: Model) -> fx.Node | None:
    """An op that takes something of each expert that is no parameter."""
    biases = (node for block in model.blocks for node in block.ops if op_name(node) == GROUPED_BIAS)
    return next((node for node in biases if not _is_parameter(operands(node)[1])), None)


def _is_parameter(node: fx.Node) -> bool:
    """A parameter, or a view or cast of one."""
    while node.op == "call_function" and len(operands(node)) == 1:
        node = operands(node)[0]
    return info(node).role == "parameter"


def ways_of_attention(model: Model) -> list[str]:
    """How each block attends over ``cp``, once that is solved: ``ring (LlamaDecoderLayer)``."""
    found: dict[str, dict[str, None]] = {}
    for block in model.blocks:
        for node in block.ops:
            choice = info(node).choices.get("cp")
            if choice is not None and (taken := way(Op.of(node), choice)):
                found.setdefault(taken, {})[block.name] = None
    return [f"{taken} ({', '.join(names)})" for taken, names in found.items()]


def whole_sequences(model: Model) -> list[str]:
    """The products that every rank of ``cp`` computes of whole sequences, and where, once ``cp`` is solved.

    What can't be split along a sequence (a recurrence, a convolution over positions) is gathered, and so are they.
    """
    found: dict[str, None] = {}
    for node in (node for block in model.blocks for node in block.ops):
        choice = info(node).choices.get("cp")
        if choice is None or not info(node).meta.needs_grad or not all(k.is_whole for k in choice.operands):
            continue
        activations = [operand for operand in operands(node) if info(operand).role not in ("parameter", "buffer")]
        if choice.result.is_whole and activations and lookup(op_name(node)).flops(Op.of(node)):
            found[where(node)] = None
    return list(found)


def _check_lengths(model: Model, mesh: Mesh, lengths: dict[int, fx.Node], parts: int) -> None:
    sequences = [item for item in reversed(model.inputs) if item.seq_dim is not None]
    given = {item.meta.shape[item.seq_dim or 0]: item.path for item in sequences}
    for length, node in lengths.items():
        if length % (parts * mesh.cp):
            fits = [n for n in range(1, length + 1) if length % (parts * n) == 0]
            what = "" if parts == 1 else " in pairs (cp_order='paired')"
            place = f"batch input {given[length]!r}" if length in given else where(node)
            raise ShardingError(
                f"{place} has sequences of {length} positions, which cp={mesh.cp} doesn't divide{what}; "
                f"cp may be one of {fits}, or pad the sequences to a multiple of {parts * mesh.cp}"
            )
