"""Inside Hugging Face: `generate` of a transformers model on the paged runtime."""

from specdec.hf.custom import generate
from specdec.hf.plugin import Enabled, disable, enable

__all__ = ["Enabled", "disable", "enable", "generate"]
