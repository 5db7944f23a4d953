"""mixed_precision: the casts that ``torch.autocast`` would make become ops of the graph.

Guarantees: what the flat graph computes is what the model computes under an autocast of the given precision, on the
given device type; the model's own regions (:class:`~autopar.graph.Autocast`) go before it, the innermost first. After
it no op's dtype depends on a mode. Parameters stay as they are: float32 ones are the masters that an optimizer updates.
Example, bf16: ``linear(x f32, w f32)`` becomes ``linear(to(x, bf16), to(w, bf16))``, a bf16 tensor.

Each op gets casts of its own here, just before it; :mod:`autopar.passes.place_casts` shares and moves them.
(Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3; the policies are in
:mod:`autopar.rules.autocast`.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import fx

from autopar.capture import Flat
from autopar.errors import CaptureError
from autopar.graph import arguments, derive, info, is_aten, is_getitem, is_view, op_name, operands, short_dtype, where
from autopar.rules.autocast import Policy, policy

aten = torch.ops.aten

LOWER: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
_LIKE_FIRST: Final = frozenset({"aten.normal.Tensor_Tensor"})
"""Ops whose results have the dtype of their first operand, where torch's meta kernels name the promoted one."""
"""The lower precision by its name; there is none for "model"."""


def has_autocast(flat: Flat, precision: str) -> bool:
    """Whether anything is to be cast: by ``precision``, or in a region of the model's own."""
    return precision in LOWER or any(region.enabled for node in flat.nodes for region in info(node).autocast)


def mixed_precision(flat: Flat, device: str, precision: str) -> Flat:
    """In place. ``device`` is "cuda" or "cpu", ``precision`` "bf16", "fp16" or "model".

    Raises CaptureError naming the op that autocast refuses, or that can't take what it would be given.
    """
    caster = _Caster(flat, device, LOWER.get(precision))
    for node in flat.nodes:
        caster.add(node)
    flat.nodes = caster.order
    return flat


@dataclass
class _Caster:
    """Goes through the captured ops in order. ``captured`` are the dtypes before anything was cast."""

    flat: Flat
    device: str
    outer: torch.dtype | None
    order: list[fx.Node] = field(default_factory=list)
    captured: dict[fx.Node, torch.dtype] = field(default_factory=dict)
    known: dict[Any, tuple[torch.dtype, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = (n for n in self.flat.graph.nodes if n.op == "placeholder")
        self.captured = {n: info(n).meta.dtype for n in (*named, *self.flat.nodes)}

    def add(self, node: fx.Node) -> None:
        lower = self._lower(node)
        if lower is not None and is_aten(node):
            self._follow(policy(op_name(node), self.device, arguments(node)), node, lower)
        self._retype(node)
        self.order.append(node)

    def _lower(self, node: fx.Node) -> torch.dtype | None:
        """The lower precision of the autocast that the op runs under; None where there is none."""
        for region in reversed(info(node).autocast):
            if region.device in ("", self.device):
                return region.dtype if region.enabled else None
        return self.outer

    def _follow(self, rule: Policy, node: fx.Node, lower: torch.dtype) -> None:
        floats = [n for n in operands(node) if _is_castable(info(n).meta.dtype)]
        if not floats or rule is Policy.AS_GIVEN:
            return
        if rule is Policy.REFUSED:
            raise CaptureError(
                f"{where(node)} is unsafe in {short_dtype(lower)}, and torch.autocast refuses it on {self.device}; use "
                "binary_cross_entropy_with_logits on what goes into the sigmoid, or disable autocast around it"
            )
        if rule is Policy.INSIDE:
            self._refuse_inside(node, lower)
            return
        if rule is Policy.FLOAT32_RESULT:
            _ask_for_float32(node)
            return
        wide = any(info(n).meta.dtype != lower for n in floats)
        widest = torch.float32 if wide else lower
        wanted = {Policy.LOWER: lower, Policy.FLOAT32: torch.float32, Policy.WIDEST: widest}
        self._cast(node, wanted[rule])

    def _refuse_inside(self, node: fx.Node, lower: torch.dtype) -> None:
        """Without a mode, all of its steps are in the operands' dtype: right where that is the lower precision."""
        if all(info(n).meta.dtype == lower for n in operands(node) if _is_castable(info(n).meta.dtype)):
            return
        raise CaptureError(
            f"{where(node)} is cast within by torch.autocast, some of its steps and not others; write torch.autocast"
            f"({self.device!r}, enabled=False) around it, and give it tensors of one dtype"
        )

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> None:
        """Give ``node`` its floating-point operands in ``dtype``."""
        made: dict[fx.Node, fx.Node] = {}

        def taken(operand: fx.Node) -> fx.Node:
            before = info(operand).meta
            if before.dtype == dtype or not _is_castable(before.dtype):
                return operand
            if operand not in made:
                with self.flat.graph.inserting_before(node):
                    cast = self.flat.graph.call_function(aten.to.dtype, (operand, dtype))
                made[operand] = derive(cast, node, outputs=(replace(before, dtype=dtype),), random=False, autocast=())
            return made[operand]

        arguments_: Any = fx.map_arg((node.args, node.kwargs), taken)
        node.args, node.kwargs = arguments_
        self.order += made.values()

    def _retype(self, node: fx.Node) -> None:
        """Write down the dtypes that the op's results have now."""
        data = info(node)
        if is_getitem(node):
            parent: Any = node.args[0]
            data.outputs = (replace(data.meta, dtype=info(parent).outputs[node.args[1]].dtype),)  # type: ignore[index]
        elif any(_is_castable(info(n).meta.dtype) for n in operands(node)):
            dtypes = self._dtypes(node)
            data.outputs = tuple(replace(m, dtype=d) for m, d in zip(data.outputs, dtypes, strict=True))

    def _dtypes(self, node: fx.Node) -> tuple[torch.dtype, ...]:
        if self._only_moves(node) or op_name(node) in _LIKE_FIRST:
            return (info(operands(node)[0]).meta.dtype,)
        key = (node.target, _freeze((node.args, node.kwargs)))
        if key not in self.known:
            is_cast = any(self.captured.get(n) != info(n).meta.dtype for n in operands(node))
            self.known[key] = _computed_dtypes(node, is_cast)
        return self.known[key]

    def _only_moves(self, node: fx.Node) -> bool:
        """Whether it is a view by its shape alone: no run on contiguous memory would tell more."""
        given = operands(node)
        if not is_view(node) or len(given) != 1 or len(info(node).outputs) != 1 or "dtype" in arguments(node):
            return False
        return self.captured[node] == self.captured.get(given[0])


def _is_castable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype != torch.float64


def _ask_for_float32(node: fx.Node) -> None:
    """Set argument ``dtype`` of a reduction or softmax that isn't in float32 anyway and names none."""
    given = arguments(node)
    if given["dtype"] is not None or info(operands(node)[0]).meta.dtype == torch.float32:
        return
    names = list(given)
    position = names.index("dtype")
    if position < len(node.args):
        node.args = (*node.args[:position], torch.float32, *node.args[position + 1 :])
    else:
        node.kwargs = {**node.kwargs, "dtype": torch.float32}


def _computed_dtypes(node: fx.Node, is_cast: bool) -> tuple[torch.dtype, ...]:
    """What the op makes of operands without data; ``is_cast``: of other dtypes than were captured.

    Raises CaptureError where it can't take them, or can't tell without data.
    """

    def empty(operand: fx.Node) -> Any:
        meta = info(operand).meta
        return torch.empty(meta.shape, dtype=meta.dtype, device="meta")

    args, kwargs = fx.map_arg((node.args, node.kwargs), empty)
    args = tuple(_on_meta(a) for a in args)
    kwargs = {name: _on_meta(value) for name, value in kwargs.items()}
    taken = ", ".join(str(info(n).meta) for n in operands(node))
    try:
        made = node.target(*args, **kwargs)  # type: ignore[operator]
    except NotImplementedError as error:
        found = tuple(meta.dtype for meta in info(node).outputs)
        if not is_cast or not any(map(_is_castable, found)):
            return found
        raise CaptureError(
            f"{where(node)} is given {taken} under autocast, and of which dtype its result is then can't be told "
            f"without values ({str(error).splitlines()[0]}); disable autocast around it"
        ) from error
    except RuntimeError as error:
        raise CaptureError(
            f"{where(node)} can't take {taken} ({str(error).splitlines()[0]}), which it is given under autocast; cast "
            "its operands to one dtype there"
        ) from error
    return tuple(t.dtype for t in (made if isinstance(made, list | tuple) else (made,)))


def _on_meta(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) else value


def _freeze(item: Any) -> Any:
    """An argument as a key: nodes by their shape and dtype."""
    if isinstance(item, fx.Node):
        return info(item).outputs
    if isinstance(item, list | tuple):
        return tuple(map(_freeze, item))
    if isinstance(item, dict):
        return tuple((name, _freeze(value)) for name, value in item.items())
    return repr(item) if isinstance(item, slice) else (type(item).__name__, item)
