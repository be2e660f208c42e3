"""Built-in models: random ones, and ones whose next token has a distribution that is known exactly."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

_WIDTH = 16


def table_model(table: Tensor) -> PreTrainedModel:
    """A Llama whose logits after token v are table[v]: [V, V], V <= 16. Its layer adds nothing to the one-hot embedding."""
    size = len(table)
    model = _llama(vocab_size=size, hidden_size=_WIDTH, layers=1, heads=1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(size, _WIDTH))
        model.get_output_embeddings().weight.zero_()
        # The last norm makes a one-hot vector as long as the root of its width.
        model.get_output_embeddings().weight[:, :size] = table.t() / _WIDTH**0.5
    return model


def random_pair(seed: int = 0) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A small random model and a noisy copy of it, whose drafts are right about half of the time."""
    torch.manual_seed(seed)
    target = _llama(vocab_size=97, hidden_size=64, layers=2, heads=4)
    with torch.no_grad():
        for weight in target.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.25)
    drafter = copy.deepcopy(target)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn_like(weight) * 0.01)
    return target, drafter


def _llama(*, vocab_size: int, hidden_size: int, layers: int, heads: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-12,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config).eval()
