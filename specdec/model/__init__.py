"""Hugging Face models on paged KV."""

from specdec.model.paged import Packed, PagedModel, kv_specs, slots

__all__ = ["Packed", "PagedModel", "kv_specs", "slots"]
