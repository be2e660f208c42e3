"""An assistant pair as it is: `assistant_model=` with several rows, which transformers alone refuses; then sampling.

python examples/hf_assistant.py            # SmolLM2-135M, on the CPU or a GPU

The first two thirds of the target's own layers stand in for a smaller model of its vocabulary, so this shows the call and
not the speed.
"""

# %% A pair; in place of two AutoModelForCausalLM.from_pretrained(...)
import copy

import torch

import specdec.hf
from specdec.loading import load_model

loaded = load_model("smollm2-135m")
model, tokenizer = loaded.model, loaded.tokenizer
tokenizer.padding_side = "left"
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
assistant = copy.deepcopy(model)
assistant.model.layers = assistant.model.layers[: 2 * len(model.model.layers) // 3]
assistant.config.num_hidden_layers = len(assistant.model.layers)

questions = ["The three primary colours are", "The capital of France is", "Water boils at"]
inputs = tokenizer(questions, return_tensors="pt", padding=True).to(model.device)
arguments = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}

# %% What the code has done so far: a row at a time
before = [
    model.generate(**tokenizer(question, return_tensors="pt").to(model.device), **arguments, assistant_model=assistant)
    for question in questions
]
before = [tokenizer.decode(out[0], skip_special_tokens=True) for out in before]

# %% One line more, and the rows are a batch
with specdec.hf.enable(model, k=3) as enabled:
    out = model.generate(**inputs, **arguments, assistant_model=assistant)
    print(f"tokens per round and row: {enabled.stats.acceptance_length:.2f}")
after = tokenizer.batch_decode(out, skip_special_tokens=True)
print(f"the same text: {before == after}")
print(*after, sep="\n")

# %% Sampling: torch's seed decides, not the drafter.
samples = []
for settings in ({}, {"drafter": assistant, "k": 3}):
    torch.manual_seed(0)
    road = {"custom_generate": specdec.hf.generate, **arguments, "do_sample": True, "max_new_tokens": 16}
    samples.append(model.generate(**inputs, **road, **settings))
print(f"the same samples with and without the assistant: {torch.equal(*samples)}")
