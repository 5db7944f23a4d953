"""A block's graph as statements of a function."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.codegen import comments
from autopar.codegen.expressions import expression
from autopar.codegen.function import Atom, Code, Function, Statement, Var, assign, join
from autopar.codegen.regions import RegionCode
from autopar.codegen.text import literal
from autopar.graph import Block, info, is_getitem, operands
from autopar.passes.edges import MICROBATCHES
from autopar.passes.recompute import groups

_UNPACKED = 6  # tuples up to this long are unpacked where they are made


@dataclass
class Writer:
    """Writes the ops of a block into ``function``.

    ``bases`` are the names that values would like; ``random`` numbers the random ops of this function;
    ``call`` is one of those that the code serves; ``methods`` are those that its regions became.
    """

    function: Function
    bases: Mapping[fx.Node, str]
    random: Iterator[int]
    call: int
    methods: list[Function] = field(default_factory=list)

    def write(
        self,
        block: Block,
        given: Mapping[fx.Node, Atom],
        needed: Collection[fx.Node],
        regions: Sequence[RegionCode] = (),
    ) -> list[Atom]:
        """Write the ops in ``needed``; ``given`` are the placeholders' values.

        Returns what stands for each output; "" for one that wasn't needed.
        """
        atoms = self.values(block, given, needed, regions)
        return [atoms.get(node, "") for node in block.outputs]

    def values(
        self,
        block: Block,
        given: Mapping[fx.Node, Atom],
        needed: Collection[fx.Node],
        regions: Sequence[RegionCode] = (),
    ) -> dict[fx.Node, Atom]:
        """The same, from what stands for any nodes to what stands for these and all that is written."""
        atoms: dict[fx.Node, Atom] = dict(given)
        numbers = {node: next(self.random) for node in block.ops if info(node).random}
        region_of = {node: region for region in regions for node in region.nodes}
        for node in _in_groups(block) if regions else block.ops:
            if node not in needed or node in atoms:
                continue
            if (region := region_of.get(node)) is None:
                self.function.add(self._statement(node, atoms, numbers.get(node, 0)))
            elif node is region.nodes[0]:
                self._region(region, atoms, numbers)
        return atoms

    def _region(self, region: RegionCode, atoms: dict[fx.Node, Atom], numbers: Mapping[fx.Node, int]) -> None:
        """A method for the region, and its call."""
        method = Function(region.name, [], self.function.reserved)
        inside: dict[fx.Node, Atom] = {n: a for n in region.inputs if isinstance(a := atoms[n], str)}
        passed: list[Code] = []
        for node in region.inputs:
            if isinstance(outer := atoms[node], Var):
                note = comments.typed(info(node).meta, info(node).types())
                inside[node] = method.argument(self.bases.get(node, outer.base), note)
                passed.append((outer,))
        writer = replace(self, function=method)
        for node in region.nodes:
            if node not in inside:
                method.add(writer._statement(node, inside, numbers.get(node, 0)))
        method.results = tuple(inside[node] for node in region.outputs)
        self.methods.append(method)
        targets = [Var(self.bases[node]) for node in region.outputs]
        atoms |= dict(zip(region.outputs, targets, strict=True))
        code = join([(f"self.{region.name}",), *passed])
        self.function.add(assign(targets, ("recompute(", *code, ")"), region.note))

    def _statement(self, node: fx.Node, atoms: dict[fx.Node, Atom], number: int) -> Statement:
        header = f"with rng(self.axes, {number}, {literal(_own_axes(node))}):" if info(node).random else ""
        comment = comments.of_node(node)
        if is_getitem(node):
            value: Code = (atoms[operands(node)[0]], f"[{node.args[1]}]")
            targets = self._targets(node, atoms)
        else:
            value = expression(node, lambda n: atoms[n])
            targets = self._unpack(node, atoms) or self._targets(node, atoms)
        return assign(targets, value, comment, header, (self.call, node.name))

    def _targets(self, node: fx.Node, atoms: dict[fx.Node, Atom]) -> list[Var | None]:
        variable = Var(self.bases[node])
        atoms[node] = variable
        return [variable]

    def _unpack(self, node: fx.Node, atoms: dict[fx.Node, Atom]) -> list[Var | None]:
        """``a, b = op(x)``: the variables of the elements, which the getitem nodes then are."""
        length = len(info(node).outputs)
        if not 1 < length <= _UNPACKED or not all(map(is_getitem, node.users)):
            return []
        targets: list[Var | None] = [None] * length
        for user in node.users:
            position = user.args[1]
            assert isinstance(position, int)
            if targets[position] is None:
                targets[position] = Var(self.bases[user])
            atoms[user] = targets[position]  # type: ignore[assignment]
        return targets


def _in_groups(block: Block) -> list[fx.Node]:
    """The ops in an order in which every region is in one piece."""
    return [node for group in groups(block) for node in group]


def _own_axes(node: fx.Node) -> tuple[str, ...]:
    """The axes on which ranks hold different parts of the result, and so draw different numbers."""
    return tuple(axis for axis, kind in info(node).types().items() if axis != MICROBATCHES and kind.is_shard)
