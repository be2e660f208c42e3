"""Hugging Face models on paged KV."""

from specdec.model.adapters import active_adapters
from specdec.model.calibration import scales_for
from specdec.model.layers import decoder_layers
from specdec.model.packed import Packed
from specdec.model.paged import PagedModel, kv_specs
from specdec.model.placement import device_of
from specdec.model.scales import KVScales
from specdec.model.taps import Taps

__all__ = [
    "KVScales",
    "Packed",
    "PagedModel",
    "Taps",
    "active_adapters",
    "decoder_layers",
    "device_of",
    "kv_specs",
    "scales_for",
]
