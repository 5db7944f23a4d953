"""Every formula of the cost models, in the order in which they print."""

from __future__ import annotations

from typing import Final

from autopar.cost_models import collective, compute, memory, step
from autopar.cost_models.formula import Formula

FORMULAS: Final[tuple[Formula, ...]] = (
    *compute.FORMULAS,
    *collective.FORMULAS,
    *memory.FORMULAS,
    *step.FORMULAS,
)
