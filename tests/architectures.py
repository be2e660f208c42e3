"""Tiny configs of many architectures, by what they ask of a route: one for each mechanism."""

import torch
import transformers as T
from support import COMMON

TEXT = {**COMMON, "sliding_window": 6}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT = {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 97,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "head_dim": 8,
}

PAGED = {
    "keywords dropped on the way": lambda: T.StableLmConfig(**COMMON),
    "a scale of its own": lambda: T.OPTConfig(
        vocab_size=97, hidden_size=64, word_embed_proj_dim=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4
    ),
    "windows in some layers": lambda: T.Qwen3Config(**TEXT, use_sliding_window=True, max_window_layers=1),
    "a window without a keyword": lambda: T.PhimoeConfig(**TEXT, num_local_experts=4),
    "soft cap": lambda: T.Gemma2Config(**TEXT, query_pre_attn_scalar=24, attn_logit_softcapping=3.0),
    "sinks": lambda: T.GptOssConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2),
    "latent attention, K wider than V": lambda: T.DeepseekV3Config(**{**COMMON, **LATENT}),
    "two calls in a layer": lambda: T.DiffLlamaConfig(**COMMON),
    "heads of two sizes, shared KV": lambda: T.Gemma4TextConfig(
        **{**TEXT, "num_hidden_layers": 4},
        global_head_dim=32,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=97,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "one KV head": lambda: T.GPTBigCodeConfig(**GPT),
    "experts": lambda: T.Qwen3MoeConfig(**COMMON, **MOE),
}
GATHERED = {
    "ALiBi": lambda: T.BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4),
    "ALiBi, or rotary": lambda: T.FalconConfig(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
    ),
    "ALiBi by distance": lambda: T.MptConfig(vocab_size=97, d_model=64, n_heads=4, n_layers=2, max_seq_len=128),
    "a local layer of its own": lambda: T.GPTNeoConfig(
        vocab_size=97,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=6,
    ),
    "a mask of its own": lambda: T.DogeConfig(**COMMON, keep_window_size=6),
}
APART = {
    "positions counted for a batch": lambda: T.BartConfig(
        vocab_size=97, d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96, is_decoder=True
    ),
    "positions that start past the padding id": lambda: T.RobertaConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, is_decoder=True
    ),
    "attention in chunks": lambda: T.Llama4TextConfig(
        **COMMON,
        num_local_experts=4,
        intermediate_size_mlp=96,
        attention_chunk_size=8,
        moe_layers=[1],
        no_rope_layers=[1, 0],
    ),
}
REFUSED = {
    "linear attention": lambda: T.Qwen3NextConfig(**COMMON, **MOE, layer_types=["linear_attention", "full_attention"]),
    "recurrent state": lambda: T.MambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2),
    "convolutions": lambda: T.Lfm2Config(**COMMON, layer_types=["conv", "full_attention"]),
    "no cache at all": lambda: T.OpenAIGPTConfig(**GPT),
}


def model_of(config: T.PreTrainedConfig) -> T.PreTrainedModel:
    """A random model in fp32."""
    torch.manual_seed(0)
    return T.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
