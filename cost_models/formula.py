"""A cost as a value: it prints itself for people, and evaluates on numbers or arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
import sympy
from numpy.typing import NDArray

from autopar.errors import ArgumentError

Number: TypeAlias = float | Sequence[float] | NDArray[Any]

_maximum, _minimum = sympy.Function("maximum"), sympy.Function("minimum")


class Quantity(NamedTuple):
    """What a symbol stands for; the unit of a pure number is "1"."""

    unit: str
    meaning: str


@dataclass(frozen=True)
class Formula:
    """``name`` in ``unit`` as an ``expression`` over ``symbols``; ``source`` is the paper, or the reasoning.

    ``str`` shows the expression (which sympy parses back), then one line per symbol, then the source.
    Raises ArgumentError where ``symbols`` and the symbols of the expression differ.
    """

    name: str
    unit: str
    expression: sympy.Expr
    symbols: Mapping[str, Quantity] = field(hash=False)
    source: str

    def __post_init__(self) -> None:
        used = {symbol.name for symbol in self.expression.free_symbols}
        if used != set(self.symbols):
            different = ", ".join(sorted(used ^ set(self.symbols)))
            raise ArgumentError(f"formula {self.name}: its expression and its list of symbols differ in {different}")

    def __str__(self) -> str:
        names = max(map(len, self.symbols))
        units = max(len(quantity.unit) for quantity in self.symbols.values())
        lines = [f"{self.name} [{self.unit}] = {self.expression}"]
        for name, (unit, meaning) in self.symbols.items():
            lines.append(f"    {name:{names}}  {unit:{units}}  {meaning}")
        return "\n".join([*lines, f"    from: {self.source}"])

    @overload
    def __call__(self, **numbers: float) -> float: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, **numbers: Number) -> NDArray[np.float64]: ...

    def __call__(self, **numbers: Number) -> float | NDArray[np.float64]:
        """The value: a float, or float64 of the arguments' broadcast shape where one of them is an array.

        Raises ArgumentError where a symbol has no number, or a number no symbol.
        """
        if numbers.keys() != self.symbols.keys():
            raise ArgumentError(self._complaint(set(numbers)))
        values = [numbers[name] for name in self.symbols]
        if all(isinstance(value, int | float) for value in values):
            return float(self.number(*values))
        return np.asarray(self._function(*(np.asarray(value, dtype=np.float64) for value in values)))

    @cached_property
    def number(self) -> Callable[..., float]:
        """The value of numbers in the order of ``symbols``: a plain function, for callers that need it very often."""
        function: Callable[..., float]
        function = sympy.lambdify([self._sympy(name) for name in self.symbols], self.expression, "math")
        return function

    def _sympy(self, name: str) -> sympy.Symbol:
        return next(symbol for symbol in self.expression.free_symbols if symbol.name == name)

    @cached_property
    def _function(self) -> Callable[..., Any]:
        # sympy 1.13 writes Max as numpy.amax of one array, which operands of different shapes can't make; Min likewise.
        expression = self.expression.replace(sympy.Max, lambda *terms: reduce(_maximum, terms))
        expression = expression.replace(sympy.Min, lambda *terms: reduce(_minimum, terms))
        function: Callable[..., Any]
        function = sympy.lambdify([self._sympy(name) for name in self.symbols], expression, "numpy")
        return function

    def _complaint(self, given: set[str]) -> str:
        missing = ", ".join(name for name in self.symbols if name not in given) or "nothing"
        unknown = ", ".join(sorted(given - set(self.symbols))) or "nothing"
        return f"formula {self.name} takes {', '.join(self.symbols)}; missing: {missing}, unknown: {unknown}"
