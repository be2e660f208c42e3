"""Hugging Face models on paged KV."""

from specdec.model.paged import Packed, PagedModel, kv_specs
from specdec.model.taps import Taps

__all__ = ["Packed", "PagedModel", "Taps", "kv_specs"]
