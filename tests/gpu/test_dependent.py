"""Kernels that start while the one before them ends give what they give one after the other, bit for bit."""

import pytest
import torch
import transformers
from support import COMMON

from specdec import LLM, SamplingParams
from specdec.kernels import dependent
from specdec.model import layers

CONFIG = COMMON | dict(
    vocab_size=8000,
    hidden_size=1024,
    intermediate_size=3072,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=1024,
    initializer_range=0.02,
)


def model(num_layers: int) -> transformers.PreTrainedModel:
    torch.manual_seed(num_layers)
    config = transformers.LlamaConfig(**CONFIG | dict(num_hidden_layers=num_layers))
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to("cuda").eval()


def decode(drafter: bool, compile: bool) -> list[list[int]]:
    """Greedy and sampled tokens of batches of 1, 3 and 12 rows, with rounds of up to 60 tokens."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(8000, (12, 40), generator=generator).tolist()
    params = [SamplingParams(max_tokens=150, temperature=i % 2, seed=i, ignore_eos=True) for i in range(12)]
    with LLM(model(4), drafter=model(4) if drafter else None, k=4, max_rows=12, compile=compile) as llm:
        outputs = [o for rows in (1, 3, 12) for o in llm.generate(prompts[:rows], params[:rows])]
    assert [o.error for o in outputs if o.error] == []
    return [o.token_ids for o in outputs]


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("drafter", [False, True])
def test_same_tokens_as_one_after_the_other(drafter, compile, monkeypatch):
    overlapped = decode(drafter, compile)
    monkeypatch.setattr(dependent, "_supported", lambda device: False)
    monkeypatch.setattr(layers, "_OPTIONS", layers._OPTIONS | {"triton.enable_pdl": False})
    assert overlapped == decode(drafter, compile)
