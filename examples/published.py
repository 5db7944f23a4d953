"""What the examples plan: published models without weights, batches without values, and a plan in a few words."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from autopar.plan import Plan


def llama_3_8b() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )


def mixtral_8x22b() -> MixtralConfig:
    return MixtralConfig(
        hidden_size=6144,
        intermediate_size=16384,
        num_hidden_layers=56,
        num_attention_heads=48,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=32000,
        max_position_embeddings=65536,
        use_cache=False,
    )


def without_weights(config: LlamaConfig | MixtralConfig) -> nn.Module:
    """The model of ``config``: planning doesn't look at weights."""
    kind = LlamaForCausalLM if isinstance(config, LlamaConfig) else MixtralForCausalLM
    with torch.device("meta"):
        return kind(config).train()


def batch_of(sequences: int, positions: int) -> dict[str, torch.Tensor]:
    tokens = torch.zeros(sequences, positions, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def how(plan: Plan) -> str:
    """Degrees, microbatches, schedule and ZeRO in one line."""
    count, rows = plan.microbatches, plan.batch_size // plan.microbatches // plan.mesh.replicas
    parts = [str(plan.mesh), f"{count} microbatch{'' if count == 1 else 'es'} of {rows}"]
    if plan.mesh.pp * plan.chunks > 1:
        parts.append(plan.schedule + (f" x {plan.chunks}" if plan.chunks > 1 else ""))
    if plan.options.zero:
        parts.append(f"ZeRO {plan.options.zero}")
    if plan.options.offload:
        parts.append(f"{'+'.join(plan.options.offload)} on the host")
    return ", ".join(parts)
