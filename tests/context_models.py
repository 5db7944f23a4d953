"""Small models for long sequences: windows, soft caps, relative biases, cross-attention, packed documents, scans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import SEQUENCE, VOCABULARY, Case, NanoGPT, gpt2, labels_with_gaps, llama, nano_gpt, tokens

LAYERS: Final = 2


def gemma2(batch: int) -> Case:
    """Windows in every other layer, soft caps on scores (attention written out) and logits, tied table."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **_sizes(),
        head_dim=8,
        sliding_window=6,
        attn_implementation="eager",
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=8,
    )
    return Case(Gemma2ForCausalLM(config), {"input_ids": tokens(batch), "labels": labels_with_gaps(batch)})


def gemma3(batch: int) -> Case:
    """Windows through masks of scaled dot product attention, two rotary tables."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **_sizes(),
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        attn_implementation="sdpa",
    )
    return Case(Gemma3ForCausalLM(config), {"input_ids": tokens(batch), "labels": labels_with_gaps(batch)})


def t5(batch: int) -> Case:
    """Encoder and decoder of unequal length, relative biases shared by layers, cross-attention."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=LAYERS,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    given = {"input_ids": tokens(batch, sequence=2 * SEQUENCE), "labels": labels_with_gaps(batch)}
    return Case(T5ForConditionalGeneration(config), given)


def bert(batch: int) -> Case:
    """Attention to both sides, with rows of unequal length."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    mask = torch.ones(batch, SEQUENCE, dtype=torch.long)
    for row in range(batch):
        mask[row, SEQUENCE - row % 4 :] = 0
    given = {"input_ids": tokens(batch), "attention_mask": mask, "labels": labels_with_gaps(batch)}
    return Case(BertForMaskedLM(config), given)


def mamba(batch: int) -> Case:
    """Convolutions and scans along the sequence."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=LAYERS, time_step_rank=2
    )
    return Case(MambaForCausalLM(config), {"input_ids": tokens(batch), "labels": labels_with_gaps(batch)})


DOCUMENTS: Final = ((7, 5, 4), (3, 13), (16,), (1, 2, 8, 5))
"""How long the documents are that each row packs, row by row and again from the first."""


def positions(batch: int) -> Tensor:
    """``position_ids`` that start over with each document."""
    rows = [torch.cat([torch.arange(n) for n in DOCUMENTS[row % len(DOCUMENTS)]]) for row in range(batch)]
    return torch.stack(rows)


def packed(batch: int) -> Case:
    """Several documents in a row; none sees another."""
    case = llama(batch, layers=LAYERS)
    case.model.config.use_cache = False
    labels = labels_with_gaps(batch).masked_fill(positions(batch) == 0, -100)
    return Case(case.model, {"input_ids": tokens(batch), "position_ids": positions(batch), "labels": labels})


class Tokens(nn.Module):
    """A model that returns logits alone, given with what its loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = NanoGPT(layers=LAYERS, width=16)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.gpt(ids, ids)[1]


def weighted_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The next token's cross entropy with a weight for each token, and a z loss."""
    shifted, targets, weights = logits[:, :-1], batch["ids"][:, 1:], batch["weights"][:, 1:]
    each = F.cross_entropy(shifted.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return (each * weights).sum() / weights.sum() + 1e-2 * shifted.logsumexp(-1).square().mean()


def weighted(batch: int) -> Case:
    weights = torch.rand(batch, SEQUENCE, generator=torch.Generator().manual_seed(batch), dtype=torch.float64)
    return Case(Tokens(), {"ids": tokens(batch), "weights": weights}, weighted_loss)


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": SEQUENCE,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


CONTEXT: Final[dict[str, Callable[[int], Case]]] = {
    "llama": lambda batch: llama(batch, layers=LAYERS),
    "gpt2": lambda batch: gpt2(batch, layers=LAYERS),
    "nano_gpt": nano_gpt,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "t5": t5,
    "bert": bert,
    "mamba": mamba,
    "packed": packed,
    "weighted": weighted,
}
