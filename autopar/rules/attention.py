"""Attention: batch and heads may be split, and queries; with causal or block-by-block forms, positions of all.

On an axis that splits a sequence there are three ways, which the planner prices: ``"all_gather"`` (queries split, keys
and values whole; where the mask is causal that needs a form that knows where its queries stand), ``"ring"`` (all split,
keys and values go round), ``"heads"`` (all-to-alls before and after; S. A. Jacobs et al., "DeepSpeed Ulysses", 2023).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from autopar.graph import AxisRef, Choice, Meta
from autopar.rules.base import Communication, Given, Local, Op, Rule
from autopar.rules.spec import Letters, Spec
from autopar.spmd import R, S, Type

OFFSET: Final = "attention_with_offset"
RING: Final = "ring_attention"
WAYS: Final = ("all_gather", "ring", "heads")
_SDPA: Final = "aten.scaled_dot_product_attention.default"
_OFFSET_BLOCKS: Final = 4


def is_causal(op: Op) -> bool:
    """Whether a query sees no later key because the op says so, and not a mask."""
    if op.name == _SDPA:
        return bool(op.arg(5, "is_causal", False))
    return op.name == OFFSET or (op.name == RING and bool(op.kwargs.get("causal")))


def is_attention(op: Op) -> bool:
    return op.name in RULES


def heads(op: Op) -> tuple[int, int] | None:
    """Heads of queries and of keys, which a split by heads has to divide; None for an op that is no attention."""
    if op.name not in RULES or len(op.operands[0].shape) < 4:
        return None
    return op.operands[0].shape[1], op.operands[1].shape[1]


def way(op: Op, choice: Choice) -> str:
    """Which of :data:`WAYS` splits positions or heads under ``choice``; "" for another op or another split.

    ``op`` may be local already.
    """
    if op.name not in RULES or not choice.result.is_shard:
        return ""
    rank = len(op.result.shape)
    if choice.form == RING:
        return "ring"
    if choice.result.dim == rank - 2:
        return "all_gather"
    return "heads" if rank > 3 and choice.result.dim == rank - 3 else ""


def offers(op: Op, choice: Choice, splits_sequence: bool, wanted: str) -> bool:
    """Whether attention may be split so, where ``wanted`` is one of :data:`WAYS` or "auto"; True for other ops.

    On an axis that doesn't split a sequence, queries are split only where that takes no form.
    """
    if op.name != _SDPA:
        return True
    if not splits_sequence:
        return not choice.form
    return wanted in ("auto", way(op, choice))


def explain(op: Op) -> str:
    """What an attention's split depends on."""
    query, key = op.operands[0].shape, op.operands[1].shape
    counts = heads(op)
    of_heads = f", heads {counts[0]} of queries and {counts[1]} of keys" if counts else ""
    dropped = f", dropout {op.arg(4, 'dropout_p')}" if op.arg(4, "dropout_p", 0.0) else ""
    return f"it has {query[-2]} queries and {key[-2]} keys{of_heads}{dropped}"


def _line_of(op: Op) -> str:
    """Key and value heads may be fewer than query heads (grouped): a split keeps groups together.

    Where the result depends on the positions of queries they stay as they are; a ring's mask has the keys of all ranks.
    """
    q = "q!" if op.name != _SDPA or is_causal(op) else "q"
    lead = "... h*" if len(op.operands[0].shape) > 3 else "..."
    mask = f"... {q} t!" if lead == "..." or _rank(op, 3) < 3 else f"... h {q} t!"
    return f"{lead} {q} d!, {lead} k! d!, {lead} k! e!, {mask} -> {lead} {q} e!"


def _rank(op: Op, operand: int) -> int:
    return len(op.operands[operand].shape) if operand < len(op.operands) else 0


def _forms(op: Op) -> Iterable[Choice]:
    """By positions; dropout would have to be drawn alike for a pair of positions on any rank: it isn't offered."""
    q, k, *masks = op.operands[:2] + op.operands[3:]
    rank = len(q.shape)
    if op.arg(4, "dropout_p", 0.0) or rank not in (3, 4):
        return
    rows = S(rank - 2)
    causal = is_causal(op)
    if causal:
        yield Choice((rows, R, R), rows, OFFSET)
    if not causal or q.shape[-2] == k.shape[-2]:
        yield Choice((rows, rows, rows, *(_of_mask(mask) for mask in masks)), rows, RING)


def _of_mask(mask: Meta) -> Type:
    """By rows, where it has any."""
    rank = len(mask.shape)
    return S(rank - 2) if rank > 1 and mask.shape[-2] > 1 else R


def _local(op: Op, choice: Choice, size: int, axis: str) -> Local:
    if not choice.form:
        return Local.same()
    scale = op.arg(6, "scale")
    named = {"scale": scale} if scale is not None else {}
    if choice.form == RING:
        mask = {"mask": Given(3, "attn_mask")} if len(op.operands) > 3 else {}
        named = mask | ({"causal": True} if is_causal(op) else {}) | named
    return Local({3: AxisRef(axis)}, named, target=choice.form, keep=3)


def _flops(op: Op, letters: Letters) -> int:
    """Two products over all pairs of query and key; a causal mask halves them."""
    count = _pairs(op) * op.operands[0].shape[-2] * op.operands[1].shape[-2]
    return count // 2 if is_causal(op) else count


def _pairs(op: Op) -> int:
    """Operations per pair of query and key."""
    *lead, _, width = op.operands[0].shape
    count = 2 * (width + op.operands[2].shape[-1])
    for extent in lead:
        count *= extent
    return count


def _local_flops(op: Op, letters: Letters) -> int:
    """Of a rank: of the one with the most to do, where causal work isn't equal."""
    ref = _axis(op)
    queries, keys = op.operands[0].shape[-2], op.operands[1].shape[-2]
    seen = keys * ref.size if op.name == RING else keys
    if not is_causal(op):
        return _pairs(op) * queries * seen
    return round(_pairs(op) * queries * seen / 2 * (1.0 if ref.paired else _busiest(ref.size)))


def _busiest(size: int) -> float:
    """Causal work of the last of ``size`` neighbouring parts of a sequence, in that of the average part."""
    return 2 - 1 / size


@dataclass(frozen=True)
class _Attention(Spec):
    """A ring's messages run beside its blocks: keys and values forward, the same and their gradients backward."""

    def communication(self, op: Op, choice: Choice, size: int) -> Communication:
        return _messages(op, choice, size) * (_ranks(op, size) - 1)

    def communication_back(self, op: Op, choice: Choice, size: int) -> Communication:
        return _messages(op, choice, size) * (2 * _ranks(op, size) - 1)

    def overlaps(self, op: Op, choice: Choice) -> bool:
        return choice.form == RING

    def is_fused(self, op: Op) -> bool:
        return True

    def factors(self, op: Op) -> tuple[int, ...]:
        """Its backward has four products, of which each is as large as one of the forward's two."""
        return super().factors(op)[:2]

    def imbalance(self, op: Op, choice: Choice, size: int) -> float:
        return _busiest(size) if is_causal(op) and choice.form in (OFFSET, RING) else 1.0

    def pieces(self, op: Op, choice: Choice, size: int) -> int:
        """A ring's blocks; queries in pairs of parts, each with what is before it and with itself."""
        if op.name == RING or choice.form == RING:
            return _ranks(op, size)
        if op.name == OFFSET and not _axis(op).paired:
            return _OFFSET_BLOCKS // 2
        return _OFFSET_BLOCKS if OFFSET in (op.name, choice.form) else 1


def _messages(op: Op, choice: Choice, size: int) -> Communication:
    """One rank's keys and values."""
    return [("send", sum(meta.bytes for meta in op.operands[1:3]) // size)] if choice.form == RING else []


def _ranks(op: Op, size: int) -> int:
    """The axis' size, which a local call knows itself."""
    return _axis(op).size if op.name == RING else size


def _axis(op: Op) -> AxisRef:
    """That of a local call."""
    ref = op.args[3]
    assert isinstance(ref, AxisRef)
    return ref


RULES: dict[str, Rule] = {
    _SDPA: _Attention(_line_of, forms=_forms, local=_local, flop_count=_flops),
    OFFSET: _Attention(_line_of, flop_count=_local_flops),
    RING: _Attention(_line_of, flop_count=_local_flops),
}
