"""Are the costs that a plan was chosen by those of its programs? An evaluator that doesn't know the planner.

:func:`audit` runs the emitted programs of a job on fake tensors, sees which ops and messages they really are
(:mod:`autopar.audit.record`), prices them by the cost models (:mod:`autopar.audit.prices`), and works out the step from
the action lists (:mod:`autopar.audit.step`). Of the planner it reads the figures that it compares with, and which bytes
an op moves (:mod:`autopar.planner.op_costs`); no graph, no choices, no shapes.
"""

from autopar.audit.compare import Audit, Row, Unpriced, audit

__all__ = ["Audit", "Row", "Unpriced", "audit"]
