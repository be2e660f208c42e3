"""What runs beside the pool fits what was planned for it, where the pool takes all the rest."""

import copy

import pytest
import torch
import transformers
from support import COMMON

from specdec import LLM, SamplingParams
from specdec.limits import Work

ROWS, K, VOCAB = 64, 8, 131072


@pytest.mark.parametrize("graphs", [True, False])
def test_the_largest_rounds_stay_within_what_was_planned(graphs):
    """All rows draft, sample with filters, and have their logits adjusted; what is more than planned is out of memory.

    Logits are 288 MB a copy, so that one too many shows beside what is reserved for libraries.
    """
    config = transformers.LlamaConfig(**{**COMMON, "vocab_size": VOCAB})
    model = transformers.AutoModelForCausalLM.from_config(config).eval().cuda()
    prompts = [[i + 1, 2, 3, i + 1, 2, 3, i] for i in range(ROWS)]
    work = Work(K, 512, graphs=graphs)
    options = {"max_model_len": 96, "max_rows": ROWS, "kv_memory": 32 << 20, "graphs": graphs, "compile": False}
    with LLM(model, drafter=copy.deepcopy(model), k=K, **options) as llm:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        nodes = Work(0, 0, graphs=graphs).num_bytes(model, 0) - Work(0, 0, graphs=False).num_bytes(model, 0)
        limit = torch.cuda.memory_reserved() + work.num_bytes(model, ROWS) - nodes  # nodes are the driver's
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
        torch.cuda.reset_peak_memory_stats()
        try:
            for asked in ({"temperature": 0.0}, {"top_p": 0.9, "top_k": 50}, {"top_p": 0.9, "presence_penalty": 1.0}):
                outputs = llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True, seed=1, **asked))
                assert not [o.error for o in outputs if o.error]
                assert all(len(o.token_ids) == 40 for o in outputs)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.cuda.max_memory_reserved() <= limit
        if llm.engine.graphs:
            assert None not in llm.engine.graphs._graphs.values(), "a capture failed"
