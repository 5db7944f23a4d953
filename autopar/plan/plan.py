"""The plan: every decision about a parallel job, as a frozen value that is JSON both ways.

A plan holds decisions and predictions, no code: loading one executes nothing. The same model, mesh and options give the
same bytes; ``digest`` names them, and a plan that is read must have it. The emitted programs are derived from a plan
and carry its digest.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

from pydantic import Field, ValidationError, model_validator

from autopar.errors import ArgumentError, AutoparError, PlanError
from autopar.mesh import Mesh
from autopar.options import Options
from autopar.plan.checks import problems
from autopar.plan.diff import PlanDiff, difference
from autopar.plan.explain import Explanation, explain_experts, explanation
from autopar.plan.parts import (
    BlockPlan,
    CostPlan,
    ExpertsPlan,
    InputPlan,
    Positive,
    RankPlan,
    SearchPlan,
    StagePlan,
    Value,
)

VERSION: Final = 8


class Plan(Value):
    """See the module docstring. ``peak_bytes`` has one entry per rank.

    ``chunks`` is how many stages a pipeline rank holds; ``vocabulary`` how embedding and head are computed; ``options``
    what was pinned of memory and precision; ``attention`` how positions attend to those
    of other ranks of ``cp``, by block, ``whole_sequences`` what isn't split on it;
    ``compression`` what is compressed, and what of that is lossy, as text; ``remarks`` how the model was read;
    ``actions`` the list of a schedule that was made for this plan's costs,
    None for one that has a name; ``search`` what else was looked at, None where everything was pinned.
    """

    version: int = VERSION
    model_name: str
    model_fingerprint: str
    cluster: str
    cluster_toml: str
    mesh_sizes: dict[str, int]
    batch_size: Positive
    microbatches: Positive
    inputs: list[InputPlan]
    blocks: list[BlockPlan]
    stage_plans: list[StagePlan]
    rank_plans: list[RankPlan]
    schedule: str
    chunks: Positive
    vocabulary: str
    options: Options
    actions: str | None
    replicated_ops: list[str]
    attention: list[str] = Field(default_factory=list)
    whole_sequences: list[str] = Field(default_factory=list)
    compression: list[str] = Field(default_factory=list)
    experts: list[ExpertsPlan] = Field(default_factory=list)
    remarks: list[str] = Field(default_factory=list)
    cost: CostPlan
    search: SearchPlan | None = None
    digest: str = Field(default="")

    @model_validator(mode="after")
    def _check(self) -> Plan:
        Mesh.from_json(self.mesh_sizes)
        for problem in problems(self):
            raise ValueError(problem)
        if self.digest and self.digest != _digest(self):
            raise ValueError(f"its digest is {self.digest}, its content's {_digest(self)}: it was changed or damaged")
        return self

    @property
    def mesh(self) -> Mesh:
        return Mesh.from_json(self.mesh_sizes)

    @property
    def stages(self) -> list[list[str]]:
        """Per pipeline stage, the paths of its units."""
        return [list(stage.units) for stage in self.stage_plans]

    @property
    def step_seconds(self) -> float:
        return self.cost.step_seconds

    @property
    def bound_seconds(self) -> float:
        """No placement and no cut on this mesh has a shorter step, under the same cost model."""
        return self.cost.bound_seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: ``model_flops / (step_seconds x gpus x peak_flops_per_second)``.

        As in A. Chowdhery et al., "PaLM", 2022, appendix B: what the model needs, not what ranks compute.
        """
        possible = self.cost.step_seconds * self.mesh.world * self.cost.peak_flops_per_second
        return self.cost.model_flops / possible if possible else 0.0

    @property
    def peak_bytes(self) -> list[int]:
        held = [rank.peak_bytes for rank in self.rank_plans]
        return [held[index] for index in self.mesh.places("pp")]

    def sealed(self) -> Plan:
        """This plan with its digest filled in."""
        return self.model_copy(update={"digest": _digest(self)})

    def to_json(self) -> str:
        return json.dumps(self.model_dump(), indent=1, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, *, name: str = "plan") -> Plan:
        """Strict inverse of :meth:`to_json` of a plan that is sealed.

        Raises PlanError where it is cut short, changed, without a digest or of another version.
        """
        try:
            data = json.loads(text)
        except TypeError as error:
            raise ArgumentError(f"{text!r} is no text; give that of a plan.json") from error
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{name} is no complete JSON ({error}); it was cut short or damaged: plan again") from error
        version = data.get("version") if isinstance(data, dict) else None
        if version != VERSION:
            raise PlanError(f"{name} has version {version!r}, this autopar reads version {VERSION}: plan again")
        if not data.get("digest"):
            raise PlanError(f"{name} has no digest, so nothing shows whether it was changed or damaged: plan again")
        try:
            return cls.model_validate(data)
        except (ValidationError, AutoparError) as error:
            raise PlanError(f"{name} is not a valid plan: {_first_problem(error)}; plan again") from error

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file (or ``plan.json`` in a directory).

        Raises PlanError; ArgumentError where ``path`` is none.
        """
        if not isinstance(path, str | Path):
            raise ArgumentError(f"{path!r} is no path; give that of a plan.json, or of a written job's directory")
        file = Path(path)
        try:
            file = file / "plan.json" if file.is_dir() else file
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # the latter of text that isn't UTF-8, and of a path that can't be
            raise PlanError(f"can't read the plan {file}: {getattr(error, 'strerror', None) or error}") from error
        return cls.from_json(text, name=str(file))

    def diff(self, other: Plan) -> str:
        """What is other in ``other``, in groups, one line each: ``microbatches: 2 -> 4``; empty where nothing is.

        Raises ArgumentError where ``other`` is no plan.
        """
        return str(self.differences(other))

    def differences(self, other: Plan) -> PlanDiff:
        """The same for machines, by exact path. Raises ArgumentError where ``other`` is no plan."""
        if not isinstance(other, Plan):
            raise ArgumentError(f"{other!r} is no plan; give a Plan, such as autopar.load('plan.json') reads")
        return difference(self, other)

    def explanation(self) -> Explanation:
        """What there is to know of the plan, as tables: what :meth:`explain` prints."""
        return explanation(self)

    def summary(self) -> str:
        """A screen of text: degrees, step, bound, MFU, peak memory, what takes the most time, remarks."""
        return self.explanation().summary

    def explain(self) -> str:
        """Everything, as text: degrees, where time and memory go, the layout of parameters and activations, what else
        was looked at."""
        return str(self.explanation())

    def explain_experts(self) -> str:
        """How many experts layers have, where they are and what they are reckoned with; empty where there are none."""
        return "\n".join(explain_experts(self))

    def __str__(self) -> str:
        return self.explain()


def _digest(plan: Plan) -> str:
    content = json.dumps(plan.model_dump(exclude={"digest"}), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _first_problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        problem = first["msg"].removeprefix("Value error, ")
        path = ".".join(map(str, first["loc"]))
        given: Any = first["input"]
        shown = f" (it is {given!r})" if path and isinstance(given, int | float | str | bool | None) else ""
        return f"{path}: {problem}{shown}" if path else problem
    return str(error)
