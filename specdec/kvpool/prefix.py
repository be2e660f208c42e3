"""Keys that name the content of a full block together with everything before it."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_KEY_BYTES = 16


def prefix_keys(
    token_ids: Sequence[int], block_size: int, *, upto: int, salt: bytes = b"", keys: list[bytes] | None = None
) -> list[bytes]:
    """One key for each full block inside `token_ids[:upto]`, each hashing its parent's key and its own tokens.

    Equal keys mean equal tokens from position 0 on (up to a collision of BLAKE2b with 128 bits, which cannot be aimed
    at without 2^64 work), so a lookup needs no comparison of tokens.

    Args:
        token_ids: the tokens of a sequence, each below 2^63.
        block_size: tokens per block, at least 1.
        upto: the number of leading tokens to cover. For a sequence of length l whose newest token has no KV: l - 1.
        salt: whatever else changes the KV: model revision, adapter. It enters the first key, and so all of them.
        keys: what an earlier call with the same salt returned for these tokens. It is extended in place and returned,
            so that a call costs its new blocks only; if it covers more than `upto`, a shorter copy is returned.

    Raises: ValueError if block_size < 1 or `upto` is not in 0..len(token_ids).
    """
    if block_size < 1:
        raise ValueError(f"block_size: expected at least 1, got {block_size}")
    if not 0 <= upto <= len(token_ids):
        raise ValueError(f"upto: expected 0..{len(token_ids)} (the tokens given), got {upto}")
    keys = [] if keys is None else keys
    num_blocks = upto // block_size
    parent = keys[-1] if keys else blake2b(salt, digest_size=_KEY_BYTES).digest()
    for start in range(len(keys) * block_size, num_blocks * block_size, block_size):
        tokens = array("q", token_ids[start : start + block_size]).tobytes()
        parent = blake2b(parent + tokens, digest_size=_KEY_BYTES).digest()
        keys.append(parent)
    return keys if len(keys) == num_blocks else keys[:num_blocks]
