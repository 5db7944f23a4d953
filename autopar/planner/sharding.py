"""Which type every tensor has on one axis: the model's blocks as one MILP (:mod:`autopar.planner.onehot`).

Folding keeps it small: a block is in the problem once, its costs times the number of its calls; an edge between two
calls is an edge between their blocks, so a repeated layer closes on itself and depth costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from autopar.errors import PlanError, ShardingError
from autopar.graph import INPUT_CALL, Choice, Info, Model, info, op_name, operands, where
from autopar.passes.vocabulary import CASTS, VOCABULARY, head_of, is_head, vocabulary_dims
from autopar.planner.indivisible import refusal
from autopar.planner.onehot import Edge, Problem, Solution, Vertex, solve
from autopar.planner.prices import FORBIDDEN_SECONDS, STATE_COPIES, MicrobatchPrices, Prices
from autopar.rules import lookup
from autopar.rules.attention import WAYS, explain, heads, offers, way
from autopar.rules.base import Op, Splits, legal_choices
from autopar.rules.experts import EXCHANGE, FILTER
from autopar.rules.forms import NUMBERED
from autopar.spmd import RAGGED, I, P, R, S, Type, can_become, divides

Key = tuple[int, fx.Node | int]
"""(block, node), or (INPUT_CALL, position) for a tensor of the batch."""


@dataclass(frozen=True)
class AxisProblem:
    """One axis to solve: its size and what things cost on it.

    What the axis splits is the ``"batch"`` (``mb``, ``dp``, ``ep``: tensors of the batch come split, parameters are
    whole), the ``"sequence"`` (``cp``: tensors of the batch come whole, what goes from call to call is split by
    positions, parameters are whole), or the ``"model"`` (``tp``: parameters may be split, and stay where they are
    stored). The batch dim of no value is split on the latter two. With ``holds_experts``, weights of experts are split
    by experts. ``paired``: shards are two parts of 2 ``size`` (:class:`autopar.mesh.Mesh`). ``attention``: how
    positions attend to those of other ranks, where that is pinned (:class:`autopar.options.Options`). ``inner``: over
    so many ranks within a rank's part of the heads is split again.
    """

    axis: str
    size: int
    prices: Prices
    kind: str
    budget_bytes: int | None = None
    holds_experts: bool = False
    paired: bool = False
    attention: str = "auto"
    inner: int = 1

    @property
    def splits_batch(self) -> bool:
        return self.kind == "batch"

    @property
    def splits_tokens(self) -> bool:
        return self.kind != "model"

    def divides(self, shape: tuple[int, ...], kind: Type) -> bool:
        return divides(shape, kind, self.size * (1 + (self.paired and not kind.is_ragged)))


@dataclass
class _Build:
    model: Model
    problem: AxisProblem
    splits: dict[Key, Splits] = field(default_factory=dict)
    batch: dict[Key, Type] = field(default_factory=dict)  # the type that a split of the batch gives each value
    sequence: dict[Key, Type] = field(default_factory=dict)  # and one of the sequence
    experts: dict[Key, list[Type]] = field(default_factory=dict)  # types of weights of experts on an axis of theirs
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
        raise ShardingError(refusal(model, build.choices, problem.prices, problem.size))
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
    build.batch = follow(build, {p: item.batch_dim for p, item in enumerate(model.inputs)})
    if problem.kind == "sequence":
        build.sequence = follow(build, {p: item.seq_dim for p, item in enumerate(model.inputs)}, slices=True)
    if problem.holds_experts:
        build.experts = _expert_types(build)
    _add_vertices(build)
    _add_edges(build)
    return build


def sequence_lengths(model: Model) -> dict[int, fx.Node]:
    """How many positions activations have where they are first made of sequences of the batch, and by which op."""
    build = _Build(model, AxisProblem("cp", 1, MicrobatchPrices(), "sequence"))
    _spread_splits(build)
    types = follow(build, {p: item.seq_dim for p, item in enumerate(model.inputs)}, slices=True)
    found: dict[int, fx.Node] = {}
    for (number, node), kind in types.items():
        if isinstance(node, int) or node.op != "call_function" or not info(node).meta.needs_grad or kind.outer != 1:
            continue
        before = (o for o in operands(node) if info(o).meta.needs_grad)
        if not any((number, operand) in types for operand in before):
            found.setdefault(info(node).meta.shape[kind.dim], node)
    return found


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


def follow(build: _Build, dims: Mapping[int, int | None], slices: bool = False) -> dict[Key, Type]:
    """The type that a split of the batch's tensors on ``dims`` (by position) gives each value, call by call, as far as
    the rules carry it. With ``slices``, what is not split may be cut to fit what is, and what is split otherwise be
    gathered; and what is shifted or padded along the dim, which is computed whole, still has it.
    """
    found: dict[Key, Type] = {(INPUT_CALL, position): S(dim) for position, dim in dims.items() if dim is not None}
    edges = [_edge_keys(build.model, edge) for edge in sorted(build.model.edges())]
    for number, block in enumerate(build.model.blocks):
        for source, target in edges:
            if target[0] == number and source in found:
                found[target] = found[source]
        for node in block.ops:
            kind = _followed(build, found, number, node, slices)
            if kind is not None:
                found[number, node] = kind
    return found


def _followed(build: _Build, found: Mapping[Key, Type], number: int, node: fx.Node, slices: bool) -> Type | None:
    given = tuple(found.get((number, o), R) for o in operands(node))
    if all(kind == R for kind in given):
        return None
    op = Op.of(node)
    inputs = [build.splits[number, o] for o in operands(node)]
    legal = legal_choices(lookup(op.name), op, 1, inputs, build.splits[number, node])
    choices = [c for c in legal if c.result.is_shard]
    exact = [c.result for c in choices if c.operands == given]
    if not slices:
        return next(iter(exact), None)
    fitting = exact or [c.result for c in choices if _sliced_to(given, c.operands)]
    kept = next((kind for kind in given if kind in fitting), None) or _shifted(op, given)
    return kept or next(iter(fitting), None) or next((c.result for c in choices if _gathered_to(given, c)), None)


def _sliced_to(given: Sequence[Type], taken: Sequence[Type]) -> bool:
    return all(have in (R, want) for have, want in zip(given, taken, strict=True))


def _gathered_to(given: Sequence[Type], choice: Choice) -> bool:
    """Whether the first operand that is split stays so."""
    first = next(i for i, kind in enumerate(given) if kind.is_shard)
    return choice.operands[first] == given[first]


def _shifted(op: Op, given: Sequence[Type]) -> Type | None:
    """The type of an operand, where the result has no gradient and the operand's dims, but maybe for the extent of the
    one that is split: a slice or a pad of positions, or one put in another's place.
    """
    for kind, meta in zip(given, op.operands, strict=True):
        pairs = enumerate(zip(meta.shape, op.result.shape, strict=False))
        same = all(d == kind.dim or before == after for d, (before, after) in pairs)
        if kind.is_shard and not op.result.needs_grad and same and len(meta.shape) == len(op.result.shape):
            return kind
    return None


def _expert_types(build: _Build) -> dict[Key, list[Type]]:
    """How parameters of experts may be stored on an axis that holds experts.

    Those that products take with a dim of experts have to be split on it. What else is as long in its first dim (their
    biases) may be; where it was split on an axis of experts before, it is on this one too. Raises ShardingError where
    the model has no experts, or their number doesn't divide.
    """
    found: dict[Key, list[Type]] = {}
    extents: set[int] = set()
    for number, block in enumerate(build.model.blocks):
        for node in block.ops:
            op = Op.of(node)
            for position in lookup(op.name).expert_operands(op):
                source = _source_of_experts(build, number, operands(node)[position], S(0))
                if source is not None:
                    key, kind = source
                    found[key] = [kind]
                    extents.add(info(node if not isinstance(key[1], fx.Node) else key[1]).meta.shape[kind.dim])
    if not found and build.model.remarks:  # it has experts, and the plan says why they stay whole
        return {}
    if not found:
        raise ShardingError(
            f"the mesh splits experts over {build.problem.axis}, but {build.model.name} has no product with a weight "
            "per expert; leave ep out of the mesh"
        )
    _check_experts(build, found)
    for number, block in enumerate(build.model.blocks):
        for node in block.placeholders("parameter"):
            shape = info(node).meta.shape
            if (number, node) not in found and shape and shape[0] in extents:
                before = [c.result for axis, c in info(node).choices.items() if axis in ("ep", "cp")]
                if not before:
                    found[number, node] = [I, S(0)]
                elif any(kind == S(0) for kind in before):
                    found[number, node] = [S(0)]
    return found


def _source_of_experts(build: _Build, number: int, node: fx.Node, kind: Type) -> tuple[Key, Type] | None:
    """The parameter behind an operand that is split as ``kind``, and how that is split then."""
    while info(node).role != "parameter":
        if node.op != "call_function":
            return None
        op, inputs = Op.of(node), [build.splits[number, o] for o in operands(node)]
        rule = lookup(op.name)
        choices = legal_choices(rule, op, build.problem.size, inputs, build.splits[number, node])
        taken = next((c.operands for c in choices if c.result == kind), ())
        behind = [(o, k) for o, k in zip(operands(node), taken, strict=False) if k.is_shard and info(o).meta.needs_grad]
        if len(behind) != 1:
            return None
        node, kind = behind[0]
    return (number, node), kind


def _check_experts(build: _Build, found: Mapping[Key, list[Type]]) -> None:
    size = build.problem.size
    for (number, node), (kind,) in found.items():
        assert isinstance(node, fx.Node)
        extent = info(node).meta.shape[kind.dim]
        if extent % size:
            fits = [n for n in range(1, extent + 1) if extent % n == 0]
            raise ShardingError(
                f"{build.model.blocks[number].name}: {info(node).name} holds {extent} experts, which don't divide over "
                f"{build.problem.axis} {size}; they do over {fits}"
            )


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
    if not build.problem.splits_tokens and block.kind == VOCABULARY and node in (dims := vocabulary_dims(block)):
        kinds = [S(dims[node])]
    elif (number, node) in build.experts:
        kinds = build.experts[number, node]
    elif not build.problem.splits_tokens and meta.needs_grad:
        kinds += _shards(build, (number, node), meta.shape)
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


def _shards(build: _Build, key: Key, shape: tuple[int, ...]) -> list[Type]:
    kinds = [S(d, outer) for d, outers in enumerate(build.splits[key]) for outer in sorted(outers)]
    return [k for k in kinds if build.problem.divides(shape, k)]


def _input_types(build: _Build, number: int, node: fx.Node) -> list[Type]:
    """What can come in at all; the edges decide."""
    meta, key = info(node).meta, (number, node)
    if meta.needs_grad and key in build.sequence:
        return [build.sequence[key]]
    kinds = [R, *([I] if meta.needs_grad else []), P, *_shards(build, key, meta.shape)]
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
    choices = [c for c in choices if _divide(build.problem, node, op, c)]
    choices = [c for c in choices if build.problem.holds_experts or c.form not in (EXCHANGE, FILTER)]
    choices = _attends(build.problem, node, op, choices)
    choices = [c for c in choices if _keeps_vocabulary(build, number, node, c)]
    if _is_loss(build.model, number, node):
        choices = [c for c in choices if c.result in (P, I)]
    seconds = [build.problem.prices.op(node, op, rule, c) for c in choices]
    _vertex(build, (number, node), choices, seconds, [0] * len(choices), count, node.name)


def _divide(problem: AxisProblem, node: fx.Node, op: Op, choice: Choice) -> bool:
    """Whether shards divide, in pairs of parts too, where the axis has them; and forms are made for those."""
    if not problem.paired:
        return True
    given = zip(operands(node), op.operands, choice.operands, strict=True)
    values = [*given, *((node, meta, choice.result) for meta in op.outputs)]
    return choice.form not in NUMBERED and all(
        _lies_in_order(value) or problem.divides(meta.shape, kind) for value, meta, kind in values
    )


def _lies_in_order(value: fx.Node) -> bool:
    """Objects, and what is made of parameters alone (weights of experts), are never split in pairs of parts."""
    given = operands(value) if value.op == "call_function" else []
    return info(value).is_object or info(value).role == "parameter" or (bool(given) and all(map(_lies_in_order, given)))


def _leaves_heads(problem: AxisProblem, op: Op, choice: Choice) -> bool:
    """Whether a split by heads leaves each of the ranks within the axis as many."""
    counts = heads(op)
    if problem.kind != "sequence" or counts is None or way(op, choice) != "heads":
        return True
    parts = problem.size * (1 + problem.paired) * problem.inner
    return problem.inner == 1 or all(count == 1 or count % parts == 0 for count in counts)


def _attends(problem: AxisProblem, node: fx.Node, op: Op, choices: list[Choice]) -> list[Choice]:
    """Only an axis of the sequence has forms of attention by positions; there the pinned way has to be possible."""
    splits_sequence = problem.kind == "sequence"
    choices = [choice for choice in choices if _leaves_heads(problem, op, choice)]
    left = [choice for choice in choices if offers(op, choice, splits_sequence, problem.attention)]
    if choices and not left:
        possible = [wanted for wanted in WAYS if any(offers(op, c, splits_sequence, wanted) for c in choices)]
        raise ShardingError(
            f"{where(node)}: attention={problem.attention!r} can't be split over {problem.axis} "
            f"{problem.size}{' in pairs' if problem.paired else ''}; {explain(op)}. "
            f"attention may be {' or '.join(map(repr, (*possible, 'auto')))}"
        )
    return left


def _keeps_vocabulary(build: _Build, number: int, node: fx.Node, choice: Choice) -> bool:
    """Whether a choice leaves the vocabulary split over pp to do: by its rows on tp, by tokens on ``mb`` and ``dp``.

    From the product to the logits nothing is exchanged then, and a table's gradient is a sum over ``dp`` alone.
    """
    block = build.model.blocks[number]
    if block.kind != VOCABULARY:
        return True
    if build.problem.splits_tokens:
        return _keeps_tokens(build, number, node, choice)
    if not is_head(block):
        return True
    head = head_of(block)
    return bool(choice.form) if node is head.entropy else node not in head.path or choice.result == S(1)


def _keeps_tokens(build: _Build, number: int, node: fx.Node, choice: Choice) -> bool:
    """Parameters are taken ``R``, and logits have the type that the split of batch or sequence gives them."""
    block = build.model.blocks[number]
    path = head_of(block).path if is_head(block) else ()
    pairs = [*zip(operands(node), choice.operands, strict=True), (node, choice.result)]
    tokens = build.batch if build.problem.splits_batch else build.sequence
    wanted = {other: tokens[number, other] for other in path if (number, other) in tokens}
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
    exact = not meta.dtype.is_floating_point  # has no equal terms
    is_fixed = source[0] != INPUT_CALL and _is_fixed(info(source[1]))  # type: ignore[arg-type]
    for a in sorted(made):
        for b in sorted(taken):
            if not can_become(a, b) or (is_fixed and a != b) or (exact and a.is_whole and b == P):
                continue
            if a != b and not _may_change(build, source, (a, b), share is None, from_tables):
                continue
            is_total = from_tables and (share is None or build.problem.axis != "mb")  # known before the step
            price = build.problem.prices.change(meta, a, b, per_step=per_step, from_tables=is_total)
            if price is not None:
                prices[a, b] = price * count
    build.edges.append(Edge(build.index[source], build.index[target], position, prices, share))


def _is_fixed(made: Info) -> bool:
    """Tuples and objects have no transitions."""
    return len(made.outputs) > 1 or made.is_object


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
    if any(kind.is_shard and RAGGED in build.splits[source][kind.dim] for kind in pair):
        return False  # how many rows each expert gets is known to those ops alone that bring them there and back
    if between and build.problem.splits_tokens:
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
