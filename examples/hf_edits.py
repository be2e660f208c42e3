"""Edits of code: most of the answer stands in the prompt. transformers' own argument for look-up, now for a batch.

python examples/hf_edits.py            # SmolLM2-135M, on the CPU or a GPU
"""

# %% A model and its tokenizer, as they come; here SmolLM2, in place of AutoModelForCausalLM.from_pretrained(...)
import time

import specdec.hf
from specdec.loading import load_model

loaded = load_model("smollm2-135m")
model, tokenizer = loaded.model, loaded.tokenizer
tokenizer.padding_side = "left"
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

# %% One function, three names for it
CODE = '''def area(width, height):
    """The area of a rectangle in square metres."""
    result = width * height
    print("the area is", result)
    return result
'''
prompts = [f"# Version 1\n{CODE}\n# Version 2, where area is called {name}\n" for name in ("surface", "size", "extent")]
inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)


def decode(**arguments):
    start = time.perf_counter()
    out = model.generate(**inputs, do_sample=False, max_new_tokens=56, pad_token_id=tokenizer.pad_token_id, **arguments)
    text = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text, time.perf_counter() - start


# %% transformers decodes the batch without drafts; with prompt_lookup_num_tokens it takes one row at a time
before, seconds = decode()
print(f"transformers, no drafts {seconds:.2f} s")
with specdec.hf.enable(model) as enabled:
    after, seconds = decode(prompt_lookup_num_tokens=10)
    print(f"specdec, look-up        {seconds:.2f} s, its engine built within")
    after, seconds = decode(prompt_lookup_num_tokens=10)
    print(f"specdec, the next call  {seconds:.2f} s")
    print(f"tokens per round and row: {enabled.stats.acceptance_length:.2f}")
print(f"the same text: {before == after}")
print(after[0])
