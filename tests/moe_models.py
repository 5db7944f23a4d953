"""Mixture-of-experts families of transformers, each in a tiny configuration of two layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from tests.models import VOCABULARY, Case, tokens

SEQUENCE: Final = 8

_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes by the names that configurations have for them; each takes those that it has."""

_EXPERTS: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K: Final = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")

FAMILIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "afmoe": {},
    "cohere2_moe": {},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "dots1": {"n_shared_experts": 1},
    "ernie4_5_moe": {},
    "exaone_moe": {},
    "flex_olmo": {},
    "glm4_moe": {},
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"intermediate_size_mlp": 24, "interleave_moe_layer_step": 1},
    "longcat_flash": {
        "num_layers": 1,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "ffn_hidden_size": 24,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 2,
    },
    "mellum": {},
    "mimo_v2_flash": {},
    "minimax": {},
    "minimax_m2": {},
    "mixtral": {},
    "nemotron_h": {
        "layers_block_type": ["attention", "moe"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 4,
    },
    "olmoe": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "solar_open": {},
}
"""Model type -> what its configuration needs beside the common sizes."""


def labels(batch: int, gaps: bool) -> Tensor:
    """Labels of which, with ``gaps``, each row ignores another number."""
    made = tokens(batch, sequence=SEQUENCE).clone()
    for row in range(batch if gaps else 0):
        made[row, : 1 + row % 3] = -100
    return made


def family(
    name: str, batch: int, *, experts: int = 8, top_k: int = 2, layers: int = 2, gaps: bool = True, **config: Any
) -> Case:
    """A model of transformers by its ``model_type``, with ids and labels; the auxiliary loss is on where it has one.

    Expert layers are in transformers' "eager" form, the only one that computes in float64: a loop over experts.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    known = AutoConfig.for_model(name)
    sizes = {**_SIZES, "num_hidden_layers": layers, "output_router_logits": True}
    sizes |= dict.fromkeys(_EXPERTS, experts) | dict.fromkeys(_TOP_K, top_k)
    given = {key: value for key, value in sizes.items() if hasattr(known, key)} | dict(FAMILIES.get(name, {})) | config
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **given), experts_implementation="eager")
    for parameter in model.parameters():  # some are left as memory was
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    return Case(model, {"input_ids": tokens(batch, sequence=SEQUENCE), "labels": labels(batch, gaps)})


def experts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The expert layers that go by transformers' registry."""
    return [module for module in model.modules() if hasattr(module, "_apply_gate")]
