"""`model.generate` of a Hugging Face model on the paged runtime: the same calls and the same tokens, in batches.

python examples/hf_generate.py            # SmolLM2-135M, on the CPU or a GPU
"""

# %% A model and its tokenizer, as they come; here SmolLM2, in place of AutoModelForCausalLM.from_pretrained(...)
import copy
import time

import torch

import specdec.hf
from specdec.loading import load_model

loaded = load_model("smollm2-135m")
model, tokenizer = loaded.model, loaded.tokenizer
tokenizer.padding_side = "left"
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token


def decode(what, prompts, **kwargs):
    """`model.generate` on a batch, as ever; prints the time that it took."""
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    start = time.perf_counter()
    out = model.generate(**inputs, do_sample=False, pad_token_id=tokenizer.pad_token_id, **kwargs)
    print(f"{what:40} {time.perf_counter() - start:6.2f} s")
    return tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


# %% Records with one long instruction. Its KV is computed once for the batch, and what is copied is drafted by look-up.
INSTRUCTION = """Turn the record into one line of JSON. Copy every value exactly as it is written.
Record: name = Blaise Pascal; city = Clermont-Ferrand; year = 1623; field = mathematics and physics
JSON: {"name": "Blaise Pascal", "city": "Clermont-Ferrand", "year": 1623, "field": "mathematics and physics"}
Record: name = Sofia Kovalevskaya; city = Moscow; year = 1850; field = analysis and mechanics
JSON: {"name": "Sofia Kovalevskaya", "city": "Moscow", "year": 1850, "field": "analysis and mechanics"}
"""
RECORDS = [
    "Ada Lovelace; city = London; year = 1815; field = the analytical engine",
    "Emmy Noether; city = Erlangen; year = 1882; field = rings and ideals",
    "Alan Turing; city = Maida Vale; year = 1912; field = computable numbers",
    "Kurt Gödel; city = Brünn; year = 1906; field = undecidable propositions",
]
prompts = [f"{INSTRUCTION}Record: name = {record}\nJSON:" for record in RECORDS]
line = {"max_new_tokens": 48, "stop_strings": ["}"], "tokenizer": tokenizer}

before = decode("records, transformers", prompts, **line)
with specdec.hf.enable(model, drafter="lookup") as enabled:
    after = decode("records, specdec with look-up", prompts, **line)
    stats = enabled.stats
print(f"    prompt tokens run: {stats.prompt_tokens} of {sum(len(tokenizer(p)['input_ids']) for p in prompts)}")
print(f"    tokens per round and row: {stats.acceptance_length:.2f}; the same text: {before == after}")
print(*after, sep="\n")

# %% Editing code: most of the answer stands in the prompt. The argument is transformers' own, now for a batch.
CODE = '''def area(width, height):
    """The area of a rectangle in square metres."""
    result = width * height
    print("the area is", result)
    return result
'''
edits = [f"# Version 1\n{CODE}\n# Version 2, where area is called {name}\n" for name in ("surface", "size", "extent")]

before = decode("edits, transformers", edits, max_new_tokens=56)
specdec.hf.enable(model)
after = decode("edits, prompt_lookup_num_tokens=10", edits, max_new_tokens=56, prompt_lookup_num_tokens=10)
specdec.hf.disable(model)
print(f"    the same text: {before == after}")

# %% An assistant pair: assistant_model= with several rows, which transformers alone refuses. The first twenty layers of
# the target itself stand in for a smaller model of its vocabulary, so this shows the call and not the speed.
assistant = copy.deepcopy(model)
assistant.model.layers = assistant.model.layers[:20]
assistant.config.num_hidden_layers = 20
questions = ["The three primary colours are", "The capital of France is"]

with specdec.hf.enable(model, k=3) as enabled:
    texts = decode("questions, assistant_model", questions, max_new_tokens=24, assistant_model=assistant)
    print(f"    tokens per round and row: {enabled.stats.acceptance_length:.2f}")

# %% Sampling: torch's seed decides, not the drafter.
torch.manual_seed(0)
plain = model.generate(
    **tokenizer("Once upon a time", return_tensors="pt").to(model.device),
    custom_generate=specdec.hf.generate,
    do_sample=True,
    max_new_tokens=16,
)
torch.manual_seed(0)
drafted = model.generate(
    **tokenizer("Once upon a time", return_tensors="pt").to(model.device),
    custom_generate=specdec.hf.generate,
    drafter="lookup",
    do_sample=True,
    max_new_tokens=16,
)
print(f"samples with and without drafts are the same: {torch.equal(plain, drafted)}")
