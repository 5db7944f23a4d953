"""Small models for tests: two that transformers wrote and three that no library did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.float64 import Float64

__all__ = ["CASES", "MORE", "SEQUENCE", "VOCABULARY", "Case", "Float64", "make", "prepared", "tokens"]

VOCABULARY, SEQUENCE = 48, 16


@dataclass(frozen=True)
class Case:
    """A model in ``dtype`` with a batch of ``batch`` rows, and its loss if it returns none."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Tensor] | None = None


def tokens(batch: int, *, vocabulary: int = VOCABULARY, sequence: int = SEQUENCE) -> Tensor:
    return torch.randint(0, vocabulary, (batch, sequence), generator=torch.Generator().manual_seed(batch))


def labels_with_gaps(batch: int) -> Tensor:
    """Labels of which each row ignores another number: parts of the batch count different numbers of tokens."""
    labels = tokens(batch).clone()
    for row in range(batch):
        labels[row, : 1 + row % 5] = -100
    return labels


def gpt2(batch: int, *, layers: int = 4, dropout: float = 0.0) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        n_embd=32,
        n_layer=layers,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return Case(GPT2LMHeadModel(config), {"input_ids": tokens(batch), "labels": labels_with_gaps(batch)})


def llama(batch: int, *, layers: int = 4, tied: bool = False, vocabulary: int = VOCABULARY) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=SEQUENCE,
        tie_word_embeddings=tied,
    )
    return Case(LlamaForCausalLM(config), {"input_ids": tokens(batch), "labels": labels_with_gaps(batch)})


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (t.view(b, s, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, s, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A GPT in plain PyTorch: fused q, k, v; learned positions; tied head; its own loss."""

    def __init__(self, *, layers: int = 4, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Embedding(SEQUENCE, width)
        self.h = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, VOCABULARY), targets.view(-1), ignore_index=-1), logits


def nano_gpt(batch: int) -> Case:
    targets = tokens(batch).roll(-1, dims=1)
    targets[:, -1] = -1
    targets[0, :5] = -1
    return Case(NanoGPT(), (tokens(batch), targets))


class Classifier(nn.Module):
    """``torch.nn.TransformerEncoder`` and a head over its mean; returns logits, no loss."""

    def __init__(self, *, layers: int = 4, classes: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(32, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(ids)).mean(dim=1))


def encoder(batch: int) -> Case:
    given = {"ids": tokens(batch), "label": torch.arange(batch) % 4}
    return Case(Labelled(Classifier()), given, lambda output, batch: F.cross_entropy(output, batch["label"]))


class Labelled(nn.Module):
    """Takes the label with the ids and passes it by, as data loaders give it."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, ids: Tensor, label: Tensor) -> Tensor:
        return self.classifier(ids)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.norm(x))))


class MLP(nn.Module):
    """An MLP with residuals; the additions are in the outer loop; mean squared error of what it is given."""

    def __init__(self, *, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        self.inward = nn.Linear(8, width)
        self.layers = nn.ModuleList([Residual(width) for _ in range(layers)])
        self.outward = nn.Linear(width, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inward(x)
        for layer in self.layers:
            h = h + layer(h)
        return F.mse_loss(self.outward(h), y)


def mlp(batch: int) -> Case:
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, 8, generator=generator, dtype=torch.float64)
    y = torch.randn(batch, 4, generator=generator, dtype=torch.float64)
    return Case(MLP(), (x, y))


CASES: Final[dict[str, Callable[[int], Case]]] = {
    "gpt2": gpt2,
    "llama": llama,
    "llama_tied": lambda batch: llama(batch, tied=True),
    "nano_gpt": nano_gpt,
    "encoder": encoder,
    "mlp": mlp,
}

MORE: Final[dict[str, Callable[[int], Case]]] = {
    "llama_deep": lambda batch: llama(batch, layers=8, vocabulary=50),
}
"""Cases for tests of one thing: enough layers for two stages on each of four ranks, a vocabulary that none divides."""


def make(name: str, batch: int, dtype: torch.dtype = torch.float64) -> Case:
    """The case in ``dtype``, weights from seed 0, biases not zero."""
    return prepared(lambda: (CASES | MORE)[name](batch), dtype)


def prepared(case_of: Callable[[], Case], dtype: torch.dtype = torch.float64) -> Case:
    """What :func:`make` makes of any case."""
    torch.manual_seed(0)
    case = case_of()
    model = case.model.to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return Case(model, _cast(case.batch, dtype), case.loss)


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    if isinstance(batch, dict):
        return {k: _cast(v, dtype) for k, v in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_cast(v, dtype) for v in batch)
    return batch.to(dtype) if batch.is_floating_point() else batch
