"""What is traced once for several tests: models that are the same, and no others."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from tests import shared_captures
from tests.models import Case, make
from tests.shared_captures import captured


def test_only_models_that_are_the_same_share_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_captures, "_known", OrderedDict())  # whatever other tests traced

    def shares(case: Case, precision: str = "model") -> bool:
        return "flat" in vars(captured(case.model, case.batch, case.loss, precision=precision))

    case = make("mlp", 4)
    _ = captured(case.model, case.batch, case.loss).flat
    assert shares(make("mlp", 4))
    assert not shares(case, "bf16")
    assert not shares(make("mlp", 8))
    assert not shares(make("mlp", 4, torch.float32))
    frozen = make("mlp", 4)
    next(frozen.model.parameters()).requires_grad_(False)
    assert not shares(frozen)
    other = make("mlp", 4)
    with torch.no_grad():
        next(other.model.parameters()).add_(1.0)
    assert not shares(other)
    assert not shares(Case(case.model.eval(), case.batch, case.loss))
