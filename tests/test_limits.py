"""How much fits: what logits, activations and graphs take is known before the pool is sized."""

import pytest
import torch
import transformers
from support import COMMON, tiny

from specdec.adjustments import AdjustmentTables, table_bytes
from specdec.limits import Wishes, Work, choose, learned_positions, max_positions, share
from specdec.model import kv_specs

GRAPH_NODES, WORKSPACES = 32 * (16 << 20), 8 * (32 << 20)


@pytest.mark.parametrize(("drafts", "width"), [(0, 1), (1, 2), (4, 5), (8, 9), (15, 17)])
def test_work_is_logits_activations_tables_and_graphs(drafts, width):
    """By hand: fp32 logits and their copy, eight hidden states and three of the MLP, for the larger of both buckets."""
    tokens = 256 * width
    logits = tokens * COMMON["vocab_size"] * (4 + 4 + 4)
    layer = (8 * COMMON["hidden_size"] + 3 * COMMON["intermediate_size"]) * 4
    stays = table_bytes(257, COMMON["vocab_size"]) + WORKSPACES
    assert Work(drafts, 16, graphs=False).num_bytes(tiny(), 256) == logits + tokens * layer + stays
    assert Work(drafts, 16).num_bytes(tiny(), 256) == 2 * (logits + tokens * layer) + stays + GRAPH_NODES
    assert Work(drafts, 10**6).num_bytes(tiny(), 256) == 2 * (logits + 10**6 * layer) + stays + GRAPH_NODES


def test_tables_of_adjustments_are_as_large_as_planned():
    columns = AdjustmentTables(5, 97, torch.device("cpu")).columns
    assert sum(column.nbytes for column in columns) == table_bytes(5, 97)


def test_a_model_without_an_intermediate_size():
    work = Work(0, 16, graphs=False)
    assert work.num_bytes(tiny("gpt2"), 1) == 97 * 12 + 16 * (8 + 12) * 64 * 4 + table_bytes(2, 97) + WORKSPACES


def test_a_model_whose_layers_have_widths_of_their_own():
    config = transformers.Gemma3nTextConfig(num_hidden_layers=2, num_kv_shared_layers=0, intermediate_size=[32, 96])
    with torch.device("meta"):
        model = transformers.Gemma3nForCausalLM(config)
    tokens = 16 * (8 * config.hidden_size + 3 * 96) * 4
    stays = table_bytes(2, config.vocab_size) + WORKSPACES
    assert Work(0, 16, graphs=False).num_bytes(model, 1) == config.vocab_size * 12 + tokens + stays


@pytest.mark.parametrize(
    ("free", "beside", "kv"), [(1000, 0, 850), (1000, 100, 850), (1000, 400, 600), (1000, 2000, 0)]
)
def test_kv_gets_what_is_left(free, beside, kv):
    assert share(free, beside) == kv


def test_memory_that_is_asked_for_is_taken_at_its_word():
    model = tiny()
    limits = choose([model], kv_specs(model), Wishes(kv_memory=1 << 20, max_model_len=64), Work(4, 512))
    assert limits == choose([model], kv_specs(model), Wishes(kv_memory=1 << 20, max_model_len=64))
    assert limits.num_blocks * 16 * 2 * 2 * 2 * 16 * torch.float32.itemsize <= 1 << 20


def test_angles_that_follow_the_length_hold_for_short_texts_only():
    """A long row would change its neighbours' angles, so no row may be long."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = transformers.Phi3Config(**COMMON, original_max_position_embeddings=32, rope_parameters=rope)
    model = transformers.Phi3ForCausalLM(config)
    assert max_positions(model) == 32 and max_positions(tiny()) == 128
    with pytest.raises(ValueError, match="max_model_len: expected at most 32, the model's positions, got 33"):
        choose([model], kv_specs(model), Wishes(max_model_len=33))


def test_a_draft_model_that_has_learned_few_positions_bounds_the_text():
    """128 of the target's; past its own such a model fails, which on a GPU takes the process with it."""
    sizes = {"vocab_size": 97, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    opt = transformers.OPTForCausalLM(
        transformers.OPTConfig(**sizes, ffn_dim=16, word_embed_proj_dim=16, max_position_embeddings=32)
    )
    assert learned_positions(opt) == 32 and learned_positions(tiny("gpt2")) == 128 and learned_positions(tiny()) is None
    models, specs = [tiny(), opt], [*kv_specs(tiny()), *kv_specs(opt)]
    with pytest.warns(UserWarning, match="max_model_len: 32, as many positions as the draft model has learned"):
        assert choose(models, specs, Wishes()).max_model_len == 32
    with pytest.raises(ValueError, match="max_model_len: expected at most 32"):
        choose(models, specs, Wishes(max_model_len=33))
