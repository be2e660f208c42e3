"""Hugging Face models on paged KV."""

from specdec.model.paged import Packed, PagedModel, kv_specs

__all__ = ["Packed", "PagedModel", "kv_specs"]
