"""The engine's CPU kernels in C: called through ctypes, equal to `kernels.TorchPaged`.

Owns: `NativePaged`. Invariants: float32 on the CPU only; where `library()` is None the engine uses PyTorch. Why C: one
decode step of a small model is hundreds of small operations, each dearer in PyTorch than its arithmetic, and paged
attention in PyTorch copies all KV before it reads it (measured: benchmarks/engine.py, `kernels` rows).
Called by: `engine.local.engine`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from springtide import compiled
from springtide.engine.local.kernels import Pass
from springtide.engine.local.kv import BLOCK
from springtide.models.decoder import DecoderConfig, Layer, RotaryTable

_POINTER, _LONG, _FLOAT = compiled.POINTER, compiled.LONG, compiled.FLOAT
_SIGNATURES: dict[str, list[Any]] = {
    "st_rms_norm": [_POINTER] * 3 + [_LONG] * 2 + [_FLOAT],
    "st_gate": [_POINTER] * 2 + [_LONG] * 3,
    "st_heads": [_POINTER] * 6 + [_FLOAT] * 2 + [_POINTER] * 5 + [_LONG] * 5,
    "st_attend": [_POINTER] * 6 + [_LONG, _POINTER] + [_LONG] * 6 + [_POINTER],
    "st_sample": [_POINTER] * 5 + [_LONG] * 2,
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they cannot be built."""
    return compiled.load(Path(__file__).with_name("native.c"), _SIGNATURES, "the engine")


def _zeros(shape: tuple[int, ...]) -> Tensor:
    """float32 zeros in huge pages, touched only when used: attention reads blocks anywhere in the pool (2x faster)."""
    memory = mmap.mmap(-1, 4 * math.prod(shape), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


def supports(config: DecoderConfig) -> bool:
    return config.head_dim % 8 == 0


class NativePaged:
    """`PagedKernels` over the compiled library."""

    def __init__(self, config: DecoderConfig, blocks: int, positions: int, loaded: ctypes.CDLL) -> None:
        self.config, self._c = config, loaded
        self._rotary = RotaryTable.by_layer(config, positions)
        shape = (config.layers, blocks, config.kv_heads * config.head_dim * BLOCK)
        self._k, self._v = _zeros(shape), _zeros(shape)
        self._layers = [(self._k[i].data_ptr(), self._v[i].data_ptr()) for i in range(config.layers)]

    def begin(self, batch: Pass) -> None:
        self._batch = batch
        self._slots = np.ascontiguousarray(batch.slots, np.int32)
        self._positions = np.ascontiguousarray(batch.positions, np.int32)
        self._runs = np.ones((batch.decode + len(batch.runs), 2), np.int64)
        self._runs[: batch.decode, 0] = np.arange(batch.decode)
        if batch.runs:
            self._runs[batch.decode :] = batch.runs
        self._last_runs = self._runs
        if batch.wanted is not None:
            self._last_runs = np.ones((len(batch.wanted), 2), np.int64)
            self._last_runs[:, 0] = batch.wanted
        self._longest = int(self._positions.max()) + 1
        self._place = (self._slots.ctypes.data, self._positions.ctypes.data, batch.tables.ctypes.data)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._c.st_rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps)
        return out

    def gate(self, gate_up: Tensor) -> Tensor:
        n, m = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((n, m))
        self._c.st_gate(gate_up.data_ptr(), out.data_ptr(), n, m, self.config.activation != "silu")
        return out

    def attention(self, index: int, layer: Layer, qkv: Tensor) -> Tensor:
        c, n, width = self.config, qkv.shape[0], self._batch.tables.shape[1]
        queries, out = torch.empty((2, n, c.heads * c.head_dim))
        keys, values = self._layers[index]
        runs = self._runs if index < c.layers - 1 else self._last_runs
        self._c.st_heads(
            qkv.data_ptr(),
            queries.data_ptr(),
            keys,
            values,
            None if layer.q_norm is None else layer.q_norm.data_ptr(),
            None if layer.k_norm is None else layer.k_norm.data_ptr(),
            c.eps,
            c.query_scale,
            self._rotary[index].cos.data_ptr(),
            self._rotary[index].sin.data_ptr(),
            *self._place,
            width,
            n,
            c.heads,
            c.kv_heads,
            c.head_dim,
        )
        failed = self._c.st_attend(
            queries.data_ptr(),
            keys,
            values,
            *self._place,
            width,
            runs.ctypes.data,
            len(runs),
            c.heads,
            c.kv_heads,
            c.head_dim,
            self._longest,
            c.windows[index],
            out.data_ptr(),
        )
        if failed:
            raise MemoryError(f"no memory for the attention scores of {self._longest} tokens")
        return out

    def copy_block(self, source: int, target: int) -> None:
        self._k[:, target] = self._k[:, source]
        self._v[:, target] = self._v[:, source]

    def clear_blocks(self, blocks: list[int]) -> None:
        self._k[:, blocks] = 0
        self._v[:, blocks] = 0

    def sample(
        self, logits: Tensor, inverse_temperature: np.ndarray, uniform: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        n = logits.shape[0]
        inverse, draw = (
            np.ascontiguousarray(inverse_temperature, np.float32),
            np.ascontiguousarray(uniform, np.float64),
        )
        ids, logprobs = np.empty(n, np.int32), np.empty(n, np.float32)
        failed = self._c.st_sample(
            logits.data_ptr(),
            inverse.ctypes.data,
            draw.ctypes.data,
            ids.ctypes.data,
            logprobs.ctypes.data,
            n,
            logits.shape[1],
        )
        if failed:
            raise MemoryError(f"no memory to sample from {logits.shape[1]} scores")
        return ids, logprobs
