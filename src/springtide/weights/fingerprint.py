"""What tells one set of weights from another: of each tensor its shape, its type, a float64 sum and a sample.

Owns: the order of the sum, and what computes it. Invariants: a sum is the same to the last bit whatever computes it, a
processor or a GPU, C or PyTorch, with any number of threads, as publisher and reader compare every digit.
Called by: `weights.store`, `trainer.lora` (which base an adapter belongs to).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from springtide import compiled
from springtide.compiled import LONG, POINTER

_SAMPLE = 16  # values a tensor: enough to notice a permuted, shifted or scaled copy whose sum happens to agree
_LANES, _BLOCK = 32, 8192  # as in sums.c
_AT_ONCE = 512  # blocks that PyTorch adds together on a CPU; on a GPU all of a tensor's
_SIGNATURE = [POINTER, POINTER, LONG, POINTER]
_KERNELS = {torch.float32: "st_sum_f32", torch.bfloat16: "st_sum_bf16"}


class FingerprintMismatch(Exception):
    """What was read is not what was published. The text names the tensor and both values."""


@dataclass(frozen=True, slots=True)
class TensorPrint:
    """A tensor's shape and dtype, its float64 sum, and every stride-th value."""

    shape: tuple[int, ...]
    dtype: str
    sum: float
    sample: tuple[float, ...]

    @classmethod
    def of(cls, tensor: Tensor, copy: Tensor | None = None) -> TensorPrint:
        """copy: a tensor of the same shape and type to write the values to, while they are at hand."""
        tensor = tensor.detach()
        flat = tensor.reshape(-1)
        stride = max(1, flat.numel() // _SAMPLE)
        return cls(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            float64_sum(flat, None if copy is None else copy.view(-1)),
            tuple(flat[::stride][:_SAMPLE].double().tolist()),
        )


@functools.cache
def _library() -> ctypes.CDLL | None:
    signatures = dict.fromkeys(_KERNELS.values(), _SIGNATURE)
    return compiled.load(Path(__file__).with_name("sums.c"), signatures, "the weight store")


def float64_sum(flat: Tensor, copy: Tensor | None = None) -> float:
    """The sum of a one-dimensional tensor in float64, in one defined order; `copy` (same type) becomes equal to it.

    Of each block, the values i, i + _LANES, i + 2 _LANES, ... are added to a lane, from the first on; the lanes are
    folded, the upper half onto the lower, until one is left; the blocks' sums are added from the first on.
    """
    flat, count, kernel = flat.contiguous(), flat.numel(), _KERNELS.get(flat.dtype)
    if kernel is not None and flat.device.type == "cpu" and (library := _library()) is not None:
        found = ctypes.c_double()
        getattr(library, kernel)(
            flat.data_ptr(), None if copy is None else copy.data_ptr(), count, ctypes.addressof(found)
        )
        return found.value
    if copy is not None:
        copy.copy_(flat)
    whole = count // _BLOCK * _BLOCK
    several = _AT_ONCE * _BLOCK if flat.device.type == "cpu" else max(whole, 1)
    total = 0.0
    for part in (*flat[:whole].split(several), flat[whole:]):
        if not part.numel():
            continue
        blocks = part.view(-1, min(_BLOCK, part.numel()))
        lanes = torch.zeros(len(blocks), _LANES, dtype=torch.float64, device=flat.device)
        for row in blocks.split(_LANES, dim=1):
            lanes[:, : row.shape[1]] += row.double()
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        for value in lanes[:, 0].tolist():
            total += value
    return total


@dataclass(frozen=True, slots=True)
class Canary:
    """A prompt and the publisher's log-probs of its tokens after the first: ids [T], logprobs [T - 1]."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float = 1e-3


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of one version: every stored tensor by checkpoint name; `aliases` maps a tied name to the stored one.

    base, scale: of a version that is an adapter: what its updates are of, and what they are scaled by.
    """

    version: int
    tensors: dict[str, TensorPrint]
    aliases: dict[str, str] = field(default_factory=dict)
    canary: Canary | None = None
    base: str | None = None
    scale: float = 1.0

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises: FingerprintMismatch, naming the first tensor that differs."""
        if missing := self.tensors.keys() ^ tensors.keys():
            raise FingerprintMismatch(f"version {self.version}: {sorted(missing)[0]} is on one side only")
        for name, expected in self.tensors.items():
            found = TensorPrint.of(tensors[name])
            # Every digit; and a NaN is what was published if a NaN was published.
            if found != expected and repr(found) != repr(expected):
                raise FingerprintMismatch(
                    f"version {self.version}: {name} differs from what was published: read {_short(found)}, "
                    f"published {_short(expected)}"
                )

    def not_finite(self) -> str | None:
        """The first tensor that holds a NaN or an infinite value; None: all is finite."""
        return next((name for name, p in self.tensors.items() if not math.isfinite(p.sum)), None)

    def to_json(self) -> str:
        tensors = {
            n: {"shape": p.shape, "dtype": p.dtype, "sum": p.sum, "sample": p.sample} for n, p in self.tensors.items()
        }
        canary = self.canary and dataclasses.asdict(self.canary)
        rest = {"aliases": self.aliases, "canary": canary, "base": self.base, "scale": self.scale}
        return json.dumps({"version": self.version, "tensors": tensors, **rest})

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        data = json.loads(text)
        prints = {
            name: TensorPrint(tuple(p["shape"]), p["dtype"], p["sum"], tuple(p["sample"]))
            for name, p in data["tensors"].items()
        }
        canary = data["canary"] and Canary(
            tuple(data["canary"]["ids"]), tuple(data["canary"]["logprobs"]), data["canary"]["tolerance"]
        )
        return cls(data["version"], prints, data["aliases"], canary, data["base"], data["scale"])


def _short(p: TensorPrint) -> str:
    return f"{p.dtype}{list(p.shape)} sum {p.sum:.9g}"
