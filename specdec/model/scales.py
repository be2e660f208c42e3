"""KVScales: what fp8 keys and values are multiplied by. Which dtype KV is kept in, and where fp8 can be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.check import FP8
from specdec.kvpool import KVSpec
from specdec.shown import shown

FP8_MAX = 448.0
HEADROOM = 4.0
"""How much larger than what calibration saw a value may be before it saturates. That costs 2 of the 14.8 octaves between
the largest e4m3 number and the smallest of full precision."""


@dataclass(frozen=True)
class KVScales:
    """One scale per attention call of a forward, in their order, and KV head: k and v hold a [Hkv] fp32 tensor a call."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        if len(self.k) != len(self.v):
            raise ValueError(f"kv_scales: expected k and v for the same calls, got {len(self.k)} and {len(self.v)}")

    @classmethod
    def of(cls, k: Sequence[Tensor], v: Sequence[Tensor]) -> KVScales:
        """Scales for keys and values whose largest magnitudes are k, v: a [Hkv] fp32 tensor per attention call.

        Powers of two, so that scaling itself rounds nothing in any dtype. Raises ValueError for what isn't finite.
        """
        return cls(
            *(tuple(_scale(name, i, most) for i, most in enumerate(each)) for name, each in {"k": k, "v": v}.items())
        )

    @classmethod
    def unit(cls, specs: Sequence[KVSpec]) -> KVScales:
        """Scales of 1 for the attention calls of `specs`."""
        ones = tuple(torch.ones(spec.num_kv_heads) for spec in specs)
        return cls(ones, ones)

    @classmethod
    def load(cls, path: str | Path) -> KVScales:
        """What `save` wrote. Raises ValueError for another file, OSError if it can't be read."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls(*(tuple(torch.tensor(heads, dtype=torch.float32) for heads in values[name]) for name in "kv"))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"kv_scales: expected a file of KVScales.save, got {path} ({error!r:.80})") from error

    def save(self, path: str | Path) -> None:
        """Write them as JSON: {"k": [[a number per KV head] per attention call], "v": ...}."""
        values = {name: [scale.tolist() for scale in getattr(self, name)] for name in "kv"}
        Path(path).write_text(json.dumps(values) + "\n", encoding="utf-8")

    def on(self, specs: Sequence[KVSpec]) -> list[tuple[Tensor, Tensor]]:
        """(k, v) for each of `specs`, on its device. Raises ValueError if they are not for these attention calls."""
        wanted, got = [[s.num_kv_heads] * 2 for s in specs], [[k.numel(), v.numel()] for k, v in self._pairs()]
        if wanted != got or not all(bool((t > 0).all() & t.isfinite().all()) for t in (*self.k, *self.v)):
            heads = sorted({spec.num_kv_heads for spec in specs})
            raise ValueError(
                f"kv_scales: expected numbers above 0 for {len(specs)} attention calls of {heads} KV heads, "
                f"got them for {len(self.k)} calls of {sorted({n for pair in got for n in pair})}, {self._range()}"
            )
        return [(k.to(s.device), v.to(s.device)) for s, (k, v) in zip(specs, self._pairs(), strict=True)]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.k, self.v, strict=True))

    def _range(self) -> str:
        values = torch.cat([*self.k, *self.v]) if self.k else torch.zeros(0)
        return f"{values.min():g} to {values.max():g}" if len(values) else "no number"


def _scale(name: str, call: int, most: Tensor) -> Tensor:
    """2^n with most / 2^n <= FP8_MAX / HEADROOM; 1 for a head that is always 0."""
    if not most.isfinite().all():
        raise ValueError(
            f"kv_scales: expected finite {name} in calibration, got {most.max():g} in attention call {call}"
        )
    return torch.where(most > 0, torch.exp2(torch.ceil(torch.log2(most * HEADROOM / FP8_MAX))), 1.0)


def stored_as(specs: Sequence[KVSpec], kv_dtype: Any, name: str = "kv_dtype") -> list[KVSpec]:
    """`specs` of a model with their KV kept in `kv_dtype`: "auto" is their own dtype, "fp8" torch.float8_e4m3fn.

    Raises ValueError, about the argument `name`, for any other dtype, and where a device has no fp8.
    """
    own = {spec.dtype for spec in specs}
    if kv_dtype == "auto" or own == {kv_dtype}:
        return list(specs)
    if kv_dtype not in ("fp8", FP8):
        known = ", ".join(sorted(map(str, own)))
        raise ValueError(f'{name}: expected "auto", "fp8" or the model\'s own {known}, got {shown(kv_dtype)}')
    for device in {torch.device(spec.device) for spec in specs if torch.device(spec.device).type == "cuda"}:
        refuse_without_fp8(name, device, torch.cuda.get_device_capability(device))
    return [replace(spec, dtype=FP8) for spec in specs]


def refuse_without_fp8(name: str, device: torch.device, capability: tuple[int, int]) -> None:
    """Raises ValueError, about the argument `name`, for a GPU whose compute capability is too old for fp8."""
    if capability < (8, 9):
        found = ".".join(map(str, capability))
        raise ValueError(f"{name}: fp8 needs a GPU of compute capability 8.9 or newer, {device} has {found}")
