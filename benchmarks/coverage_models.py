"""Architectures of transformers in tiny configurations, made without downloads: sizes go by the names that
configurations have for them, so that no architecture needs a table of its own; what some need beside that is in
:data:`MORE`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

ROWS, SEQUENCE, VOCABULARY, WIDTH, HEADS, LAYERS, CLASSES = 8, 16, 128, 32, 4, 2, 3

SIZES: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim", "d_embed"), WIDTH),
    **dict.fromkeys(("word_embed_proj_dim", "n_embed", "projection_dim", "lru_width"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("decoder_ffn_dim", "hidden_dim", "d_inner", "dff", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size", "q_lora_rank"), 16),
    **dict.fromkeys(("kv_lora_rank", "o_lora_rank", "num_mel_bins"), 16),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "attention_heads", "num_encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "mamba_num_heads", "mamba_n_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size", "kv_channels", "head_size", "attn_head_dim"), 8),
    **dict.fromkeys(("dim_head", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k"), 2),
    **dict.fromkeys(("top_k_experts", "moe_top_k", "n_group", "type_vocab_size", "index_n_heads"), 2),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "num_dense_layers", "mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("sliding_window", "attention_window", "local_window_size", "chunk_size", "mamba_chunk_size"), 8),
    **dict.fromkeys(("index_head_dim", "index_topk", "hidden_size_per_layer_input", "patch_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("mamba_d_state", "mamba_dt_rank", "state_size", "ssm_state_size"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("use_mamba_kernels", "num_kv_shared_layers", "pad_token_id"), 0),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "num_labels": CLASSES,
    "image_size": 32,
}

TOKENS: Final = ("pad_token_id", "bos_token_id", "eos_token_id")
"""What is given where a configuration leaves it open: heads look for the last token that is no padding."""

_OF_STAGES: Final = (
    "hidden_size",
    "embedding_size",
    "hidden_dim",
    "num_layers",
    "num_heads",
    "num_attention_heads",
    "num_hidden_layers",
    "embed_dim",
)
"""What models with stages of several resolutions have by stage, or by a rule from the first."""

MORE: Final[Mapping[str, Mapping[str, Any]]] = {
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "dots1": {"n_shared_experts": 1},
    "donut-swin": {"window_size": 2},
    "efficientnet": {"hidden_dim": 2560, "image_size": 64},
    "esm": {"vocab_size": VOCABULARY},
    "esmc": {"num_key_value_heads": 4},
    "funnel": {"block_sizes": [1, 1], "d_head": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    "longcat_flash": {"num_layers": 1, "num_hidden_layers": 2, "num_key_value_heads": 4, "zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "nemotron_h": {"layers_block_type": ["attention", "moe"]},
    "perceiver": {"num_latents": 8, "d_latents": 32, "num_self_attends_per_block": 2, "num_self_attention_heads": 4},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (4, 4),
        "attn_layers": ["local", "lsh"],
        "num_buckets": 2,
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
    },
    "swin": {"window_size": 2},
    "swinv2": {"window_size": 2},
    "xmod": {"default_language": "en_XX"},
}
"""Model type -> what its configuration needs beside sizes: layers of each kind, and what has to agree with them."""


@dataclass(frozen=True)
class Task:
    """A family of classes (``MODEL_FOR_…_MAPPING_NAMES`` of transformers), and a batch for a model of it."""

    mapping: str
    batch: Callable[[Any], dict[str, Tensor]]
    has_positions: bool = True

    @property
    def classes(self) -> dict[str, str]:
        """Class by model type."""
        from transformers.models.auto import modeling_auto

        named = getattr(modeling_auto, f"MODEL_FOR_{self.mapping}_MAPPING_NAMES").items()
        return {kind: names if isinstance(names, str) else names[0] for kind, names in named}


def _ids(seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(seed))


def _padding() -> Tensor:
    """1 for tokens; rows end with other numbers of padding."""
    mask = torch.ones(ROWS, SEQUENCE, dtype=torch.long)
    for row in range(ROWS):
        mask[row, SEQUENCE - row % 4 :] = 0
    return mask


def _causal(config: Any) -> dict[str, Tensor]:
    labels = _ids()
    for row in range(ROWS):
        labels[row, : 1 + row % 3] = -100
    return {"input_ids": _ids(), "labels": labels}


def _masked(config: Any) -> dict[str, Tensor]:
    mask = _padding()
    return {"input_ids": _ids(), "labels": _ids().masked_fill(mask == 0, -100), "attention_mask": mask}


def _translated(config: Any) -> dict[str, Tensor]:
    return {"input_ids": _ids(), "labels": _ids(1), "attention_mask": _padding()}


def _classified(config: Any) -> dict[str, Tensor]:
    """Each row has one token that ends it."""
    mask = _padding()
    ids = _ids() * mask
    ids[torch.arange(ROWS), mask.sum(1) - 1] = SIZES["eos_token_id"]
    return {"input_ids": ids, "labels": torch.arange(ROWS) % CLASSES, "attention_mask": mask}


def _images(config: Any) -> dict[str, Tensor]:
    size = getattr(config, "image_size", 32)
    sides = (size, size) if isinstance(size, int) else tuple(size or (32, 32))
    shape = (ROWS, getattr(config, "num_channels", 3), *sides)
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.arange(ROWS) % CLASSES}


TASKS: Final[Mapping[str, Task]] = {
    "causal": Task("CAUSAL_LM", _causal),
    "masked": Task("MASKED_LM", _masked),
    "translated": Task("SEQ_TO_SEQ_CAUSAL_LM", _translated),
    "classified": Task("SEQUENCE_CLASSIFICATION", _classified),
    "images": Task("IMAGE_CLASSIFICATION", _images, has_positions=False),
}


def tiny(task: Task, kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of a type in float64 and training mode, weights from seed 0, nothing random in it, and a batch.

    Raises what transformers raises where such a configuration is none.
    """
    import transformers

    made = getattr(transformers, task.classes[kind])
    given = _shrunk(made.config_class()) | dict(MORE.get(kind, {}))
    if task.mapping == "CAUSAL_LM" and "is_decoder" in vars(made.config_class()):
        given["is_decoder"] = True
    config = _configuration(made.config_class, given)
    config.problem_type = "single_label_classification"
    torch.manual_seed(0)
    experts = {"experts_implementation": "eager"} if hasattr(config, "_experts_implementation") else {}
    model = made._from_config(config, **experts).double().train()
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForMaskedLM" if task.mapping == "MASKED_LM" else "ForCausalLM"
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for parameter in model.parameters():  # some are left as memory was; a bias of zero is where ReLU has its kink
            if parameter.dim() > 1 or not bool(parameter.isfinite().all()) or bool((parameter.abs() > 1e3).any()):
                parameter.normal_(std=0.1)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model, task.batch(model.config)


def _shrunk(config: Any) -> dict[str, Any]:
    """What makes a small configuration of this one's class."""
    kinds_of = {name: type(_given(config, name)) for name in SIZES}
    given = {n: kinds_of[n](v) for n, v in SIZES.items() if kinds_of[n] in (int, bool, float)}
    given |= {n: SIZES[n] for n in TOKENS if kinds_of[n] is type(None) and hasattr(config, n)}
    rates = {n: v for n, v in vars(config).items() if "drop" in n}
    given |= {n: 0.0 for n, v in rates.items() if isinstance(v, float)}
    given |= {n: [0.0] * len(v) for n, v in rates.items() if isinstance(v, list | tuple)}
    if "kv_lora_rank" in given:
        given["num_key_value_heads"] = HEADS
    for name in getattr(config, "sub_configs", {}):
        if hasattr(getattr(config, name, None), "to_dict"):
            given[name] = _shrunk(getattr(config, name))
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list) and kinds:
        given["layer_types"] = _some_of_each(kinds)
        given |= {n: len(given["layer_types"]) for n in ("num_hidden_layers", "num_layers", "n_layer") if n in given}
    layers, kinds = given.get("num_hidden_layers", LAYERS), getattr(config, "mlp_layer_types", None)
    if isinstance(kinds, list) and kinds:
        some = _some_of_each(kinds)
        given["mlp_layer_types"] = [some[min(i, len(some) - 1)] for i in range(layers)]
    if hasattr(config, "depths") or getattr(config, "hidden_sizes", None) is not None:
        given = {n: v for n, v in given.items() if n not in (*_OF_STAGES, "intermediate_size", "patch_size")}
        depths = getattr(config, "depths", ())
        given |= {"depths": [1] * len(depths)} if depths and isinstance(depths[0], int) else {}
        given["image_size"] = 64 if isinstance(getattr(config, "image_size", 64), int) else [64, 64]
    return given


def _given(config: Any, name: str) -> Any:
    """None where a configuration has no such thing, or none for all layers."""
    try:
        return getattr(config, name, None)
    except Exception:  # of transformers' own kinds
        return None


def _some_of_each(kinds: list[str]) -> list[str]:
    found = list(dict.fromkeys(kinds))
    return found if len(found) > 1 else found * LAYERS


def _configuration(made: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Without what this class computes itself and won't have set."""
    for _ in range(8):
        try:
            config = made(**given)
            break
        except (AttributeError, NotImplementedError) as error:
            found = re.search(r"property '(\w+)'|setting of `(\w+)`", str(error))
            named = next((name for name in (found.groups() if found else ()) if name), "")
            name = "layer_types" if named == "layers_block_type" and named not in given else named
            given = {key: value for key, value in given.items() if key != name}
    else:
        config = made(**given)
    for part in (config, getattr(config, "text_config", None), getattr(config, "decoder", None)):
        if part is not None and getattr(part, "decoder_start_token_id", None) is None:
            part.decoder_start_token_id = 1
    return config
