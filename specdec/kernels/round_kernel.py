"""The Triton side of `round`: each step of a round that is not a model's is one launch, whatever the batch."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gather_kernel(
    index, num_tokens, drafter_len, active, ints, floats, table, out, out_active, out_floats, out_table,
    batch, total, width, NUM_INTS: tl.constexpr, NUM_FLOATS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row of the round. out [3 + NUM_INTS, batch]: where the row is, its state, then `ints`."""
    b = tl.program_id(0).to(tl.int64)
    row = tl.load(index + b)
    row = tl.where((row < 0) | (row >= total), total - 1, row)
    tl.store(out + b, row)
    tl.store(out + batch + b, tl.load(num_tokens + row))
    tl.store(out + 2 * batch + b, tl.load(drafter_len + row))
    tl.store(out_active + b, tl.load(active + row))
    c = tl.arange(0, COLUMNS)
    tl.store(out + (3 + c) * batch + b, tl.load(ints + c * total + row, mask=c < NUM_INTS), mask=c < NUM_INTS)
    tl.store(out_floats + c * batch + b, tl.load(floats + c * total + row, mask=c < NUM_FLOATS), mask=c < NUM_FLOATS)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(out_table + b * width + i, tl.load(table + row * width + i, mask=i < width), mask=i < width)


@triton.jit
def room_kernel(
    num_tokens, active, limit, k, table, running, want, width, s_table, block_size, max_len, draft_steps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    b = tl.program_id(0).to(tl.int64)
    blocks = tl.zeros([BLOCK], tl.int32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        blocks += (tl.load(table + b * s_table + i, mask=i < width, other=-1) >= 0).to(tl.int32)
    reserved = block_size * tl.sum(blocks, 0).to(tl.int64)
    l = tl.load(num_tokens + b)
    runs = (tl.load(active + b) != 0) & (l - 1 < reserved)
    space = tl.minimum(tl.minimum(tl.load(limit + b) - l - 1, reserved - l), max_len - l)
    most = tl.minimum(tl.minimum(tl.load(k + b), space), draft_steps)
    tl.store(running + b, runs)
    tl.store(want + b, tl.where(runs, tl.maximum(most, 0), 0))


@triton.jit
def legal_kernel(token_ids, counts, want, out, batch, k, s_b, s_k, vocab_size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """One program per ROWS rows."""
    b = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK)
    here = (b < batch)[:, None] & (j < k)[None, :]
    token = tl.load(token_ids + b.to(tl.int64)[:, None] * s_b + j[None, :] * s_k, mask=here, other=-1)
    first_bad = tl.min(tl.where((token >= 0) & (token < vocab_size), BLOCK, j[None, :]), 1).to(tl.int64)
    count = tl.maximum(tl.load(counts + b, mask=b < batch, other=0).to(tl.int64), 0)
    count = tl.minimum(count, tl.load(want + b, mask=b < batch, other=0))
    tl.store(out + b, tl.minimum(count, first_bad), mask=b < batch)


@triton.jit
def _worth(scores, counts, b, j, batch, s_b, s_k):
    """(score, whether it is a draft) of row b's draft j; NaN is worth nothing."""
    valid = (b < batch) & (j < tl.load(counts + b, mask=b < batch, other=0))
    score = tl.load(scores + b.to(tl.int64) * s_b + j * s_k, mask=valid, other=0.0).to(tl.float32)
    least = -3.4028234663852886e38
    return tl.where(score == score, tl.maximum(score, least), least), valid


@triton.jit
def grant_kernel(
    counts, scores, running, out, batch, k, s_b, s_k, tokens,
    BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: the rank of each of its drafts among all, by comparison with every other draft."""
    j = tl.arange(0, BLOCK_K)
    b = tl.program_id(0) + tl.zeros([BLOCK_K], tl.int32)
    mine, valid = _worth(scores, counts, b, j, batch, s_b, s_k)
    rank = tl.zeros([BLOCK_K], tl.int32)
    for start in range(0, batch * k, BLOCK):
        at = start + tl.arange(0, BLOCK)  # depth-major: draft 0 of every row, then draft 1
        other_j, other_b = at // batch, at % batch
        other, is_draft = _worth(scores, counts, tl.where(at < batch * k, other_b, batch), other_j, batch, s_b, s_k)
        before = (other_j[None, :] < j[:, None]) | ((other_j[None, :] == j[:, None]) & (other_b[None, :] < b[:, None]))
        ahead = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & before)
        rank += tl.sum((ahead & is_draft[None, :]).to(tl.int32), 1)
    r = tl.arange(0, BLOCK_B)
    runs = tl.sum(tl.load(running + r, mask=r < batch, other=0).to(tl.int32), 0)
    first_out = tl.min(tl.where(valid & (rank < tokens - runs), BLOCK_K, j), 0)
    tl.store(out + tl.program_id(0), first_out.to(tl.int64))


@triton.jit
def _slot(table, s_table, row, position, write, width, block_size):
    """Slot of `position` in the blocks of `row`, -1 where nothing is to be written or no block is there."""
    entry = tl.minimum(position // block_size, width - 1)
    block = tl.load(table + row.to(tl.int64) * s_table + entry, mask=write, other=-1).to(tl.int64)
    return tl.where(block >= 0, block * block_size + position % block_size, -1)


@triton.jit
def pack_kernel(
    index, num_tokens, running, num_drafts, drafts, all_tokens, table,
    token_ids, positions, slot_mapping, rows, seq_lens, cu_seqlens_q,
    batch, tokens, s_db, s_dk, s_tokens, s_table, width, block_size, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK tokens of the bucket; the first also writes the lengths."""
    r = tl.arange(0, BLOCK_B)
    runs = tl.load(running + r, mask=r < batch, other=0) != 0
    n = tl.load(num_drafts + r, mask=r < batch, other=0).to(tl.int32)
    ends = tl.cumsum(tl.where(runs, n + 1, 0), 0)
    if tl.program_id(0) == 0:
        l = tl.load(num_tokens + r, mask=r < batch, other=0).to(tl.int32)
        tl.store(seq_lens + r, tl.where(runs, l + n, 0), mask=r < batch)
        tl.store(cu_seqlens_q + 1 + r, ends, mask=r < batch)
        tl.store(cu_seqlens_q, 0)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    past = (ends[None, :] <= at[:, None]) & (r < batch)[None, :]
    row = tl.sum(past.to(tl.int32), 1)
    valid = (row < batch) & (at < tokens)
    row = tl.minimum(row, batch - 1)
    offset = tl.where(valid, at - tl.max(tl.where(past, ends[None, :], 0), 1), 0)
    l = tl.load(num_tokens + row)
    position = tl.where(valid, l - 1 + offset, 0)
    newest = all_tokens + tl.load(index + row) * s_tokens + l - 1
    token = tl.load(newest, mask=valid & (offset == 0), other=0).to(tl.int64)
    draft = drafts + row.to(tl.int64) * s_db + (offset - 1) * s_dk
    token += tl.load(draft, mask=valid & (offset > 0), other=0).to(tl.int64)
    tl.store(token_ids + at, token, mask=at < tokens)
    tl.store(positions + at, position, mask=at < tokens)
    tl.store(slot_mapping + at, _slot(table, s_table, row, position, valid, width, block_size), mask=at < tokens)
    tl.store(rows + at, row.to(tl.int64), mask=at < tokens)


@triton.jit
def draft_depth_kernel(num_tokens, drafter_len, running, want, counts, depth, batch, window, BLOCK: tl.constexpr):
    """One program per BLOCK rows."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = b < batch
    behind = tl.load(num_tokens + b, mask=here, other=0) - tl.load(drafter_len + b, mask=here, other=0)
    synced = (tl.load(running + b, mask=here, other=0) != 0) & (behind <= window)
    wanted = tl.load(want + b, mask=here, other=0)
    tl.store(counts + b, tl.where(synced, wanted, 0), mask=here)
    tl.store(depth + b, tl.where(synced, tl.maximum(wanted, 1), 0), mask=here)


@triton.jit
def draft_step_kernel(
    index, num_tokens, drafter_len, depth, previous, all_tokens, table,
    token_ids, positions, slot_mapping, seq_lens, cu_seqlens_q, drawn_at,
    batch, s_tokens, s_table, width, block_size, step, vocab_size, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK rows, N tokens for each row."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = b < batch
    l = tl.load(num_tokens + b, mask=here, other=0)
    live = step < tl.load(depth + b, mask=here, other=0)
    held = tl.load(drafter_len + b, mask=here, other=0)
    history = all_tokens + tl.load(index + b, mask=here, other=0) * s_tokens
    for i in tl.static_range(N):
        position = l - N + step + i
        known = live & (position >= 0)
        position = tl.where(known, position, 0)
        if previous is None:
            token = tl.load(history + position, mask=known, other=0).to(tl.int64)
            write = known & (position >= held)
        else:
            token = tl.load(previous + b, mask=known, other=0).to(tl.int64)
            write = known
        token = tl.where((token >= 0) & (token < vocab_size), token, 0)
        at = b * N + i
        tl.store(token_ids + at, token, mask=here)
        tl.store(positions + at, position, mask=here)
        tl.store(slot_mapping + at, _slot(table, s_table, b, position, write, width, block_size), mask=here)
    tl.store(seq_lens + b, tl.where(live, l + step, 0).to(tl.int32), mask=here)
    tl.store(cu_seqlens_q + b, b * N, mask=b <= batch)
    tl.store(drawn_at + b, l + step, mask=here)


@triton.jit
def settle_kernel(
    index, num_tokens, drafter_len, active, limit, all_tokens, state_tokens, state_drafter, state_active,
    token_ids, num_emitted, num_accepted, num_drafts, num_wanted, running, ended, failed, written, out,
    tokens, s_b, s_tokens, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row. Nothing is copied or cleared: the row moves on by what was emitted."""
    b = tl.program_id(0).to(tl.int64)
    row, l = tl.load(index + b), tl.load(num_tokens + b)
    emitted = tl.load(num_emitted + b).to(tl.int64)
    j = tl.arange(0, BLOCK)
    token = tl.load(token_ids + b * s_b + j, mask=j < tokens, other=-1)
    tl.store(all_tokens + row * s_tokens + l + j, token.to(tl.int32), mask=(j < emitted) & (j < tokens))
    length, held = l + emitted, tl.load(drafter_len + b)
    if written is not None:
        wrote = tl.load(written + b)
        held = tl.where(wrote > 0, tl.minimum(length - 1, l + wrote - 1), held)
    runs, fails = tl.load(running + b) != 0, tl.load(failed + b) != 0
    finished = runs & (fails | (tl.load(ended + b) != 0) | (length >= tl.load(limit + b)))
    tl.store(state_tokens + row, length)
    tl.store(state_drafter + row, held)
    tl.store(state_active + row, (tl.load(active + b) != 0) & (finished == 0))
    values = out + b * (COLUMNS + tokens)
    tl.store(values, emitted)
    tl.store(values + 1, tl.load(num_drafts + b).to(tl.int64))
    tl.store(values + 2, tl.load(num_accepted + b).to(tl.int64))
    tl.store(values + 3, tl.load(num_wanted + b).to(tl.int64))
    tl.store(values + 4, held)
    tl.store(values + 5, runs.to(tl.int64))
    tl.store(values + 6, finished.to(tl.int64))
    tl.store(values + 7, fails.to(tl.int64))
    tl.store(values + COLUMNS + j, token, mask=j < tokens)
