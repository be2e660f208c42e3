"""`custom_generate=specdec.hf.generate`: the paged runtime for one call; what has no form there is named, never ignored."""

import pytest
import torch
from hf.prompts import batch, own

import specdec.hf
from specdec.hf.plugin import enabled_of

ROAD = {"custom_generate": specdec.hf.generate, "do_sample": False, "max_new_tokens": 12}


def test_an_enabled_model_and_another_one(model, near):
    for arguments in ({}, {"drafter": "lookup", "k": 5}, {"drafter": near}):
        assert torch.equal(model.generate(**batch(), **ROAD, **arguments), own())
    assert enabled_of(model) is None
    with specdec.hf.enable(model) as enabled:
        assert torch.equal(model.generate(**batch(), **ROAD, drafter="lookup"), own())
        assert enabled.stats.rounds


def test_what_is_dropped_on_the_way_is_named(model, near):
    with pytest.raises(ValueError, match="assistant_model: .* pass drafter="):
        model.generate(**batch(), **ROAD, assistant_model=near)
    with pytest.raises(ValueError, match="synced_gpus: .* leave it out"):
        model.generate(**batch(), **ROAD, synced_gpus=True)


OTHER_MODES = {
    "output_hidden_states=True": {"output_hidden_states": True, "return_dict_in_generate": True},
    "num_beams=3": {"num_beams": 3},
    "penalty_alpha=0.6": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers='low'": {"dola_layers": "low"},
}


@pytest.mark.parametrize("said", OTHER_MODES)
def test_other_modes_are_refused_by_name(model, said):
    with pytest.raises(ValueError, match=said):
        model.generate(**batch(), **ROAD, **OTHER_MODES[said])


def test_look_up_as_transformers_asks_for_it(model):
    with specdec.hf.enable(model) as enabled:
        arguments = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
        assert torch.equal(model.generate(**batch(), **ROAD, **arguments), own())
        assert enabled.stats.drafted
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens: expected either it or drafter="):
        model.generate(**batch(), **ROAD, **arguments, drafter="lookup")
