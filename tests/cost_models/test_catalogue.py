"""All formulas as a reader sees them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy

from autopar.cost_models.catalogue import FORMULAS
from autopar.cost_models.formula import Formula


def test_all_formulas_print(golden: Callable[[str, str], None]) -> None:
    golden("cost_models/formulas.txt", "\n\n".join(map(str, FORMULAS)))


def test_names_are_unique() -> None:
    names = [formula.name for formula in FORMULAS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.name)
def test_what_prints_parses(formula: Formula) -> None:
    first, *_ = str(formula).splitlines()
    assert sympy.sympify(first.partition(" = ")[2]) == formula.expression


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.name)
def test_every_formula_works_on_arrays(formula: Formula) -> None:
    one = {name: float(number) for number, name in enumerate(formula.symbols, start=2)}
    many = {name: [number, number] for name, number in one.items()}
    assert formula(**many).tolist() == [formula(**one)] * 2
