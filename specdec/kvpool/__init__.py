"""Paged KV memory on its own: block ids and their owners, prefix reuse, KV tensors, and plain tensors for any kernel.

Imports torch only.
"""

from specdec.kvpool.blocks import BlockAllocator, PoolExhausted
from specdec.kvpool.layout import block_table, cu_seqlens, page_indices, slot_mapping
from specdec.kvpool.pool import KVPool, KVSpec
from specdec.kvpool.prefix import prefix_keys
from specdec.kvpool.table import BlockTable

__all__ = [
    "BlockAllocator",
    "BlockTable",
    "KVPool",
    "KVSpec",
    "PoolExhausted",
    "block_table",
    "cu_seqlens",
    "page_indices",
    "prefix_keys",
    "slot_mapping",
]
