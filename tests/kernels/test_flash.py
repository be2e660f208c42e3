"""The flash-attn face: its meaning of lengths, its alignment, its append and rotary, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels.flash import flash_attn_with_kvcache
from tests.kernels.attention_oracle import relative_error

B, HEADS, KV_HEADS, DIM, LENGTHS = 3, 6, 2, 32, [37, 5, 60]


def expected(
    q: Tensor, keys: list[Tensor], values: list[Tensor], causal: bool, left: int = -1
) -> tuple[Tensor, Tensor]:
    """fp64: q [B, Sq, Hq, D], a list of [S, Hkv, D] for each sequence; out, and lse [B, Hq, Sq]."""
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(B, HEADS, q.shape[1], dtype=torch.float64)
    for b in range(len(keys)):
        k, v = (x[b].double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[b].double(), k) * DIM**-0.5
        at = torch.arange(len(k))[None] - (len(k) - q.shape[1] + torch.arange(q.shape[1]))[:, None]
        seen = (at <= 0 if causal else at < len(k)) & (at >= -left if left >= 0 else at > -len(k) - 99)
        scores = scores.masked_fill(~seen, float("-inf"))
        out[b] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        lse[b] = scores.logsumexp(-1)
    return out, lse


def paged(keys: list[Tensor], page: int, room: int) -> tuple[Tensor, Tensor]:
    """(cache [num_blocks, page, Hkv, D] of NaN but for the keys, table) with room for so many tokens more."""
    counts = [-(-(len(k) + room) // page) for k in keys]
    table = torch.zeros(len(keys), max(counts), dtype=torch.int32)
    cache = torch.full((sum(counts), page, KV_HEADS, DIM), float("nan"))
    ids = iter(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5)).tolist())
    for b, k in enumerate(keys):
        for i in range(counts[b]):
            table[b, i] = block = next(ids)
            part = k[i * page : (i + 1) * page]
            cache[block, : len(part)] = part
    return cache, table


@pytest.fixture
def data() -> dict[str, Any]:
    torch.manual_seed(0)
    draw = lambda n: torch.randn(n, KV_HEADS, DIM)  # noqa: E731
    old = [[draw(n) for n in LENGTHS] for _ in range(2)]
    return dict(q=torch.randn(B, 4, HEADS, DIM), old=old, new=torch.randn(2, B, 4, KV_HEADS, DIM))


@pytest.mark.parametrize("page", [1, 16, 48])
def test_append_then_attend(data: dict[str, Any], page: int) -> None:
    """flash-attn's documented call: lengths before the append, causal, block table."""
    (k_cache, table), (v_cache, _) = (paged(x, page, 4) for x in data["old"])
    seqlens = torch.tensor(LENGTHS, dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        data["q"], k_cache, v_cache, *data["new"], cache_seqlens=seqlens, block_table=table, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    full = [[torch.cat([x[b], new[b]]) for b in range(B)] for x, new in zip(data["old"], data["new"], strict=True)]
    want, want_lse = expected(data["q"], *full, causal=True)
    assert relative_error(out, want) < 3e-6
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    assert seqlens.tolist() == LENGTHS
    again = flash_attn_with_kvcache(
        data["q"], k_cache, v_cache, cache_seqlens=seqlens + 4, block_table=table, causal=True
    )
    torch.testing.assert_close(again, out)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("left", [-1, 7])
def test_contiguous_cache_rows(data: dict[str, Any], causal: bool, left: int) -> None:
    """No table: a cache row per sequence, in the order of cache_batch_idx; window (left, -1) with and without causal."""
    caches = [torch.full((5, 64, KV_HEADS, DIM), float("nan")) for _ in range(2)]
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    for cache, old in zip(caches, data["old"], strict=True):
        for b, row in enumerate(rows.tolist()):
            cache[row, : LENGTHS[b]] = old[b]
    out = flash_attn_with_kvcache(
        data["q"], *caches, cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32), cache_batch_idx=rows, causal=causal,
        window_size=(left, -1),
    )  # fmt: skip
    assert relative_error(out, expected(data["q"], *data["old"], causal=causal, left=left)[0]) < 3e-6


def test_defaults(data: dict[str, Any]) -> None:
    """An int for all lengths; none at all: full caches; a scale and a right window of 0, which is causal."""
    k_cache, v_cache = torch.randn(2, B, 20, KV_HEADS, DIM)
    half = [list(x[:, :10]) for x in (k_cache, v_cache)]
    out = flash_attn_with_kvcache(data["q"] * 2, k_cache, v_cache, cache_seqlens=10, softmax_scale=DIM**-0.5 / 2)
    assert relative_error(out, expected(data["q"], *half, causal=False)[0]) < 3e-6
    out = flash_attn_with_kvcache(data["q"], k_cache, v_cache, window_size=(-1, 0))
    assert relative_error(out, expected(data["q"], list(k_cache), list(v_cache), causal=True)[0]) < 3e-6


def turned(x: Tensor, position: Tensor, dim: int, interleaved: bool) -> Tensor:
    """Rotary embedding by complex numbers: x [S, H, D]."""
    angle = position[:, None].double() / 10000 ** (torch.arange(0, dim, 2).double() / dim)
    pairs = x[..., :dim].double().unflatten(-1, (dim // 2, 2) if interleaved else (2, dim // 2))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    spun = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angle)[:, None])
    spun = spun if interleaved else spun.transpose(-1, -2)
    return torch.cat([spun.flatten(-2), x[..., dim:].double()], -1).to(x.dtype)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_rotary(data: dict[str, Any], interleaved: bool, causal: bool) -> None:
    """New keys at their positions; queries too if causal, else all at the first new one, as flash-attn has it."""
    dim = 16
    angle = torch.arange(80)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
    (k_cache, table), (v_cache, _) = (paged(x, 16, 4) for x in data["old"])
    out = flash_attn_with_kvcache(
        data["q"], k_cache, v_cache, *data["new"], rotary_cos=angle.cos(), rotary_sin=angle.sin(), causal=causal,
        cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32), block_table=table, rotary_interleaved=interleaved,
    )  # fmt: skip
    positions = [n + torch.arange(4) for n in LENGTHS]
    at = positions if causal else [torch.full((4,), n) for n in LENGTHS]
    q = torch.stack([turned(x, p, dim, interleaved) for x, p in zip(data["q"], at, strict=True)])
    new = [turned(x, p, dim, interleaved) for x, p in zip(data["new"][0], positions, strict=True)]
    keys = [torch.cat(pair) for pair in zip(data["old"][0], new, strict=True)]
    values = [torch.cat(pair) for pair in zip(data["old"][1], data["new"][1], strict=True)]
    assert relative_error(out, expected(q, keys, values, causal=causal)[0]) < 1e-5


def test_append_past_the_table_is_dropped(data: dict[str, Any]) -> None:
    """flash-attention#638: what doesn't fit is not written into another sequence's block."""
    k_cache, v_cache = torch.zeros(2, 2, 4, KV_HEADS, DIM)
    table = torch.tensor([[0]], dtype=torch.int32)
    new = torch.ones(1, 3, KV_HEADS, DIM)
    with pytest.raises(ValueError, match="seq_lens: expected at most the 4 positions"):
        flash_attn_with_kvcache(data["q"][:1], k_cache, v_cache, new, new, cache_seqlens=3, block_table=table)
    assert k_cache[0, 3].eq(1).all() and k_cache[1].eq(0).all() and k_cache[0, :3].eq(0).all()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "leftpad": (dict(cache_leftpad=torch.zeros(3, dtype=torch.int32)), "cache_leftpad: expected None"),
    "right window": (dict(window_size=(3, 2)), r"window_size: expected 0 or -1 to the right, got \(3, 2\)"),
    "slopes": (dict(alibi_slopes=torch.zeros(3, 6)), r"alibi_slopes: expected \[Hq\]"),
    "no lengths": (dict(k=torch.zeros(3, 1, 2, 32), v=torch.zeros(3, 1, 2, 32)), "cache_seqlens: expected where"),
    "k alone": (dict(k=torch.zeros(3, 1, 2, 32), cache_seqlens=1), "k, v: expected both or neither, got k alone"),
    "cos alone": (dict(rotary_cos=torch.zeros(9, 8)), "rotary_cos, rotary_sin: expected both or neither"),
    "q": (dict(q=torch.zeros(3, 6, 32)), r"q: expected shape"),
    "table": (dict(block_table=torch.zeros(2, 1, dtype=torch.int32)), r"block_table: expected shape \[3, any\]"),
    "both": (
        dict(block_table=torch.zeros(3, 1, dtype=torch.int32), cache_batch_idx=torch.zeros(3, dtype=torch.int32)),
        "cache_batch_idx: expected None beside a block_table",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(data: dict[str, Any], name: str) -> None:
    changed, message = REFUSED[name]
    k_cache, v_cache = torch.randn(2, B, 20, KV_HEADS, DIM)
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(**dict(q=data["q"], k_cache=k_cache, v_cache=v_cache) | changed)
