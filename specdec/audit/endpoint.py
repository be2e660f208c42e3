"""A pair of OpenAI-compatible servers, with speculation and without, as a subject."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from typing import Any

from transformers import PreTrainedModel

from specdec.audit.subject import Output, Request

TIMEOUT_S = 120.0
"""For one request; a server that needs longer is given up with an error."""

PROMPTS = (
    "The capital of France is",
    "Write a Python function that reverses a list.\n",
    "Once upon a time there was a lighthouse keeper who",
    "Q: Why is the sky blue?\nA:",
)


class EndpointSubject:
    """speculative, plain: URLs up to /v1. served: the model's name there, None for the first that the server lists.

    Outputs are the server's tokens where it gives them with logprobs, else the words of its text.
    """

    model: PreTrainedModel | None = None
    seeded = "servers promise their seeds for one setting only"

    def __init__(self, speculative: str, plain: str, served: str | None = None, prompts: list[str] | None = None):
        self.urls = {True: speculative.rstrip("/"), False: plain.rstrip("/")}
        self.name = f"{self.urls[True]} against {self.urls[False]}"
        self.prompts: list[Any] = list(prompts or PROMPTS)
        self.served = {key: served or self._first_model(url) for key, url in self.urls.items()}
        self._likeliest: dict[tuple[Any, int], list[dict[str, float]]] = {}

    def decode(self, requests: list[Request], speculative: bool) -> list[Output]:
        return [self._decode(request, speculative) for request in requests]

    def margin(self, request: Request, plain: Output, other: Output, at: int) -> float | None:
        """From the log probabilities that the plain server gives beside its tokens, if the other token is among them."""
        likeliest = self._likeliest.get((request.prompt, request.seed), [])
        if at >= min(len(likeliest), len(plain), len(other)):
            return None
        here = likeliest[at]
        return here[str(plain[at])] - here[str(other[at])] if {plain[at], other[at]} <= here.keys() else None

    def _decode(self, request: Request, speculative: bool) -> Output:
        body = {
            "model": self.served[speculative],
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
            "logprobs": 5,
        }
        choice = self._ask(self.urls[speculative] + "/completions", body)["choices"][0]
        logprobs = choice.get("logprobs") or {}
        if not speculative and request.temperature == 0:
            self._likeliest[request.prompt, request.seed] = [top or {} for top in logprobs.get("top_logprobs") or []]
        return logprobs.get("tokens") or re.findall(r"\s*\S+|\s+$", choice["text"])

    def _first_model(self, url: str) -> str:
        listed = self._ask(url + "/models").get("data") or []
        if not listed:
            raise ValueError(f"{url}: the server lists no model; name one")
        return listed[0]["id"]

    def _ask(self, url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        question = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(question, timeout=TIMEOUT_S) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            raise ValueError(
                f"{url}: the server answered {error.code}: {error.read(200).decode(errors='replace')}"
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{url}: expected a JSON answer, got {error}") from error
        if not isinstance(found, dict) or (body is not None and not found.get("choices")):
            raise ValueError(f"{url}: expected completions as OpenAI's API has them, got {str(found)[:200]}")
        return found
