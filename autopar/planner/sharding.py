"""Which type every tensor has on one axis: the model's blocks as one problem (:mod:`autopar.planner.placement`).

Folding keeps it small: a block is in the problem once, its costs times the number of its calls; an edge between two
calls is an edge between their blocks, so a repeated layer closes on itself and depth costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.errors import PlanError, ShardingError
from autopar.graph import INPUT_CALL, Choice, Meta, Model, info, operands, where
from autopar.passes.vocabulary import CASTS, VOCABULARY, head_of, is_head, vocabulary_dims
from autopar.planner.indivisible import refusal
from autopar.planner.pinned_placements import Placements, pinned_types, restricted
from autopar.planner.placement import Change, Edge, Problem, Solution, Vertex, WayPrices
from autopar.planner.prices import FORBIDDEN_SECONDS, Prices
from autopar.planner.rank_memory import state_bytes
from autopar.planner.rulings import Changes
from autopar.planner.solve_placement import solve
from autopar.planner.spreading import Key, Spread, expert_types, follow
from autopar.rules.attention import WAYS, explain, heads, is_attention, offers, way
from autopar.rules.base import Op
from autopar.rules.experts import EXCHANGE, FILTER
from autopar.rules.forms import NUMBERED
from autopar.rules.indexing import pairs_samples
from autopar.spmd import RAGGED, I, P, R, S, Type, divides


@dataclass(frozen=True)
class AxisProblem:
    """One axis to solve: its size and what things cost on it.

    What the axis splits is the ``"batch"`` (``mb``, ``dp``, ``ep``: tensors of the batch come split, parameters are
    whole), the ``"sequence"`` (``cp``: tensors of the batch come whole, what goes from call to call is split by
    positions, parameters are whole), or the ``"model"`` (``tp``: parameters may be split, and stay where they are
    stored). The batch dim of no value is split on the latter two. With ``holds_experts``, weights of experts are split
    by experts. ``paired``: shards are two parts of 2 ``size`` (:class:`autopar.mesh.Mesh`). ``attention``: how
    positions attend to those of other ranks, where that is pinned (:class:`autopar.options.Options`). ``inner``: over
    so many ranks within a rank's part of the heads is split again. ``placements``: of parameters, where a user pins
    them (:mod:`autopar.planner.pinned_placements`).
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
    placements: Placements = field(default_factory=dict)

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
    spread: Spread
    loss: Key
    batch: Mapping[Key, Type] = field(default_factory=dict)  # the type that a split of the batch gives each value
    sequence: Mapping[Key, Type] = field(default_factory=dict)  # and one of the sequence
    path: frozenset[object] = frozenset()  # from a split head's product to its logits: passes of a rank see these alone
    experts: dict[Key, list[Type]] = field(default_factory=dict)  # types of weights of experts on an axis of theirs
    choices: dict[Key, list[Choice]] = field(default_factory=dict)
    index: dict[Key, int] = field(default_factory=dict)
    vertices: list[Vertex] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    in_order: dict[fx.Node, bool] = field(default_factory=dict)
    made: dict[Key, tuple[Type, ...]] = field(default_factory=dict)

    def placement(self) -> Problem:
        return Problem(
            tuple(self.vertices),
            tuple(self.edges),
            _ties(self),
            self.problem.budget_bytes,
            self.spread.rulings.numbered,
        )


@dataclass(frozen=True)
class Solved:
    """A problem with the choices of its vertices, and its solution."""

    problem: AxisProblem
    vertices: Sequence[Vertex]
    choices: Mapping[Key, Sequence[Choice]]
    solution: Solution


@dataclass(frozen=True)
class Chosen:
    """A solved axis: ``rows[b]`` has the choice of every node of block b but its output, in order."""

    solution: Solution
    rows: Sequence[Sequence[Choice]]

    def write(self, model: Model, axis: str) -> None:
        """Into ``info(node).choices[axis]`` of the model that was solved, or a copy of it."""
        for block, row in zip(model.blocks, self.rows, strict=True):
            nodes = (node for node in block.graph.nodes if node.op != "output")
            for node, choice in zip(nodes, row, strict=True):
                info(node).choices[axis] = choice


def solve_axis(model: Model, problem: AxisProblem) -> Solution:
    """Choose and write ``info(node).choices[axis]`` for every node. Returns cost and proven bound.

    Raises ShardingError naming the ops where the axis can't be executed.
    """
    chosen = choose(Spread.of(model), problem)
    chosen.write(model, problem.axis)
    return chosen.solution


def choose(spread: Spread, problem: AxisProblem) -> Chosen:
    """What :func:`solve_axis` writes, of the model that ``spread`` is of; that stays as it is.

    Raises ShardingError naming the ops where the axis can't be executed.
    """
    build, model = _with_vertices(spread, problem), spread.model
    solution = _known_or_solved(build)
    if solution.seconds >= FORBIDDEN_SECONDS / 2:
        raise ShardingError(refusal(model, build.choices, problem.prices, problem.size))
    rows = []
    for number, block in enumerate(model.blocks):
        keys = [(number, node) for node in block.graph.nodes if node.op != "output"]
        rows.append([build.choices[key][solution.choices[build.index[key]]] for key in keys])
    return Chosen(solution, rows)


def _known_or_solved(build: _Build) -> Solution:
    """``build`` has no edges yet: of one model, they follow from the choices of what they are between, and their costs
    from prices. So several numbers of microbatches that leave ops the same choices are one problem."""
    for known in build.spread.solved:
        alike = replace(known.problem, size=build.problem.size) == build.problem
        if alike and known.vertices == build.vertices and known.choices == build.choices:
            return known.solution
    _add_edges(build)
    solution = _solved(build)
    build.spread.solved.append(Solved(build.problem, build.vertices, build.choices, solution))
    return solution


def _solved(build: _Build) -> Solution:
    try:
        return solve(build.placement(), alike=_iterations(build))
    except ShardingError as error:
        axis = build.problem.axis
        pinned = [pattern for pattern, wanted in build.problem.placements.items() if axis in wanted]
        if not pinned:
            raise
        raise ShardingError(f"{error}, where placements on {axis} pin {', '.join(pinned)}") from error


def _iterations(build: _Build) -> Iterator[list[int]]:
    """Vertices of each op of a loop: found when they are asked for, which is where nothing else can be solved."""
    for keys in build.spread.loops:
        yield [build.index[key] for key in keys]


def apply_choices(model: Model, problem: AxisProblem, pins: Mapping[tuple[str, str], str]) -> Solution:
    """Take every node's choice from ``pins`` ((block, node) -> text) instead of solving.

    Raises PlanError where a node has none, or one that isn't legal for this model on this axis.
    """
    build = _build(Spread.of(model), problem)
    taken = [0] * len(build.vertices)
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
        taken[position] = legal[text]
        info(node).choices[problem.axis] = build.choices[key][legal[text]]
    seconds = build.placement().seconds(taken)
    return Solution(tuple(taken), seconds, seconds)


def _build(spread: Spread, problem: AxisProblem) -> _Build:
    build = _with_vertices(spread, problem)
    _add_edges(build)
    return build


def _with_vertices(spread: Spread, problem: AxisProblem) -> _Build:
    model = spread.model
    last = model.calls[model.loss.call].block
    build = _Build(model, problem, spread, (last, model.blocks[last].outputs[model.loss.output]))
    build.batch = follow(build.spread, {p: item.batch_dim for p, item in enumerate(model.inputs)})
    if problem.kind == "sequence":
        build.sequence = follow(build.spread, {p: item.seq_dim for p, item in enumerate(model.inputs)}, slices=True)
    build.path = frozenset(node for block in model.blocks if is_head(block) for node in head_of(block).path)
    if problem.holds_experts:
        build.experts = expert_types(build.spread, problem.axis, problem.size)
    _add_vertices(build)
    return build


def _add_vertices(build: _Build) -> None:
    model, problem = build.model, build.problem
    for position, item in enumerate(model.inputs):
        kind = S(item.batch_dim) if problem.splits_batch and item.batch_dim is not None else R
        _vertex(build, (INPUT_CALL, position), [Choice((), kind)], [0.0], [0], 1, item.name)
    counts, pinned = model.counts(), pinned_types(model, problem.placements, problem.axis)
    for number, block in enumerate(model.blocks):
        dims = vocabulary_dims(block) if block.kind == VOCABULARY and not problem.splits_tokens else {}
        for node, stored in zip(block.parameters, _stored(model, number), strict=True):
            kinds = [S(dims[node])] if node in dims else _parameter_types(build, number, node)
            if (number, node) in pinned:
                name = f"{info(node).name} of {block.name}"
                kinds = restricted(name, problem.axis, problem.size, kinds, pinned[number, node])
            _parameter_vertex(build, (number, node), kinds, stored, counts[number])
        for node in block.inputs:
            choices = [Choice((k,), k) for k in _input_types(build, number, node)]
            zeros = [0] * len(choices)
            _vertex(build, (number, node), choices, zeros, zeros, 1, node.name)
        for node in block.ops:
            _op_vertex(build, (number, node), counts[number])


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


def _parameter_types(build: _Build, number: int, node: fx.Node) -> list[Type]:
    meta, key = info(node).meta, (number, node)
    if key in build.experts:
        return build.experts[key]
    kinds = [I if meta.needs_grad and build.problem.axis != "mb" else R]
    return kinds if build.problem.splits_tokens or not meta.needs_grad else [*kinds, *_shards(build, key, meta.shape)]


def _parameter_vertex(build: _Build, key: Key, kinds: Sequence[Type], stored_bytes: int, count: int) -> None:
    node, problem = key[1], build.problem
    assert isinstance(node, fx.Node)
    meta = info(node).meta
    parts = [problem.size if k.is_shard else 1 for k in kinds]
    stored = [stored_bytes // part for part in parts]
    seconds = [problem.prices.update(meta.numel // part) if meta.needs_grad else 0.0 for part in parts]
    _vertex(build, key, [Choice((), k) for k in kinds], seconds, stored, count, node.name)


def _stored(model: Model, number: int) -> list[int]:
    """Bytes of a block's parameters: what is trained, its gradient and moments; and the working copy, where that is
    another."""
    names = next((call.parameters for call in model.calls if call.block == number), ())
    found = []
    for name, node in zip(names, model.blocks[number].parameters, strict=True):
        found.append(state_bytes(info(node).meta, model.parameters[name].master))
    return found


def _shards(build: _Build, key: Key, shape: tuple[int, ...]) -> list[Type]:
    kinds = [S(d, outer) for d, outers in enumerate(build.spread.splits[key]) for outer in sorted(outers)]
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


def _op_vertex(build: _Build, key: Key, count: int) -> None:
    known, problem = build.spread.ops[key], build.problem
    node, op, rule = known.node, known.op, known.rule
    choices = list(build.spread.legal(key, problem.size))
    if not problem.splits_batch:
        choices = [c for c in choices if c.result != build.batch.get(key) and not pairs_samples(op, c)]
    if problem.paired:
        choices = [c for c in choices if _divide(build, node, op, c)]
    if not problem.holds_experts:
        choices = [c for c in choices if c.form not in (EXCHANGE, FILTER)]
    if is_attention(op):
        choices = _attends(problem, node, op, choices)
    if build.model.blocks[key[0]].kind == VOCABULARY:
        choices = [c for c in choices if _keeps_vocabulary(build, key, c)]
    if key == build.loss:
        choices = [c for c in choices if c.result in (P, I)]
    if not choices:
        raise ShardingError(_no_way(build, key))
    seconds = problem.prices.ops(node, op, rule, choices)
    _vertex(build, key, choices, seconds, [0] * len(choices), count, node.name)


def _no_way(build: _Build, key: Key) -> str:
    axis, size = build.problem.axis, build.problem.size
    others = ", or vocabulary='redistributed'" if build.model.blocks[key[0]].kind == VOCABULARY else ""
    return (
        f"{where(build.spread.ops[key].node)}: no way to compute it goes with {axis}={size}; use another {axis}{others}"
    )


def _divide(build: _Build, node: fx.Node, op: Op, choice: Choice) -> bool:
    """Whether shards divide in pairs of parts too, and forms are made for those."""
    given = zip(operands(node), op.operands, choice.operands, strict=True)
    values = [*given, *((node, meta, choice.result) for meta in op.outputs)]
    return choice.form not in NUMBERED and all(
        build.problem.divides(meta.shape, kind) or _lies_in_order(build, value) for value, meta, kind in values
    )


def _lies_in_order(build: _Build, value: fx.Node) -> bool:
    """Objects, and what is made of parameters alone (weights of experts), are never split in pairs of parts."""
    if value not in build.in_order:
        given = operands(value) if value.op == "call_function" else []
        own = info(value).is_object or info(value).role == "parameter"
        build.in_order[value] = own or (bool(given) and all(_lies_in_order(build, other) for other in given))
    return build.in_order[value]


def _leaves_heads(problem: AxisProblem, op: Op, choice: Choice) -> bool:
    """Whether a split by heads leaves each of the ranks within the axis as many."""
    counts = heads(op)
    if problem.kind != "sequence" or counts is None or way(op, choice) != "heads":
        return True
    parts = problem.size * (1 + problem.paired) * problem.inner
    return problem.inner == 1 or all(count == 1 or count % parts == 0 for count in counts)


def _attends(problem: AxisProblem, node: fx.Node, op: Op, choices: Sequence[Choice]) -> list[Choice]:
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


def _keeps_vocabulary(build: _Build, key: Key, choice: Choice) -> bool:
    """Whether a choice leaves the vocabulary split over pp to do: by its rows on tp, by tokens on ``mb`` and ``dp``.

    From the product to the logits nothing is exchanged then, and a table's gradient is a sum over ``dp`` alone.
    """
    block = build.model.blocks[key[0]]
    if build.problem.splits_tokens:
        return _keeps_tokens(build, key, choice)
    if not is_head(block):
        return True
    head = head_of(block)
    return bool(choice.form) if key[1] is head.entropy else key[1] not in head.path or choice.result == S(1)


def _keeps_tokens(build: _Build, key: Key, choice: Choice) -> bool:
    """Parameters are taken ``R``, and logits have the type that the split of batch or sequence gives them."""
    block = build.model.blocks[key[0]]
    path: set[Key] = {(key[0], node) for node in (head_of(block).path if is_head(block) else ())}
    tokens = build.batch if build.problem.splits_batch else build.sequence
    wanted = {other: tokens[other] for other in path if other in tokens}
    pairs = [*zip(build.spread.ops[key].operands, choice.operands, strict=True), (key, choice.result)]
    wanted |= {other: R for other, _ in pairs if other in build.spread.parameters}
    return all(wanted.get(other, kind) == kind for other, kind in pairs)


def _add_edges(build: _Build) -> None:
    model, spread = build.model, build.spread
    counts = model.counts()
    for key, known in spread.ops.items():
        number = key[0]
        for position, operand in enumerate(known.operands):
            paid = _Paid(counts[number], operand in spread.parameters, False)
            _edge(build, operand, key, position, paid, is_between=False, share=number)
    for (source, target), count in spread.edges.items():
        from_tables = source[0] != INPUT_CALL and model.blocks[source[0]].kind == "tables"
        _edge(build, source, target, 0, _Paid(count, False, from_tables), is_between=True, share=None)


@dataclass(frozen=True)
class _Paid:
    """How often a change on an edge is paid for: ``count`` times, its backward once ``per_step``, or, of a total that
    comes ``from_tables``, both ways; what tables themselves do is done in each microbatch."""

    count: int
    per_step: bool
    from_tables: bool


def _edge(
    build: _Build, source: Key, target: Key, position: int, paid: _Paid, *, is_between: bool, share: int | None
) -> None:
    changes, meta = _changes_of(build, source, target, position, paid, is_between), _meta(build.model, source)
    priced = build.problem.prices.changes(meta, changes.examples, per_step=paid.per_step, from_tables=paid.from_tables)
    ways = changes.where(tuple(price is not None for price in priced))
    seconds = (0.0, *(price * paid.count if price is not None else 0.0 for price in priced))
    build.edges.append(Edge(build.index[source], build.index[target], position, WayPrices(ways, seconds), share))


def _changes_of(build: _Build, source: Key, target: Key, position: int, paid: _Paid, is_between: bool) -> Changes:
    """What the problem has on an edge, found out once for edges that are alike."""
    made, taken, is_stored = _made(build, source), _taken(build, target, position), source in build.spread.parameters
    ragged = tuple(RAGGED in points for points in build.spread.splits[source])
    exact = not _meta(build.model, source).dtype.is_floating_point  # has no equal terms
    here = is_between and build.problem.splits_tokens, paid.from_tables
    key = made, taken, ragged, here, is_stored, _is_changeable(build, source), exact
    known = build.spread.rulings.changes
    if key not in known:
        free = (kind for kind in made if kind in taken)
        known[key] = Changes.of(free, _changes(*key) if key[-2] else ())
    return known[key]


def _made(build: _Build, source: Key) -> tuple[Type, ...]:
    """The types that a value can be made in."""
    if source not in build.made:
        build.made[source] = tuple(dict.fromkeys(choice.result for choice in build.choices[source]))
    return build.made[source]


def _taken(build: _Build, target: Key, position: int) -> frozenset[Type]:
    """The types that it can be taken in."""
    return frozenset([choice.operands[position] for choice in build.choices[target]])


def _is_changeable(build: _Build, source: Key) -> bool:
    fixed = source[0] != INPUT_CALL and (_is_fixed(source) or source[1] in build.path)
    return not (fixed or _is_parameter_cast(build, source))


def _changes(
    made: Sequence[Type],
    taken: Collection[Type],
    ragged: Sequence[bool],
    here: tuple[bool, bool],
    is_stored: bool,
    is_changeable: bool,
    exact: bool,
) -> list[Change]:
    """Which changes of type the problem has on an edge, of a value whose dims may be ``ragged`` shards.

    Parameters are used where they are stored (``I -> R`` costs one reduction a
    step and moves nothing), and casts of them too: what changes changes before the cast, where it can be hoisted.
    Between calls nothing changes on an axis that others are solved after, but totals over the batch: a change of one
    axis has to be a node of a block, where the rules of the later axes see it. (``here``: whether it is between calls
    on such an axis, and of tables.)
    """
    if is_stored:
        return [(I, R)] if I in made and R in taken else []
    if here[0]:
        return [(P, R)] if here[1] and P in made and R in taken else []
    # How many rows each expert gets is known to the ops that send them alone.
    plain = [[k for k in sorted(kinds) if not (k.is_shard and ragged[k.dim])] for kinds in (made, taken)]
    pairs = ((a, b) for a in plain[0] for b in plain[1] if a != b)
    return [(a, b) for a, b in pairs if not (exact and a.is_whole and b == P)]


def _meta(model: Model, key: Key) -> Meta:
    node = key[1]
    return model.inputs[node].meta if isinstance(node, int) else info(node).meta


def _is_fixed(key: Key) -> bool:
    """Tuples and objects have no transitions."""
    made = info(key[1])  # type: ignore[arg-type]
    return len(made.outputs) > 1 or made.is_object


def _is_parameter_cast(build: _Build, key: Key) -> bool:
    known = build.spread.ops.get(key)
    return known is not None and known.op.name in CASTS and known.operands[0] in build.spread.parameters


def _ties(build: _Build) -> tuple[tuple[int, int], ...]:
    """Placeholders that hold one stored tensor (tied weights)."""
    first: dict[str, int] = {}
    ties: dict[tuple[int, int], None] = {}
    places = [[build.index[n, node] for node in block.parameters] for n, block in enumerate(build.model.blocks)]
    for call in build.model.calls:
        for name, here in zip(call.parameters, places[call.block], strict=True):
            owner = first.setdefault(name, here)
            if owner != here:
                ties[owner, here] = None
    return tuple(ties)
