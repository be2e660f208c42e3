"""What is audited: something that decodes requests with speculation on and off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from specdec.audit.report import Check, check, skipped
from specdec.llm import LLM
from specdec.sampling import SamplingParams

Output = Sequence[Any]


@dataclass(frozen=True)
class Request:
    """One prompt, as token ids or as text, and how it is decoded. options: further fields of SamplingParams."""

    prompt: Any
    temperature: float
    seed: int
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)


class Subject(Protocol):
    """name: in words. model: for probabilities of its own, None where there is none at hand; prompts: what to decode.

    seeded: whether the same seed promises the same tokens with speculation on and off; else why not, in words.
    """

    name: str
    model: PreTrainedModel | None
    prompts: list[Any]
    seeded: str

    def decode(self, requests: list[Request], speculative: bool) -> list[Output]:
        """What is emitted for each: token ids, or other units of it."""

    def margin(self, request: Request, plain: Output, other: Output, at: int) -> float | None:
        """How much likelier the plain unit is than the other one, in logits, at the first that differs; None: unknown."""


class EngineSubject:
    """An LLM of this package; its own requests with k = 0 are the plain ones."""

    def __init__(self, llm: LLM, prompts: list[list[int]], name: str, verifier: str = "coupled"):
        self.llm, self.model, self.prompts, self.name = llm, llm.model, prompts, name
        self.seeded = "" if verifier == "coupled" else f"the verifier {verifier} keeps the distribution, not the tokens"

    def decode(self, requests: list[Request], speculative: bool) -> list[Output]:
        params = [
            SamplingParams(
                max_tokens=r.max_tokens, temperature=r.temperature, seed=r.seed, ignore_eos=True,
                k=None if speculative else 0, **(neutral(r) | r.options),
            )
            for r in requests
        ]  # fmt: skip
        outputs = self.llm.generate([r.prompt for r in requests], params)
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"a request failed: {output.error}") from output.error
        return [output.token_ids for output in outputs]

    def margin(self, request: Request, plain: Output, other: Output, at: int) -> float | None:
        return model_margin(self.model, request, plain, other, at)

    def drafts(self) -> Check:
        """Whether there was anything to verify: an audit in which nothing was drafted says nothing."""
        stats = self.llm.stats
        if not stats.drafted:
            return skipped(2, "drafts", "nothing was drafted, so speculation was not tested: other prompts or drafter?")
        return check(2, "drafts", True, f"{stats.accepted} of {stats.drafted} accepted", "some")


def neutral(request: Request) -> dict[str, Any]:
    """Filters off where the request names none: the model's own defaults would hide what they filter."""
    return {} if request.temperature == 0 else {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


class AssistedSubject:
    """`generate` of transformers, plain and assisted: by a model, or by prompt look-up. One request at a time, as it asks."""

    seeded = "transformers draws drafts and tests from one stream of numbers"

    def __init__(self, model: PreTrainedModel, assistant: PreTrainedModel | None, prompts: list[list[int]], name: str):
        self.model, self.assistant, self.prompts, self.name = model, assistant, prompts, name

    def decode(self, requests: list[Request], speculative: bool) -> list[Output]:
        helper = {"assistant_model": self.assistant} if self.assistant is not None else {"prompt_lookup_num_tokens": 8}
        return [self._decode(request, helper if speculative else {}) for request in requests]

    def margin(self, request: Request, plain: Output, other: Output, at: int) -> float | None:
        return model_margin(self.model, request, plain, other, at)

    @torch.inference_mode()
    def _decode(self, request: Request, helper: dict[str, Any]) -> Output:
        torch.manual_seed(request.seed)
        ids = torch.tensor([request.prompt], device=self.model.get_input_embeddings().weight.device)
        how: dict[str, Any] = {"do_sample": request.temperature > 0}
        if request.temperature:
            how |= {"temperature": request.temperature, "top_k": 0, "top_p": 1.0}
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_tokens,
            **how,
            **helper,
        )
        return out[0, ids.shape[1] :].tolist()


def model_margin(model: PreTrainedModel, request: Request, plain: Output, other: Output, at: int) -> float | None:
    """Of the model's own logits after the tokens that both outputs share; None where one of them ends there."""
    if at >= min(len(plain), len(other)):
        return None
    logits = forward(model, [*request.prompt, *plain[:at]])[-1]
    return float(logits[plain[at]] - logits[other[at]])


@torch.inference_mode()
def forward(model: PreTrainedModel, token_ids: list[Any]) -> torch.Tensor:
    """[len(token_ids), V] fp32 logits by an ordinary forward of the model, on the CPU."""
    ids = torch.tensor([token_ids], device=model.get_input_embeddings().weight.device)
    return model(ids, use_cache=False).logits[0].float().cpu()
