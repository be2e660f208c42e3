"""Whether a draft model speaks the target's tokens."""

from __future__ import annotations

from typing import Any

_PADDING = 1024
"""Embedding rows by which two models of one vocabulary may differ: they are padded to different multiples."""


def check_vocabulary(target: Any, drafter: Any, tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raise ValueError, with the reason, unless both models mean the same by each token id.

    target, drafter: transformers models; the tokenizers may be None, then only the sizes can be compared.
    """
    sizes = [m.config.get_text_config().vocab_size for m in (target, drafter)]
    if tokenizer is not None and draft_tokenizer is not None and tokenizer is not draft_tokenizer:
        ours, theirs = tokenizer.get_vocab(), draft_tokenizer.get_vocab()
        if ours != theirs:
            differing = sorted(set(ours.items()) ^ set(theirs.items()), key=lambda item: (item[1], item[0]))
            token, at = differing[0]
            raise ValueError(
                f"drafter: expected the target's vocabulary, got another one: {len(differing)} entries differ, "
                f"first {token!r} at id {at}"
            )
    elif abs(sizes[0] - sizes[1]) >= _PADDING:
        raise ValueError(f"drafter: expected a vocabulary of {sizes[0]} tokens, the target's, got {sizes[1]}")
