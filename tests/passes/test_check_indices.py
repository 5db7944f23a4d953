"""A sample that reads rows which a table doesn't have is refused where it is captured, with the one that would do."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import BatchError, CaptureError
from autopar.preparation import Captured

ROWS = 8


class Reader(nn.Module):
    """Adds to each token's vector one that the token's position is read with, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.tokens = nn.Embedding(32, 4)
        self.positions = nn.Embedding(ROWS, 4)
        self.register_buffer("angles", torch.ones(ROWS, 4))

    def read(self, tokens: Tensor) -> Tensor:
        numbers = torch.arange(tokens.shape[1], device=tokens.device)
        match self.way:
            case "embedding":
                found: Tensor = self.positions(numbers.unsqueeze(0))
            case "index":
                found = self.angles[numbers]
            case "from the end":
                found = self.angles[-1 - numbers]
            case "index_select":
                found = self.angles.index_select(0, numbers)
            case "gather":
                found = self.angles.gather(0, numbers[:, None].expand(-1, 4))
            case "written":  # what is computed of numbers that were written in place
                numbers[1:] = numbers[1:] + 2
                found = self.positions(numbers)
            case "sliced":  # of which no more are there
                found = self.angles[: tokens.shape[1]]
            case "values":  # padding has no position
                seen = (tokens != 0).long()
                found = self.positions(seen.cumsum(1) * seen)
            case "chosen":  # not before it runs
                found = self.positions(self.tokens(tokens).argmax(-1) + 100)
            case _:
                raise ValueError(self.way)
        return found

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.tokens(tokens) + self.read(tokens)).square().mean()


def captured(way: str, sample: Tensor, device: str = "cpu") -> None:
    with torch.device(device):
        model = Reader(way)
    _ = Captured(model, sample).flat


ALIKE = ["embedding", "index", "index_select", "gather"]
WAYS = {**dict.fromkeys([*ALIKE, "from the end"], ROWS), "written": ROWS - 2}
"""The longest sequence that each may read."""


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", WAYS)
def test_positions_past_the_last_row_are_refused(way: str, device: str) -> None:
    longest = WAYS[way]
    captured(way, torch.ones(2, longest, dtype=torch.long), device)
    with pytest.raises(BatchError, match=rf"test_check_indices.py:\d+.* has {ROWS} rows, and the sample reads row"):
        captured(way, torch.ones(2, longest + 1, dtype=torch.long), device)


@pytest.mark.parametrize("way", ALIKE)
@pytest.mark.parametrize("length", [ROWS + 1, ROWS + 5])
def test_the_longest_sequence_is_named(way: str, length: int) -> None:
    with pytest.raises(BatchError, match=rf"sequences of {length} positions are too long .* use at most {ROWS} "):
        captured(way, torch.ones(2, length, dtype=torch.long))


def test_positions_that_follow_from_values() -> None:
    """Seven positions and that of padding; ones that no token has aren't read."""
    full = torch.ones(2, ROWS, dtype=torch.long)
    captured("values", full[:, 1:])
    padded = full.clone()
    padded[:, 3] = 0
    captured("values", padded)
    captured("values", full.to("meta"), "meta")  # has none
    with pytest.raises(BatchError, match=rf"'positions.weight' has {ROWS} rows, .* use at most {ROWS - 1} "):
        captured("values", full, "meta")


def test_tokens_of_another_vocabulary() -> None:
    for wrong in (32, -1):
        message = (
            f"'tokens.weight' has 32 rows, and the sample reads row {wrong}; use a sample whose indices are from 0"
        )
        with pytest.raises(BatchError, match=re.escape(message) + " to 31"):
            captured("index", torch.tensor([[1, 5, wrong]]))


def test_what_depends_on_parameters_isn_t_known() -> None:
    captured("chosen", torch.ones(2, 3, dtype=torch.long))


def test_a_shape_that_does_not_fit_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """torch logs a traceback of its own, which the error's message makes superfluous."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    with pytest.raises(CaptureError, match="It has to run with this sample on one device"):
        captured("sliced", torch.ones(2, ROWS + 1, dtype=torch.long))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert log.level == level


def test_a_job_of_too_long_a_sample_is_refused() -> None:
    given: dict[str, Any] = {"sample": torch.ones(2, ROWS + 1, dtype=torch.long), "mesh": {"dp": 2}}
    with pytest.raises(BatchError, match=f"use at most {ROWS} "):
        autopar.compile(Reader("embedding"), 2, **given)
