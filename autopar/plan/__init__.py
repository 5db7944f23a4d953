"""The plan of a parallel job: a value (:mod:`.plan`), its parts, what it says, and how two differ."""

from autopar.plan.diff import Difference, PlanDiff
from autopar.plan.explain import Explanation
from autopar.plan.parts import (
    BUBBLE,
    PARTS,
    BlockPlan,
    CostPart,
    CostPlan,
    ExpertsPlan,
    InputPlan,
    MessagePlan,
    NodePlan,
    PointPlan,
    RankPlan,
    RecomputePlan,
    SearchPlan,
    StagePlan,
)
from autopar.plan.plan import VERSION, Plan
from autopar.plan.tables import Column, Section
from autopar.plan.text import (
    bytes_text,
    change_text,
    flops_text,
    percent_text,
    seconds_text,
    spans_text,
    units_text,
)

__all__ = [
    "BUBBLE",
    "PARTS",
    "VERSION",
    "BlockPlan",
    "Column",
    "CostPart",
    "CostPlan",
    "Difference",
    "ExpertsPlan",
    "Explanation",
    "InputPlan",
    "MessagePlan",
    "NodePlan",
    "Plan",
    "PlanDiff",
    "PointPlan",
    "RankPlan",
    "RecomputePlan",
    "SearchPlan",
    "Section",
    "StagePlan",
    "bytes_text",
    "change_text",
    "flops_text",
    "percent_text",
    "seconds_text",
    "spans_text",
    "units_text",
]
