"""Values that a model's code reads are known where they depend on nothing but that code and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.errors import CaptureError
from tests.fast_cluster import FAST
from tests.pinned import compile_pinned

ROWS, LENGTH, WIDTH, WORDS = 8, 8, 16, 32


class Encoder(nn.Module):
    """torch's own layers, which look at the mask's values to see whether it is causal."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True)
        self.layers, self.leave = nn.TransformerEncoder(layer, 2), nn.Linear(WIDTH, WORDS)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask if is_buffer else None)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = self.mask if self.mask is not None else nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return F.cross_entropy(self.leave(self.layers(self.embed(x), mask)).flatten(0, 1), y.flatten())


class Translator(nn.Module):
    """A decoder's causal mask beside a mask of padding, which is written to in between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.leave = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.Transformer(WIDTH, 4, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        causal, padding = nn.Transformer.generate_square_subsequent_mask(y.shape[1]), x == 0
        h = self.layers(self.embed(x), self.embed(y), tgt_mask=causal, src_key_padding_mask=padding)
        return F.cross_entropy(self.leave(h).flatten(0, 1), y.flatten())


def words() -> tuple[Tensor, Tensor]:
    return torch.randint(WORDS, (ROWS, LENGTH)), torch.randint(WORDS, (ROWS, LENGTH))


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}], ids=str)
@pytest.mark.parametrize(
    "make", [lambda: Encoder(True), lambda: Encoder(False), Translator], ids=["buffer", "made", "decoder"]
)
def test_masks_that_torch_looks_at(make: Callable[[], nn.Module], mesh: dict[str, int]) -> None:
    torch.manual_seed(0)
    batch = words()
    job = compile_pinned(make().double(), 4, sample=batch, cluster=FAST, mesh=mesh, optimizer=tame)
    result = job.verify(batch, steps=2)
    assert result.ok, str(result)


def tame(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_mask_that_is_found_to_be_causal_is_none_of_the_program() -> None:
    job = compile_pinned(Encoder(False), 2, sample=words(), cluster=FAST, mesh={"tp": 2})
    assert "is_causal=True" in job.job.texts[0]


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Encoder(False)
    autopar.capture(model, sample=words())


class Body(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.enter, self.body = nn.Linear(WIDTH, WIDTH), body
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("center", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.enter(x)).square().mean()


def depths(_: Any, x: Tensor) -> Tensor:
    for rate in torch.linspace(0.5, 1, 3).tolist():
        x = x * rate
    return x[:, : int(torch.arange(8).max())] * torch.full((2,), 3.0).unbind()[1].item()


def test_numbers_of_vectors() -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    job = compile_pinned(Body(depths).double(), 2, sample=x, cluster=FAST, mesh={"dp": 2}, optimizer=tame)
    result = job.verify(x, steps=2)
    assert result.ok, str(result)


def starts(model: Any, x: Tensor) -> Tensor:
    if not model.started:
        model.center.copy_(x.detach().mean(0))
        model.started.fill_(True)
    return x - model.center


def written(_: Any, x: Tensor) -> Tensor:
    found = torch.zeros(2)
    found.unbind()[1].copy_(x.detach().sum())
    return x if found.sum() > 0 else -x


def drawn(_: Any, x: Tensor) -> Tensor:
    return x if torch.rand(()) > 0.5 else -x


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (starts, r"decides by the values of buffer 'started'\n  at .*if not model.started:\nand writes to it"),
        (written, "(?s)can't be traced into one graph.*return x if found.sum"),
        (drawn, "(?s)can't be traced into one graph.*return x if torch.rand"),
    ],
    ids=["buffer", "written", "random"],
)
def test_what_isnt_known(body: Callable[[Any, Tensor], Tensor], what: str) -> None:
    with pytest.raises(CaptureError, match=what):
        autopar.capture(Body(body), sample=torch.randn(ROWS, WIDTH))
