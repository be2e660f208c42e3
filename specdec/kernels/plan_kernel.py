"""The table of work: one small kernel reads the lengths on the device and cuts a batch into items of about equal cost.

An item is one tile of query rows of one sequence against one run of key tiles; `attention_kernel` runs it once for each KV
head. Sequences whose keys are many get several items per tile of rows, a split, and a *pair* entry that says which
partial results belong together.
"""

import triton
import triton.language as tl

# Columns of an item.
ROW = tl.constexpr(0)  # sequence
Q_START = tl.constexpr(1)  # its first row of q
Q_LEN = tl.constexpr(2)
KV_LEN = tl.constexpr(3)
Q_TILE = tl.constexpr(4)
FIRST = tl.constexpr(5)  # key tiles [FIRST, LAST)
LAST = tl.constexpr(6)
SLOT = tl.constexpr(7)  # partial result to write; -1: write the output itself
PAIR = tl.constexpr(8)
ITEM = tl.constexpr(16)  # columns in all: one aligned load group

# Columns of a pair.
PAIR_Q_START = tl.constexpr(0)
PAIR_Q_LEN = tl.constexpr(1)
PAIR_Q_TILE = tl.constexpr(2)
PAIR_SLOT = tl.constexpr(3)  # first partial result
PAIR_SPLITS = tl.constexpr(4)
PAIR_COLUMNS = tl.constexpr(8)

# The head of the table.
NUM_ITEMS = tl.constexpr(0)
NUM_PAIRS = tl.constexpr(1)
PADDING = tl.constexpr(2)  # first row of q that no sequence owns


@triton.jit
def visible_range(
    q_len, kv_len, q_tile, window,
    G: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TREE_NODES: tl.constexpr,
):  # fmt: skip
    """Key positions [start, stop) outside of which no query row of the tile sees anything."""
    first_q = q_tile * BLOCK_M // G
    last_q = tl.minimum((q_tile * BLOCK_M + BLOCK_M - 1) // G, q_len - 1)
    stop = kv_len
    if CAUSAL:
        stop = tl.minimum(kv_len - q_len + last_q + 1, kv_len)
        if TREE_NODES > 0:  # a node may see any of the new keys, and sits no deeper than its place in the row
            stop = tl.where(q_len <= TREE_NODES, kv_len, stop)
            first_q = tl.where(q_len <= TREE_NODES, 0, first_q)
    start = kv_len * 0
    if WINDOW:
        start = tl.maximum(kv_len - q_len + first_q - window + 1, 0)
    return start, tl.maximum(stop, 0)


@triton.jit
def _load_row(Q_BOUNDS, KV_LENS, row, mask, total_tokens, capacity):
    """(first row of q, q_len, kv_len), held within q and the block table whatever the lengths say."""
    start = tl.load(Q_BOUNDS + row, mask=mask, other=0)
    q_len = tl.load(Q_BOUNDS + row + 1, mask=mask, other=0) - start
    q_len = tl.maximum(tl.minimum(q_len, total_tokens - start), 0)
    kv_len = tl.load(KV_LENS + row, mask=mask, other=0)
    return start, q_len, tl.maximum(tl.minimum(kv_len, capacity), 0)


@triton.jit
def _width(
    kv_len, window,
    G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TREE_NODES: tl.constexpr,
):  # fmt: skip
    """The most key tiles that one tile of a sequence's query rows touches."""
    width = tl.cdiv(kv_len, BLOCK_N)
    if WINDOW and CAUSAL:
        width = tl.minimum(width, tl.cdiv(window + BLOCK_M // G + 2 + TREE_NODES, BLOCK_N) + 1)
    return width


@triton.jit
def _num_splits(
    q_len, kv_len, width, chunk, window,
    G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, TREE_NODES: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """(splits of each tile of query rows, first chunk). A last chunk of under a quarter is not worth an item."""
    if FIXED:
        start, _ = visible_range(q_len, kv_len, 0, window, G, BLOCK_M, CAUSAL, WINDOW, TREE_NODES)
        base = start // BLOCK_N // chunk
        return tl.maximum(tl.cdiv(tl.cdiv(kv_len, BLOCK_N), chunk) - base, 1), base
    else:
        return tl.maximum(tl.cdiv(width - chunk // 4, chunk), 1), width * 0


@triton.jit(
    do_not_specialize=[
        "num_rows", "total_tokens", "capacity", "window", "fixed_chunk", "workers", "max_items", "max_pairs", "max_slots",
    ]
)  # fmt: skip
def plan_kernel(
    Q_BOUNDS, KV_LENS, HEAD, ITEMS, PAIRS, COUNTERS,
    num_rows, total_tokens, capacity, window, fixed_chunk, workers, max_items, max_pairs, max_slots,
    H_KV: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, TREE_NODES: tl.constexpr, FIXED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """One program per sequence, each of which reads all lengths: no program waits for another.

    The chunk of key tiles per item is total tiles / workers, so that long sequences are spread over the GPU whatever the
    others' lengths are; FIXED cuts at absolute multiples of `fixed_chunk` tiles instead.
    """
    me = tl.program_id(0)
    lanes = tl.arange(0, BLOCK_R)
    chunk = fixed_chunk
    if not FIXED:
        total = tl.zeros([BLOCK_R], tl.int64)
        for first in range(0, num_rows, BLOCK_R):
            row = first + lanes
            _, q_len, kv_len = _load_row(Q_BOUNDS, KV_LENS, row, row < num_rows, total_tokens, capacity)
            width = _width(kv_len, window, G, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, TREE_NODES)
            total += width.to(tl.int64) * tl.cdiv(q_len * G, BLOCK_M)
        chunk = tl.maximum(tl.cdiv(tl.sum(total, 0) * H_KV, workers), 1).to(tl.int32)

    items = tl.zeros([BLOCK_R], tl.int32)
    slots = tl.zeros([BLOCK_R], tl.int32)
    pairs = tl.zeros([BLOCK_R], tl.int32)
    # Program 0 counts all sequences, for the head; the others those before their own.
    stop = tl.where(me == 0, num_rows, me)
    for first in range(0, stop, BLOCK_R):
        row = first + lanes
        _, q_len, kv_len = _load_row(Q_BOUNDS, KV_LENS, row, row < stop, total_tokens, capacity)
        width = _width(kv_len, window, G, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, TREE_NODES)
        splits, _ = _num_splits(
            q_len, kv_len, width, chunk, window, G, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, TREE_NODES, FIXED
        )
        tiles = tl.cdiv(q_len * G, BLOCK_M)
        items += tiles * splits
        slots += tl.where(splits > 1, tiles * splits, 0)
        pairs += tl.where(splits > 1, tiles, 0)
    item, slot, pair = tl.sum(items, 0), tl.sum(slots, 0), tl.sum(pairs, 0)
    if me == 0:
        tl.store(HEAD + NUM_ITEMS, tl.minimum(item, max_items))
        tl.store(HEAD + NUM_PAIRS, tl.minimum(pair, max_pairs))
        tl.store(HEAD + PADDING, tl.load(Q_BOUNDS + num_rows))
        item, slot, pair = item * 0, slot * 0, pair * 0

    q_start, q_len, kv_len = _load_row(Q_BOUNDS, KV_LENS, me, me < num_rows, total_tokens, capacity)
    width = _width(kv_len, window, G, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, TREE_NODES)
    splits, base = _num_splits(
        q_len, kv_len, width, chunk, window, G, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, TREE_NODES, FIXED
    )
    tiles = tl.cdiv(q_len * G, BLOCK_M)
    step = chunk
    if not FIXED:
        step = tl.cdiv(width, splits)
    for first in range(0, tiles * splits, BLOCK_I):
        i = first + tl.arange(0, BLOCK_I)
        mine = (i < tiles * splits) & (item + i < max_items)
        q_tile, split = tiles - 1 - i // splits, i % splits  # the last tile sees most keys: it starts first
        start, end = visible_range(q_len, kv_len, q_tile, window, G, BLOCK_M, CAUSAL, WINDOW, TREE_NODES)
        low, high = start // BLOCK_N, tl.cdiv(end, BLOCK_N)
        if FIXED:
            begin = tl.maximum((base + split) * step, low)
            stop_tile = tl.minimum((base + split + 1) * step, high)
        else:
            begin = low + split * step
            stop_tile = tl.minimum(begin + step, high)
        to = ITEMS + (item + i).to(tl.int64) * ITEM
        tl.store(to + ROW, me, mask=mine)
        tl.store(to + Q_START, q_start, mask=mine)
        tl.store(to + Q_LEN, q_len, mask=mine)
        tl.store(to + KV_LEN, kv_len, mask=mine)
        tl.store(to + Q_TILE, q_tile, mask=mine)
        tl.store(to + FIRST, begin, mask=mine)
        tl.store(to + LAST, stop_tile, mask=mine)
        tl.store(to + SLOT, tl.where((splits > 1) & (slot + i < max_slots), slot + i, -1), mask=mine)
        tl.store(to + PAIR, pair + q_tile, mask=mine)
    if splits > 1:
        for first in range(0, tiles, BLOCK_I):
            q_tile = first + tl.arange(0, BLOCK_I)
            mine = (q_tile < tiles) & (pair + q_tile < max_pairs)
            to = PAIRS + (pair + q_tile).to(tl.int64) * PAIR_COLUMNS
            tl.store(to + PAIR_Q_START, q_start, mask=mine)
            tl.store(to + PAIR_Q_LEN, q_len, mask=mine)
            tl.store(to + PAIR_Q_TILE, q_tile, mask=mine)
            tl.store(to + PAIR_SLOT, slot + (tiles - 1 - q_tile) * splits, mask=mine)
            tl.store(to + PAIR_SPLITS, splits, mask=mine)
            for head in range(0, H_KV):
                tl.store(COUNTERS + (pair + q_tile) * H_KV + head, 0, mask=mine)
