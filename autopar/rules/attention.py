"""Attention: batch and heads may be split, and queries too unless the mask depends on their position."""

from __future__ import annotations

from autopar.rules.base import Op, Rule
from autopar.rules.spec import Letters, Spec


def _attention(op: Op) -> str:
    """Key and value heads may be fewer than query heads (grouped): a split keeps groups together."""
    q = "q!" if op.arg(5, "is_causal", False) else "q"
    lead = "... h*" if len(op.operands[0].shape) > 3 else "..."
    mask = f"... {q} k!" if lead == "..." or _rank(op, 3) < 3 else f"... h {q} k!"
    return f"{lead} {q} d!, {lead} k! d!, {lead} k! e!, {mask} -> {lead} {q} e!"


def heads(op: Op) -> tuple[int, int] | None:
    """Heads of queries and of keys, which a split by heads has to divide; None for an op that is no attention."""
    if op.name not in RULES or len(op.operands[0].shape) < 4:
        return None
    return op.operands[0].shape[1], op.operands[1].shape[1]


def _rank(op: Op, operand: int) -> int:
    return len(op.operands[operand].shape) if operand < len(op.operands) else 0


def _flops(op: Op, letters: Letters) -> int:
    """Two products over all pairs of query and key; a causal mask halves them."""
    *lead, queries, width = op.operands[0].shape
    *_, keys, value_width = op.operands[2].shape
    count = 2 * queries * keys * (width + value_width)
    for extent in lead:
        count *= extent
    return count // 2 if op.arg(5, "is_causal", False) else count


RULES: dict[str, Rule] = {
    "aten.scaled_dot_product_attention.default": Spec(_attention, flop_count=_flops),
}
