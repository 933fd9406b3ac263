"""The engine's kernels in plain PyTorch: paged attention, and sampling with log-probs. Any device.

Owns: the KV pool's memory on this path, and what one pass over a mixed batch needs to know (`Pass`). Invariants:
a token attends to its own slot's positions up to its own, within the layer's window; sampling never holds more than
`_SCORES` scores.
Called by: `engine.local.core`. `engine.local.native` computes the same on CPUs, faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from springtide.engine.local.kv import BLOCK
from springtide.models.decoder import Decoder, DecoderConfig, Kernels, Layer, TorchKernels, visible

_SCORES = 1 << 22  # scores (tokens x vocabulary) that exist at once: 16 MiB of float32


@dataclass(frozen=True, slots=True)
class Pass:
    """The tokens of one forward: first `decode` single tokens of as many slots, then runs of prompt tokens.

    ids, slots, positions: int32 [N]. runs: (first row, count) of each prompt chunk. tables: int32 [slots, blocks].
    wanted: int64 [R], the tokens whose final states are read (None: all). The last layer's attention of others is not.
    """

    ids: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    decode: int
    runs: tuple[tuple[int, int], ...]
    tables: np.ndarray
    wanted: np.ndarray | None = None


class PagedKernels(Kernels, Protocol):
    """Kernels with a KV pool. One `begin` before every forward."""

    def begin(self, batch: Pass) -> None: ...

    def copy_block(self, source: int, target: int) -> None: ...

    def clear_blocks(self, blocks: list[int]) -> None: ...

    def sample(
        self, logits: Tensor, inverse_temperature: np.ndarray, uniform: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """float32 [R, V] -> ids int32 [R] and log-probs float32 [R] of the tempered distribution.

        uniform: float64 [R]; a negative one means greedy.
        """
        ...


class TorchPaged(TorchKernels):
    """Gathers each decode batch's blocks, then one batched attention; prompt chunks run one by one."""

    def __init__(self, config: DecoderConfig, blocks: int, positions: int, dtype: torch.dtype, device: str) -> None:
        super().__init__(config, positions, device)
        self._windows = sorted(set(config.windows))
        shape = (config.layers, blocks, config.kv_heads, BLOCK, config.head_dim)
        self._device = torch.device(device)
        self._k = torch.zeros(shape, dtype=dtype, device=device)
        self._v = torch.zeros(shape, dtype=dtype, device=device)

    def begin(self, batch: Pass) -> None:
        positions = torch.from_numpy(batch.positions.astype(np.int64))
        slots = torch.from_numpy(batch.slots.astype(np.int64))
        tables = torch.from_numpy(batch.tables)
        self._positions = positions.to(self._device)
        self._write_block = tables[slots, positions // BLOCK].long().to(self._device)
        self._write_place = (positions % BLOCK).to(self._device)
        self._decode, self._chunks = batch.decode, []
        if batch.decode:
            lengths = positions[: batch.decode] + 1
            used = -(-int(lengths.max()) // BLOCK)
            self._decode_blocks = tables[slots[: batch.decode], :used].long().to(self._device)
            at = (lengths - 1).to(self._device)
            self._decode_masks = {w: visible(at, used * BLOCK, w)[:, None, None] for w in self._windows}
        for first, count in batch.runs:
            length = int(positions[first]) + count
            blocks = tables[slots[first], : -(-length // BLOCK)].long().to(self._device)
            masks = {w: visible(self._positions[first : first + count], length, w) for w in self._windows}
            self._chunks.append((first, count, length, blocks, masks))

    def attention(self, index: int, layer: Layer, qkv: Tensor) -> Tensor:
        c, window = self.config, self.config.windows[index]
        q, k, v = self.heads(index, layer, qkv, self._positions)
        keys, values = self._k[index], self._v[index]
        keys[self._write_block, :, self._write_place] = k
        values[self._write_block, :, self._write_place] = v
        out = torch.empty_like(q)
        n = self._decode
        if n:
            # The query heads of one KV head stand where a prompt's tokens would, so nothing is repeated.
            grouped = q[:n].view(n, c.kv_heads, -1, c.head_dim)
            k, v = self._gather(keys, self._decode_blocks), self._gather(values, self._decode_blocks)
            attended = functional.scaled_dot_product_attention(
                grouped, k, v, attn_mask=self._decode_masks[window], scale=c.query_scale
            )
            out[:n] = attended.reshape(n, c.heads, c.head_dim)
        for first, count, length, blocks, masks in self._chunks:
            k = self._gather(keys, blocks[None])[:, :, :length]
            v = self._gather(values, blocks[None])[:, :, :length]
            rows = q[first : first + count].transpose(0, 1)[None]
            attended = functional.scaled_dot_product_attention(
                rows, k, v, attn_mask=masks[window], enable_gqa=True, scale=c.query_scale
            )
            out[first : first + count] = attended[0].transpose(0, 1)
        return out.view(len(qkv), -1)

    def _gather(self, pool: Tensor, blocks: Tensor) -> Tensor:
        """[sequences, blocks] -> [sequences, kv heads, blocks * BLOCK, head dim]."""
        count, used = blocks.shape
        picked = pool.index_select(0, blocks.reshape(-1)).view(count, used, *pool.shape[1:])
        return picked.transpose(1, 2).reshape(count, self.config.kv_heads, used * BLOCK, self.config.head_dim)

    def copy_block(self, source: int, target: int) -> None:
        self._k[:, target] = self._k[:, source]
        self._v[:, target] = self._v[:, source]

    def clear_blocks(self, blocks: list[int]) -> None:
        self._k[:, blocks] = 0
        self._v[:, blocks] = 0

    def sample(
        self, logits: Tensor, inverse_temperature: np.ndarray, uniform: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        scale = torch.from_numpy(inverse_temperature.astype(np.float32)).to(logits.device)
        logprobs = (logits * scale[:, None]).log_softmax(-1)
        cumulative = logprobs.double().exp_().cumsum(-1)
        draw = torch.from_numpy(uniform).to(logits.device)
        target = draw.clamp(min=0)[:, None] * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
        chosen = torch.where(draw < 0, logits.argmax(-1), drawn)
        picked = logprobs.gather(1, chosen[:, None]).squeeze(1)
        return chosen.int().cpu().numpy(), picked.cpu().numpy()


def sample_rows(
    decoder: Decoder, kernels: PagedKernels, hidden: Tensor, inverse_temperature: np.ndarray, uniform: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sample from final hidden states [R, hidden], a bounded number of scores at a time."""
    step = max(1, _SCORES // decoder.config.vocab_size)
    parts = [
        kernels.sample(decoder.logits(hidden[i : i + step]), inverse_temperature[i : i + step], uniform[i : i + step])
        for i in range(0, len(hidden), step)
    ]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])


def target_logprobs(decoder: Decoder, hidden: Tensor, targets: np.ndarray, inverse_temperature: float) -> np.ndarray:
    """float32 [R]: log-probs of `targets` int32 [R] under the tempered distributions of hidden states [R, hidden]."""
    step = max(1, _SCORES // decoder.config.vocab_size)
    parts = []
    for i in range(0, len(hidden), step):
        logits = decoder.logits(hidden[i : i + step]) * inverse_temperature
        target = torch.from_numpy(targets[i : i + step].astype(np.int64)).to(logits.device)
        parts.append((logits.gather(1, target[:, None]).squeeze(1) - logits.logsumexp(-1)).cpu().numpy())
    return np.concatenate(parts)
