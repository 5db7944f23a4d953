"""Parameters of the experts of a loop as one parameter each, with a first dim for the expert.

``experts.0.up``, ``experts.1.up`` … of ``[out, in]`` become ``experts.*.up`` of ``[experts, out, in]``
(:attr:`autopar.graph.ParameterInfo.stacked`). What has such a dim in the model already, of which a loop takes parts, is
taken whole. Loops that call the same experts (of a layer that is applied twice, say) share the one parameter.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import fx

from autopar.capture import Flat
from autopar.graph import Info, ParameterInfo, arguments, derive, info, is_view, op_name, set_info

_NUMBERED: Final = "*"
"""What stands in the name of a stacked parameter for the number of the expert."""


def selected_from(nodes: Sequence[fx.Node], numbers: Sequence[int], dim: int) -> fx.Node | None:
    """``base`` where node i is ``base`` at i along ``dim``, and all of ``base`` is taken."""
    bases: set[fx.Node] = set()
    for node, number in zip(nodes, numbers, strict=True):
        found = _element(node, dim)
        if found is None or found[1] != number:
            return None
        bases.add(found[0])
    if len(bases) != 1 or list(numbers) != list(range(len(numbers))):
        return None
    base = bases.pop()
    return base if info(base).meta.shape[dim] == len(numbers) else None


def _element(node: fx.Node, dim: int) -> tuple[fx.Node, int] | None:
    """The tensor and place along ``dim`` that ``node`` is taken from; size 1 is as good as no dim."""
    name = op_name(node) if node.op == "call_function" else ""
    if name in ("aten.squeeze.dim", "aten.squeeze.default", "aten.view.default", "aten.reshape.default"):
        return _element(node.args[0], dim) if info(node.args[0]).meta.numel == info(node).meta.numel else None  # type: ignore[arg-type]
    if name == "aten.select.int":
        base: Any = node.args[0]
        rank = len(info(base).meta.shape)
        if node.args[1] % rank == dim % rank and isinstance(node.args[2], int):  # type: ignore[operator]
            return base, node.args[2] % info(base).meta.shape[dim]
    if name == "getitem":
        made: Any = node.args[0]
        pieces = op_name(made) in ("aten.unbind.int", "aten.split.Tensor", "aten.chunk.default")
        if pieces and arguments(made).get("dim", 0) % len(info(made.args[0]).meta.shape) == dim % len(
            info(made.args[0]).meta.shape
        ):
            alone = len(info(made).outputs) == info(made.args[0]).meta.shape[dim]
            return (made.args[0], node.args[1]) if alone else None  # type: ignore[return-value]
    return None


@dataclass
class Shared:
    """What the loops of one model have: ``inside`` are the ops of all of their bodies, ``made`` what is one parameter
    since, by what it was."""

    inside: Container[fx.Node]
    made: dict[tuple[fx.Node, ...], fx.Node] = field(default_factory=dict)

    def read_rows(self, flat: Flat) -> None:
        """Where ops of a loop that couldn't be rewritten so still read one expert's parameter: that is a row now."""
        rows: list[fx.Node] = []
        live = set(flat.nodes)
        for nodes, made in self.made.items():
            for number, node in enumerate(nodes):
                readers = {user for user in node.users if user in live}
                if not readers:
                    continue
                with flat.graph.inserting_after(made):
                    row = flat.graph.call_function(torch.ops.aten.select.int, (made, 0, number))
                like = min(readers, key=flat.nodes.index)
                rows.append(derive(row, like, outputs=(info(node).meta,)))
                node.replace_all_uses_with(row)
        flat.nodes = [*rows, *flat.nodes]


class Stacks:
    """Parameters of experts as one parameter each, which nothing but ops inside of bodies of loops may read; nothing is
    changed before :meth:`keep`. ``skips``: the loop passes over experts without tokens."""

    def __init__(self, flat: Flat, shared: Shared, *, skips: bool) -> None:
        self.skips = skips
        self.flat, self.shared, self.live = flat, shared, set(flat.nodes)
        self.made: dict[tuple[fx.Node, ...], fx.Node] = {}

    def of(self, nodes: Sequence[fx.Node], numbers: Sequence[int]) -> fx.Node | None:
        """One tensor ``[experts, …]``; None where there is none in the model and they aren't its parameters."""
        whole = selected_from(nodes, numbers, dim=0)
        if whole is not None:
            return whole
        if tuple(nodes) not in self.made:
            node = self.shared.made.get(tuple(nodes)) or self._stacked(nodes)
            if node is None:
                return None
            self.made[tuple(nodes)] = node
        return self.made[tuple(nodes)]

    def keep(self) -> None:
        """From now on the model has them. An expert is passed over where all loops do so."""
        for nodes, made in self.made.items():
            data = info(made)
            first = self.flat.parameters[info(nodes[0]).name]
            names = tuple(info(n).name for n in nodes)
            before = self.flat.parameters.get(data.name)
            skips = self.skips and (before is None or before.skips)
            self.flat.parameters[data.name] = ParameterInfo(
                data.name, data.meta, (), first.trainable, stacked=names, skips=skips
            )
        self.shared.made |= self.made

    def _stacked(self, nodes: Sequence[fx.Node]) -> fx.Node | None:
        known = [self.flat.parameters.get(info(n).name) for n in nodes]
        name = stacked_name([info(n).name for n in nodes])
        if name is None or name in self.flat.parameters:
            return None
        for node, parameter in zip(nodes, known, strict=True):
            if parameter is None or parameter.is_buffer or parameter.aliases or not self._is_read_inside(node):
                return None
        metas = {info(n).meta for n in nodes}
        if len(metas) > 1:
            return None
        meta = metas.pop()
        with self.flat.graph.inserting_after(nodes[-1]):
            made = self.flat.graph.placeholder(f"p_{name}".replace(".", "_"))
        shape = replace(meta, shape=(len(nodes), *meta.shape))
        return set_info(made, Info((shape,), role="parameter", name=name))

    def _is_read_inside(self, node: fx.Node) -> bool:
        """Whether nothing but bodies of loops reads a parameter, or a view of it."""
        users = [user for user in node.users if user in self.live]
        return all(user in self.shared.inside or (is_view(user) and self._is_read_inside(user)) for user in users)


def stacked_name(names: Sequence[str]) -> str | None:
    """``moe.experts.*.up`` for ``moe.experts.0.up``, ``moe.experts.1.up`` …; None for others than 0, 1 … in order."""
    for at, character in enumerate(names[0]):
        if character == "0":
            pattern = names[0][:at] + _NUMBERED + names[0][at + 1 :]
            if [pattern.replace(_NUMBERED, str(number)) for number in range(len(names))] == list(names):
                return pattern
    return None
