"""Which type every tensor has on one axis: the model's blocks as one MILP (:mod:`autopar.planner.onehot`).

Folding keeps it small: a block is in the problem once, its costs times the number of its calls; an edge between two
calls is an edge between their blocks, so a repeated layer closes on itself and depth costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.errors import PlanError, ShardingError
from autopar.graph import INPUT_CALL, Choice, Model, info, op_name, operands, where
from autopar.passes.vocabulary import CASTS, VOCABULARY, head_of, is_head, vocabulary_dims
from autopar.planner.onehot import Edge, Problem, Solution, Vertex, solve
from autopar.planner.prices import FORBIDDEN_SECONDS, STATE_COPIES, Prices
from autopar.rules import has_rule, lookup
from autopar.rules.base import Op, Splits, legal_choices
from autopar.spmd import I, P, R, S, Type, can_become, divides

Key = tuple[int, fx.Node | int]
"""(block, node), or (INPUT_CALL, position) for a tensor of the batch."""


@dataclass(frozen=True)
class AxisProblem:
    """One axis to solve: its size and what things cost on it.

    Either the batch is split on the axis (``mb``, ``dp``: tensors of the batch come split, parameters are whole), or
    the model is (``tp``: parameters may be split, and stay where they are stored; the batch dim of no value is split).
    """

    axis: str
    size: int
    prices: Prices
    splits_batch: bool
    budget_bytes: int | None = None


@dataclass
class _Build:
    model: Model
    problem: AxisProblem
    splits: dict[Key, Splits] = field(default_factory=dict)
    batch: dict[Key, Type] = field(default_factory=dict)  # the type that a split of the batch gives each value
    choices: dict[Key, list[Choice]] = field(default_factory=dict)
    index: dict[Key, int] = field(default_factory=dict)
    vertices: list[Vertex] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)


def solve_axis(model: Model, problem: AxisProblem) -> Solution:
    """Choose and write ``info(node).choices[axis]`` for every node. Returns cost and proven bound.

    Raises ShardingError naming the ops where the axis can't be executed.
    """
    build = _build(model, problem)
    solution = solve(Problem(tuple(build.vertices), tuple(build.edges), _ties(build), problem.budget_bytes))
    for key, position in build.index.items():
        block, node = key
        if block != INPUT_CALL:
            assert isinstance(node, fx.Node)
            info(node).choices[problem.axis] = build.choices[key][solution.choices[position]]
    if solution.seconds >= FORBIDDEN_SECONDS / 2:
        raise ShardingError(_refusal(build))
    return solution


def apply_choices(model: Model, problem: AxisProblem, pins: Mapping[tuple[str, str], str]) -> Solution:
    """Take every node's choice from ``pins`` ((block, node) -> text) instead of solving.

    Raises PlanError where a node has none, or one that isn't legal for this model on this axis.
    """
    build = _build(model, problem)
    seconds = 0.0
    for key, position in build.index.items():
        if key[0] == INPUT_CALL:
            continue
        block, node = model.blocks[key[0]], key[1]
        assert isinstance(node, fx.Node)
        text = pins.get((block.name, node.name))
        legal = {str(choice): c for c, choice in enumerate(build.choices[key])}
        if text not in legal:
            raise PlanError(
                f"the plan has {text or 'nothing'} for {where(node)} on {problem.axis}, which may be one of "
                f"{list(legal)}: it was made for another model or another autopar; plan again"
            )
        info(node).choices[problem.axis] = build.choices[key][legal[text]]
        seconds += build.vertices[position].seconds[legal[text]]
    return Solution((), seconds, seconds)


def _build(model: Model, problem: AxisProblem) -> _Build:
    build = _Build(model, problem)
    _spread_splits(build)
    _trace_batch(build)
    _add_vertices(build)
    _add_edges(build)
    return build


def _spread_splits(build: _Build) -> None:
    """Carry split points over ops and edges until nothing changes."""
    model = build.model
    for position, item in enumerate(model.inputs):
        build.splits[INPUT_CALL, position] = [{1} for _ in item.meta.shape]
    for number, block in enumerate(model.blocks):
        for node in block.graph.nodes:
            if node.op != "output":
                build.splits[number, node] = [{1} for _ in info(node).meta.shape]
    links = [_op_link(build, n, node) for n, block in enumerate(model.blocks) for node in block.ops]
    edges = [_edge_keys(model, edge) for edge in model.edges()]
    before = -1
    while before != (before := _size(build)):
        for rule, op, inputs, output in links:
            rule.link(op, inputs, output)
        for source, target in edges:
            for a, b in zip(build.splits[source], build.splits[target], strict=True):
                a |= b
                b |= a


def _trace_batch(build: _Build) -> None:
    """Follow a split of the batch through the ops, call by call, as far as the rules carry it."""
    model = build.model
    for position, item in enumerate(model.inputs):
        if item.batch_dim is not None:
            build.batch[INPUT_CALL, position] = S(item.batch_dim)
    edges = [_edge_keys(model, edge) for edge in sorted(model.edges())]
    for number, block in enumerate(model.blocks):
        for source, target in edges:
            if target[0] == number and source in build.batch:
                build.batch[target] = build.batch[source]
        for node in block.ops:
            kind = _batch_type(build, number, node)
            if kind is not None:
                build.batch[number, node] = kind


def _batch_type(build: _Build, number: int, node: fx.Node) -> Type | None:
    given = tuple(build.batch.get((number, o), R) for o in operands(node))
    if all(kind == R for kind in given):
        return None
    op = Op.of(node)
    inputs = [build.splits[number, o] for o in operands(node)]
    choices = legal_choices(lookup(op.name), op, 1, inputs, build.splits[number, node])
    return next((c.result for c in choices if c.operands == given and c.result.is_shard), None)


def _size(build: _Build) -> int:
    return sum(len(s) for splits in build.splits.values() for s in splits)


def _op_link(build: _Build, number: int, node: fx.Node):  # type: ignore[no-untyped-def]
    op = Op.of(node)
    inputs = [build.splits[number, o] for o in operands(node)]
    return lookup(op.name), op, inputs, build.splits[number, node]


def _edge_keys(model: Model, edge: tuple[int, int, int, int]) -> tuple[Key, Key]:
    source_block, output, target_block, position = edge
    target = (target_block, model.blocks[target_block].inputs[position])
    if source_block == INPUT_CALL:
        return (INPUT_CALL, output), target
    return (source_block, model.blocks[source_block].outputs[output]), target


def _add_vertices(build: _Build) -> None:
    model, problem = build.model, build.problem
    for position, item in enumerate(model.inputs):
        kind = S(item.batch_dim) if problem.splits_batch and item.batch_dim is not None else R
        _vertex(build, (INPUT_CALL, position), [Choice((), kind)], [0.0], [0], 1, item.name)
    counts = model.counts()
    for number, block in enumerate(model.blocks):
        for node in block.placeholders("parameter", "buffer"):
            _parameter_vertex(build, number, node, counts[number])
        for node in block.inputs:
            kinds = _input_types(build, number, node)
            choices = [Choice((k,), k) for k in kinds]
            _vertex(build, (number, node), choices, [0.0] * len(kinds), [0] * len(kinds), 1, node.name)
        for node in block.ops:
            _op_vertex(build, number, node, counts[number])


def _vertex(
    build: _Build,
    key: Key,
    choices: list[Choice],
    seconds: Sequence[float],
    bytes_: Sequence[int],
    count: int,
    name: str,
) -> None:
    build.index[key] = len(build.vertices)
    build.choices[key] = choices
    results = tuple(c.result for c in choices)
    taken = tuple(c.operands for c in choices)
    costs = tuple(s * count for s in seconds)
    build.vertices.append(Vertex(name, results, taken, costs, tuple(b * count for b in bytes_)))


def _parameter_vertex(build: _Build, number: int, node: fx.Node, count: int) -> None:
    meta, size, block = info(node).meta, build.problem.size, build.model.blocks[number]
    kinds: list[Type] = [I if meta.needs_grad and build.problem.axis != "mb" else R]
    if not build.problem.splits_batch and block.kind == VOCABULARY and node in (dims := vocabulary_dims(block)):
        kinds = [S(dims[node])]
    elif not build.problem.splits_batch and meta.needs_grad:
        kinds += _shards(build.splits[number, node], meta.shape, size)
    parts = [size if k.is_shard else 1 for k in kinds]
    stored = [_state_bytes(build.model, number, node) // part for part in parts]
    seconds = [build.problem.prices.update(meta.numel // part) if meta.needs_grad else 0.0 for part in parts]
    _vertex(build, (number, node), [Choice((), k) for k in kinds], seconds, stored, count, node.name)


def _state_bytes(model: Model, number: int, node: fx.Node) -> int:
    """Of a parameter: what is trained, its gradient and moments; and the working copy, where that is another."""
    position, meta = model.blocks[number].parameters.index(node), info(node).meta
    name = next(call.parameters[position] for call in model.calls if call.block == number)
    master = model.parameters[name].master
    return STATE_COPIES * meta.bytes if master is None else meta.bytes + STATE_COPIES * meta.numel * master.itemsize


def _shards(splits: Splits, shape: tuple[int, ...], size: int) -> list[Type]:
    kinds = [S(d, outer) for d, outers in enumerate(splits) for outer in sorted(outers)]
    return [k for k in kinds if divides(shape, k, size)]


def _input_types(build: _Build, number: int, node: fx.Node) -> list[Type]:
    """What can come in at all; the edges decide."""
    meta = info(node).meta
    kinds = [R, *([I] if meta.needs_grad else []), P]
    kinds += _shards(build.splits[number, node], meta.shape, build.problem.size)
    return [k for k in kinds if not _splits_batch(build, (number, node), k)]


def _splits_batch(build: _Build, key: Key, kind: Type) -> bool:
    """Whether ``kind`` splits the batch on an axis that must not."""
    return not build.problem.splits_batch and kind.is_shard and build.batch.get(key) == kind


def _op_vertex(build: _Build, number: int, node: fx.Node, count: int) -> None:
    op = Op.of(node)
    rule = lookup(op.name)
    inputs = [build.splits[number, o] for o in operands(node)]
    choices = legal_choices(rule, op, build.problem.size, inputs, build.splits[number, node])
    choices = [c for c in choices if not _splits_batch(build, (number, node), c.result)]
    choices = [c for c in choices if _keeps_vocabulary(build, number, node, c)]
    if _is_loss(build.model, number, node):
        choices = [c for c in choices if c.result in (P, I)]
    seconds = [build.problem.prices.op(node, op, rule, c) for c in choices]
    _vertex(build, (number, node), choices, seconds, [0] * len(choices), count, node.name)


def _keeps_vocabulary(build: _Build, number: int, node: fx.Node, choice: Choice) -> bool:
    """Whether a choice leaves the vocabulary split over pp to do: by its rows on tp, by tokens on ``mb`` and ``dp``.

    From the product to the logits nothing is exchanged then, and a table's gradient is a sum over ``dp`` alone.
    """
    block = build.model.blocks[number]
    if block.kind != VOCABULARY:
        return True
    if build.problem.splits_batch:
        return _keeps_tokens(build, number, node, choice)
    if not is_head(block):
        return True
    head = head_of(block)
    return bool(choice.form) if node is head.entropy else node not in head.path or choice.result == S(1)


def _keeps_tokens(build: _Build, number: int, node: fx.Node, choice: Choice) -> bool:
    """Parameters are taken ``R``, and logits have the type that the split of the batch gives them."""
    block = build.model.blocks[number]
    path = head_of(block).path if is_head(block) else ()
    pairs = [*zip(operands(node), choice.operands, strict=True), (node, choice.result)]
    wanted = {other: build.batch[number, other] for other in path if (number, other) in build.batch}
    wanted |= {other: R for other, _ in pairs if _is_parameter((number, other))}
    return all(wanted.get(other, kind) == kind for other, kind in pairs)


def _is_loss(model: Model, number: int, node: fx.Node) -> bool:
    loss = model.loss
    return model.calls[loss.call].block == number and model.blocks[number].outputs[loss.output] is node


def _add_edges(build: _Build) -> None:
    model = build.model
    counts = model.counts()
    for number, block in enumerate(model.blocks):
        from_tables = block.kind == "tables"
        for node in block.ops:
            for position, operand in enumerate(operands(node)):
                per_step = _is_parameter((number, operand))
                _edge(build, (number, operand), (number, node), position, counts[number], number, per_step, from_tables)
    for edge, count in model.edges().items():
        source, target = _edge_keys(model, edge)
        from_tables = source[0] != INPUT_CALL and model.blocks[source[0]].kind == "tables"
        _edge(build, source, target, 0, count, None, False, from_tables)


def _edge(
    build: _Build,
    source: Key,
    target: Key,
    position: int,
    count: int,
    share: int | None,
    per_step: bool,
    from_tables: bool,
) -> None:
    meta = build.model.inputs[source[1]].meta if source[0] == INPUT_CALL else info(source[1]).meta  # type: ignore[index,arg-type]
    made = {c.result for c in build.choices[source]}
    taken = {c.operands[position] for c in build.choices[target]}
    prices: dict[tuple[Type, Type], float] = {}
    tuple_result = source[0] != INPUT_CALL and len(info(source[1]).outputs) > 1  # type: ignore[arg-type]
    for a in sorted(made):
        for b in sorted(taken):
            if not can_become(a, b) or (tuple_result and a != b):
                continue
            if a != b and not _may_change(build, source, (a, b), share is None, from_tables):
                continue
            price = build.problem.prices.change(meta, a, b, per_step=per_step, from_tables=from_tables)
            if price is not None:
                prices[a, b] = price * count
    build.edges.append(Edge(build.index[source], build.index[target], position, prices, share))


def _may_change(build: _Build, source: Key, pair: tuple[Type, Type], between: bool, from_tables: bool) -> bool:
    """Which changes of type are left out of the problem.

    Parameters are used where they are stored (``I -> R`` costs one reduction a step and moves nothing), and casts of
    them too: what changes changes before the cast, where it can be hoisted. Between calls
    nothing changes on an axis that others are solved after, but totals over the batch: a change of one axis has to be a
    node of a block, where the rules of the later axes see it.
    """
    if _is_parameter(source):
        return pair == (I, R)
    if _is_parameter_cast(source):
        return False
    if between and build.problem.splits_batch:
        return from_tables and pair == (P, R)
    return True


def _is_parameter(key: Key) -> bool:
    """A parameter, or what an axis solved before made of it without communication in the forward."""
    block, node = key
    if block == INPUT_CALL:
        return False
    assert isinstance(node, fx.Node)
    if op_name(node) == "convert":
        return _is_parameter((block, operands(node)[0]))
    return info(node).role == "parameter"


def _is_parameter_cast(key: Key) -> bool:
    block, node = key
    return isinstance(node, fx.Node) and op_name(node) in CASTS and _is_parameter((block, operands(node)[0]))


def _ties(build: _Build) -> tuple[tuple[int, int], ...]:
    """Placeholders that hold one stored tensor (tied weights)."""
    first: dict[str, int] = {}
    ties: dict[tuple[int, int], None] = {}
    for call in build.model.calls:
        for name, node in zip(call.parameters, build.model.block_of(call).parameters, strict=True):
            here = build.index[call.block, node]
            owner = first.setdefault(name, here)
            if owner != here:
                ties[owner, here] = None
    return tuple(ties)


def _refusal(build: _Build) -> str:
    """Why the axis can't be executed: the ops at which microbatches would have to be exchanged."""
    axis = build.problem.axis
    culprits = []
    for block in build.model.blocks:
        for node in block.ops:
            for operand, kind in zip(operands(node), info(node).choices[axis].operands, strict=True):
                given = info(operand).choices[axis].result
                if given != kind:
                    known = "" if has_rule(op_name(node)) else " (an op autopar has no rule for)"
                    culprits.append(f"{where(node)}{known}")
    what = "; ".join(dict.fromkeys(culprits)) or "the loss"
    return (
        f"the batch can't be split into {build.problem.size} microbatches: {what} needs the whole batch at once. "
        "Use microbatches=1, or add a rule for the op (CONTRIBUTING: a new op rule)."
    )
