"""A config's small sibling: the same architecture with every size small, windows shorter than a line of text included.

Sizes are known by the names that configs of transformers give them; what has no such name keeps its value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

VOCAB = 96
POSITIONS = 256
WINDOW = 6
_HIDDEN, _HEADS, _HEAD_DIM = 64, 4, 16
_MOST_LAYERS = 8

_LAYER_COUNTS = (
    r"(num_)?(hidden_|decoder_|encoder_)?layers|n_layers?|num_hidden_layers|depth|num_layers_per_stack|conf_num_hidden_layers"
    r"|n_(input|recurrent|output)_layers"
)
_SIZES: list[tuple[str, int | Callable[[int], int | None]]] = [
    (r"(\w+_)?vocab(_size)?(_per_layer_input)?", lambda old: min(old, VOCAB)),
    (r"(\w+_)?(token_id|token_index)", lambda old: old if old < 8 else 7),
    (r"hidden_size|n_embd|d_model|emb_dim|embed_dim|embedding_dim|dim_model|word_embed_proj_dim|input_size", _HIDDEN),
    (r"hidden_size_global|attention_hidden_size|embedding_size|(input|output)_embedding_size|backbone_hidden_size", _HIDDEN),
    (r"hidden_size_per_layer_input", 16),
    (r"(\w+_)?(num_)?(\w+_)?num_attention_heads|num_heads|n_heads?|(en|de)coder_attention_heads|attention_heads", _HEADS),
    (r"(\w+_)?num_(key_value|kv)_heads|n_head_kv|kv_n_heads|num_query_groups", lambda old: 1 if old == 1 else 2),
    (r"(global_|swa_|attention_|linear_|mamba_)?head_dim|dim_head|d_kv|d_head|attention_head_size|kv_channels", _HEAD_DIM),
    (r"(swa_)?v_head_dim|v_head_dim", 12),
    (r"rotary_dim|qk_rope_head_dim", 8),
    (r"qk_nope_head_dim", _HEAD_DIM),
    (r"qk_head_dim", _HEAD_DIM + 8),
    (r"q_lora_rank", 24),
    (r"kv_lora_rank|o_lora_rank|gated_norm_rank|laurel_rank|adapter_rank", 16),
    (r"linear_(key|value)_head_dim", _HEAD_DIM),
    (r"linear_num_(key_|value_)?heads", 2),
    (r"(\w+_)?(intermediate_size|ffn_hidden_size|ffn_dim|ff_dim)(_mlp)?|n_inner|d_ff|d_inner|dff|dim_ff|feed_forward_size", 96),
    (r"mlp_dim", 96),
    (r"(moe_)?num_(local_)?experts|n_routed_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts", lambda old: min(old, 2)),
    (r"n_group|num_expert_group", lambda old: min(old, 2)),
    (r"topk_group", 1),
    (r"(max|num)_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|model_max_length", POSITIONS),
    (r"original_max_position_embeddings", POSITIONS // 4),
    (r"(\w+_)?(sliding_)?window(_size)?|local_attention(_window_len)?|sliding_window_size", WINDOW),
    (r"attention_chunk_size|floor_scale|log_scaling_n_floor", 8),
    (r"(\w+_)?index_head_dim", _HEAD_DIM),
    (r"index_n_heads", 2),
    (r"index_topk|index_block_size", 4),
    (r"index_topk_blocks", 2),
    (r"first_k_dense_replace|num_dense_layers", lambda old: min(old, 1)),
    (r"max_window_layers", 1),
    (r"moe_layer_end_index", lambda old: -1),
    (r"image_size", 28),
    (r"patch_size", 14),
    (r"\w*vocab_offset", VOCAB - 16),
]  # fmt: skip
_UNSAID = {
    "head_dim": _HEAD_DIM,
    "num_key_value_heads": _HEADS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
"""Sizes that some classes need and whose default is None."""

_STACKS = ("n_input_layers", "n_recurrent_layers", "n_output_layers")

_RULES = [(re.compile(pattern), value) for pattern, value in _SIZES]
_LAYERS = re.compile(_LAYER_COUNTS)


def shrunk(config: PreTrainedConfig) -> PreTrainedConfig:
    """The small sibling of `config`, a new object of its class. Raises whatever its class raises if sizes don't fit."""
    values = config.to_dict()
    for name in ("quantization_config", "_name_or_path", "transformers_version", "architectures", "dtype"):
        values.pop(name, None)
    return type(config)(**_small(values))


def _small(values: dict[str, Any]) -> dict[str, Any]:
    layers, kept = _layers(values)
    small = {name: _value(name, value, layers, kept) for name, value in values.items() if name != "model_type"}
    if small.get("num_kv_shared_layers"):
        small["num_kv_shared_layers"] = kept // 2
    if isinstance(layer_configs := values.get("per_layer_config"), dict):
        small["per_layer_config"] = {i: _small(c) for i, c in layer_configs.items() if int(i) < kept}
    heads = values.get("num_attention_heads") or values.get("n_head") or values.get("num_heads")
    for name in ("num_key_value_heads", "num_kv_heads"):
        if isinstance(values.get(name), int) and values[name] == heads:
            small[name] = _HEADS
    if values.get("qk_rope_head_dim") and values.get("head_dim") == values["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]  # of latent attention: what is rotated
    if parts := [small[name] for name in _STACKS if name in values]:
        small["num_hidden_layers"] = sum(parts)
    for name, value in _UNSAID.items():
        if name in values and values[name] is None:
            small[name] = value
    return small


def _layers(values: dict[str, Any]) -> tuple[int, int]:
    """(the number of layers, how many to keep): as many as it takes to have one of each kind, two at least."""
    count = next((v for n, v in values.items() if isinstance(v, int) and _LAYERS.fullmatch(n)), 0)
    rows = [v for v in values.values() if isinstance(v, list) and len(v) == count and v]
    kinds = [str(row) for row in zip(*rows, strict=True)]
    kept = max([2, *(kinds.index(kind) + 1 for kind in set(kinds))])
    if kept > _MOST_LAYERS:  # numbers of a layer's own: only names count
        kinds = [str(row) for row in zip(*(v for v in rows if isinstance(v[0], str)), strict=True)]
        kept = min(_MOST_LAYERS, max([2, *(kinds.index(kind) + 1 for kind in set(kinds))]))
    if values.get("num_kv_shared_layers"):
        kept *= 2
    return count, min(kept, max(count, 1))


def _value(name: str, value: Any, layers: int, kept: int) -> Any:
    if isinstance(value, dict):
        return _rope(value) if "rope_type" in value else _small(value) if value else value
    if isinstance(value, list):
        return [_value(name, v, layers, kept) for v in value[: kept if len(value) == layers else len(value)]]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if _LAYERS.fullmatch(name) and value > 1:
        return min(value, kept)
    for pattern, small in _RULES:
        if pattern.fullmatch(name):
            return small(value) if callable(small) else small if value > 0 else value
    return value


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters for heads of _HEAD_DIM and texts of POSITIONS."""
    small = dict(values)
    half = int(_HEAD_DIM * (values.get("partial_rotary_factor") or 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if isinstance(values.get(name), list):
            small[name] = values[name][:half]
    if values.get("original_max_position_embeddings"):
        small["original_max_position_embeddings"] = POSITIONS // 4
    if isinstance(section := values.get("mrope_section"), list):
        share = [max(1, n * half // sum(section)) for n in section]
        small["mrope_section"] = [half - sum(share[1:]), *share[1:]]
    return small
