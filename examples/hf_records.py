"""Records to JSON, a batch with one long instruction: its KV is computed once, and what is copied is drafted by look-up.

python examples/hf_records.py            # SmolLM2-135M, on the CPU or a GPU
"""

# %% A model and its tokenizer, as they come; here SmolLM2, in place of AutoModelForCausalLM.from_pretrained(...)
import time

import specdec.hf
from specdec.loading import load_model

loaded = load_model("smollm2-135m")
model, tokenizer = loaded.model, loaded.tokenizer
tokenizer.padding_side = "left"
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

# %% The instruction, the same for every record, and the records
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
inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)


def decode():
    """`model.generate`, as ever: the call is the same with and without specdec."""
    start = time.perf_counter()
    out = model.generate(
        **inputs,
        do_sample=False,
        max_new_tokens=48,
        stop_strings=["}"],
        tokenizer=tokenizer,
        pad_token_id=tokenizer.pad_token_id,
    )
    text = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text, time.perf_counter() - start


# %% transformers' own, then the same call with look-up drafts on the paged runtime
before, seconds = decode()
print(f"transformers {seconds:.2f} s")
with specdec.hf.enable(model, drafter="lookup") as enabled:
    after, seconds = decode()
    stats = enabled.stats
print(f"specdec      {seconds:.2f} s, its engine built within")
print(f"prompt tokens run: {stats.prompt_tokens} of {int(inputs['attention_mask'].sum())}")
print(f"tokens per round and row: {stats.acceptance_length:.2f}")
print(f"the same text: {before == after}")
print(*after, sep="\n")
