"""The attention kernel: one item of the table of work against one KV head, and the reduction of split sequences.

Query rows are (query token, head of the group) pairs, so that a tile of rows reads each key once. Scores live in base 2:
the running max is kept in raw-score units and scaled within one fused multiply-add, in the same way whether a tile is
masked or not, so that the same keys give the same bits in either. The online softmax is FlashAttention-2's (Dao, 2023),
the split over keys flash-decoding's, the block table PagedAttention's (Kwon et al., 2023).
"""

import triton
import triton.language as tl

from specdec.kernels.dependent import wait
from specdec.kernels.plan_kernel import (
    FIRST,
    ITEM,
    KV_LEN,
    LAST,
    NUM_ITEMS,
    NUM_PAIRS,
    PADDING,
    PAIR,
    PAIR_COLUMNS,
    PAIR_Q_LEN,
    PAIR_Q_START,
    PAIR_Q_TILE,
    PAIR_SLOT,
    PAIR_SPLITS,
    Q_LEN,
    Q_START,
    Q_TILE,
    ROW,
    SLOT,
    visible_range,
)

LOG2E = tl.constexpr(1.4426950408889634)
EMPTY = tl.constexpr(float("-inf"))
SMALLEST = tl.constexpr(2.0**-126)

UNPACK = tl.constexpr("""{
    .reg .b32 low, high;
    .reg .b16 a, b;
    prmt.b32 low, $2, 0, 0x4420;
    prmt.b32 high, $2, 0, 0x4431;
    cvt.u16.u32 a, low;
    cvt.u16.u32 b, high;
    cvt.rn.f16x2.e4m3x2 $0, a;
    cvt.rn.f16x2.e4m3x2 $1, b;
}""")


@triton.jit
def unpack(words, UPCAST: tl.constexpr):
    """int16 -> (low byte, high byte) of each, e4m3 as fp16: of which the hardware makes two at once, and of bf16 none."""
    if UPCAST:  # the interpreter has no assembler
        words = words.to(tl.int32)
        return _half_of(words), _half_of(words >> 8)
    else:
        return tl.inline_asm_elementwise(
            UNPACK, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def _half_of(byte):
    """The low 8 bits of int32, e4m3 as fp16: a shorter exponent whose bias is less by 8."""
    bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
    x = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), x).to(tl.float16)


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b in fp32. UPCAST: the interpreter gets 16-bit products wrong, so it is given 32-bit ones."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b.to(a.dtype), acc, input_precision="ieee")


@triton.jit
def _scores(q, k, UPCAST: tl.constexpr):
    """q k^T [BLOCK_M, BLOCK_N]; q is a tuple of one tensor, or of the even columns and the odd ones where k is packed."""
    if len(q) == 2:
        even, odd = unpack(tl.trans(k), UPCAST)
        return _dot(q[1], odd, _dot(q[0], even, None, UPCAST), UPCAST)
    else:
        return _dot(q[0], tl.trans(k), None, UPCAST)


@triton.jit
def _add_values(acc, p, v, decay, UPCAST: tl.constexpr):
    """acc * decay + p v, a tuple like q's."""
    if len(acc) == 2:
        even, odd = unpack(v, UPCAST)
        even = _dot(p, even, acc[0] * decay[:, None], UPCAST)
        return even, _dot(p, odd, acc[1] * decay[:, None], UPCAST)
    else:
        return (_dot(p, v, acc[0] * decay[:, None], UPCAST),)


@triton.jit
def _tanh(x):
    """From exp2 alone, without overflow; the error is a few 1e-7 of full scale."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def _popcount(x):
    """Bits set in an int64, by adding neighbours (Warren, Hacker's Delight, 5-1)."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return (x + (x >> 32)) & 0x7F


@triton.jit
def _seen(pos, qpos, q_from, stop, words, window, is_tree, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """[BLOCK_M, BLOCK_N]: whether a query at qpos sees the key at pos; q_from is the position of the first new key."""
    seen = tl.broadcast_to(pos[None, :] < stop, [qpos.shape[0], pos.shape[0]])
    if CAUSAL:
        causal = pos[None, :] <= qpos[:, None]
        if words is not None:
            causal = tl.where(is_tree, _bits(words, pos - q_from), causal)
        seen = seen & causal
    if WINDOW:
        seen = seen & (qpos[:, None] - pos[None, :] < window)
    return seen


@triton.jit
def _bits(words, j):
    """[BLOCK_M, BLOCK_N]: bit j of each row's words, a tuple of [BLOCK_M] int64; all keys before the new ones are seen."""
    seen = tl.broadcast_to(j[None, :] < 0, [words[0].shape[0], j.shape[0]])
    for w in tl.static_range(len(words)):
        here = (j >= 64 * w) & (j < 64 * (w + 1))
        shift = tl.where(here, j - 64 * w, 0).to(tl.int64)
        seen = seen | (here[None, :] & (((words[w][:, None] >> shift[None, :]) & 1) != 0))
    return seen


@triton.jit
def _place(pos, PAGE: tl.constexpr):
    """(entry of the block table, offset in the block) of positions, none negative: unsigned division takes less."""
    pos = pos.to(tl.uint32)
    return (pos // PAGE).to(tl.int32), (pos % PAGE).to(tl.int32)


@triton.jit
def _tiles(
    acc, m, l, ids, q, unit, qpos, words, first, last, q_from, stop, is_tree, scale, factor, softcap, slopes, window,
    K, V, TABLE, last_page, sk_b, sk_t, sv_b, sv_t,
    D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, ALIKE: tl.constexpr, NARROW: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Fold key tiles [first, last) into (acc, m, l). `ids` are the block ids of the next tile's keys; D and DV count the
    columns of K and V, half as many where they hold two each.

    They are loaded one tile ahead: a load of keys that waits for a load of ids in its own turn of the loop would cost the
    pipeline a stage. Ids are clamped to the last block in use, so the table is never read past it.
    """
    n, d, dv = tl.arange(0, BLOCK_N), tl.arange(0, q[0].shape[1]), tl.arange(0, acc[0].shape[1])
    k_column, v_column = K + d[None, :], V + dv[None, :]
    for tile in tl.range(first, last):
        pos = tile * BLOCK_N + n
        block = ids if NARROW else ids.to(tl.int64)
        _, offset = _place(pos, PAGE)
        entry, _ = _place(pos + BLOCK_N, PAGE)
        ids = tl.load(TABLE + tl.minimum(entry, last_page))
        k_row = block * sk_b + offset * sk_t
        v_row = k_row if ALIKE else block * sv_b + offset * sv_t
        k_at, v_at = k_column + k_row[:, None], v_column + v_row[:, None]
        if MASKED:  # values too: a weight of 0 does not silence a NaN
            k = tl.load(k_at, mask=(pos < stop)[:, None] & (d < D)[None, :], other=0.0)
            v = tl.load(v_at, mask=(pos < stop)[:, None] & (dv < DV)[None, :], other=0.0)
        else:
            k = tl.load(k_at) if D == q[0].shape[1] else tl.load(k_at, mask=(d < D)[None, :], other=0.0)
            v = tl.load(v_at) if DV == acc[0].shape[1] else tl.load(v_at, mask=(dv < DV)[None, :], other=0.0)
        s = _scores(q, k, UPCAST)
        if unit is not None:
            s = s * unit[:, None]
        if softcap is not None:
            s = softcap * _tanh(s * (scale / softcap))
        if slopes is not None:
            if softcap is None:
                s = s * scale
            s -= slopes[:, None] * tl.abs(qpos[:, None] - pos[None, :]).to(tl.float32)
        if MASKED:
            s = tl.where(_seen(pos, qpos, q_from, stop, words, window, is_tree, CAUSAL, WINDOW), s, EMPTY)
        m_new = tl.maximum(m, tl.max(s, 1))
        safe = tl.where(m_new == EMPTY, 0.0, m_new)
        low = safe * -factor
        # Not as p is: 1 to the bit where a tile has nothing for a row, which must come out as if the tile were not there.
        decay = tl.exp2((m - safe) * factor)
        p = tl.exp2(tl.fma(s, tl.broadcast_to(factor[:, None], s.shape), tl.broadcast_to(low[:, None], s.shape)))
        l = tl.fma(l, decay, tl.sum(p, 1))
        p = p.to(tl.float32) if UPCAST else p.to(q[0].dtype)
        acc = _add_values(acc, p, v, decay, UPCAST)
        m = m_new
    return acc, m, l, ids


@triton.jit
def _with_sinks(o, lse, sinks):
    """Join the sinks' logits (base 2) to the denominators of o, whose logarithms are lse (base 2)."""
    top = tl.maximum(lse, sinks)
    safe = tl.where(top == EMPTY, 0.0, top)
    weight = tl.exp2(lse - safe)
    total = weight + tl.exp2(sinks - safe)
    return o * (weight / total)[:, None], safe + tl.log2(total)


@triton.jit
def _store(
    O, LSE, SINKS, o, lse, tokens, heads, mask, so_t, so_h, num_heads, DV: tl.constexpr,
):  # fmt: skip
    """Write finished rows: o [BLOCK_M, DV_PAD], lse [BLOCK_M] base 2."""
    dv = tl.arange(0, o.shape[1])
    if SINKS is not None:
        o, lse = _with_sinks(o, lse, tl.load(SINKS + heads, mask=mask, other=0.0) * LOG2E)
    at = O + (tokens * so_t + heads * so_h)[:, None] + dv[None, :]
    tl.store(at, o.to(O.dtype.element_ty), mask=mask[:, None] & (dv < DV)[None, :])
    if LSE is not None:
        tl.store(LSE + tokens * num_heads + heads, lse / LOG2E, mask=mask)


@triton.jit
def _reduce(
    PAIRS, PARTIAL_O, PARTIAL_LSE, O, LSE, SINKS, pair, head, part, so_t, so_h,
    H_KV: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Sum the partial results of ROWS rows (the `part`-th lot of a tile) over their splits, in order, and write them."""
    at = PAIRS + pair.to(tl.int64) * PAIR_COLUMNS
    slot, splits = tl.load(at + PAIR_SLOT), tl.load(at + PAIR_SPLITS)
    local = part * ROWS + tl.arange(0, ROWS)
    rows = tl.load(at + PAIR_Q_TILE) * BLOCK_M + local
    mask = rows // G < tl.load(at + PAIR_Q_LEN)
    dv = tl.arange(0, DV_PAD)
    base = (slot.to(tl.int64) * H_KV + head) * BLOCK_M
    top = tl.full([ROWS], EMPTY, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DV_PAD], tl.float32)
    for split in tl.range(0, splits, loop_unroll_factor=4):  # so that a few loads are on their way at a time
        row = base + split * (H_KV * BLOCK_M) + local
        lse = tl.load(PARTIAL_LSE + row, mask=mask, other=EMPTY)
        o = tl.load(PARTIAL_O + row[:, None] * DV_PAD + dv[None, :], mask=mask[:, None], other=0.0)
        best = tl.maximum(top, lse)
        safe = tl.where(best == EMPTY, 0.0, best)
        decay, weight = tl.exp2(top - safe), tl.exp2(lse - safe)
        acc = tl.fma(o, tl.broadcast_to(weight[:, None], o.shape), acc * decay[:, None])
        total = tl.fma(total, decay, weight)
        top = best
    lse = tl.where(total == 0.0, EMPTY, top + tl.log2(tl.where(total == 0.0, 1.0, total)))
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tokens = (tl.load(at + PAIR_Q_START) + rows // G).to(tl.int64)
    _store(O, LSE, SINKS, acc, lse, tokens, head * G + rows % G, mask, so_t, so_h, H_KV * G, DV)


@triton.jit
def reduce_kernel(
    HEAD, PAIRS, PARTIAL_O, PARTIAL_LSE, O, LSE, SINKS, so_t, so_h,
    H_KV: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per (pair, KV head, lot of ROWS rows)."""
    wait(DEPENDENT)
    lots: tl.constexpr = H_KV * (BLOCK_M // ROWS)
    pair, lot = tl.program_id(0) // lots, tl.program_id(0) % lots
    if pair < tl.load(HEAD + NUM_PAIRS):
        part, head = lot // H_KV, lot % H_KV
        _reduce(
            PAIRS, PARTIAL_O, PARTIAL_LSE, O, LSE, SINKS, pair, head, part, so_t, so_h,
            H_KV, G, DV, DV_PAD, BLOCK_M, ROWS,
        )  # fmt: skip


@triton.jit
def _clear_padding(
    HEAD, O, LSE, SINKS, total_tokens, so_t, so_h,
    H: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rows of q that no sequence owns, which a captured graph of a larger bucket has, come out as if they saw no key."""
    for token in range(tl.load(HEAD + PADDING) + tl.program_id(0), total_tokens, tl.num_programs(0)):
        for first in range(0, H, BLOCK_M):
            heads = first + tl.arange(0, BLOCK_M)
            o, lse = tl.zeros([BLOCK_M, DV_PAD], tl.float32), tl.full([BLOCK_M], EMPTY, tl.float32)
            tokens = tl.full([BLOCK_M], token, tl.int64)
            _store(O, LSE, SINKS, o, lse, tokens, heads, heads < H, so_t, so_h, H, DV)


@triton.jit
def _tree_words(TREE, s_tree, tokens, mask, TREE_WORDS: tl.constexpr):
    """The bit rows of a tile's queries, a tuple of TREE_WORDS [BLOCK_M] int64."""
    words = ()
    for w in tl.static_range(TREE_WORDS):
        words = words + (tl.load(TREE + tokens * s_tree + w, mask=mask, other=0),)
    return words


@triton.jit
def _depth(words):
    """[BLOCK_M] int32: ancestors of each node, its bits less its own."""
    depth = _popcount(words[0])
    for w in tl.static_range(1, len(words)):
        depth += _popcount(words[w])
    return depth.to(tl.int32) - 1


@triton.jit
def _load_queries(at, mask, D: tl.constexpr, D_PAD: tl.constexpr, PACK: tl.constexpr):
    """A tile of queries, a tuple: of one tensor [BLOCK_M, D_PAD], or (PACK = 2) of the even columns and the odd ones."""
    d = tl.arange(0, D_PAD)
    inside = mask[:, None] & (d < D)[None, :]
    q = ()
    for i in tl.static_range(PACK):
        q = q + (tl.load(at[:, None] + (PACK * d + i)[None, :], mask=inside, other=0.0),)
    return q


@triton.jit
def _as_half(q):
    """(queries in fp16, what to multiply the scores of each row by): a power of 2 brings a row's largest number to 2^8."""
    top = tl.max(tl.abs(q[0].to(tl.float32)), 1)
    for i in tl.static_range(1, len(q)):
        top = tl.maximum(top, tl.max(tl.abs(q[i].to(tl.float32)), 1))
    exponent = tl.minimum(tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 64), 254)
    up = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    unit = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
    halves = ()
    for i in tl.static_range(len(q)):
        halves = halves + ((q[i].to(tl.float32) * up[:, None]).to(tl.float16),)
    return halves, unit


@triton.jit
def _whole(acc):
    """[BLOCK_M, DV] of the columns, or of the even ones and the odd ones."""
    if len(acc) == 2:
        both = tl.join(acc[0], acc[1])
        return tl.reshape(both, [both.shape[0], 2 * both.shape[1]])
    else:
        return acc[0]


@triton.jit
def _load_item(ITEMS, index):
    """The columns of an item, in their order."""
    item = ITEMS + index * ITEM
    q = (
        tl.load(item + ROW),
        tl.load(item + Q_START),
        tl.load(item + Q_LEN),
        tl.load(item + KV_LEN),
        tl.load(item + Q_TILE),
    )
    return q + (tl.load(item + FIRST), tl.load(item + LAST), tl.load(item + SLOT), tl.load(item + PAIR))


@triton.jit
def _item(
    item, head, Q, K, V, O, LSE, PAIRS, PARTIAL_O, PARTIAL_LSE, COUNTERS, TABLE,
    SINKS, SLOPES, TREE, K_SCALE, V_SCALE,
    scale, softcap, window, table_width, s_table, s_tree,
    sq_t, sq_h, sk_b, sk_t, sk_h, sv_b, sv_t, sv_h, so_t, so_h,
    H_KV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    TREE_WORDS: tl.constexpr, FUSED: tl.constexpr, ALIKE: tl.constexpr, NARROW: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One item, as loaded by _load_item, for one KV head.

    fp8 keys meet queries of 16 bits in fp16, which holds all of fp8; as int16, K and V hold two columns in one.
    """
    row, q_start, q_len, kv_len, q_tile, first, last, slot, pair = item

    # Query rows.
    local = tl.arange(0, BLOCK_M)
    query = (q_tile * BLOCK_M + local) // G
    heads = head * G + (q_tile * BLOCK_M + local) % G
    mask = query < q_len
    tokens = (q_start + query).to(tl.int64)
    HALF: tl.constexpr = Q.dtype.element_ty != tl.float32 and K.dtype.element_ty != Q.dtype.element_ty
    PACK: tl.constexpr = 2 if K.dtype.element_ty == tl.int16 else 1
    q = _load_queries(Q + (tokens * sq_t + heads * sq_h), mask, D // PACK, D_PAD // PACK, PACK)
    unit = None
    if HALF:
        q, unit = _as_half(q)
    q_from = kv_len - q_len
    qpos = q_from + query
    words, slopes = None, None
    is_tree = False
    if TREE is not None:
        is_tree = q_len <= 64 * TREE_WORDS
        words = _tree_words(TREE, s_tree, tokens, mask, TREE_WORDS)
        qpos = tl.where(is_tree, q_from + _depth(words), qpos)
    if SLOPES is not None:
        slopes = tl.load(SLOPES + heads, mask=mask, other=0.0)

    # Score units: raw products, unless something is added to them or bends them.
    key_scale = scale if K_SCALE is None else scale * tl.load(K_SCALE + head)
    plain: tl.constexpr = softcap is None and SLOPES is None
    factor = tl.full([BLOCK_M], 1.0, tl.float32) * (key_scale * LOG2E if plain else LOG2E)
    if HALF and plain:
        factor, unit = (
            tl.maximum(factor * unit, SMALLEST),
            None,
        )  # 0 times -inf, where a row has seen no key yet, is NaN

    # Key tiles [first, last): masked at the window's edge, then full, then masked at the diagonal.
    _, stop = visible_range(q_len, kv_len, q_tile, window, G, BLOCK_M, CAUSAL, WINDOW, 64 * TREE_WORDS)
    full_end = stop
    if CAUSAL:
        full_end = tl.maximum(q_from + tl.where(is_tree, 0, q_tile * BLOCK_M // G + 1), 0)
    full_end = tl.minimum(tl.maximum(full_end // BLOCK_N, first), last)
    full_start = first
    if WINDOW:
        last_q = tl.minimum((q_tile * BLOCK_M + BLOCK_M - 1) // G, q_len - 1)
        edge = tl.maximum(q_from + last_q - window + 1, 0)
        full_start = tl.minimum(tl.maximum(tl.cdiv(edge, BLOCK_N), first), last)
        full_end = tl.maximum(full_end, full_start)
    table = TABLE + row.to(tl.int64) * s_table
    last_page = tl.minimum(tl.cdiv(stop, PAGE), table_width) - 1
    n = tl.arange(0, BLOCK_N)
    entry, _ = _place(first * BLOCK_N + n, PAGE)
    ids = tl.load(
        table + tl.minimum(entry, last_page),
        mask=n < tl.where(first < last, BLOCK_N, 0),
        other=0,
    )
    k_head, v_head = K + head * sk_h, V + head * sv_h
    m = tl.full([BLOCK_M], EMPTY, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = ()
    for _ in tl.static_range(PACK):
        acc = acc + (tl.zeros([BLOCK_M, DV_PAD // PACK], tl.float32),)
    for phase in tl.static_range(0 if WINDOW else 1, 3):
        begin = first if phase == 0 else (full_start if phase == 1 else full_end)
        end = full_start if phase == 0 else (full_end if phase == 1 else last)
        acc, m, l, ids = _tiles(
            acc, m, l, ids, q, unit, qpos, words, begin, end, q_from, stop, is_tree, key_scale, factor, softcap, slopes, window,
            k_head, v_head, table, last_page, sk_b, sk_t, sv_b, sv_t,
            D // PACK, DV // PACK, PAGE, BLOCK_N, CAUSAL, WINDOW, phase != 1, ALIKE, NARROW, UPCAST,
        )  # fmt: skip

    lse = tl.where(l == 0.0, EMPTY, m * factor + tl.log2(tl.where(l == 0.0, 1.0, l)))
    o = _whole(acc) / tl.where(l == 0.0, 1.0, l)[:, None]
    if V_SCALE is not None:
        o *= tl.load(V_SCALE + head)
    if slot < 0:
        _store(O, LSE, SINKS, o, lse, tokens, heads, mask, so_t, so_h, H_KV * G, DV)
    else:
        part = (slot.to(tl.int64) * H_KV + head) * BLOCK_M + local
        tl.store(PARTIAL_LSE + part, lse, mask=mask)
        tl.store(PARTIAL_O + part[:, None] * DV_PAD + tl.arange(0, DV_PAD)[None, :], o, mask=mask[:, None])
        if FUSED:
            splits = tl.load(PAIRS + pair.to(tl.int64) * PAIR_COLUMNS + PAIR_SPLITS)
            counter = COUNTERS + pair * H_KV + head
            tl.debug_barrier()  # all of this program's stores come before its tick
            if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
                tl.store(counter, 0)  # ready for the next layer
                rows = tl.minimum(q_len * G - q_tile * BLOCK_M, BLOCK_M)
                for lot in range(0, tl.cdiv(rows, 16)):
                    _reduce(
                        PAIRS, PARTIAL_O, PARTIAL_LSE, O, LSE, SINKS, pair, head, lot, so_t, so_h,
                        H_KV, G, DV, DV_PAD, BLOCK_M, 16,
                    )  # fmt: skip


@triton.jit(do_not_specialize=["window", "total_tokens", "table_width", "s_table", "s_tree"])
def attention_kernel(
    Q, K, V, O, LSE, HEAD, ITEMS, PAIRS, PARTIAL_O, PARTIAL_LSE, COUNTERS, TABLE,
    SINKS, SLOPES, TREE, K_SCALE, V_SCALE,
    scale, softcap, window, total_tokens, table_width, s_table, s_tree,
    sq_t, sq_h, sk_b, sk_t, sk_h, sv_b, sv_t, sv_h, so_t, so_h,
    H_KV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    TREE_WORDS: tl.constexpr, FUSED: tl.constexpr, ALIKE: tl.constexpr, NARROW: tl.constexpr, UPCAST: tl.constexpr,
    PERSISTENT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per item and KV head, or PERSISTENT: fewer programs, which share a table of unknown length.

    FUSED: the program that finishes a split's last part also reduces it; otherwise `reduce_kernel` does. ALIKE: K and V have
    the same strides. NARROW: no element of a head lies 2^31 or more from its first one. Both make addresses cheaper,
    which are else two fifths of the loop's instructions.
    """
    wait(DEPENDENT)
    works = tl.load(HEAD + NUM_ITEMS) * H_KV
    if PERSISTENT:
        for i in range(tl.program_id(0), works, tl.num_programs(0)):
            work = tl.cast(i, tl.int64)
            _item(
                _load_item(ITEMS, work // H_KV), work % H_KV, Q, K, V, O, LSE, PAIRS, PARTIAL_O, PARTIAL_LSE, COUNTERS,
                TABLE, SINKS, SLOPES, TREE, K_SCALE, V_SCALE,
                scale, softcap, window, table_width, s_table, s_tree,
                sq_t, sq_h, sk_b, sk_t, sk_h, sv_b, sv_t, sv_h, so_t, so_h,
                H_KV, G, D, DV, D_PAD, DV_PAD, PAGE, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, TREE_WORDS, FUSED, ALIKE, NARROW,
                UPCAST,
            )  # fmt: skip
    else:  # without the loop the compiler needs a quarter fewer registers
        work = tl.program_id(0).to(tl.int64)
        item = _load_item(ITEMS, work // H_KV)  # before it is known whether there is one: a wait less
        if work < works:
            _item(
                item, work % H_KV, Q, K, V, O, LSE, PAIRS, PARTIAL_O, PARTIAL_LSE, COUNTERS,
                TABLE, SINKS, SLOPES, TREE, K_SCALE, V_SCALE,
                scale, softcap, window, table_width, s_table, s_tree,
                sq_t, sq_h, sk_b, sk_t, sk_h, sv_b, sv_t, sv_h, so_t, so_h,
                H_KV, G, D, DV, D_PAD, DV_PAD, PAGE, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, TREE_WORDS, FUSED, ALIKE, NARROW,
                UPCAST,
            )  # fmt: skip
    _clear_padding(HEAD, O, LSE, SINKS, total_tokens, so_t, so_h, H_KV * G, DV, DV_PAD, BLOCK_M)
