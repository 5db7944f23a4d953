"""Random models and plans under mixed precision: as far from one device as that is from itself, rounded differently."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import RankError
from autopar.options import Options
from autopar.passes.mixed_precision import LOWER
from autopar.verification import Trained, train_one_device
from tests.fast_cluster import FAST
from tests.models import Case
from tests.pinned import compile_pinned
from tests.random_models import Experts, case_of
from tests.ranks.test_parity import tame_optimizer
from tests.ranks.test_precision import vector_distance
from tests.ranks.test_random_models import FAST_TIERS, LEAST_COMPILED, SLOW_TIERS, drawn

STEPS, COPIES = 2, 4
DEVIATIONS = 4.0
"""How many standard deviations the loss may be off: one number per step, which may be near or far by chance."""
MARGIN = 1.25
"""Of gradients as one vector, whose distance is nearly the same for all that is rounded differently."""


@dataclass
class Spread:
    """How far runs of one device are apart whose weights differ by what rounding them to ``lower`` may change."""

    case: Case
    precision: str
    clip_norm: float | None
    reference: Trained = field(init=False)
    losses: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reference = self.trained(copy.deepcopy(self.case.model))
        for seed in range(COPIES):
            losses, gradients = self.distance(self.trained(self.rounded(seed)))
            self.losses.append(losses)
            self.gradients.append(gradients)

    def trained(self, model: nn.Module) -> Trained:
        case, options = self.case, Options(precision=self.precision)
        return train_one_device(model, [case.batch], STEPS, case.loss, tame_optimizer, self.clip_norm, options=options)

    def rounded(self, seed: int) -> nn.Module:
        """The model with each weight off by no more than rounding it may be, which is a quarter of eps or more."""
        model, chance = copy.deepcopy(self.case.model), torch.Generator().manual_seed(seed)
        most = torch.finfo(LOWER[self.precision]).eps / 4
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + most * (2 * torch.rand(parameter.shape, generator=chance) - 1))
        return model

    def distance(self, run: Trained | autopar.SimulationResult) -> tuple[float, float]:
        """The largest relative difference of losses, and that of all gradients as one vector."""
        pairs = zip(run.losses, self.reference.losses, strict=True)
        losses = max(abs(found - wanted) / abs(wanted) for found, wanted in pairs)
        return losses, vector_distance(run.gradients, self.reference.gradients)

    def is_on_edge(self) -> bool:
        """Whether rounding decides which experts some token gets, in a step of the reference: then so does the order of
        a sum, and another expert is trained."""
        margins: list[float] = []

        def look(_: nn.Module, args: object, scores: Tensor) -> None:
            _, second, third, *_ = scores.detach().float().softmax(-1).sort(-1, descending=True).values.unbind(-1)
            margins.append(float(((second - third) / second).min()))

        model = copy.deepcopy(self.case.model)
        for module in model.modules():
            if isinstance(module, Experts):
                module.router.register_forward_hook(look)
        self.trained(model)
        return min(margins, default=1.0) < torch.finfo(LOWER[self.precision]).eps

    def has_skipped(self) -> bool:
        """Whether a step found gradients that were not finite, and changed nothing: sums that overflow on one device
        may not do so in the parts that ranks have of them."""
        return len(set(self.reference.losses)) < STEPS

    def allowed(self) -> tuple[float, float]:
        deviation = math.sqrt(sum(loss**2 for loss in self.losses) / COPIES)
        return DEVIATIONS * deviation, MARGIN * max(self.gradients)


def compiled(seed: int, precision: str) -> bool:
    """Two steps of the model and plan of ``seed`` in float32 are as near to one device's under ``torch.autocast`` as
    that is to itself; False: refused."""
    recipe, plan = drawn(seed)
    torch.manual_seed(seed)
    case = case_of(recipe)
    case.model.float()
    gpus = math.prod(size for axis, size in plan["mesh"].items() if axis != "ep")
    given = {"sample": case.batch, "loss": case.loss, "optimizer": tame_optimizer, "cluster": FAST, **plan}
    try:
        found = compile_pinned(case.model, gpus, precision=precision, **given).simulate(
            case.batch, STEPS, track_memory=False
        )
    except RankError:
        raise
    except autopar.AutoparError:
        return False
    spread = Spread(case, precision, plan.get("clip_norm"))
    if spread.has_skipped() or spread.is_on_edge():
        return True
    own = spread.distance(found)
    near = all(a <= b for a, b in zip(own, spread.allowed(), strict=True))
    assert near, f"seed {seed}: {own} of {spread.allowed()}\n{recipe}\n{plan}"
    return True


DRAWN = [(precision, tier) for tier in (*FAST_TIERS, *SLOW_TIERS[:2]) for precision in LOWER]


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "seeds"), DRAWN, ids=str)
def test_random_models_in_lower_precision(precision: str, seeds: range) -> None:
    count = sum(compiled(seed, precision) for seed in seeds)
    assert count >= LEAST_COMPILED * len(seeds)


def test_another_rounding_is_no_excuse() -> None:
    """What is allowed is far below what a mistake makes: half of a batch, or weights of another seed."""
    recipe, _ = drawn(0)
    torch.manual_seed(0)
    case = case_of(recipe)
    case.model.float()
    losses, gradients = Spread(case, "bf16", None).allowed()
    assert losses < 2e-3
    assert gradients < 0.05
