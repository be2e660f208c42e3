"""Models with random weights, from a named shape or a config file: what costs the same as the trained one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

_LLAMA3 = {"vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": dict(
        _LLAMA3, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=False,
    ),
    "llama-3b": dict(
        _LLAMA3, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "llama-1b": dict(
        _LLAMA3, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    ),
    "smollm2-135m": dict(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, tie_word_embeddings=True, max_position_embeddings=8192,
    ),
    "tiny": dict(
        vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, max_position_embeddings=2048,
    ),
}  # fmt: skip
"""Llama's layout with the published sizes of Llama 3.1 8B, Llama 3.2 3B and 1B, and SmolLM2; tiny is for a try."""


def random_model(shape: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> PreTrainedModel:
    """A model with random weights of a shape of SHAPES, or of a config.json (or the folder that holds one).

    Raises ValueError, one line, for a shape that is neither, or a config that makes no causal language model.
    """
    config = config_of(shape)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ValueError(f"random-weights: {shape}: {' '.join(str(error).split())[:200]}") from error
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    return model.eval()


def config_of(shape: str) -> Any:
    """The config of a shape of SHAPES or of a config.json. Raises ValueError, one line, for what is neither."""
    if shape in SHAPES:
        return LlamaConfig(**SHAPES[shape])
    path = Path(shape)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"random-weights: expected one of {', '.join(SHAPES)} or a config.json, got {shape!r}")
    try:
        return AutoConfig.from_pretrained(file)
    except Exception as error:  # a broken config makes transformers raise types of its own
        raise ValueError(f"random-weights: {file}: {' '.join(str(error).split())[:200]}") from error
