"""The models of the benchmarks: GPTs in plain PyTorch; Llama and mixtures of experts at full size without weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Of the GPT and its global batch. By default a step takes about a tenth of a second on two threads."""

    layers: int = 4
    width: int = 256
    heads: int = 8
    vocabulary: int = 2048
    sequence: int = 64
    batch: int = 8

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_width = sizes.width // sizes.heads
        self.q, self.k, self.v, self.out = (nn.Linear(sizes.width, sizes.width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(project(x)) for project in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(sizes.width)
        self.attention = Attention(sizes)
        self.norm_2 = nn.LayerNorm(sizes.width)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.width, 4 * sizes.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * sizes.width, sizes.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Pre-norm decoder with learned positions and its own loss; no dropout, embedding and head not tied."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position = nn.Embedding(sizes.sequence, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of ``targets`` (both ``[batch, sequence]``, int64)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(sizes: Sizes) -> GPT:
    """Equal weights at every call."""
    torch.manual_seed(0)
    return GPT(sizes)


def gpt_batch(sizes: Sizes, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (sizes.batch, sizes.sequence + 1)
    tokens = torch.randint(sizes.vocabulary, shape, generator=generator)
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


class CoreAttention(nn.Module):
    """Scores, mask, softmax, dropout and the weighted sum, each a kernel of its own."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(mask, -1e4).softmax(-1)
        return F.dropout(weights, self.dropout) @ v


class MegatronLayer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.core = CoreAttention(dropout)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, -1))
        y = self.core(q, k, v, mask).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.proj(y), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.ln_2(x)))), self.dropout)


class MegatronGPT(nn.Module):
    """The GPT of Megatron-LM before fused attention, whose layers V. Korthikanti et al. measured (arXiv 2205.05198)."""

    def __init__(self, *, layers: int, width: int, heads: int, vocabulary: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(MegatronLayer(width, heads, dropout) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def llama(layers: int) -> nn.Module:
    """Llama-3-8B's width (hidden 4096, 32 heads, 8 key-value heads, vocabulary 128256), bf16, on ``meta``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=4096,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


def llama_batch(batch: int = 8, sequence: int = 4096) -> dict[str, Tensor]:
    tokens = torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def full_llama(
    layers: int, hidden: int, intermediate: int, heads: int, *, groups: int = 8, positions: int = 8192
) -> nn.Module:
    """A Llama 3 of published sizes (arXiv 2407.21783, table 3; vocabulary and rotary base of its released config),
    float32, on ``meta``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=128256,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).train()


def llama3_8b(layers: int = 32) -> nn.Module:
    return full_llama(layers, 4096, 14336, 32)


def llama3_70b(layers: int = 80) -> nn.Module:
    return full_llama(layers, 8192, 28672, 64)


def llama31_405b(layers: int = 126) -> nn.Module:
    return full_llama(layers, 16384, 53248, 128)


def gpt2(layers: int = 12) -> nn.Module:
    """GPT-2 of 124M parameters (the defaults of its ``transformers`` config), float32, on ``meta``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False)).train()


def mixtral(layers: int, hidden: int, intermediate: int, heads: int, vocabulary: int) -> nn.Module:
    """8 experts, of which each token takes 2, and 8 key-value heads; float32, on ``meta``."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=vocabulary,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        use_cache=False,
    )
    with torch.device("meta"):
        return MixtralForCausalLM(config).train()


def mixtral_8x7b(layers: int = 32) -> nn.Module:
    """Sizes of arXiv 2401.04088, table 1."""
    return mixtral(layers, 4096, 14336, 32, 32000)


def mixtral_8x22b(layers: int = 56) -> nn.Module:
    """Sizes of the released config (mistralai/Mixtral-8x22B-v0.1)."""
    return mixtral(layers, 6144, 16384, 48, 32000)


def qwen3_235b(layers: int = 94) -> nn.Module:
    """Qwen3-235B-A22B as its published config has it (arXiv 2505.09388, table 2), float32, on ``meta``."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        use_cache=False,
    )
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config).train()


def deepseek_v3(layers: int = 61) -> nn.Module:
    """DeepSeek-V3 (arXiv 2412.19437, section 4.2) without its module for multi-token prediction, which ``transformers``
    doesn't have; float32, on ``meta``. Its config's defaults are the published sizes."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    with torch.device("meta"):
        return DeepseekV3ForCausalLM(DeepseekV3Config(num_hidden_layers=layers, use_cache=False)).train()


@dataclass(frozen=True)
class Training:
    """A model as it is trained: on how many GPUs of which cluster, and the sequences and positions of a step."""

    model: Callable[[], nn.Module]
    gpus: int
    cluster: str
    batch: int
    sequence: int
    source: str

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

    def sample(self) -> dict[str, Tensor]:
        return llama_batch(self.batch, self.sequence)


_LLAMA_2: Final = "4M tokens a step, as all Llama 2 (arXiv 2307.09288, table 1)"
_ZOO: Final = "batch and sequence of Megatron's MoE model zoo (runtime.conf)"
TRAININGS: Final[Mapping[str, Training]] = {
    "gpt2": Training(gpt2, 8, "h100", 512, 1024, "0.5M tokens a step, as its sizes' authors (GPT-2, section 2.3)"),
    "llama3-8b": Training(llama3_8b, 64, "h100", 512, 8192, _LLAMA_2),
    "llama3-70b": Training(llama3_70b, 512, "h100", 512, 8192, _LLAMA_2),
    "mixtral-8x7b": Training(mixtral_8x7b, 64, "h100", 256, 4096, _ZOO),
    "mixtral-8x22b": Training(mixtral_8x22b, 128, "h100", 256, 4096, _ZOO),
    "qwen3-235b": Training(qwen3_235b, 256, "h100", 2048, 4096, "Megatron's MoE model zoo, first row of its table"),
    "deepseek-v3": Training(deepseek_v3, 2048, "h800", 15360, 4096, "arXiv 2412.19437, section 4.2"),
    "llama3.1-405b": Training(llama31_405b, 16384, "h100", 2048, 8192, "16M tokens, arXiv 2407.21783, table 4"),
}
"""Published models on the clusters that the planner is timed for."""
