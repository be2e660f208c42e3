"""The kernels behind `store_kv` and `move_kv`. Slots are checked on the device: one outside of the cache is dropped."""

import triton
import triton.language as tl

from specdec.kernels.dependent import wait

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def _copy_row(
    X, CACHE, SCALE, slot, mask, x_row, sx_h, sc_b, sc_t, sc_h, part,
    PAGE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns [part * COLUMNS, ...) of the flattened [H, D] rows x_row of X to the slots of CACHE."""
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    head, d = (column // D).to(tl.int64), column % D
    keep = mask[:, None] & (column < H * D)[None, :]
    x = tl.load(X + x_row[:, None] + (head * sx_h + d)[None, :], mask=keep)
    if CACHE.dtype.element_ty == tl.float8e4nv:  # a cast does not saturate everywhere
        x = x.to(tl.float32)
        if SCALE is not None:
            x = x / tl.load(SCALE + head, mask=column < H * D, other=1.0)[None, :]
        x = tl.minimum(tl.maximum(x, -FP8_MAX), FP8_MAX)
    to = CACHE + (slot // PAGE * sc_b + slot % PAGE * sc_t)[:, None] + (head * sc_h + d)[None, :]
    tl.store(to, x.to(CACHE.dtype.element_ty), mask=keep)


@triton.jit
def store_kernel(
    K, V, K_CACHE, V_CACHE, SLOTS, K_SCALE, V_SCALE, num_tokens, num_slots,
    sk_l, sk_t, sk_h, sv_l, sv_t, sv_h, skc_l, skc_b, skc_t, skc_h, svc_l, svc_b, svc_t, svc_h,
    PAGE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per (lot of TOKENS tokens, lot of COLUMNS columns, layer) writes both keys and values."""
    wait(DEPENDENT)
    part, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(SLOTS + token, mask=token < num_tokens, other=-1).to(tl.int64)
    mask = (slot >= 0) & (slot < num_slots)
    token = token.to(tl.int64)
    if part * COLUMNS < H * D:
        _copy_row(
            K + layer * sk_l, K_CACHE + layer * skc_l, K_SCALE, slot, mask, token * sk_t, sk_h, skc_b, skc_t, skc_h, part,
            PAGE, H, D, COLUMNS,
        )  # fmt: skip
    if part * COLUMNS < H * DV:
        _copy_row(
            V + layer * sv_l, V_CACHE + layer * svc_l, V_SCALE, slot, mask, token * sv_t, sv_h, svc_b, svc_t, svc_h, part,
            PAGE, H, DV, COLUMNS,
        )  # fmt: skip


@triton.jit
def move_kernel(
    CACHE, SOURCE, TARGET, num_moves, num_slots, s_source, s_target, s_l, s_b, s_t, s_h,
    PAGE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, MOVES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program per (row of moves, lot of COLUMNS columns, layer) holds all it moves before it writes any of it."""
    row, part, layer = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2).to(tl.int64)
    move = tl.arange(0, MOVES)
    source = tl.load(SOURCE + row * s_source + move, mask=move < num_moves, other=-1).to(tl.int64)
    target = tl.load(TARGET + row * s_target + move, mask=move < num_moves, other=-1).to(tl.int64)
    keep = (source >= 0) & (source < num_slots) & (target >= 0) & (target < num_slots)
    column = part * COLUMNS + tl.arange(0, COLUMNS)
    mask = keep[:, None] & (column < H * D)[None, :]
    at = CACHE + layer * s_l + ((column // D).to(tl.int64) * s_h + column % D)[None, :]
    x = tl.load(at + (source // PAGE * s_b + source % PAGE * s_t)[:, None], mask=mask)
    tl.debug_barrier()  # a slot may be read by one thread and written by another
    tl.store(at + (target // PAGE * s_b + target % PAGE * s_t)[:, None], x, mask=mask)
