"""Variables get names by how long they live; loops carry theirs."""

from __future__ import annotations

from autopar.codegen.function import Function, Statement, Var, assign


def lines(function: Function, axes: tuple[str, ...] = ()) -> list[str]:
    return ["    " * (line.indent - 2) + line.code for line in function.lines(axes)[1:]]


def function(*arguments: Var, reserved: frozenset[str] = frozenset()) -> Function:
    return Function("forward", list(arguments), reserved)


def test_a_dead_value_leaves_its_name() -> None:
    x, y, z = Var("h"), Var("h"), Var("h")
    made = function(x)
    made.add(assign([y], ("f(", x, ")")))
    made.add(assign([z], ("g(", y, ")")))
    made.results = (z,)
    assert lines(made) == ["h = f(h)", "h = g(h)", "return h"]


def test_a_living_value_keeps_it() -> None:
    x, y, z = Var("h"), Var("h"), Var("h1")
    made = function(x)
    made.add(assign([y], ("f(", x, ")")))
    made.add(assign([z], (x, " + ", y)))
    made.results = (z, y)
    assert lines(made) == ["h2 = f(h)", "h1 = h + h2", "return h1, h2"]


def test_numbers_go_behind_a_line_after_digits() -> None:
    x, y = Var("ln_1"), Var("ln_1")
    made = function(x)
    made.add(assign([y], ("f(", x, ")")))
    made.results = (x, y)
    assert lines(made) == ["ln_1_2 = f(ln_1)", "return ln_1, ln_1_2"]


def test_reserved_names_and_axes_are_nobodys() -> None:
    x, y = Var("sum"), Var("tp")
    made = function(x, reserved=frozenset({"sum"}))
    made.add(assign([y], ("f(", x, ", ", "tp", ")")))
    made.results = (y,)
    assert lines(made, ("dp", "tp")) == ['tp = self.axes["tp"]', "tp_ = f(sum_, tp)", "return tp_"]


def test_results_that_nobody_reads() -> None:
    x, y, z = Var("x"), Var("a"), Var("a")
    made = function(x)
    made.add(assign([y, None], ("f(", x, ")")))
    made.add(assign([z], ("g()",)))
    made.results = (z,)
    made.always_tuple = True
    assert lines(made) == ["a, _ = f(x)", "a = g()", "return (a,)"]


def loop(targets: list[Var], starts: list[Var], *constants: Var) -> Statement:
    code = [part for a in (*targets, *constants) for part in (a, ", ")][:-1]
    row = assign(targets, ("layer(", *code, ")"))
    return Statement(row.rows, row.targets, "for i in range(0, 2):", tuple(zip(targets, starts, strict=True)))


def test_a_loop_carries_a_name() -> None:
    x, y = Var("h"), Var("out")
    made = function(x)
    made.add(loop([y], [x]))
    made.results = (y,)
    assert lines(made) == ["for i in range(0, 2):", "    h = layer(h)", "return h"]


def test_what_is_read_after_the_loop_is_not_overwritten() -> None:
    x, y = Var("h"), Var("h")
    made = function(x)
    made.add(loop([y], [x]))
    made.results = (x, y)
    assert lines(made) == ["h2 = h", "for i in range(0, 2):", "    h2 = layer(h2)", "return h, h2"]


def test_what_every_turn_reads_is_not_overwritten() -> None:
    """Not even by the carried value that begins with it."""
    x, y = Var("h"), Var("h")
    made = function(x)
    made.add(loop([y], [x], x))
    made.results = (y,)
    assert lines(made) == ["h2 = h", "for i in range(0, 2):", "    h2 = layer(h2, h)", "return h2"]


def test_two_carried_values_do_not_swap() -> None:
    a, b, x, y = Var("a"), Var("b"), Var("b"), Var("a")
    made = function(a, b)
    made.add(loop([x, y], [a, b]))
    made.results = (x, y)
    assert lines(made) == ["for i in range(0, 2):", "    a, b = layer(a, b)", "return a, b"]


def test_two_carried_values_from_one() -> None:
    x, y, z = Var("h"), Var("h"), Var("h")
    made = function(x)
    made.add(loop([y, z], [x, x]))
    made.results = (y, z)
    text = "\n".join(line for line in lines(made)[:-1])
    names: dict[str, object] = {"h": 1, "layer": lambda a, b: (a + 1, b * 10)}
    exec(text, names)
    assert sorted(v for k, v in names.items() if k.startswith("h")) == [3, 100]
