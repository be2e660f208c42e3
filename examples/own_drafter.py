"""A drafter of one's own in one small file: propose whatever followed the newest token the last time.

python examples/own_drafter.py            # SmolLM2-135M, on the CPU or a GPU
"""

import torch

from specdec import LLM, SamplingParams


class BigramDrafter:
    """Wrong guesses cost a little time; they can't change the output."""

    def propose(self, rows, k):
        batch, width = rows.token_ids.shape
        columns = torch.arange(width, device=rows.token_ids.device)
        followed = columns < rows.lengths[:, None] - 1  # positions that another token follows
        newest = rows.token_ids.gather(1, rows.lengths[:, None] - 1)
        drafts, counts, alive = [], torch.zeros_like(rows.lengths), torch.ones_like(rows.lengths, dtype=torch.bool)
        for _ in range(k):
            last_seen = torch.where(followed & (rows.token_ids == newest), columns, -1).amax(1, keepdim=True)
            alive = alive & (last_seen[:, 0] >= 0)
            newest = rows.token_ids.gather(1, last_seen.clamp(min=0) + 1)
            drafts.append(newest[:, 0])
            counts += alive
        return torch.stack(drafts, 1), counts


if __name__ == "__main__":
    with LLM("smollm2-135m", drafter=BigramDrafter(), k=3) as llm:
        text = "The harbour master keeps a ledger of every vessel that enters the bay, and reads it aloud each evening."
        messages = [{"role": "user", "content": f"Copy the following text word for word: {text}"}]
        output = llm.chat(messages, SamplingParams(max_tokens=64, temperature=0))[0]
        print(output.text)
        print(f"acceptance length {output.stats.acceptance_length:.2f} tokens per round (bonus token included)")
